"""Engines write what the policy would: same ids, same distribution, right ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from lm_helpers import EOS, NAMED, PROMPTS, GRUPolicy, byte_tokenizer, gpt2, llama, padded, save_model, tensors

from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.rollouts import HFEngine, StepwiseEngine, engine_for, hf
from textenv.agents.rollouts.base import Recorder, left_pad, sample_tokens
from textenv.agents.types import Sampling
from textenv.mdp import TokenMDP
from textenv.whole import whole_responses

BUDGET = 12
SAMPLING = Sampling(max_tokens=BUDGET, stop_ids=tuple(range(0, NAMED, 10)), seed=3)
"""A tenth of the words stop, so that rows leave at different times and some are cut."""


@pytest.fixture(scope="module")
def policy(tiny_model):
    return LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def either(request, tiny_model, tmp_path_factory):
    if request.param == "llama":
        return LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    return LanguageModelPolicy.from_pretrained(save_model(tmp_path_factory.mktemp("gpt2"), gpt2()), lora_rank=None)


def prompts(repeats=8):
    encode = byte_tokenizer()
    return [encode(prompt).input_ids for prompt in PROMPTS] * repeats


def lists(generation):
    return [response.tolist() for response in generation.responses]


# Two engines, one policy


@pytest.mark.parametrize("seed", [0, 1])
def test_cached_decoding_writes_the_ids_of_stepwise_decoding(either, seed):
    sampling = dataclasses.replace(SAMPLING, seed=seed)
    cached, stepwise = (engine.generate(prompts(), sampling) for engine in (HFEngine(either), StepwiseEngine(either)))
    assert lists(cached) == lists(stepwise)
    lengths = {len(response) for response in cached.responses}
    assert {1, BUDGET} <= lengths and len(lengths) > 5  # rows left all along
    assert cached.tokens == sum(len(response) for response in cached.responses)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_when_rows_leave_the_cache_does_not_show(either, share, monkeypatch):
    expected = lists(StepwiseEngine(either).generate(prompts(), SAMPLING))
    monkeypatch.setattr(hf, "LEAVE_BELOW", share)
    assert lists(HFEngine(either).generate(prompts(), SAMPLING)) == expected


def test_blocks_have_seeds_of_their_own(policy, monkeypatch):
    same = prompts(1)[:1] * 6
    monkeypatch.setattr(hf, "MAX_ROWS", 4)
    blocks = lists(HFEngine(policy).generate(same, SAMPLING))
    later = dataclasses.replace(SAMPLING, seed=SAMPLING.seed + 1)
    assert blocks[:4] == lists(HFEngine(policy).generate(same[:4], SAMPLING))
    assert blocks[4:] == lists(HFEngine(policy).generate(same[:2], later))
    assert blocks[:2] != blocks[4:]


def test_logprobs_of_incremental_decoding_are_those_of_a_full_pass(either, monkeypatch):
    """What the engine drew from, step by step with its cache, against one pass over the finished responses."""
    seen = {}
    choose = Recorder.choose

    def spying(self, logits):
        live = self.live.tolist()
        log_pi = torch.log_softmax(logits, -1)
        result = choose(self, logits)
        for place, row in enumerate(live):
            seen.setdefault(row, []).append(log_pi[place, self._tokens[row][-1]].item())
        return result

    monkeypatch.setattr(Recorder, "choose", spying)
    responses = HFEngine(either).generate(prompts(), SAMPLING).responses
    ids, mask = padded(list(zip(prompts(), responses, strict=True)), 30, BUDGET)
    with torch.no_grad():
        whole = either.evaluate(*tensors(ids, mask), BUDGET).logprobs
    for row, logprobs in seen.items():
        np.testing.assert_allclose(logprobs, whole[row, : len(logprobs)], atol=1e-5)
        assert not whole[row, len(logprobs) :].any()


def test_engine_uses_the_weights_of_the_moment(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    engine = HFEngine(policy)
    before = lists(engine.generate(prompts(), SAMPLING))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2)
    engine.sync(policy)
    after = lists(engine.generate(prompts(), SAMPLING))
    assert after != before and after == lists(StepwiseEngine(policy).generate(prompts(), SAMPLING))


def test_policies_bring_their_engine_or_get_the_one_that_serves_all(policy):
    assert isinstance(engine_for(policy), HFEngine)
    assert isinstance(engine_for(GRUPolicy(6)), StepwiseEngine)


# Ends of responses


def hard_table(*tokens, vocab_size=6):
    """A policy that writes exactly these tokens."""
    logits = np.full((len(tokens), vocab_size), -np.inf)
    logits[np.arange(len(tokens)), tokens] = 0
    return TablePolicy(logits)


@pytest.mark.parametrize(
    "tokens, written",
    [
        ([1, 2, 4, 1, 1], [1, 2, 4]),  # the second of three stop ids
        ([0, 1, 1, 1, 1], [0]),  # at once, with the id that pads
        ([1, 1, 1, 1, 5], [1, 1, 1, 1, 5]),  # with the last token of the budget
        ([1, 2, 3, 3, 1], [1, 2, 3, 3, 1]),  # never
    ],
)
def test_responses_end_with_a_stop_id_or_the_budget(tokens, written):
    sampling = Sampling(max_tokens=5, stop_ids=(0, 4, 5))
    generation = StepwiseEngine(hard_table(*tokens)).generate([[0], [2]], sampling)
    assert lists(generation) == [written, written] and generation.tokens == 2 * len(written)
    assert all(response.dtype == np.int64 for response in generation.responses)


@pytest.mark.parametrize("place", [0, 3, BUDGET - 1])
def test_cached_decoding_stops_with_any_stop_id(policy, place):
    greedy = dataclasses.replace(SAMPLING, temperature=0.0, stop_ids=())
    [written] = lists(HFEngine(policy).generate(prompts(1)[1:2], greedy))
    assert len(written) == BUDGET
    first = written.index(written[place])
    unused = [token for token in range(NAMED) if token not in written][:2]
    stopping = dataclasses.replace(greedy, stop_ids=(unused[0], written[place], unused[1]))
    assert lists(HFEngine(policy).generate(prompts(1)[1:2], stopping)) == [written[: first + 1]]


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_every_response_is_one_that_an_episode_could_produce(policy, engine):
    """`whole_responses` refuses anything else."""
    responses = engine(policy).generate(prompts(), SAMPLING).responses
    mdp = TokenMDP(vocab_size=NAMED, stop_ids=SAMPLING.stop_ids, max_prompt_tokens=30, max_response_tokens=BUDGET)
    state = whole_responses(mdp, prompts(), responses)
    assert state.response_lengths.tolist() == [len(response) for response in responses]


# Randomness


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_seed_decides_and_torch_is_left_alone(policy, engine):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = lists(engine(policy).generate(prompts(), SAMPLING))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert lists(engine(policy).generate(prompts(), SAMPLING)) == first
    assert lists(engine(policy).generate(prompts(), dataclasses.replace(SAMPLING, seed=4))) != first


def test_rows_with_the_same_prompt_differ(policy):
    responses = lists(HFEngine(policy).generate(prompts(1)[:1] * 16, SAMPLING))
    assert len({tuple(response) for response in responses}) > 8


def test_a_rows_draws_do_not_depend_on_who_has_left(policy):
    """Stop ids that end other rows early leave a row that never meets them as it was."""
    never = dataclasses.replace(SAMPLING, stop_ids=())
    whole = lists(HFEngine(policy).generate(prompts(), never))
    some = lists(HFEngine(policy).generate(prompts(), SAMPLING))
    assert all(one[: len(other)] == other for one, other in zip(whole, some, strict=True))


# The distribution that tokens are drawn from


def test_sampling_inverts_the_cumulative_distribution():
    """Evenly spaced uniforms give every token its probability, to one draw."""
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    draws = 1000
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = sample_tokens(probabilities.log().expand(draws, -1), uniforms, 1.0)
    counts = torch.bincount(tokens, minlength=5)
    assert (counts - draws * probabilities).abs().max() <= 1
    assert counts[1] == counts[4] == 0
    assert (tokens.diff() >= 0).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("possible", [[0], [2], [4], [1, 3]])
def test_impossible_tokens_are_never_drawn(uniform, possible):
    """At the ends too: 1 - 2^-53 becomes 1 in float32."""
    logits = torch.full((1, 5), -torch.inf)
    logits[0, possible] = torch.linspace(0, 30, len(possible))
    token = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert token.item() in possible


def test_temperature_zero_takes_the_most_likely():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample_tokens(logits, torch.tensor([0.99, 0.99]), 0.0).tolist() == [1, 0]


def chi_square(counts, probabilities):
    """Pearson's statistic over words that are expected at least 5 times, and how many those are."""
    expected = counts.sum() * probabilities
    often = expected >= 5
    return ((counts - expected) ** 2 / expected)[often].sum(), often.sum()


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_frequencies_are_those_of_the_policys_temperature(tiny_model, engine):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, temperature=0.6)
    prompt = prompts(1)[1]
    draws = 128 * 24  # whole blocks
    sampling = Sampling(max_tokens=1, stop_ids=(), temperature=0.6, seed=0)
    responses = engine(policy).generate([prompt] * draws, sampling).responses
    counts = np.bincount(np.concatenate(responses), minlength=NAMED)
    with torch.no_grad():
        raw = torch.softmax(llama()(torch.tensor([prompt])).logits[0, -1, :NAMED].double(), -1).numpy()
    tempered = raw ** (1 / 0.6) / (raw ** (1 / 0.6)).sum()
    statistic, words = chi_square(counts, tempered)
    assert words > 8 and statistic < words + 4 * np.sqrt(2 * words)
    assert chi_square(counts, raw)[0] > 10 * words  # what temperature 1 would look like


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_other_temperatures_than_the_policys_are_refused(tiny_model, engine, temperature):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, temperature=0.6)
    with pytest.raises(ValueError, match=f"the policy's temperature, 0.6, got {temperature}: .* another distribution"):
        engine(policy).generate(prompts(1), dataclasses.replace(SAMPLING, temperature=temperature))


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_unnamed_ids_are_never_written(tmp_path, engine):
    """Rows beyond the tokenizer that would win every time."""
    module = llama(tie_word_embeddings=False)
    with torch.no_grad():
        module.lm_head.weight[NAMED:] = module.lm_head.weight[:7] * 50
    policy = LanguageModelPolicy.from_pretrained(save_model(tmp_path, module), lora_rank=4)
    responses = engine(policy).generate(prompts(), SAMPLING).responses
    assert max(response.max() for response in responses) < NAMED
    raw = module(torch.tensor([prompts(1)[0]])).logits[0, -1]
    assert raw.argmax() >= NAMED


def test_a_models_own_generation_settings_are_not_used(tmp_path, policy):
    settings = {"eos_token_id": EOS, "do_sample": True, "repetition_penalty": 1.9, "top_k": 2, "temperature": 0.1}
    other = LanguageModelPolicy.from_pretrained(save_model(tmp_path, llama(), settings), lora_rank=4)
    assert lists(HFEngine(other).generate(prompts(), SAMPLING)) == lists(HFEngine(policy).generate(prompts(), SAMPLING))


def test_prompts_are_padded_on_the_left():
    ids, mask = left_pad([[7], [0, 5, 6]], torch.device("cpu"))
    assert ids.tolist() == [[0, 0, 7], [0, 5, 6]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]
