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


@pytest.mark.parametrize("script", ["examples/toy_optimum.py", "examples/align_reviews.py", "benchmarks/optimality.py"])
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
