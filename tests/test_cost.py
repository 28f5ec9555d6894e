"""Prices: counted by hand, by autograd, by torch's own operation counter, and by the memory of real runs."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from agent_helpers import lm_agent, lm_envs, toy_agent
from lm_helpers import ROWS, GRUPolicy, gpt2, llama, save_model
from torch.utils.flop_counter import FlopCounterMode
from value_helpers import COMBINATIONS, make_policy

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, cost_compute, cost_memory, cost_run
from textenv.agents.cost import Cost, estimate
from textenv.agents.cost_compute import attention_flops, flops, textbook_flops
from textenv.agents.cost_memory import ADAM, activations, kv_cache, moments, resident, textbook_bytes
from textenv.agents.cost_run import cost_of, memory_warning, run_line
from textenv.agents.cost_setup import Setup
from textenv.agents.cost_shape import ModelShape, shape_named, shape_of
from textenv.lm.adapters import add_lora
from textenv.lm.cache import Place, RowCache
from textenv.lm.packing import WRITTEN_OUT
from textenv.rewards import film_review_head

GIB = 2**30
DOCUMENT = Path(__file__).parent.parent / "docs" / "cost.md"
DEEP = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8}
"""Eight layers, so that what is special about the first and the last weighs little."""

ROUND = ModelShape(
    name="round numbers",
    layers=10,
    hidden_size=100,
    heads=10,
    kv_heads=5,
    head_size=10,
    mlp_size=200,
    vocab_size=1000,
    linear=900_000,
    linear_layers=70,
    linear_ends=20_000,
    head=100_000,
    tied=True,
    embeddings=0,
    other=2_000,
)
TINY = {"batch": 6, "prompt_tokens": 10, "response_tokens": 20, "epochs": 1}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("deep") / "deep-llama", llama(**DEEP))


# The textbook's formulas


@pytest.mark.parametrize("weights", [1, 134_515_008, 7_000_000_000])
def test_four_full_models_take_36_bytes_per_weight(weights):
    assert textbook_bytes(trained=2 * weights, frozen=2 * weights) == 36 * weights


def test_textbook_bytes_by_hand():
    """Seven billion weights: 112 GB for one that trains, 14 GB for a frozen one."""
    assert textbook_bytes(trained=7 * 10**9, frozen=0) == 112 * 10**9
    assert textbook_bytes(trained=0, frozen=7 * 10**9) == 14 * 10**9
    assert textbook_bytes(trained=3, frozen=5) == 58


@pytest.mark.parametrize("epochs, trainer, engine", [(1, 22, 20), (2, 34, 32), (4, 58, 56)])
def test_textbook_flops(epochs, trainer, engine):
    assert textbook_flops(10**9, epochs) == trainer * 10**9
    assert textbook_flops(10**9, epochs, logprobs_from="engine") == engine * 10**9


@pytest.mark.parametrize("module", [cost_memory, cost_compute])
def test_examples_in_docstrings(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


# Sizes


def test_shape_of_a_llama_by_hand(tiny_model):
    """H 32, F 48, 2 layers, 4 heads of 8, 2 for keys: q and o 32 x 32, k and v 32 x 16, three of 32 x 48."""
    shape = shape_named(tiny_model)
    per_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_size, shape.mlp_size) == (2, 4, 2, 8, 48)
    assert (shape.linear, shape.linear_layers) == (2 * per_layer, 14)
    assert shape.linear_ends == 2 * (2 * 64 + 2 * 48 + 3 * 80)
    assert (shape.head, shape.tied, shape.embeddings, shape.other) == (32 * ROWS, True, 0, 5 * 32)
    assert shape.total == sum(p.numel() for p in llama().parameters())
    assert shape.multiplying == 2 * per_layer + 32 * ROWS


def test_untied_embeddings_and_learned_positions_are_looked_up(tmp_path):
    untied = shape_named(save_model(tmp_path / "untied", llama(tie_word_embeddings=False)))
    assert not untied.tied and untied.embeddings == untied.head == 32 * ROWS
    positions = shape_named(save_model(tmp_path / "gpt2", gpt2()))
    assert positions.tied and positions.embeddings == 64 * 32
    assert positions.total == sum(p.numel() for p in gpt2().parameters())
    assert positions.linear == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)


def test_adapters_are_no_part_of_the_shape(tiny_model):
    module = llama()
    add_lora(module, 4, 8, seed=0)
    assert shape_of(module, tiny_model) == shape_named(tiny_model)


def test_a_name_that_leads_nowhere_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"should be an embedded name \(smollm2-135m\), a folder with config.json"):
        shape_named(tmp_path)


@pytest.mark.slow
def test_smollm2_is_read_without_its_weights():
    """Issue and README speak of 134.5 M weights, N counts the head once and no lookups."""
    shape = shape_named("smollm2-135m")
    assert (shape.total, shape.linear, shape.head) == (134_515_008, 106_168_320, 28_311_552)
    assert 16 * shape.linear_ends == 4_884_480  # rank 16


# Memory that stays


@pytest.mark.parametrize("value, lora_rank", COMBINATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_policy(tiny_model, value, lora_rank, dtype):
    policy = make_policy(tiny_model, value, lora_rank, dtype=dtype)
    setup = Setup(shape=shape_named(tiny_model), lora_rank=lora_rank, value=value, dtype=dtype, device="cuda")
    held = {id(p): p for part in (policy, policy.reference.model) for p in part.parameters()}.values()
    parts = resident(setup)
    moments_of_adam = parts.pop("AdamW's moments")
    assert sum(parts.values()) == sum(p.nbytes for p in held)
    assert setup.trained == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert moments_of_adam == ADAM * setup.trained


def test_moments_are_those_of_the_optimiser(tiny_model):
    agent = lm_agent(tiny_model, check_start=False)
    agent.step()
    sizes = [t.nbytes for state in agent.optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(sizes) == resident(cost_of(agent).setup)["AdamW's moments"]


def test_what_stands_beside_the_policy():
    plain, separate, vllm = (
        resident(Setup(shape=ROUND, **options))
        for options in ({}, {"reward": "separate", "dtype": "bfloat16"}, {"engine": "vllm", "kv_cache_gib": 0.5})
    )
    assert plain["policy"] == 4 * 1_002_000 and plain["adapters"] == 4 * 16 * 20_000
    assert separate["policy"] == 2 * 900_000 + 4 * 102_000  # linear layers are rounded
    assert separate["reward model"] == 2 * 1_002_000
    assert vllm["vLLM's weights"] == 4 * 1_002_000 and vllm["vLLM's key-value cache"] == GIB // 2
    assert resident(Setup(shape=ROUND, device="cuda"))["process"] == 0


# Memory that comes and goes


def kept_by_autograd(policy, rows, prompt_tokens, response_tokens):
    """Bytes that a pass keeps for its backward pass, weights left out."""
    weights = {t.untyped_storage().data_ptr() for t in [*policy.parameters(), *policy.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 50, (rows, prompt_tokens + response_tokens))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # rows of unlike length
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), policy.arithmetic():
        output = policy.evaluate(ids, mask, response_tokens)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("lora_rank", [4, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [(10, 20), (20, 90), (28, WRITTEN_OUT)])
def test_activations_are_what_autograd_keeps(deep_model, lora_rank, dtype, tokens):
    policy = LanguageModelPolicy.from_pretrained(deep_model, lora_rank=lora_rank, dtype=dtype)
    sizes = {"batch": 12, "prompt_tokens": tokens[0], "response_tokens": tokens[1], "micro_batch_tokens": 10**6}
    setup = Setup(shape=shape_of(policy.lm.model), lora_rank=lora_rank, dtype=dtype, **sizes)
    assert kept_by_autograd(policy, 12, *tokens) == pytest.approx(activations(setup), rel=0.1)


@pytest.mark.parametrize("value", ["detached", "separate"])
def test_activations_of_value_functions(deep_model, value):
    policy = LanguageModelPolicy.from_pretrained(deep_model, lora_rank=4, value=value)
    setup = Setup(shape=shape_of(policy.lm.model), lora_rank=4, value=value, **TINY)
    assert kept_by_autograd(policy, 6, 10, 20) == pytest.approx(activations(setup), rel=0.1)


def test_activations_of_another_architecture(tmp_path):
    policy = LanguageModelPolicy.from_pretrained(save_model(tmp_path, gpt2()), lora_rank=4)
    setup = Setup(shape=shape_of(policy.lm.model), lora_rank=4, **TINY)
    assert kept_by_autograd(policy, 6, 10, 20) == pytest.approx(activations(setup), rel=0.25)


def test_checkpointing_keeps_the_input_of_each_layer():
    """4 bytes x (10 layers x 100 + 400 for the heads) per token, and one whole layer."""
    whole, checkpointed = (Setup(shape=ROUND, checkpointing=on, **TINY) for on in (False, True))
    layer = cost_memory.layer_bytes(whole)
    assert activations(whole) == 180 * (10 * layer + 1600)
    assert activations(checkpointed) == 180 * (4000 + layer + 1600)


def test_layer_by_hand():
    """H = A = 100, K = 50, F = 200, 10 heads, L = 30, rank 16, 7 linear layers; float32."""
    numbers = 2 * 100 + 2 * 100 + 3 * 100 + 2 * 50 + 10 * 30 + 2 * 200 + 7 * 16
    assert cost_memory.layer_bytes(Setup(shape=ROUND, **TINY)) == 4 * numbers
    full = Setup(shape=ROUND, lora_rank=None, **TINY)
    assert cost_memory.layer_bytes(full) == 4 * (numbers + 2 * 100 + 2 * 200 - 7 * 16)


def test_micro_batches_bound_activations_and_keep_gradients():
    whole = Setup(shape=ROUND, **TINY)
    parts = Setup(shape=ROUND, micro_batch_tokens=89, **TINY)  # two rows of 30
    assert (whole.pass_tokens, parts.pass_tokens) == (180, 60)
    assert whole.fused_first_pass and not parts.fused_first_pass
    assert 3 * activations(parts) == activations(whole)
    assert "gradients" not in moments(whole)["forward and backward"]
    assert moments(parts)["forward and backward"]["gradients"] == 4 * parts.trained
    alone = Setup(shape=ROUND, micro_batch_tokens=7, **TINY)  # a longer row goes alone
    assert alone.pass_tokens == 30


def test_memory_does_not_grow_with_the_batch_but_for_the_cache():
    small, large = (Cost.of(Setup(shape=ROUND, batch=batch)) for batch in (64, 640))
    assert activations(small.setup) == activations(large.setup)
    assert kv_cache(large.setup) > kv_cache(small.setup)


def test_cache_is_that_of_the_engine(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model)
    setup = Setup(shape=shape_named(tiny_model), batch=3, prompt_tokens=4, response_tokens=6)
    cache = RowCache(policy.lm.num_layers, 3, 10)
    policy.lm.extend(torch.ones(3, 4, dtype=torch.long), cache, Place(None, torch.arange(4).expand(3, 4), 4))
    assert kv_cache(setup) == cache.nbytes


# Compute


IN_PLACE = {torch.ops.aten.addmm_: lambda _out, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
"""What torch's counter leaves out."""


