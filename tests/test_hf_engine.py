"""What `HFEngine` saves does not show in what it writes: blocks, shared prompts, leaving rows, merged weights."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, mamba, tiny
from lm_helpers import EOS, NAMED, PROMPTS, byte_tokenizer, padded, tensors

from textenv.agents import LanguageModelPolicy
from textenv.agents.rollouts import HFEngine, StepwiseEngine, hf
from textenv.agents.rollouts.base import Recorder
from textenv.agents.rollouts.hf_attention import NAME, attend
from textenv.agents.rollouts.hf_weights import can_pack, fast_forwards, packed_product, replaced
from textenv.agents.rollouts.seeds import row_seeds
from textenv.agents.types import Sampling
from textenv.lm import LanguageModel
from textenv.lm.adapters import AdapterFree, add_lora
from textenv.lm.cache import plain_attention
from textenv.lm.precision import precision

BUDGET = 12
SAMPLING = Sampling(max_tokens=BUDGET, stop_ids=tuple(range(0, NAMED, 10)), seed=3)


def prompts(repeats=2):
    encode = byte_tokenizer()
    return [encode(prompt).input_ids for prompt in PROMPTS] * repeats


def lists(generation):
    return [response.tolist() for response in generation.responses]


def shake(model, scale=0.2, seed=0):
    """Adapters far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.fixture(scope="module")
def policy(tiny_model):
    made = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    shake(made)
    return made


@pytest.fixture(scope="module")
def whole(policy):
    return HFEngine(policy).generate(prompts(), SAMPLING)


def assert_same(generation, expected, order=slice(None)):
    assert lists(generation) == np.array(lists(expected), dtype=object)[order].tolist()
    for ours, theirs in zip(generation.logprobs, np.array(expected.logprobs, dtype=object)[order], strict=True):
        np.testing.assert_allclose(ours, theirs.astype(np.float32), atol=1e-5)


# A row's company


@pytest.mark.parametrize("row", range(8))
def test_a_row_alone_is_the_row_in_a_batch(policy, whole, row, monkeypatch):
    """Under the seed that it has there."""
    seeds = row_seeds(SAMPLING.seed, 8)
    monkeypatch.setattr(hf, "row_seeds", lambda *_: seeds[row : row + 1])
    alone = HFEngine(policy).generate(prompts()[row : row + 1], SAMPLING)
    assert lists(alone) == lists(whole)[row : row + 1]
    np.testing.assert_allclose(alone.logprobs[0], whole.logprobs[row], atol=1e-5)


@pytest.mark.parametrize("max_rows, tokens", [(1, 10**6), (3, 10**6), (256, 60), (256, 1)])
def test_blocks_do_not_show(policy, whole, max_rows, tokens, monkeypatch):
    monkeypatch.setattr(hf, "MAX_ROWS", max_rows)
    monkeypatch.setattr(hf, "CACHE_TOKENS", {"cpu": tokens})
    monkeypatch.setattr(hf, "TOKENS_PER_PASS", {"cpu": 2})
    assert_same(HFEngine(policy).generate(prompts(), SAMPLING), whole)


def test_order_does_not_show(policy, whole, monkeypatch):
    order = np.random.default_rng(0).permutation(8)
    seeds = row_seeds(SAMPLING.seed, 8)[order]
    monkeypatch.setattr(hf, "row_seeds", lambda *_: seeds)
    permuted = HFEngine(policy).generate([prompts()[row] for row in order], SAMPLING)
    assert lists(permuted) == [lists(whole)[row] for row in order]
    for place, row in enumerate(order):
        np.testing.assert_allclose(permuted.logprobs[place], whole.logprobs[row], atol=1e-5)


def test_blocks_are_rows_of_like_length_within_the_budget(monkeypatch):
    rows = [[1] * length for length in (9, 2, 5, 2, 9, 30, 5)]
    monkeypatch.setattr(hf, "MAX_ROWS", 4)
    blocks = [block.tolist() for block in hf._blocks(rows, 3, 30)]
    assert blocks == [[1, 3, 2], [6, 0], [4], [5]]  # 3 x 8, 2 x 12, 12, and one that is too long for any budget
    assert [block.tolist() for block in hf._blocks(rows, 3, 10**6)] == [[1, 3, 2, 6], [0, 4, 5]]


