"""`VLLMEngine` against the trainer: same distribution, same ends, weights that arrive, a process that stays as it was.

Everything runs real vLLM, on tiny random models whose heads have 32 numbers (what its CPU attention takes).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_helpers import EOS, NAMED, PROMPTS, ROWS, GRUPolicy, byte_tokenizer, llama, padded, save_model, tensors
from test_engines import chi_square
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from textenv.agents import LanguageModelPolicy, tiny_transformer
from textenv.agents.rollouts import HFEngine, VLLMEngine
from textenv.agents.rollouts.sync_proof import SyncError
from textenv.agents.rollouts.vllm_requests import constraint_parameters, sampling_parameters
from textenv.agents.types import Sampling
from textenv.constraint_kinds import AllowedIds, NoStopBefore, TopK
from textenv.constraints import joint
from textenv.mdp import TokenMDP
from textenv.whole import whole_responses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

BUDGET = 12
SAMPLING = Sampling(max_tokens=BUDGET, stop_ids=tuple(range(0, NAMED, 10)), seed=3, temperature=0.8)
"""A tenth of the words stop, so that rows leave at different times and some are cut."""
LONG = [1 + i % (NAMED - 1) for i in range(70)]
"""Two whole blocks of 32 tokens, and 6 more."""


def heads_of_32(**changes):
    return llama(**({"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1} | changes))


def prompts(repeats=8):
    encode = byte_tokenizer()
    return [encode(prompt).input_ids for prompt in PROMPTS] * repeats


def lists(generation):
    return [response.tolist() for response in generation.responses]


def move(policy, size=0.05, seed=0):
    """What an optimiser would do to everything that trains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.lm.model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def gaps(policy, asked, generation, action_masks=None):
    """|engine - trainer| for every token that was written."""
    width = max(map(len, asked))
    budget = max(map(len, generation.responses))
    ids, mask = padded(list(zip(asked, generation.responses, strict=True)), width, budget)
    with torch.no_grad(), policy.arithmetic():
        more = {} if action_masks is None else {"action_masks": action_masks}
        trainer = policy.evaluate(*tensors(ids, mask), budget, **more).logprobs.float().numpy()
    rows = zip(trainer, generation.logprobs, strict=True)
    return np.concatenate([np.abs(row[: len(own)] - own) for row, own in rows])


def cached_tokens(engine, monkeypatch, asked, sampling):
    """Prompt tokens that each request found in the prefix cache, in vLLM's own counting."""
    seen, generate = [], engine.llm.generate

    def spying(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        seen.extend(output.num_cached_tokens for output in outputs)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "generate", spying)
        engine.generate(asked, sampling)
    return seen


@pytest.fixture(scope="module", autouse=True)
def numba_is_loaded():
    """As in a process with other libraries, where vLLM by itself stumbles over an object of llvmlite's."""
    pytest.importorskip("numba")
    yield sys.modules["llvmlite.binding.ffi"]
    assert "llvmlite.binding.ffi" in sys.modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("heads-of-32"), heads_of_32())


@pytest.fixture(scope="class")
def policy(folder):
    return LanguageModelPolicy.from_pretrained(folder, lora_rank=4, temperature=0.8)


@pytest.fixture(scope="class")
def engine(policy):
    engine = VLLMEngine(policy, kv_cache_gib=0.1)
    yield engine
    engine.close()


@pytest.fixture
def synced(engine, policy):
    """With the class's own policy's weights, and proofs as at the start."""
    engine.sync(policy)
    engine.proof.proven = 0
    return engine


