"""`benchmarks/ppo_step.py`: what it counts is counted right, and it leaves the tables and the file that it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(*arguments, cwd):
    command = [sys.executable, str(BENCHMARKS / "ppo_step.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SMALL = ("--model", "tiny", "--repetitions", "1", "--iterations", "1", "--threads", "1", "--ceiling-size", "64")
SMALL += ("--prompts", "4", "--prompt-tokens", "6", "--response-tokens", "5", "--json", "report.json")


# Counting


def test_parameters_that_multiply_are_those_of_the_linear_layers():
    from support.flops import Shape
    from transformers import LlamaConfig, LlamaForCausalLM

    from textenv.lm.adapters import add_lora

    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    linear = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    shape = Shape.of_llama(config.to_dict(), rank=5)
    assert shape.head == linear.pop("lm_head") == 24 * 50
    assert shape.trunk == sum(linear.values())
    add_lora(model, 5, 10, seed=0)
    assert shape.adapters == sum(p.numel() for name, p in model.named_parameters() if "lora" in name)


def test_flops_of_an_update_by_hand():
    """Trunk 100, head 10, adapters 4; 6 tokens, of which 4 go through the head; 2 epochs."""
    from support.flops import Shape, pass_flops, update_flops

    shape = Shape(trunk=100, head=10, adapters=4)
    assert pass_flops(shape, "separate", 6, 4) == 6 * (600 + 40)
    assert pass_flops(shape, "adapters", 6, 4) == 4 * (600 + 40) + 6 * 24
    assert update_flops(shape, "separate", 6, 4, 2) == 2 * (6 * 640 + 6 * 600)
    assert update_flops(shape, "adapters", 6, 4, 2) == 2 * (4 * 640 + 6 * 24)


def test_flops_of_plain_training_are_those_that_torch_counts():
    """torch's own counter on a Llama whose attention it can see, without the attention's own products."""
    from support.flops import Shape, pass_flops
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    ids = torch.arange(12).reshape(2, 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, logits_to_keep=4, use_cache=False).logits.sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    # The first layer's q, k, v and norm still get an input gradient, because the embeddings train.
    assert counted == pass_flops(Shape.of_llama(config.to_dict(), 1), "separate", 12, 8)


# Judging


def group(**figures):
    return {
        name.replace("_", "-"): {"tokens_per_second": rate, "peak_memory": memory}
        for name, (rate, memory) in figures.items()
    }


def test_targets_are_ratios_with_the_right_side_better():
    from support.tables import target_rows

    measured = group(trl=(10, 8e9), trl_medium=(14, 8e9), ours_a=(13, 8e9), ours_b=(36, 2.6e9), ours_b_vllm=(40, 2e9))
    rows = {
        (row["contender"], row["target"].against, row["target"].figure): (row["ratio"], row["holds"])
        for row in target_rows(measured)
    }
    assert rows["ours-a", "trl", "tokens_per_second"] == (pytest.approx(1.3), True)
    assert rows["ours-a", "trl-medium", "tokens_per_second"] == (pytest.approx(13 / 14), False)
    assert rows["ours-b", "trl", "tokens_per_second"] == (pytest.approx(3.6), True)
    assert rows["ours-b", "trl", "peak_memory"] == (pytest.approx(0.325), False)
    assert rows["ours-b-vllm", "trl", "peak_memory"] == (pytest.approx(0.25), True)
    assert not any(name.startswith("ours-c") for name, *_ in rows)  # not measured


def test_step_rows_are_medians_over_iterations_and_shares_of_the_ceiling():
    from support.flops import Shape
    from support.tables import step_rows

    job = {"batch_size": 2, "prompt_tokens": 1, "response_tokens": 2, "epochs": 2}  # 6 tokens, 4 of them responses
    shape = Shape(trunk=100, head=10, adapters=4)
    times = [(1.0, 1.0, 2.0), (1.0, 1.0, 4.0), (9.0, 9.0, 9.0)]
    rounds = [
        {"iterations": [dict(zip(("generate", "forward", "update"), t, strict=True))], "peak_memory": m}
        for t, m in zip(times, (1, 2, 3), strict=True)
    ]
    ceilings = {"float32": 2e-6, "medium": 1e-6, "bf16": 4e-6}  # GFLOP/s
    trl, ours = step_rows({"trl/1": rounds, "ours-c/1": rounds}, ceilings, shape, job)
    assert trl["tokens_per_second"] == pytest.approx(4 / 6) and trl["seconds"] == 6 and trl["update"] == 4
    assert trl["peak_memory"] == 2
    assert trl["share"] == pytest.approx(2 * (6 * 640 + 6 * 600) / 4 / 2e3)
    assert trl["share_performed"] == pytest.approx(2 * (6 * 660 + 6 * 600) / 4 / 2e3)
    assert ours["share"] == pytest.approx(2 * (4 * 640 + 6 * 24) / 4 / 4e3) and ours["share_performed"] is None


@pytest.mark.parametrize(
    "name, shapes, group",
    [
        ("aten::mm", [[768, 576], [576, 1536]], "matmul"),
        ("aten::addmm", [[576], [768, 576], [576, 576], []], "matmul"),
        ("aten::mm", [[128, 576], [576, 49152]], "head"),
        ("aten::_log_softmax", [[128, 49152], [], []], "head"),
        ("aten::_fused_adamw_", [], "optimiser"),
        ("Optimizer.step#AdamW.step", [], "optimiser"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[16, 9, 48, 64]], "attention"),
        ("aten::copy_", [[768, 576], [768, 576]], "copies"),
        ("aten::mul", [[16, 48, 576], []], "rest"),
    ],
)
def test_operations_are_grouped_by_what_they_belong_to(name, shapes, group):
    from support.update_side import group_of

    assert group_of(name, shapes, vocab_size=49152) == group


# Processes


def test_a_failing_side_says_what_it_said(tmp_path):
    from support.process import measure

    with pytest.raises(RuntimeError, match=r"(?s)support\.ceilings.*KeyError: 'size'"):
        measure("support.ceilings", {"threads": 1})


def test_memory_peak_is_the_processs_own():
    """Half a gigabyte that this process touches does not show in the process that it starts."""
    from support.process import measure, peak_memory

    held = bytearray(b"\1") * 2**29
    assert peak_memory() > len(held)
    result = measure("support.ceilings", {"threads": 1, "size": 8, "repetitions": 2})
    assert 50e6 < result["peak_memory"] < len(held)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in result["gflops"].values())


def test_another_environment_than_the_pinned_one_is_refused(tmp_path):
    from support.trl_venv import trl_python

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(RuntimeError, match="another TRL would be measured"):
        trl_python(tmp_path)


# The commands


def test_help_names_every_option(tmp_path):
    text = run("--help", cwd=tmp_path)
    for option in ("--trl-venv", "--repetitions", "--minibatches", "--contenders", "--update-only", "--json"):
        assert option in text


@pytest.mark.slow
def test_ours_is_measured_in_every_layout(tmp_path):
    text = run(*SMALL, "--contenders", "ours-a", "ours-b", "ours-c", "--minibatches", "2", cwd=tmp_path)
    assert "four networks" in text and "2 minibatches" in text and "Matrix products" in text
    assert "Targets" not in text  # those are SmolLM2's
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    assert set(rows) == {"ours-a", "ours-b", "ours-c"} and all(row["minibatches"] == 2 for row in rows.values())
    for row in rows.values():
        assert row["seconds"] == pytest.approx(row["generate"] + row["forward"] + row["update"])
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(20)
        assert 0 < row["share"] < 2
    # Of 15.5 million float32 weights (a) holds 10 copies: 4 networks, and of 2 a gradient and two moments. (b) holds 1.
    assert rows["ours-a"]["peak_memory"] - rows["ours-b"]["peak_memory"] > 250e6
    for measurement in (report["measurements"][f"{name}/2"][0] for name in rows):
        assert abs(measurement["kl"][0]) < 0.5  # the first batch comes from the reference itself


@pytest.mark.slow
def test_what_was_measured_survives_a_failure(tmp_path):
    """Adapters of no rank: the second case fails."""
    script = (
        "import dataclasses, sys; sys.argv = ['ppo_step.py', *sys.argv[1:]]; import ppo_step, tyro\n"
        "from support.update_cases import CASES\n"
        "CASES['ours-adapters-float32'] = dataclasses.replace(CASES['ours-adapters-float32'], lora_rank=0)\n"
        "ppo_step.main(tyro.cli(ppo_step.Arguments))"
    )
    command = [sys.executable, "-c", script, *SMALL, "--update-only"]
    command += ["--cases", "plain-full-float32", "ours-adapters-float32"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1 and "lora_rank" in done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["plain-full-float32"]


@pytest.mark.slow
def test_the_update_alone_is_measured_and_taken_apart(tmp_path):
    cases = ("ours-full-float32", "plain-full-medium", "ours-adapters-bf16", "plain-adapters-bf16")
    text = run(*SMALL, "--update-only", "--cases", *cases, cwd=tmp_path)
    assert "Where the time goes" in text
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert tuple(row["case"] for row in rows) == cases
    for row in rows:
        assert row["gflops"] > 0
        assert {"head", "matmul", "attention", "optimiser", "rest"} <= set(row["profile"])