def test_equal_prompts_are_read_once(policy, monkeypatch):
    """And only rows that still write go through the model."""
    passes = []
    extend = LanguageModel.extend

    def spying(self, input_ids, cache, place):
        passes.append(tuple(input_ids.shape))
        return extend(self, input_ids, cache, place)

    engine = HFEngine(policy)
    engine.generate(prompts(1), SAMPLING)  # has tried whether the past can be kept
    monkeypatch.setattr(LanguageModel, "extend", spying)
    generation = engine.generate(prompts(2), dataclasses.replace(SAMPLING, samples_per_prompt=4))
    assert passes[0] == (4, max(map(len, prompts())))
    lengths = np.array([len(response) for response in generation.responses])
    assert passes[1:] == [(n, 1) for step in range(1, BUDGET) if (n := int((lengths > step).sum()))]


# Models


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_write_what_full_passes_write(name, lora):
    module = tiny(name)
    if lora:
        add_lora(module, 4, 8, 0)
        shake(module, 0.1)
    check_against_stepwise(LanguageModel(module, source=name))


def test_recurrent_models_are_read_whole():
    check_against_stepwise(LanguageModel(mamba(), source="mamba"))


def test_attention_that_is_written_out_stays_as_it_is():
    check_against_stepwise(LanguageModel(tiny("gemma2", attention="eager"), source="gemma2"))


def check_against_stepwise(lm):
    policy = LanguageModelPolicy(lm, AdapterFree(lm.model, source="same"), None, {})
    rows = np.random.default_rng(0).integers(0, VOCAB, (5, 9))
    several = [row[:length].tolist() for row, length in zip(rows, (9, 1, 4, 9, 6), strict=True)]
    sampling = Sampling(max_tokens=10, stop_ids=(0, 1, 2, 3, 4), samples_per_prompt=2)
    cached, stepwise = (engine(policy).generate(several, sampling) for engine in (HFEngine, StepwiseEngine))
    assert lists(cached) == lists(stepwise)
    for ours, theirs in zip(cached.logprobs, stepwise.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("value", ["trunk", "separate"])
@pytest.mark.parametrize("rank", [None, 4])
def test_policies_with_other_value_functions_write_the_same(tiny_model, value, rank):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=rank, value=value)
    shake(policy.lm.model)
    assert_same(HFEngine(policy).generate(prompts(), SAMPLING), StepwiseEngine(policy).generate(prompts(), SAMPLING))


@pytest.mark.parametrize("rank", [None, 4])
def test_bfloat16_is_the_trainers_within_its_rounding(tiny_model, rank):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=rank, dtype="bfloat16")
    shake(policy.lm.model)
    generation = HFEngine(policy).generate(prompts(4), SAMPLING)
    ids, mask = padded(list(zip(prompts(4), generation.responses, strict=True)), 30, BUDGET)
    with torch.no_grad(), policy.arithmetic():
        theirs = policy.evaluate(*tensors(ids, mask), BUDGET).logprobs.numpy()[mask[:, 30:] == 1]
    error = np.abs(np.concatenate(generation.logprobs) - theirs)
    assert np.median(error) < 0.05 and error.max() < 1


# What is replaced while it writes, and afterwards


def memory_of(policy):
    return {name: (p.data_ptr(), p._version, p.clone()) for name, p in policy.named_parameters()}


def assert_untouched(policy, before):
    for name, parameter in policy.named_parameters():
        where, version, value = before[name]
        assert (parameter.data_ptr(), parameter._version) == (where, version) and torch.equal(parameter, value)
    assert not [module for module in policy.modules() if "forward" in vars(module)]
    assert policy.lm.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_is_left_as_it_was(tiny_model, dtype):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype=dtype)
    shake(policy.lm.model)
    before = memory_of(policy)
    HFEngine(policy).generate(prompts(), SAMPLING)
    assert_untouched(policy, before)


def test_the_policy_is_left_as_it_was_by_an_interruption(policy, monkeypatch):
    def interrupted(*_):
        assert policy.lm.model.config._attn_implementation == NAME  # in the middle of it
        assert [module for module in policy.modules() if "forward" in vars(module)]
        raise KeyboardInterrupt

    before = memory_of(policy)
    monkeypatch.setattr(LanguageModel, "extend", interrupted)
    engine = HFEngine(policy)
    engine._cached = True
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), SAMPLING)
    assert_untouched(policy, before)