class TestOneEngine:
    # The distribution that tokens are drawn from

    @pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
    def test_logprobs_are_the_trainers_at_every_temperature(self, folder, synced, temperature):
        other = LanguageModelPolicy.from_pretrained(folder, lora_rank=4, temperature=temperature)
        move(other)
        synced.sync(other)
        generation = synced.generate(prompts(), dataclasses.replace(SAMPLING, temperature=temperature))
        assert all(own.dtype == np.float32 for own in generation.logprobs)
        assert np.quantile(gaps(other, prompts(), generation), [0.5, 0.99, 1.0]) == pytest.approx(0, abs=1e-4)

    def test_frequencies_are_the_policys(self, synced, policy):
        prompt, draws = prompts(1)[1], 2048
        once = dataclasses.replace(SAMPLING, max_tokens=1, stop_ids=(), samples_per_prompt=draws)
        counts = np.bincount(np.concatenate(synced.generate([prompt], once).responses), minlength=NAMED)
        with torch.no_grad():
            ids = torch.tensor([prompt])
            logits = policy.next_logits(ids, torch.ones_like(ids))[0, :NAMED]
        probabilities = torch.softmax(logits.double(), -1).numpy()
        statistic, words = chi_square(counts, probabilities)
        assert words > 8 and statistic < words + 4 * np.sqrt(2 * words)

    def test_unnamed_ids_have_probability_0(self, folder, synced):
        """Rows beyond the tokenizer that would win every time."""
        other = LanguageModelPolicy.from_pretrained(folder, lora_rank=None, temperature=0.8)
        with torch.no_grad():
            embeddings = other.lm.model.get_input_embeddings().weight
            embeddings[NAMED:] = embeddings[: ROWS - NAMED] * 50
        ids = torch.tensor([prompts(1)[0]])
        assert other.lm.model(ids).logits[0, -1].argmax() >= NAMED
        synced.sync(other)
        generation = synced.generate(prompts(), SAMPLING)
        assert max(response.max() for response in generation.responses) < NAMED
        assert gaps(other, prompts(), generation).max() < 1e-4

    def test_a_models_own_generation_settings_are_not_used(self, tmp_path, synced, policy):
        from vllm.config import ModelConfig

        settings = {"eos_token_id": EOS, "do_sample": True, "repetition_penalty": 1.9, "top_k": 2, "temperature": 0.1}
        strange = save_model(tmp_path, heads_of_32(), settings)
        expected = lists(synced.generate(prompts(), SAMPLING))
        other = LanguageModelPolicy.from_pretrained(strange, lora_rank=4, temperature=0.8)
        synced.sync(other)
        assert lists(synced.generate(prompts(), SAMPLING)) == expected
        filled_in = ModelConfig(strange, skip_tokenizer_init=True).get_diff_sampling_param()
        assert set(filled_in) == {"repetition_penalty", "top_k", "temperature"} <= set(sampling_parameters(SAMPLING))

    def test_temperature_0_takes_the_most_likely(self, synced, policy):
        greedy = dataclasses.replace(SAMPLING, temperature=0.0)
        generation = synced.generate(prompts(1), greedy)
        assert lists(generation) == lists(HFEngine(policy).generate(prompts(1), greedy))
        assert generation.logprobs is None

    # Ends

    def test_every_response_is_one_that_an_episode_could_produce(self, synced):
        responses = synced.generate(prompts(), SAMPLING).responses
        mdp = TokenMDP(vocab_size=NAMED, stop_ids=SAMPLING.stop_ids, max_prompt_tokens=30, max_response_tokens=BUDGET)
        state = whole_responses(mdp, prompts(), responses)  # refuses anything else
        lengths = state.response_lengths.tolist()
        assert lengths == [len(response) for response in responses]
        assert {1, BUDGET} <= set(lengths) and len(set(lengths)) > 5

    @pytest.mark.parametrize("place", [0, 3, BUDGET - 1])
    def test_the_second_of_three_stop_ids_ends_a_response_and_belongs_to_it(self, synced, place):
        greedy = dataclasses.replace(SAMPLING, temperature=0.0, stop_ids=())
        [written] = lists(synced.generate(prompts(1)[1:2], greedy))
        assert len(written) == BUDGET
        first = written.index(written[place])
        unused = [token for token in range(NAMED) if token not in written][:2]
        stopping = dataclasses.replace(greedy, stop_ids=(unused[0], written[place], unused[1]))
        assert lists(synced.generate(prompts(1)[1:2], stopping)) == [written[: first + 1]]

    # Randomness

    def test_equal_seeds_repeat_and_others_do_not(self, synced):
        first = lists(synced.generate(prompts(), SAMPLING))
        assert lists(synced.generate(prompts(), SAMPLING)) == first
        later = lists(synced.generate(prompts(), dataclasses.replace(SAMPLING, seed=4)))
        assert sum(one == other for one, other in zip(first, later, strict=True)) < len(first) / 4

    def test_it_writes_what_the_other_engine_writes(self, synced, policy):
        asked = dataclasses.replace(SAMPLING, samples_per_prompt=2)
        assert lists(synced.generate(prompts(), asked)) == lists(HFEngine(policy).generate(prompts(), asked))

    def test_a_rows_draws_depend_on_its_seed_and_place_alone(self, synced):
        asked = dataclasses.replace(SAMPLING, samples_per_prompt=3)
        whole = lists(synced.generate(prompts(2), asked))
        assert lists(synced.generate(prompts(2)[:3], asked)) == whole[:9]
        never = dataclasses.replace(asked, stop_ids=())
        longer = lists(synced.generate(prompts(2), never))
        assert all(one == other[: len(one)] for one, other in zip(whole, longer, strict=True))

    def test_rows_and_samples_of_one_prompt_differ(self, synced):
        asked = dataclasses.replace(SAMPLING, samples_per_prompt=4)
        responses = lists(synced.generate(prompts(1)[:1] * 4, asked))
        assert len(responses) == 16 and len({tuple(response) for response in responses}) > 8

    def test_samples_of_a_prompt_share_its_blocks(self, synced, monkeypatch):
        synced.llm.reset_prefix_cache()
        asked = dataclasses.replace(SAMPLING, samples_per_prompt=4)
        assert cached_tokens(synced, monkeypatch, [LONG, LONG[::-1]], asked) == [0, 64, 64, 64] * 2

    # Constraints

    def test_constraints_renormalise_as_the_trainer_does(self, synced, policy):
        mdp = TokenMDP(vocab_size=ROWS, stop_ids=SAMPLING.stop_ids, max_prompt_tokens=30, max_response_tokens=BUDGET)
        constraint = joint([NoStopBefore(mdp, 4, NAMED), AllowedIds(mdp, range(5, 60), NAMED)])
        generation = synced.generate(prompts(), dataclasses.replace(SAMPLING, constraint=constraint))
        written = np.concatenate(generation.responses)
        assert min(written) >= 5 and max(written) < 60
        assert min(map(len, generation.responses)) >= 5
        state = whole_responses(mdp, prompts(), generation.responses)
        masks = constraint.response_masks(state.input_ids, state.attention_mask, BUDGET)
        longest = max(map(len, generation.responses))
        assert gaps(policy, prompts(), generation, masks[:, :longest]).max() < 1e-4
        assert gaps(policy, prompts(), generation).max() > 0.1

    def test_constraints_that_need_a_reference_are_refused(self, synced, policy, monkeypatch):
        monkeypatch.setattr(synced.llm, "generate", None)  # nothing may be asked of vLLM
        mdp = TokenMDP(vocab_size=ROWS, stop_ids=(0,), max_prompt_tokens=30, max_response_tokens=BUDGET)
        top = joint([NoStopBefore(mdp, 2, NAMED), TopK(mdp, policy.reference, 5, NAMED)])
        with pytest.raises(ValueError, match=r"MinLength and ActionMask\(allowed_ids=...\), got .* TopK"):
            synced.generate(prompts(1), dataclasses.replace(SAMPLING, constraint=top))

    # What is refused before any work

    @pytest.mark.parametrize(
        "asked, budget, message",
        [
            ([[1], []], 4, "at least one token, got none in prompt 1"),
            ([], 4, "at least 1 prompt"),
            ([[1], [1] * 128], 4, r"128 tokens.*row 1, which fills that alone"),
            ([[1] * 124, [1] * 125], 4, "125 tokens in row 1, which leaves 3"),
            ([[1], [2, NAMED]], 4, rf"ids in \[0, {NAMED}\), got {NAMED} in row 1"),
            ([[-1]], 4, "got -1 in row 0"),
        ],
    )
    def test_prompts_that_cannot_be_continued_are_refused(self, synced, monkeypatch, asked, budget, message):
        assert synced.context == 128
        monkeypatch.setattr(synced.llm, "generate", None)
        with pytest.raises(ValueError, match=message):
            synced.generate(asked, dataclasses.replace(SAMPLING, max_tokens=budget))

    def test_a_prompt_and_response_that_just_fit_are_written_whole(self, synced):
        full = dataclasses.replace(SAMPLING, max_tokens=4, stop_ids=())
        assert [len(response) for response in synced.generate([[1] * 124], full).responses] == [4]

    def test_other_temperatures_than_the_policys_are_refused(self, synced):
        with pytest.raises(ValueError, match=r"the policy's temperature, 0.8, got 1.0: .* another distribution"):
            synced.generate(prompts(1), dataclasses.replace(SAMPLING, temperature=1.0))

    # Weights

    def test_after_an_update_a_cached_prompt_is_answered_with_the_new_weights(self, synced, policy, monkeypatch):
        sampling = dataclasses.replace(SAMPLING, stop_ids=())
        before = synced.generate([LONG], sampling)
        assert cached_tokens(synced, monkeypatch, [LONG], sampling) == [64]
        move(policy, seed=1)
        assert gaps(policy, [LONG], before).max() > 0.05
        synced.sync(policy)
        assert cached_tokens(synced, monkeypatch, [LONG], sampling) == [0]
        assert gaps(policy, [LONG], synced.generate([LONG], sampling)).max() < 1e-4

    def test_the_log_shows_a_probe_before_and_after_the_first_syncs(self, synced, policy, caplog):
        with caplog.at_level(logging.INFO, "textenv"):
            for seed in range(5):
                move(policy, seed=seed)
                synced.sync(policy)
        shown = [record.getMessage() for record in caplog.records if "probe" in record.getMessage()]
        assert len(shown) == 3
        assert all("before the sync trainer" in line and "largest difference" in line for line in shown)
        numbers = [record.args for record in caplog.records if "probe" in record.msg]
        assert all(abs(args[3] - args[4]) < 1e-3 for args in numbers)
        assert len({round(args[3], 4) for args in numbers}) == 3

    @pytest.mark.parametrize("broken", ["collective_rpc", "reset_prefix_cache"])
    @pytest.mark.parametrize("size", [0.05, 2e-4])
    def test_a_sync_that_does_not_arrive_is_an_error(self, synced, policy, monkeypatch, broken, size):
        synced.generate([LONG], SAMPLING)
        move(policy, size, seed=2)
        with monkeypatch.context() as patch:
            patch.setattr(synced.llm, broken, lambda *args, **kwargs: None)
            with pytest.raises(SyncError, match=r"trainer and engine should agree .* does not have the trainer's"):
                synced.sync(policy)
        synced.llm.reset_prefix_cache()
        synced.sync(policy)  # an engine whose sync failed asks again, changed or not
        assert gaps(policy, [LONG], synced.generate([LONG], SAMPLING)).max() < 1e-4

    def test_unchanged_weights_are_not_copied(self, synced, policy, monkeypatch):
        calls, reload = [], synced.llm.collective_rpc
        monkeypatch.setattr(synced.llm, "collective_rpc", lambda *a, **k: (calls.append(a), reload(*a, **k))[1])
        synced.sync(policy)
        assert calls == []
        move(policy, seed=3)
        synced.sync(policy)
        synced.sync(policy)
        assert calls.count(("reload_weights",)) == 1

    def test_policies_of_another_architecture_are_refused(self, synced):
        with pytest.raises(ValueError, match=r"the architecture that the engine was made for, got .* 'lm_head.weight'"):
            synced.sync(tiny_transformer(NAMED, hidden_size=64))

    # One at a time

    def test_a_second_engine_at_the_same_time_is_refused(self, synced, policy):
        with pytest.raises(RuntimeError, match=r"one VLLMEngine at a time, and another one is open.*close"):
            VLLMEngine(policy)

    # Other models, one engine after the other

    def test_more_prompt_tokens_than_a_step_reads(self, synced, policy):
        """Seeded prompts that were read in parts would crash vLLM's CPU sampler."""
        asked = [LONG] * 61  # 4,270 tokens
        sampling = dataclasses.replace(SAMPLING, max_tokens=2)
        assert max(gaps(policy, asked, synced.generate(asked, sampling))) < 1e-3