@pytest.mark.parametrize("lora_rank", [4, None])
@pytest.mark.parametrize("value", ["trunk", "separate"])
def test_operations_are_those_that_torch_counts(deep_model, lora_rank, value):
    """All products with weights, forward and backward. The first layer's inputs need no gradient: 1% less."""
    policy = LanguageModelPolicy.from_pretrained(deep_model, lora_rank=lora_rank, value=value)
    ids, mask = torch.randint(0, 50, (6, 30)), torch.ones(6, 30, dtype=torch.long)
    policy.evaluate(ids, mask, 20)  # tries once whether it can be packed
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        output = policy.evaluate(ids, mask, 20)
        (output.logprobs.sum() + output.values.sum()).backward()
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as frozen, torch.no_grad():
        policy.evaluate(ids, mask, 20)
    shape = shape_of(policy.lm.model)
    once = flops(Setup(shape=shape, lora_rank=lora_rank, value=value, **TINY))
    assert products_with_weights(counter) / 120 == pytest.approx(once["update"], rel=0.02)
    parts = flops(Setup(shape=shape, lora_rank=lora_rank, value=value, micro_batch_tokens=30, **TINY))
    assert products_with_weights(frozen) / 120 == pytest.approx(parts["logprobs"], rel=0.02)
    attention = sum(count for name, count in frozen.get_flop_counts()["Global"].items() if "bmm" in str(name))
    trunks = 2 if value == "separate" else 1
    attention -= 2 * 120 * shape.vocab_size  # entropies
    assert attention / 180 == trunks * attention_flops(shape, 30)


