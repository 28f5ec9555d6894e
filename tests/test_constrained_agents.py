"""Constraints through language models, engines and PPO: one distribution everywhere."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT, lm_agent, lm_envs, toy_agent, toy_envs
from lm_helpers import EOS, NAMED, PROMPTS, ROWS, GRUPolicy, byte_tokenizer, llama, padded, save_model

from textenv.agents import PPO, LanguageModelPolicy, TablePolicy
from textenv.agents.policy import PolicyLogprobs, output_from_logits
from textenv.agents.rollouts import HFEngine, StepwiseEngine, hf
from textenv.agents.rollouts.collect import collect
from textenv.agents.start_check import StartError
from textenv.agents.types import Generation, Sampling
from textenv.constraint_kinds import AllowedIds, NoStopBefore, TopK
from textenv.constraints import Joint, constraint_of
from textenv.distributions import chosen, renormalised
from textenv.lm import LanguageModel, OutputHead, token_logprobs
from textenv.lm.output_head import allowed_tokens
from textenv.mdp import TokenMDP
from textenv.packed_masks import PackedMasks
from textenv.toy import standard_toy
from textenv.wrappers import vector as wrappers

BUDGET, P = 8, 30
MDP = TokenMDP(vocab_size=ROWS, stop_ids=tuple(range(0, NAMED, 10)), max_prompt_tokens=P, max_response_tokens=BUDGET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("constrained"), llama())


@pytest.fixture(scope="module")
def policy(folder):
    """One that has left its reference."""
    policy = LanguageModelPolicy.from_pretrained(folder, lora_rank=4)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    return policy


def prompts(repeats=4):
    encode = byte_tokenizer()
    return [encode(prompt).input_ids for prompt in PROMPTS] * repeats


def constraint(kind, reference):
    made = {
        "min length": NoStopBefore(MDP, 3, NAMED),
        "allowed": AllowedIds(MDP, range(0, NAMED, 2), NAMED),
        "top-k": TopK(MDP, reference, 12, NAMED),
    }
    return Joint([made["min length"], made["top-k"]]) if kind == "both" else made[kind]


KINDS = pytest.mark.parametrize("kind", ["min length", "allowed", "top-k", "both"])


# The output head


@pytest.mark.parametrize("path", ["frozen", "fused", "trained", "softcap"])
def test_masked_log_probabilities_and_their_gradients_are_those_of_a_dense_softmax(path):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator, requires_grad=path != "frozen")
    weight = torch.randn(19, 6, generator=generator, requires_grad=path == "trained")
    head = OutputHead(weight, temperature=0.7, named_size=17, softcap=2.0 if path == "softcap" else None)
    allowed = np.random.default_rng(0).random((11, 19)) < 0.5
    allowed[:, 3] = True
    targets = torch.as_tensor([np.flatnonzero(row[:17])[-1] for row in allowed])
    masks = PackedMasks.of(allowed)
    logprobs, entropies = token_logprobs(hidden, targets, head, chunk=4, action_masks=masks)
    dense = head.logits(hidden).masked_fill(~torch.as_tensor(allowed), -torch.inf).log_softmax(-1)
    torch.testing.assert_close(logprobs, dense.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    expected = torch.special.entr(dense.detach().exp()).sum(-1)
    torch.testing.assert_close(entropies.detach(), expected, atol=1e-5, rtol=0)
    unmasked, _ = token_logprobs(hidden, targets, head)
    assert (logprobs - unmasked).min() > 0.01  # the mask matters in every row
    if path != "frozen":
        theirs = torch.autograd.grad(dense.gather(1, targets[:, None]).sum(), hidden, retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), hidden)[0], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_of_masked_entropies(trained):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 6, generator=generator, requires_grad=True)
    head = OutputHead(torch.randn(9, 6, generator=generator, requires_grad=trained))
    allowed = np.random.default_rng(1).random((5, 9)) < 0.6
    allowed[:, 0] = True
    masks = PackedMasks.of(allowed)
    _, entropies = token_logprobs(hidden, torch.zeros(5).long(), head, entropy_grad=True, action_masks=masks)
    log_pi = head.logits(hidden).masked_fill(~torch.as_tensor(allowed), -torch.inf).log_softmax(-1)
    dense = -(log_pi.exp() * log_pi.clamp_min(-1e30)).sum()
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), hidden) for x in (entropies, dense))
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_bits_are_unpacked_as_they_were_packed():
    allowed = np.random.default_rng(0).random((3, 4, 21)) < 0.5
    assert (allowed_tokens(PackedMasks.of(allowed), torch.device("cpu")).numpy() == allowed).all()


def test_masks_are_unpacked_a_chunk_at_a_time(monkeypatch):
    shapes = []
    unpacked = allowed_tokens

    def spying(masks, device):
        shapes.append(masks.index.shape)
        return unpacked(masks, device)

    monkeypatch.setattr("textenv.lm.output_head.allowed_tokens", spying)
    masks = PackedMasks(np.packbits(np.ones((1, 9), dtype=bool), axis=1), np.zeros(10, dtype=np.int64), 9)
    token_logprobs(torch.zeros(10, 2), torch.zeros(10).long(), OutputHead(torch.zeros(9, 2)), 4, action_masks=masks)
    assert shapes == [(4,), (4,), (2,)]


def test_small_policies_through_output_from_logits():
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    masks = PackedMasks.of(np.array([[[True, True, False], [True, True, True]]]))
    ids, mask = torch.tensor([[9, 1, 2]]), torch.ones(1, 2)
    output = output_from_logits(logits, torch.zeros(1, 2), ids, mask, action_masks=masks)
    torch.testing.assert_close(output.logprobs[0], torch.log(torch.tensor([1 / 2, 1 / 3])))
    torch.testing.assert_close(output.entropies[0], torch.log(torch.tensor([2.0, 3.0])))
    output.logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 0, 2] == 0


# Language models


ROWS_OF_TEXT = [([5, 6, 7], [8, 9, 1, 0]), ([3], [2, 4, 6, 8, 12, 14, 16, 18]), ([30, 31], [0])]


def test_distributions_of_a_language_model_agree_with_its_log_probabilities(folder, policy):
    model = LanguageModel(llama(), source="tiny", named_size=NAMED, temperature=0.8)
    ids, mask = padded(ROWS_OF_TEXT, P, BUDGET)
    whole = model.response_distributions(ids, mask, BUDGET)
    real = mask[:, P:] == 1
    assert whole.shape == (3, BUDGET, ROWS) and whole.dtype == np.float32
    np.testing.assert_allclose(np.exp(whole[real]).sum(-1), 1, atol=1e-5)
    assert np.isneginf(whole[real][:, NAMED:]).all()
    expected = model.response_logprobs(ids, mask, BUDGET)
    np.testing.assert_allclose(chosen(whole, ids[:, P:])[real], expected[real], atol=1e-5)
    prefix = {"input_ids": ids * (np.arange(P + BUDGET) < P), "attention_mask": mask * (np.arange(P + BUDGET) < P)}
    np.testing.assert_allclose(model.next_logprobs(prefix), whole[:, 0], atol=1e-4)
    np.testing.assert_allclose(model(prefix, ids[:, P]), chosen(model.next_logprobs(prefix), ids[:, P]), atol=1e-5)
    lazy = gym.make_vec("RLHF-v0", num_envs=1, model=folder, scorer=len, prompts=PROMPTS).unwrapped.task.reference
    cold = LanguageModel(llama(), source="tiny", named_size=NAMED)
    np.testing.assert_allclose(
        lazy.response_distributions(ids, mask, BUDGET)[real],
        cold.response_distributions(ids, mask, BUDGET)[real],
        atol=1e-5,
    )
    np.testing.assert_allclose(lazy.next_logprobs(prefix), cold.next_logprobs(prefix), atol=1e-5)
    np.testing.assert_allclose(
        PolicyLogprobs(policy).response_distributions(ids, mask, BUDGET)[real][:, :NAMED],
        policy.lm.response_distributions(ids, mask, BUDGET)[real][:, :NAMED],
        atol=1e-6,
    )


@KINDS
def test_masked_log_probabilities_of_whole_responses(policy, kind):
    responses = HFEngine(policy).generate(prompts(1), sampling(constraint(kind, policy.reference)))
    ids, mask = padded(list(zip(prompts(1), responses.responses, strict=True)), P, BUDGET)
    real = mask[:, P:] == 1
    masks = constraint(kind, policy.reference).response_masks(ids, mask, BUDGET)
    for model in (policy.lm, policy.reference, PolicyLogprobs(policy)):
        whole = model.response_distributions(ids, mask, BUDGET)
        expected = chosen(renormalised(whole[real], masks[real]), ids[:, P:][real])
        ours = model.response_logprobs(ids, mask, BUDGET, action_masks=masks)
        np.testing.assert_allclose(ours[real], expected, atol=1e-5)
        assert not ours[~real].any()
        assert (ours - model.response_logprobs(ids, mask, BUDGET))[real].max() > 0.01


def test_a_policy_without_whole_distributions_is_read_prefix_by_prefix():
    model = PolicyLogprobs(GRUPolicy(9))
    ids, mask = padded([([1, 2], [3, 4, 0]), ([5], [6])], 3, 4)
    whole = model.response_distributions(ids, mask, 4)
    real = mask[:, 3:] == 1
    np.testing.assert_allclose(chosen(whole, ids[:, 3:])[real], model.response_logprobs(ids, mask, 4)[real], atol=1e-6)


# Engines


def sampling(constraint, seed=3):
    return Sampling(max_tokens=BUDGET, stop_ids=MDP.stop_ids, seed=seed, constraint=constraint)


@KINDS
def test_engines_write_allowed_tokens_and_what_was_allowed(policy, kind):
    made = constraint(kind, policy.reference)
    cached, stepwise = (e.generate(prompts(), sampling(made)) for e in (HFEngine(policy), StepwiseEngine(policy)))
    written = [response.tolist() for response in cached.responses]
    assert written == [response.tolist() for response in stepwise.responses]
    free = HFEngine(policy).generate(prompts(), sampling(None))
    assert free.action_masks is None and written != [response.tolist() for response in free.responses]
    assert len({len(response) for response in written}) > 2  # rows left all along
    ids, mask = padded(list(zip(prompts(), cached.responses, strict=True)), P, BUDGET)
    real = mask[:, P:] == 1
    asked = made.response_masks(ids, mask, BUDGET)
    assert cached.action_masks.allows(np.where(real, ids[:, P:], EOS))[real].all()
    for generation in (cached, stepwise):
        assert generation.action_masks.index.shape == real.shape
        np.testing.assert_array_equal(generation.action_masks[real].unpacked(), asked[real].unpacked())


def test_a_minimal_length_is_one(policy):
    lengths = lambda made: [len(r) for r in HFEngine(policy).generate(prompts(8), sampling(made)).responses]  # noqa: E731
    assert min(lengths(None)) == 1
    assert min(lengths(NoStopBefore(MDP, 3, NAMED))) == 4  # three tokens and a stop id


def test_blocks_of_prompts_keep_their_masks(policy, monkeypatch):
    monkeypatch.setattr(hf, "MAX_ROWS", 3)
    made = constraint("both", policy.reference)
    generation = HFEngine(policy).generate(prompts(2), sampling(made))
    ids, mask = padded(list(zip(prompts(2), generation.responses, strict=True)), P, BUDGET)
    real = mask[:, P:] == 1
    asked = made.response_masks(ids, mask, BUDGET)
    np.testing.assert_array_equal(generation.action_masks[real].unpacked(), asked[real].unpacked())


def test_the_greedy_token_is_the_best_of_the_allowed(policy):
    greedy = dataclasses.replace(sampling(AllowedIds(MDP, [EOS, 7], NAMED)), temperature=0.0)
    assert {int(t) for r in HFEngine(policy).generate(prompts(1), greedy).responses for t in r} <= {EOS, 7}


# Agents


def constrained_lm_envs(folder, kind, **options):
    envs = lm_envs(folder, **({"max_prompt_tokens": P} | options))
    if kind in ("top-k", "both"):
        envs = wrappers.ActionMask(envs, top_k=12)
    return wrappers.MinLength(envs, 2) if kind in ("min length", "both") else envs


@pytest.mark.parametrize("kind", ["min length", "top-k", "both"])
@pytest.mark.filterwarnings(CUT)
def test_ppo_on_a_language_model_starts_at_ratio_one_and_kl_zero(folder, kind):
    """The checks of the start raise where rollout, reference and update are not of one distribution."""
    agent = lm_agent(folder, envs=constrained_lm_envs(folder, kind), num_minibatches=2, micro_batch_tokens=40, epochs=1)
    first, second = agent.step(), agent.step()
    assert first.kl == pytest.approx(0, abs=1e-3) and first.ratio_q50 == pytest.approx(1, abs=0.2)
    assert np.isfinite([second.kl, second.entropy, second.policy_loss]).all()
    rollout = agent.rollout()
    assert rollout.action_masks.index.shape == rollout.response_mask.shape
    if kind != "top-k":
        assert int(rollout.response_mask.sum(1).min()) > 2


@pytest.mark.filterwarnings(CUT)
def test_an_update_without_the_masks_is_found_out(folder, monkeypatch):
    monkeypatch.setattr("textenv.agents.on_policy.masks_argument", lambda _masks: {})
    agent = lm_agent(folder, envs=constrained_lm_envs(folder, "min length"))
    with pytest.raises(StartError, match="every ratio should be 1"):
        agent.step()


@pytest.mark.filterwarnings(CUT)
def test_a_reference_without_the_masks_is_found_out(folder, monkeypatch):
    from textenv.agents.rollouts import collect as module

    plain = module._scores_and_reference
    monkeypatch.setattr(module, "_scores_and_reference", lambda *arguments: plain(*arguments[:-1], None))
    agent = lm_agent(folder, envs=constrained_lm_envs(folder, "min length"))
    with pytest.raises(StartError, match="should be the reference"):
        agent.step()


def away(seed=0):
    logits = standard_toy().reference_logprobs + np.random.default_rng(seed).normal(size=(8, 6))
    logits[:, 0] += 2  # it would like to stop
    return TablePolicy(logits)


@pytest.mark.parametrize("layer", ["inside", "outside"])
def test_the_kl_of_rollouts_is_not_negative(layer):
    """2,048 responses of a policy that would rather stop; unmasked log-probabilities would give -1.2 nats."""
    if layer == "inside":
        envs = toy_envs(256, min_length=4)
    else:
        envs = wrappers.MinLength(toy_envs(256), 4)
    agent = toy_agent(away(), envs, check_start=False, episodes_per_iteration=2048)
    episodes = collect(agent.policy, envs, agent.engine, episodes=2048, seed=0)
    kl = episodes.replayed.infos["kl"]
    assert kl.mean() > 3 * kl.std() / np.sqrt(len(kl))
    ids, mask = episodes.replayed.input_ids, episodes.replayed.attention_mask
    real = episodes.replayed.response_mask
    policy, reference = PolicyLogprobs(agent.policy), standard_toy().reference
    unmasked = policy.response_logprobs(ids, mask, 8) - reference.response_logprobs(ids, mask, 8)
    assert np.where(real, unmasked, 0).sum(1).mean() < -1
    np.testing.assert_allclose(
        np.where(real, episodes.output.logprobs.numpy() - episodes.ref_logprobs.numpy(), 0).sum(1), kl, atol=1e-4
    )


def test_ppo_learns_under_a_constraint():
    envs = wrappers.ActionMask(toy_envs(64, min_length=2), [0, 1, 3, 5])
    agent = toy_agent(envs=envs, learning_rate=0.05, episodes_per_iteration=128)
    stats = [agent.step() for _ in range(12)]
    assert stats[-1].score > stats[0].score + 0.5
    written = agent.rollout().input_ids[:, 1:].unique().tolist()
    assert set(written) <= {0, 1, 3, 5}


def test_predict_chooses_among_the_allowed():
    agent = toy_agent(away(), toy_envs(4, min_length=4))
    observations, _ = agent.envs.reset(seed=0)
    for deterministic in (True, False):
        assert (agent.predict(observations, deterministic) != 0).all()
        assert agent.predict({key: value[0] for key, value in observations.items()}, deterministic) != 0
    free = toy_agent(away(), toy_envs(4))
    assert (free.predict(observations) == 0).any()


def test_a_policy_that_cannot_be_told_is_refused_before_any_work():
    envs = toy_envs(4, min_length=2)
    with pytest.raises(TypeError, match=r"got GRUPolicy\.evaluate without it.*Add action_masks=None"):
        PPO(GRUPolicy(6), envs)
    PPO(GRUPolicy(6), toy_envs(4))  # without a constraint it is fine


class Careless:
    """An engine that has never heard of constraints."""

    def generate(self, prompts, _sampling):
        return Generation([np.array([0]) for _ in prompts])

    def sync(self, policy):
        pass

    def close(self):
        pass


def test_an_engine_that_ignores_the_constraint_is_found_out():
    agent = toy_agent(envs=toy_envs(4, min_length=2), engine=Careless())
    with pytest.raises(ValueError, match=r"got 0 \(row 0, response token 0\)\. MinLength\(2\)"):
        agent.rollout()


def test_an_engine_that_writes_no_masks_down_makes_the_constraint_say_them_again():
    class Forgetful(StepwiseEngine):
        def generate(self, prompts, sampling):
            return Generation(super().generate(prompts, sampling).responses)

    policy = away()
    agent = toy_agent(policy, toy_envs(4, min_length=2), engine=Forgetful(policy), check_start=False)
    twin = toy_agent(policy, toy_envs(4, min_length=2), check_start=False)
    ours, theirs = agent.rollout(), twin.rollout()
    torch.testing.assert_close(ours.logprobs, theirs.logprobs)
    real = ours.response_mask.numpy()
    np.testing.assert_array_equal(ours.action_masks[real].unpacked(), theirs.action_masks[real].unpacked())


def test_rows_of_a_rollout_take_their_masks_along():
    rollout = toy_agent(envs=toy_envs(4, min_length=2)).rollout()
    part = rollout.rows(torch.tensor([3, 1]))
    np.testing.assert_array_equal(part.action_masks.unpacked(), rollout.action_masks.unpacked()[[3, 1]])
    assert toy_agent(envs=toy_envs(4)).rollout().action_masks is None


def test_rlhf_masks_unnamed_ids_too(folder):
    envs = lm_envs(folder, min_length=2)
    observations, infos = envs.reset()
    masks = constraint_of(envs).next_masks(observations).unpacked()
    assert not masks[:, NAMED:].any() and masks[:, :NAMED].sum() > 50
    np.testing.assert_array_equal(np.packbits(masks, axis=1), infos["action_mask"])
