"""The examples and the benchmark run from their command lines, and leave what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        "examples/toy_optimum.py",
        "examples/align_reviews.py",
        "examples/leash.py",
        "examples/value_head.py",
        "examples/token_rewards.py",
        "benchmarks/optimality.py",
    ],
)
def test_help_explains(script, tmp_path):
    text = run(script, "--help", cwd=tmp_path)
    assert "--episodes" in text
    assert "seed" in text


@pytest.mark.parametrize(
    ("script", "option"), [("examples/sanity.py", "--seeds"), ("benchmarks/env_speed.py", "--num-envs")]
)
def test_help_of_the_others_explains(script, option, tmp_path):
    assert option in run(script, "--help", cwd=tmp_path)


def test_env_speed_prints_its_tables(tmp_path):
    text = run("benchmarks/env_speed.py", "--no-model", "--repetitions", "1", "--num-envs", "16", cwd=tmp_path)
    assert "SyncVectorEnv" in text and "4096" in text


@pytest.mark.slow
def test_env_speed_measures_the_model(tmp_path):
    text = run("benchmarks/env_speed.py", "--repetitions", "1", "--num-envs", "16", "--model-envs", "2", cwd=tmp_path)
    assert "t = 48" in text and "MiB" in text
    assert "policy.act and envs.step" in text and "act over generate" in text


@pytest.mark.slow
def test_toy_optimum_draws_the_frontier(tmp_path):
    run("examples/toy_optimum.py", "--kl-coefs", "0.0", "0.2", "1.0", cwd=tmp_path)
    folder = tmp_path / "runs" / "toy-optimum"
    rows = json.loads((folder / "frontier.json").read_text())
    assert [row["kl_coef"] for row in rows] == [0.0, 0.2, 1.0]
    assert all(-1e-9 <= row["regret"] < 0.05 for row in rows)  # nothing lies above the frontier, PPO lies near it
    assert rows[0]["score"] > rows[1]["score"] > rows[2]["score"]
    assert (folder / "frontier.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_optimality_benchmark_measures_the_gap(tmp_path):
    run("benchmarks/optimality.py", "--seeds", "1", "--kl-coefs", "0.1", "--output", "rows.json", cwd=tmp_path)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["reference"] == pytest.approx(-0.23257, abs=1e-5)
    assert row["optimum"] == pytest.approx(2.08533, abs=1e-5)
    assert row["gap_closed"] >= 0.98
    assert row["distance"] == pytest.approx((row["optimum"] - row["ppo"]) / 0.1)


@pytest.mark.slow
def test_align_reviews_trains_the_real_model(tmp_path):
    """Two iterations of the demo: everything it promises is there. What it reaches is measured by the full run."""
    text = run(
        "examples/align_reviews.py", "--episodes", "96", "--eval-episodes", "32", "--name", "short", cwd=tmp_path
    )
    folder = tmp_path / "runs" / "short"
    for name in ("metrics.jsonl", "samples.txt", "training.png", "report.json", "checkpoint/state.json"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").glob("events*"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["episodes"] for row in rows] == [48, 96]
    report = json.loads((folder / "report.json").read_text())
    assert abs(report["before"]["kl"]) < 0.1
    assert report["after"]["kl"] > 0.01
    assert "standard deviations of the reference's scores" in text
    assert text.count("before: ") == 2
    assert text.count(" after: ") == 2


SMALL = ("--num-envs", "8", "--episodes", "8")


@pytest.mark.slow
def test_leash_runs_twice_and_draws_both(tmp_path):
    """One small iteration each: the files are there and tell one story. The full run measures what the leash does."""
    text = run("examples/leash.py", *SMALL, "--eval-episodes", "8", "--name", "pair", cwd=tmp_path)
    folder = tmp_path / "runs" / "pair"
    assert (folder / "leash.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((folder / "leash.json").read_text())
    loose, held = (written["reports"][label] for label in ("without the leash", "on the leash"))
    assert loose["before"] == held["before"]  # the same reference, the same random numbers
    assert written["figures"]["kl_ratio"] == pytest.approx(loose["after"]["kl"] / held["after"]["kl"])
    for name, kl_coef in (("kl-coef-0", 0.0), ("kl-coef-0.13", 0.13)):
        (row,) = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert row["kl_coef"] == kl_coef
    assert (folder / "samples.txt").read_text().count("without the leash: ") == 6
    assert "Without the leash the score ends" in text


@pytest.mark.slow
def test_value_head_learns_from_rollouts(tmp_path):
    sizes = ("--episodes", "48", "--held-out-episodes", "16", "--num-envs", "16", "--max-response-tokens", "8")
    text = run("examples/value_head.py", *sizes, "--epochs", "60", "--minibatch-tokens", "64", cwd=tmp_path)
    folder = tmp_path / "runs" / "value-head"
    assert (folder / "value_head.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((folder / "value_head.json").read_text())
    before, after = results["train, before"], results["train, after"]
    assert after["error"] < 0.5 * before["error"]
    assert after["correlation"] > 0.8
    assert results["eval, before"]["constant"] > 0
    assert "error, first tokens" in text


@pytest.mark.slow
def test_token_rewards_add_up(tmp_path):
    """Of a real policy after one small iteration: the figures of every token, redone here from log-probabilities."""
    text = run("examples/token_rewards.py", *SMALL, cwd=tmp_path)
    folder = tmp_path / "runs" / "token-rewards"
    one = json.loads((folder / "token_rewards.json").read_text())
    tolls = [one["kl_coef"] * (p - q) for p, q in zip(one["logprobs"], one["ref_logprobs"], strict=True)]
    assert one["toll"] == pytest.approx(tolls, abs=1e-6)
    assert any(abs(toll) > 1e-4 for toll in tolls)
    assert sum(one["toll"]) == pytest.approx(one["kl_coef"] * one["kl"], abs=1e-6)
    assert one["score"][:-1] == [0.0] * (len(tolls) - 1)
    rewards = [score - toll for score, toll in zip(one["score"], tolls, strict=True)]
    assert one["reward"] == pytest.approx(rewards, abs=1e-5)  # the wrapped environments charged just that
    assert one["returns"] == pytest.approx([sum(rewards[t:]) for t in range(len(rewards))], abs=1e-5)
    values = [*one["value"], 0.0]
    deltas = [rewards[t] + values[t + 1] - values[t] for t in range(len(rewards))]
    by_hand = [sum(0.95 ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    assert one["advantage"] == pytest.approx(by_hand, abs=1e-5)
    page = (folder / "token_rewards.html").read_text()
    assert one["prompt"] in page and "background-color" in page
    assert "The tolls add up to" in text


@pytest.mark.slow
def test_overoptimisation_draws_both_curves_and_says_where_gold_peaks(tmp_path):
    small = ["--comparisons", "30", "--prompts", "4", "--samples", "4", "--episodes", "16", "--num-envs", "8"]
    few = ["--eval-every", "1", "--eval-samples", "2", "--refits", "1", "--max-response-tokens", "8"]
    run("examples/overoptimisation.py", "--name", "x", *small, *few, cwd=tmp_path)
    folder = tmp_path / "runs" / "x"
    assert (folder / "overoptimisation.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "report.json").read_text())
    assert list(report) == ["30 comparisons", "30 comparisons, retrained"]
    plain, retrained = report.values()
    assert plain["best_of_n"] == retrained["best_of_n"]  # the same proxy to begin with
    assert [point["label"] for point in plain["best_of_n"]["points"]] == ["best of 1", "best of 2", "best of 4"]
    best = [point["proxy"]["value"] for point in plain["best_of_n"]["points"]]
    assert best == sorted(best) and best[0] == pytest.approx(0, abs=1e-9)
    for of in (plain, retrained):
        kls = [point["kl"] for point in of["ppo"]["points"]]
        assert kls[0] == 0 and kls == sorted(kls)


@pytest.mark.slow
def test_full_pipeline_goes_on_where_it_was(tmp_path):
    small = ["--demonstrations", "48", "--comparisons", "16", "--episodes", "8", "--num-envs", "8", "--held-out", "6"]
    few = ["--name", "x", "--max-response-tokens", "8"]
    run("examples/full_pipeline.py", *small, *few, cwd=tmp_path)
    folder = tmp_path / "runs" / "x"
    report = json.loads((folder / "report.json").read_text())
    assert report["sft"]["kl"] == pytest.approx(0, abs=1e-3)  # stage 3 starts at its reference
    gain = report["gold_gain"]
    assert gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] == pytest.approx(report["ppo"]["gold"] - report["sft"]["gold"], abs=1e-6)
    kept = [folder / "1-sft" / "merged" / "model.safetensors", folder / "2-reward" / "checkpoint.safetensors"]
    kept += [folder / "2-reward" / "classifier" / "model.safetensors", folder / "3-ppo" / "metrics.jsonl"]
    written = [path.stat().st_mtime_ns for path in kept]
    (folder / "report.json").unlink()
    run("examples/full_pipeline.py", *small, *few, cwd=tmp_path)
    assert [path.stat().st_mtime_ns for path in kept] == written
    again = json.loads((folder / "report.json").read_text())
    assert again["gold_gain"]["value"] == pytest.approx(gain["value"], abs=1e-3)


@pytest.mark.slow
def test_dpo_reviews_learns_from_its_own_samples(tmp_path):
    small = ["--pairs", "12", "--episodes", "4", "--max-response-tokens", "6", "--batch-size", "4", "--epochs", "1"]
    text = run("examples/dpo_reviews.py", "--name", "x", *small, "--held-out", "0.5", cwd=tmp_path)
    folder = tmp_path / "runs" / "x"
    report = json.loads((folder / "report.json").read_text())
    assert report["before"]["kl"] == pytest.approx(0, abs=0.05) and report["pairs"] > 0
    assert set(report["after"]) == {"score", "kl"} and 0 <= report["held_out"]["accuracy"] <= 1
    assert len((folder / "pairs.jsonl").read_text().splitlines()) > report["pairs"]
    assert (folder / "training.png").exists() and "as they were sampled" in text