def products_with_weights(counter):
    return sum(count for name, count in counter.get_flop_counts()["Global"].items() if "bmm" not in str(name))


def test_operations_by_hand():
    """M = 900 k, V H = 100 k, A = 320 k, c = 30 / 20: four full models, and the default layout."""
    four = Setup(shape=ROUND, lora_rank=None, value="separate", reward="separate", micro_batch_tokens=30, **TINY)
    assert flops(four) == {
        "generate": 2 * 1.35e6 + 2e5,
        "score": 4 * 1.35e6 + 2e5,
        "logprobs": 4 * 1.35e6 + 2e5,
        "update": 12 * 1.35e6 + 8e5,
    }
    default = Setup(shape=ROUND, **(TINY | {"epochs": 3}))
    assert flops(default) == {
        "generate": 2 * 1.35e6 + 2e5,
        "score": 2 * 1.35e6 + 2e5,
        "logprobs": 0,  # the update's first pass
        "update": 3 * (4 * 1.35e6 + 6 * 0.48e6 + 4e5),
    }


def test_without_prompts_and_lookups_four_models_cost_what_the_textbook_says():
    """But for the output heads: the value and reward models have none, and a trained one is read twice."""
    headless = ModelShape(**(vars(ROUND) | {"head": 0}))
    sizes = {"batch": 6, "prompt_tokens": 1, "response_tokens": 10**6, "epochs": 4, "micro_batch_tokens": 1}
    setup = {"shape": headless, "lora_rank": None, "value": "separate", "reward": "separate", **sizes}
    assert sum(flops(Setup(**setup)).values()) == pytest.approx(textbook_flops(900_000, 4), rel=1e-5)
    engine = sum(flops(Setup(**setup, logprobs_from="engine")).values())
    assert engine == pytest.approx(textbook_flops(900_000, 4, "engine"), rel=1e-5)