def gpt2_with_heads_of_32():
    config = GPT2Config(
        vocab_size=ROWS, n_positions=96, n_embd=64, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=EOS
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def qwen2():
    config = Qwen2Config(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "make, lora_rank, dtype",
    [
        (heads_of_32, None, "float32"),  # the tied head trains
        (lambda: heads_of_32(tie_word_embeddings=False), None, "float32"),
        (gpt2_with_heads_of_32, 4, "float32"),
        (qwen2, 4, "float32"),
        (heads_of_32, 4, "bfloat16"),
    ],
    ids=["tied", "untied", "gpt2-lora", "qwen2-lora", "bfloat16-lora"],
)
def test_models_of_many_kinds_are_synced_and_agree(tmp_path, make, lora_rank, dtype):
    policy = LanguageModelPolicy.from_pretrained(save_model(tmp_path, make()), lora_rank=lora_rank, dtype=dtype)
    sampling = dataclasses.replace(SAMPLING, temperature=1.0)
    engine = VLLMEngine(policy, kv_cache_gib=0.05)
    try:
        for seed in range(2):
            generation = engine.generate(prompts(), sampling)
            found = gaps(policy, prompts(), generation)
            if dtype == "float32":
                assert found.max() < 1e-4
            else:
                assert found.mean() < 0.1  # the trainer keeps embeddings, norms and head in float32
            move(policy, seed=seed)
            assert gaps(policy, prompts(), generation).mean() > 0.2
            engine.sync(policy)
    finally:
        engine.close()


def test_a_policy_without_a_folder_writes_too():
    policy = tiny_transformer(257, hidden_size=64)
    engine = VLLMEngine(policy, max_model_len=64, max_rows=4, kv_cache_gib=0.05)  # rows wait for others to end
    generation = engine.generate([[1, 2, 3]] * 10, Sampling(max_tokens=8, stop_ids=(256,)))
    assert gaps(policy, [[1, 2, 3]] * 10, generation).max() < 1e-4 and engine.context == 64
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match=r"should be open, but `close` was called"):
        engine.generate([[1]], Sampling(max_tokens=8, stop_ids=(256,)))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: VLLMEngine(GRUPolicy(6)), TypeError, "should be a LanguageModelPolicy, got GRUPolicy"),
        (lambda: VLLMEngine(tiny_transformer()), ValueError, r"heads of 32, .*got a model with heads of 16"),
        (
            lambda: VLLMEngine(tiny_transformer(hidden_size=64), max_model_len=129),
            ValueError,
            "at most the model's context of 128 tokens, got 129",
        ),
        (lambda: VLLMEngine(tiny_transformer(), dtype="float16"), ValueError, "float32.*bfloat16.*got 'float16'"),
        (lambda: VLLMEngine(tiny_transformer(), max_rows=1), ValueError, "`max_rows` should be an integer of at"),
        (lambda: VLLMEngine(tiny_transformer(), kv_cache_gib=0), ValueError, "positive number of GiB, got 0"),
        (lambda: VLLMEngine(tiny_transformer(), gpu_memory_utilization=1.5), ValueError, "at most 1, got 1.5"),
    ],
)
def test_what_cannot_run_is_refused_when_the_engine_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("temperature", [1e-3, 2.5, -1.0])
def test_temperatures_that_vllm_would_replace_are_refused(temperature):
    with pytest.raises(ValueError, match=r"temperatures from 0.01 to 2.0, or at 0 .* got"):
        sampling_parameters(Sampling(max_tokens=1, stop_ids=(), temperature=temperature))


