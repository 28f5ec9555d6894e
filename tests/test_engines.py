"""Engines write what the policy would: same ids, same distribution, right ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from agent_helpers import lm_envs
from lm_helpers import EOS, NAMED, PROMPTS, GRUPolicy, byte_tokenizer, gpt2, llama, padded, save_model, tensors

from textenv.agents import PPO, LanguageModelPolicy, TablePolicy
from textenv.agents.rollouts import HFEngine, StepwiseEngine, engine_for
from textenv.agents.rollouts.base import draw_tokens, fill_holes, left_pad, sample_tokens
from textenv.agents.rollouts.seeds import row_seeds, uniforms
from textenv.agents.types import Sampling
from textenv.layers import text_envs
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


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_logprobs_are_those_of_a_full_pass(either, engine):
    """Of the distribution that the engine drew from, step by step, against one pass over the finished responses."""
    generation = engine(either).generate(prompts(), SAMPLING)
    ids, mask = padded(list(zip(prompts(), generation.responses, strict=True)), 30, BUDGET)
    with torch.no_grad():
        whole = either.evaluate(*tensors(ids, mask), BUDGET).logprobs
    for row, logprobs in enumerate(generation.logprobs):
        assert logprobs.dtype == np.float32 and len(logprobs) == len(generation.responses[row])
        np.testing.assert_allclose(logprobs, whole[row, : len(logprobs)], atol=1e-5)


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_logprobs_have_the_temperature_in_them(tiny_model, engine):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, temperature=0.6)
    [prompt] = prompts(1)[1:2]
    for temperature in (0.6, 0.0):  # the policy's own log-probabilities even of the most likely tokens
        sampling = Sampling(max_tokens=1, stop_ids=(), temperature=temperature)
        generation = engine(policy).generate([prompt], sampling)
        [[token]], [[logprob]] = generation.responses, generation.logprobs
        raw = torch.log_softmax(llama()(torch.tensor([prompt])).logits[0, -1, :NAMED].double() / 0.6, -1)
        assert logprob == pytest.approx(raw[token].item(), abs=1e-5)
        assert temperature or token == raw.argmax()


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


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
def test_samples_of_a_prompt_follow_each_other(policy, engine):
    sampling = dataclasses.replace(SAMPLING, samples_per_prompt=3)
    responses = lists(engine(policy).generate(prompts(1), sampling))
    assert len(responses) == len(prompts(1)) * 3
    first = lists(engine(policy).generate(prompts(1), SAMPLING))
    assert responses[::3] == first  # a prompt's first sample does not depend on how many follow
    assert all(len({tuple(r) for r in responses[row : row + 3]}) > 1 for row in range(0, 12, 3))


@pytest.mark.parametrize("engine", [HFEngine, StepwiseEngine])
@pytest.mark.parametrize(
    "wrong, samples, says",
    [([], 1, "at least 1 prompt"), ([[1], []], 1, "none in prompt 1"), ([[1]], 0, "1 sample of each, got 1 and 0")],
)
def test_nothing_to_continue_is_refused(policy, engine, wrong, samples, says):
    with pytest.raises(ValueError, match=says):
        engine(policy).generate(wrong, dataclasses.replace(SAMPLING, samples_per_prompt=samples))


def test_rows_with_the_same_prompt_differ(policy):
    responses = lists(HFEngine(policy).generate(prompts(1)[:1] * 16, SAMPLING))
    assert len({tuple(response) for response in responses}) > 8


def test_a_rows_draws_do_not_depend_on_who_has_left(policy):
    """Stop ids that end other rows early leave a row that never meets them as it was."""
    never = dataclasses.replace(SAMPLING, stop_ids=())
    whole = lists(HFEngine(policy).generate(prompts(), never))
    some = lists(HFEngine(policy).generate(prompts(), SAMPLING))
    assert all(one[: len(other)] == other for one, other in zip(whole, some, strict=True))


def test_row_seeds_are_hashes_of_seed_prompt_and_sample():
    seeds = row_seeds(7, 5, 3).reshape(5, 3)
    assert seeds.dtype == np.uint64 and (seeds < 2**63).all() and len(np.unique(seeds)) == 15
    np.testing.assert_array_equal(seeds[:2, :1].ravel(), row_seeds(7, 2))
    assert not np.isin(row_seeds(8, 5, 3), seeds).any()
    # A seed of two 32-bit words does not run into the prompt's place.
    assert row_seeds(5 + (1 << 32), 1)[0] not in row_seeds(5, 3)
    assert seeds[1, 2] == np.random.SeedSequence(7, spawn_key=(1, 2)).generate_state(1, np.uint64)[0] >> np.uint64(1)


def test_uniforms_are_each_rows_own_stream():
    seeds = row_seeds(3, 400)
    drawn = uniforms(seeds, 50)
    np.testing.assert_array_equal(uniforms(seeds[[7, 2]], 9), drawn[[7, 2], :9])
    assert 0 <= drawn.min() and drawn.max() < 1 and abs(drawn.mean() - 0.5) < 4 / np.sqrt(12 * drawn.size)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 4 / np.sqrt(drawn.size)


@pytest.mark.parametrize("leaves", [[], [0], [4], [1, 3], [0, 1, 2], [0, 1, 2, 3, 4]])
def test_as_few_rows_as_possible_move_when_others_leave(leaves):
    going_on = ~np.isin(np.arange(5), leaves)
    rows = fill_holes(going_on)
    assert sorted(rows) == np.flatnonzero(going_on).tolist()
    assert (rows >= np.arange(len(rows))).all()
    assert (rows != np.arange(len(rows))).sum() == (~going_on[: len(rows)]).sum()


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


def test_drawn_tokens_come_with_their_log_probabilities():
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.0, 0.0]])
    tokens, logprobs = draw_tokens(logits, torch.tensor([0.5, 0.1]), 1.0)
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx([-np.log1p(np.exp(-1)), -np.log(1 + 2 * np.exp(-2))], abs=1e-6)


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
    draws = 3000
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


def test_prompts_that_an_engine_cannot_hold_are_refused_when_the_agent_is_made(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=2)
    envs = lm_envs(tiny_model, 2, prompts=["the a", "the long and winding road of good"])
    longest = max(len(prompt.ids) for prompt in text_envs(envs).task.prompts.prompts)
    budget = text_envs(envs).task.mdp.max_response_tokens
    engine = HFEngine(policy)
    engine.context = longest + budget
    PPO(policy, envs, engine=engine)
    engine.context -= 1
    with pytest.raises(ValueError, match=rf"prompts\[1\] .* context of HFEngine, .* got {longest} \+ {budget}"):
        PPO(policy, envs, engine=engine)