def test_what_saves_and_what_costs_operations():
    def total(**options):
        return sum(flops(Setup(shape=ROUND, micro_batch_tokens=30, **TINY, **options)).values())

    assert total(logprobs_from="engine") == total() - 2e5  # the head; values are still read
    assert total(checkpointing=True) == total() + 2 * (1.35e6 + 0.48e6)
    assert total(reward="separate") == total() + 2 * 1.35e6
    assert total(value="detached") == total()


# Setups that cannot be


@pytest.mark.parametrize(
    "option, message",
    [
        ({"lora_rank": 0}, "`lora_rank` should be an integer of at least 1, got 0"),
        ({"batch": 2.0}, "`batch` should be an integer of at least 1, got 2.0"),
        ({"epochs": True}, "`epochs` should be an integer of at least 1, got True"),
        ({"value": "trunc"}, r"`value` should be one of \('trunk', 'detached', 'separate', 'reward'\), got 'trunc'"),
        ({"dtype": "float16"}, r"`dtype` should be one of \('float32', 'bfloat16'\), got 'float16'"),
        ({"engine": "tgi"}, "`engine` should be one of .* got 'tgi'"),
    ],
)
def test_setups_are_checked(option, message):
    with pytest.raises(ValueError, match=message):
        Setup(shape=ROUND, **option)


# What users see


def test_estimate_adds_up(tiny_model):
    cost = estimate(tiny_model, lora_rank=4, batch=8, response_tokens=6, epochs=2)
    assert cost.setup.shape == shape_named(tiny_model)
    peaks = [sum(parts.values()) for parts in cost.moments.values()]
    assert cost.total == sum(cost.resident.values()) + max(peaks)
    assert sum(cost.moments[cost.peak].values()) == max(peaks)
    assert cost.flops_per_token == sum(cost.flops.values())
    assert cost.avoided == 2 * 4 * 8 * 22 * ROWS
    text = str(cost)
    for word in (
        "AdamW's moments",
        "activations",
        "key-value cache",
        f"peak, in {cost.peak}",
        "FLOP per response token",
    ):
        assert word in text