def test_the_reference_is_itself_while_the_policy_writes(policy, monkeypatch):
    """A constraint may ask it between two tokens; its adapters are off then, merged or not."""
    rows = [torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long)]
    expected, seen = policy.reference.hidden_states(*rows), []
    choose = Recorder.choose

    def asking(self, logits):
        seen.append(policy.reference.hidden_states(*rows))
        return choose(self, logits)

    monkeypatch.setattr(Recorder, "choose", asking)
    HFEngine(policy).generate(prompts(), SAMPLING)
    assert len(seen) == BUDGET and all(torch.allclose(states, expected, atol=1e-5) for states in seen)
    assert not torch.allclose(policy.lm.hidden_states(*rows), expected, atol=0.01)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gpt-neox"])
def test_merged_layers_compute_what_adapters_do(name):
    """With biases and transposed weights too; the head stays out of it."""
    module = tiny(name)
    add_lora(module, 4, 8, 0)
    shake(module, 0.3)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = module(input_ids=ids).logits
        forwards = fast_forwards(module, torch.float32)
        with replaced(forwards):
            merged = module(input_ids=ids).logits
        layers = [layer for layer, _ in forwards]
        assert module.get_output_embeddings() not in layers
        assert len(layers) == sum(hasattr(layer, "get_delta_weight") for layer in module.modules()) > 8
        assert torch.equal(module(input_ids=ids).logits, expected)
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_those_of_a_linear_layer(dtype, bias):
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip("this processor packs no matrices of that precision")
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 5, 7), (11, 7)))
    added = torch.randn(11, generator=generator) if bias else None
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if added is None else added.double())
    with torch.no_grad(), precision("cpu", "float32"):
        product = packed_product(weight, added, dtype)(inputs)
    assert product.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)


def test_without_packing_the_merged_matrices_serve(policy, whole, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("textenv.agents.rollouts.hf_weights.can_pack", lambda *_: False)
    assert_same(HFEngine(policy).generate(prompts(), SAMPLING), whole)


def test_short_responses_do_without_another_copy(policy, monkeypatch):
    def unwanted(*_):
        raise AssertionError

    monkeypatch.setattr(hf, "fast_forwards", unwanted)
    short = dataclasses.replace(SAMPLING, max_tokens=hf.FAST_FROM - 1)
    assert_same(HFEngine(policy).generate(prompts(), short), StepwiseEngine(policy).generate(prompts(), short))


@pytest.mark.parametrize("heads, groups", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_grouped_attention_is_torchs(heads, groups, scaling):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(4, n, k, 8, generator=generator) for n, k in ((heads, 1), (groups, 9), (groups, 9))
    )
    seen = torch.rand(4, 1, 1, 9, generator=generator) < 0.5
    seen[..., 0] = True
    ours, _ = attend(None, query, key, value, seen, scaling=scaling)
    with plain_attention("cpu"):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-6, rtol=1e-5)


# The real model


@pytest.mark.slow
def test_smollm2_writes_what_the_trainer_reads():
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=16)
    shake(policy.lm.model, 0.02)
    texts = ["The film", "A dull and overlong piece of", "I"]
    several = [policy.tokenizer.encode(text) for text in texts]
    sampling = Sampling(max_tokens=16, stop_ids=tuple(policy.tokenizer.stop_ids), samples_per_prompt=2)
    generation = HFEngine(policy).generate(several, sampling)
    rows = [prompt for prompt in several for _ in range(2)]
    ids, mask = padded(list(zip(rows, generation.responses, strict=True)), 12, 16, fill=EOS)
    theirs = policy.response_logprobs(ids, mask, 16)[mask[:, 12:] == 1]
    np.testing.assert_allclose(np.concatenate(generation.logprobs), theirs, atol=1e-3)


@pytest.mark.slow
def test_the_benchmark_leaves_a_table_and_a_file(tmp_path):
    script = Path(__file__).parent.parent / "benchmarks" / "generation.py"
    options = ["--sequences", "1", "2", "--new-tokens", "2", "--repetitions", "1", "--no-vllm", "--json", "rates.json"]
    done = subprocess.run([sys.executable, script, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HFEngine" in done.stdout and "not installed" not in done.stdout
    medians = json.loads((tmp_path / "rates.json").read_text())["medians"]
    assert list(medians) == ["1", "2"]
    assert all(rate > 0 for found in medians.values() for rate in found.values()) and len(medians["1"]) == 3