def test_constraints_in_vllms_words():
    mdp = TokenMDP(vocab_size=10, stop_ids=(0, 4), max_prompt_tokens=2, max_response_tokens=9)
    parts = [NoStopBefore(mdp, 2), AllowedIds(mdp, [1, 2, 4]), NoStopBefore(mdp, 3), AllowedIds(mdp, [2, 4, 7])]
    assert constraint_parameters(joint(parts), (4, 0)) == {"min_tokens": 3, "allowed_token_ids": [2, 4]}
    assert constraint_parameters(None, (0, 4)) == {}
    with pytest.raises(ValueError, match=r"the request's stop ids, \[0\], got .* stops with \[0, 4\]"):
        constraint_parameters(parts[0], (0,))
    with pytest.raises(ValueError, match="allow no token at all"):
        constraint_parameters(joint([NoStopBefore(mdp, 2), AllowedIds(mdp, [0, 4])]), (0, 4))


# The process around it

STATES = """
import gc, json, logging, os, random, signal, sys, threading, warnings
import numpy as np
import torch
import torch._dynamo
import torch._inductor.config
from textenv.agents import tiny_transformer
from textenv.agents.rollouts import VLLMEngine
from textenv.agents.types import Sampling

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
logging.getLogger("httpx").setLevel(logging.DEBUG)
torch.set_float32_matmul_precision("medium")
assert "vllm" not in sys.modules

def state():
    return {
        "environment": dict(os.environ),
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": [str(x) for x in np.random.get_state()],
        "python generator": str(random.getstate()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "affinity": sorted(os.sched_getaffinity(0)),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision),
        "dtype": str(torch.get_default_dtype()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "functions": [repr(f) for f in (torch.set_num_threads, torch.accelerator.synchronize,
                                        torch.accelerator.empty_cache, torch.distributed.is_initialized)],
        "loggers": {str(n): (logging.getLogger(n).level, len(logging.getLogger(n).handlers))
                    for n in (None, "httpx", "httpx2", "textenv", "torch", "transformers")},
        "record factory": repr(logging.getLogRecordFactory()),
        "hooks": [repr(h) for h in (sys.excepthook, sys.displayhook, threading.excepthook)],
        "signals": {int(s): repr(signal.getsignal(s)) for s in signal.valid_signals() if s not in (9, 19)},
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "recursion": sys.getrecursionlimit(),
        "warnings": [str(f) for f in warnings.filters],
        "process group": torch.distributed.is_initialized(),
        "folder": os.getcwd(),
        "compiler": {k: str(v) for config in (torch._dynamo.config, torch._inductor.config)
                     for k, v in config.get_config_copy().items()},
    }

policy = tiny_transformer(257, hidden_size=64)
changed = {}

def note(what):
    global before
    now = state()
    changed[what] = {key: [str(before[key]), str(now[key])] for key in before if before[key] != now[key]}
    before = now

before = state()
engine = VLLMEngine(policy, kv_cache_gib=0.05)
note("load")
engine.generate([[1, 2, 3]] * 4, Sampling(max_tokens=8, stop_ids=(256,)))
note("generate")
for parameter in policy.lm.model.parameters():
    parameter.data.mul_(1.1)
engine.sync(policy)
note("sync")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
before = state()
engine.generate([[1, 2, 3]] * 4, Sampling(max_tokens=8, stop_ids=(256,)))
note("generate beside a process group")
engine.close()
note("close beside a process group")
try:
    VLLMEngine(policy)
except ValueError as error:
    changed["refused"] = str(error)
torch.distributed.destroy_process_group()
forgotten = VLLMEngine(policy, kv_cache_gib=0.05)
del forgotten
last = VLLMEngine(policy, kv_cache_gib=0.05)  # closes itself at exit
print("STATES", json.dumps(changed))
"""


def test_the_process_stays_as_it_was():
    """In a process of its own, where vLLM has not been imported before."""
    run = subprocess.run(
        [sys.executable, "-c", STATES], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert run.returncode == 0, run.stderr[-3000:]
    printed = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert len(printed) == 1, printed
    changed = json.loads(printed[0].removeprefix("STATES "))
    assert "before torch.distributed is initialised" in changed.pop("refused")
    assert changed == {what: {} for what in changed} and len(changed) == 5
    noise = [line for line in run.stderr.splitlines() if not line.startswith(("INFO:textenv", "[Gloo]"))]
    assert noise == []