def test_command_line(tiny_model):
    """With warnings as errors: the package must not have imported the module that it runs."""
    command = [sys.executable, "-W", "error", "-m", "textenv.agents.cost", tiny_model, "--lora-rank", "None"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout and "adapters" not in done.stdout


def test_line_of_a_language_model(tiny_model):
    agent = lm_agent(tiny_model, epochs=3, num_minibatches=2)
    cost = cost_of(agent)
    setup = cost.setup
    assert (setup.lora_rank, setup.batch, setup.response_tokens, setup.epochs) == (4, 8, 6, 3)
    assert (setup.reward, setup.engine, setup.num_minibatches, setup.value) == ("none", "hf", 2, "trunk")
    assert run_line(agent) == cost.line()
    assert run_line(agent).startswith(f"This run needs about {cost.total / GIB:.2g} GiB at its peak")
    assert cost_of(PPO(agent.policy, lm_envs(tiny_model, num_envs=2), PPOConfig(epochs=1))).setup.batch == 2


@pytest.mark.slow
def test_the_packaged_head_shares_the_trunk_where_the_arithmetic_is_the_same():
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m")
    kinds = {}
    for dtype in ("float32", "bfloat16"):
        envs = gym.make_vec("RLHF-v0", num_envs=2, dtype=dtype, scorer=film_review_head(dtype=dtype))
        kinds[dtype] = cost_of(PPO(policy, envs)).setup.reward
    assert kinds == {"float32": "shared", "bfloat16": "separate"}
    assert cost_of(PPO(policy, gym.make_vec("RLHF-v0", num_envs=2))).setup.reward == "separate"


def test_lines_of_other_policies():
    """A table of 8 x 6 logits and 8 values, all trained; nothing for a policy without weights."""
    agent = toy_agent(epochs=2)
    count = sum(p.numel() for p in agent.policy.parameters())
    assert run_line(agent) == (
        f"This run needs about {16 * count / 2**20:.2g} MiB for weights, gradients and optimiser, and "
        f"{16 * count:.2g} FLOP per token."
    )
    assert run_line(toy_agent(GRUPolicy(6))).startswith("This run needs about")
    assert memory_warning(agent) is None


def test_warning_where_memory_will_not_do(tiny_model, monkeypatch):
    agent = lm_agent(tiny_model)
    assert memory_warning(agent) is None  # on any machine that runs the tests
    total = cost_of(agent).total
    for free, held, warns in (
        (total - 1, 0, True),
        (total, 0, False),
        (total // 4, total // 2, True),
        (0, total, False),
    ):
        monkeypatch.setattr(cost_run, "_host_memory", lambda free=free, held=held: (free, held))
        assert (memory_warning(agent) is not None) == warns
    monkeypatch.setattr(cost_run, "_host_memory", lambda: (GIB // 10, 0))
    assert "0.1 GiB are free: it may be killed. Lower micro_batch_tokens" in memory_warning(agent)
    monkeypatch.setattr(cost_run, "_host_memory", lambda: (None, 0))  # a system that does not tell
    assert memory_warning(agent) is None


@pytest.mark.slow
def test_table_of_the_documentation():
    layouts = [
        {"lora_rank": None, "value": "separate", "reward": "separate"},
        {"lora_rank": None},
        {},
        {"dtype": "bfloat16"},
        {"checkpointing": True},
    ]
    costs = [estimate("smollm2-135m", batch=16, response_tokens=32, **layout) for layout in layouts]
    rows = dict(line.strip("| ").split(" | ", 1) for line in DOCUMENT.read_text().splitlines() if line.count("|") == 7)
    assert rows["**total**"].split(" | ") == [f"{cost.total / GIB:.2f}" for cost in costs]
    assert rows["peak in"].split(" | ") == [cost.peak for cost in costs]
    printed = [f"{cost.flops_per_token / 1e9:.2f}" for cost in costs]
    assert rows["GFLOP per response token"].split(" | ") == printed


# What real runs take

RUN = """
import json, re, sys
import gymnasium as gym, numpy as np
import textenv
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.cost_run import cost_of

batch, prompt_tokens, response_tokens, lora_rank, micro_batch_tokens = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
prompts = [rng.integers(1000, 40000, prompt_tokens).tolist() for _ in range(batch)]
policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=lora_rank)
envs = gym.make_vec("RLHF-v0", num_envs=batch, prompts=prompts, max_response_tokens=response_tokens)
config = PPOConfig(epochs=2, micro_batch_tokens=micro_batch_tokens, learning_rate=1e-5)
agent = PPO(policy, envs, config, seed=0)
agent.step()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([cost_of(agent).total, peak]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak memory as Linux tells it")
@pytest.mark.parametrize(
    "run",
    [
        pytest.param((16, 16, 32, 16, None), id="adapters"),
        pytest.param((16, 16, 32, None, None), id="full"),
        pytest.param((16, 16, 32, 16, 1024), id="adapters-one-micro-batch"),
        pytest.param((8, 16, 112, 16, 512), id="adapters-long"),
        pytest.param((4, 16, 112, None, 256), id="full-long"),
    ],
)
def test_peak_memory_of_a_real_run_is_within_a_quarter_of_the_estimate(run):
    """The second of two epochs is the first with AdamW's moments in place; its peak is that of all later ones."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    estimated, measured = json.loads(done.stdout.splitlines()[-1])
    assert measured == pytest.approx(estimated, rel=0.25), f"{measured / 1e9:.2f} GB of {estimated / 1e9:.2f} GB"
