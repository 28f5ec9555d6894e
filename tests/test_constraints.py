"""Constraints: what may be written, the same for policy, reference and engine; masks for agents; what is refused."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
from distribution_helpers import PrefixDistributions, WholeDistributions
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import (
    BAD,
    DOT,
    END,
    FILM,
    GOOD,
    RESPONSE_TOKENS,
    VERY,
    VOCAB_SIZE,
    PieceTokenizer,
    PrefixLogprobs,
    WholeLogprobs,
    assert_same,
    random_responses,
    text_task,
    write,
)

from textenv import TextGenerationEnv, TextGenerationVectorEnv, distributions, replay
from textenv import wrappers as single_wrappers
from textenv.constraint_kinds import AllowedIds, NoStopBefore, TopK
from textenv.constraints import check_allowed, constraint_of
from textenv.distributions import renormalised
from textenv.mdp import TokenMDP
from textenv.packed_masks import PackedMasks, concatenated, intersection
from textenv.toy import ToyLanguage
from textenv.whole import whole_logprobs, whole_responses
from textenv.wrappers import vector as vector_wrappers

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
ALL = np.ones(VOCAB_SIZE, dtype=bool)
NO_STOP = ALL & (np.arange(VOCAB_SIZE) != END)


def single(*layers, **task):
    env = TextGenerationEnv(text_task(**task))
    for layer in layers:
        env = layer(single_wrappers, env)
    return env


def vector(*layers, num_envs=2, mode="NextStep", **task):
    envs = TextGenerationVectorEnv(num_envs, text_task(**task), autoreset_mode=mode)
    for layer in layers:
        envs = layer(vector_wrappers, envs)
    return envs


def min_length(n):
    return lambda wrappers, env: wrappers.MinLength(env, n)


def allowed(*ids):
    return lambda wrappers, env: wrappers.ActionMask(env, ids)


def top_k(k, reference=None):
    return lambda wrappers, env: wrappers.ActionMask(env, top_k=k, reference=reference)


def kl(reference, policy, kl_coef=1.0, **options):
    return lambda wrappers, env: wrappers.KLPenalty(env, reference, policy, kl_coef=kl_coef, **options)


def bits(packed, vocab_size=VOCAB_SIZE):
    return np.unpackbits(packed, axis=-1, count=vocab_size).astype(bool)


# Packed bits


class TestPackedMasks:
    def test_by_hand(self):
        masks = PackedMasks.of(np.array([[True, False, True], [True, True, True]]))
        assert masks.table.tolist() == [[0b10100000], [0b11100000]]
        assert masks[[1, 0, 1]].packed().tolist() == [[224], [160], [224]]

    @pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 130])
    def test_packing_loses_nothing(self, vocab_size):
        rng = np.random.default_rng(vocab_size)
        allowed = rng.random((3, 5, vocab_size)) < 0.5
        masks = PackedMasks.of(allowed)
        np.testing.assert_array_equal(masks.unpacked(), allowed)
        actions = rng.integers(vocab_size, size=(3, 5))
        np.testing.assert_array_equal(masks.allows(actions), np.take_along_axis(allowed, actions[..., None], 2)[..., 0])
        np.testing.assert_array_equal(masks[1].unpacked(), allowed[1])
        np.testing.assert_array_equal(masks[allowed[..., 0]].unpacked(), allowed[allowed[..., 0]])

    def test_intersection_and_concatenation(self):
        a, b = np.random.default_rng(0).random((2, 4, 6, 19)) < 0.6
        both = intersection([PackedMasks.of(a), PackedMasks.of(b)])
        np.testing.assert_array_equal(both.unpacked(), a & b)
        shared = PackedMasks(np.packbits(ALL[None], axis=1), np.zeros((4, 2), dtype=np.int64), VOCAB_SIZE)
        joined = concatenated([shared, shared, shared])
        assert len(joined.table) == 1 and joined.index.shape == (12, 2)
        np.testing.assert_array_equal(concatenated([PackedMasks.of(a), both]).unpacked(), np.concatenate([a, a & b]))

    def test_152_thousand_actions(self):
        mdp = TokenMDP(vocab_size=152_000, stop_ids=(0,), max_prompt_tokens=4, max_response_tokens=64)
        constraint = NoStopBefore(mdp, 3)
        masks = constraint.response_masks(np.zeros((512, 68), np.int32), np.ones((512, 68), np.int8), 64)
        assert (masks.table.shape, masks.index.shape) == ((2, 19_000), (512, 64))  # not (512, 64, 152_000)


# What the wrappers forbid, and how they tell


class TestMinLength:
    def test_masks_by_hand(self):
        env = single(min_length(2), stop_ids=[END, DOT])
        no_stop = NO_STOP & (np.arange(VOCAB_SIZE) != DOT)
        steps = write(env, [GOOD, BAD, DOT], options={"prompt": " a film"})
        shown = [bits(info["action_mask"]) for info in steps["infos"][:-1]]
        np.testing.assert_array_equal(shown, [no_stop, no_stop, ALL])
        assert "action_mask" not in steps["info"]  # the episode is over

    def test_action_masks_are_those_of_the_state_that_is_current(self):
        env = single(min_length(1))
        env.reset()
        np.testing.assert_array_equal(env.action_masks(), NO_STOP)
        assert env.action_space.sample(env.action_masks().astype(np.int8)) != END
        env.step(GOOD)
        np.testing.assert_array_equal(env.action_masks(), ALL)
        env.reset()
        np.testing.assert_array_equal(
            gym.wrappers.TransformReward(env, abs).get_wrapper_attr("action_masks")(), NO_STOP
        )

    def test_a_stop_id_too_early_is_refused_and_nothing_has_changed(self):
        env = single(min_length(2))
        before, _ = env.reset(seed=1)
        with pytest.raises(
            ValueError, match=r"got 0 \(row 0\)\. MinLength\(2\): 0 is a stop id.*env\.action_masks\(\)"
        ):
            env.step(END)
        observation, *_ = env.step(GOOD)
        assert observation["attention_mask"].sum() == before["attention_mask"].sum() + 1
        with pytest.raises(ValueError, match="MinLength"):
            env.step(END)  # one token is not two
        env.step(GOOD)
        assert env.step(END)[2]

    @pytest.mark.parametrize("n", [0, -1, RESPONSE_TOKENS, 1.5, True, "2"])
    def test_lengths_that_make_no_sense(self, n):
        for make in (single, vector):
            with pytest.raises(ValueError, match=r"from 1 to max_response_tokens - 1 = 4, got"):
                make(min_length(n))

    def test_nothing_but_stop_ids(self):
        with pytest.raises(ValueError, match="all 12 tokens of the task are stop ids"):
            single(min_length(1), stop_ids=list(range(VOCAB_SIZE)))

    def test_no_text_environment(self):
        with pytest.raises(TypeError, match="MinLength should wrap a text environment"):
            single_wrappers.MinLength(gym.make("CartPole-v1"), 1)

    def test_masks_need_an_episode(self):
        for env in (single(min_length(1)), vector(min_length(1))):
            with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) first"):
                env.action_masks()
            with pytest.raises(gym.error.ResetNeeded):
                env.step(np.array([GOOD, GOOD]) if hasattr(env, "num_envs") else GOOD)
        env = single(min_length(1))
        write(env, [GOOD, END])
        with pytest.raises(gym.error.ResetNeeded):
            env.step(GOOD)

    def test_what_the_environment_refuses_it_still_refuses(self):
        env = single(min_length(1))
        env.reset()
        for action in (VOCAB_SIZE, -1, 0.5):
            with pytest.raises(ValueError, match=r"token id"):
                env.step(action)


class TestVector:
    @MODES
    def test_rows_have_masks_of_their_own(self, mode):
        envs = vector(min_length(2), mode=mode)
        _, infos = envs.reset(seed=0)
        np.testing.assert_array_equal(bits(infos["action_mask"]), [NO_STOP, NO_STOP])
        assert infos["_action_mask"].all()
        for _ in range(2):
            *_, infos = envs.step(np.array([GOOD, GOOD]))
        np.testing.assert_array_equal(envs.action_masks(), [ALL, ALL])
        *_, infos = envs.step(np.array([GOOD, END]))
        if mode is AutoresetMode.SAME_STEP:  # row 1 has begun again
            assert infos["_action_mask"].tolist() == [True, True]
            np.testing.assert_array_equal(bits(infos["action_mask"]), [ALL, NO_STOP])
            with pytest.raises(ValueError, match=r"got 0 \(row 1\)"):
                envs.step(np.array([GOOD, END]))
        else:
            assert infos["_action_mask"].tolist() == [True, False]
            np.testing.assert_array_equal(bits(infos["action_mask"]), [ALL, ~ALL])
        if mode is AutoresetMode.DISABLED:
            _, infos = envs.reset(options={"reset_mask": np.array([False, True])})
            np.testing.assert_array_equal(bits(infos["action_mask"]), [ALL, NO_STOP])
            with pytest.raises(ValueError, match=r"got 0 \(row 1\)"):
                envs.step(np.array([GOOD, END]))

    def test_an_action_that_is_ignored_is_not_checked(self):
        envs = vector(min_length(1))
        envs.reset(seed=0)
        envs.step(np.array([GOOD, GOOD]))
        envs.step(np.array([GOOD, END]))
        *_, infos = envs.step(np.array([GOOD, END]))  # row 1 only resets
        np.testing.assert_array_equal(bits(infos["action_mask"]), [ALL, NO_STOP])
        with pytest.raises(ValueError, match=r"got 0 \(row 1\)"):
            envs.step(np.array([GOOD, END]))

    def test_equals_single_environments_side_by_side(self):
        layers = min_length(2), top_k(4, PrefixDistributions(3))
        ours, theirs = vector(*layers, num_envs=3), SyncVectorEnv([lambda: single(*layers)] * 3)
        rng = np.random.default_rng(0)
        _, infos = ours.reset(seed=5)
        _, other = theirs.reset(seed=5)
        for _ in range(25):
            for key in ("action_mask", "_action_mask"):
                assert_same(infos[key], other[key])
            masks = ours.action_masks()
            actions = np.array([rng.choice(np.flatnonzero(row)) for row in masks])
            *_, infos = ours.step(actions)
            *_, other = theirs.step(actions)

    def test_wrong_actions(self):
        envs = vector(min_length(1))
        envs.reset()
        with pytest.raises(ValueError, match=r"2 token ids"):
            envs.step(np.array([GOOD]))

    def test_152_thousand_actions(self):
        options = {"vocab_size": 152_000, "stop_ids": [END]}
        envs = vector(min_length(1), num_envs=4, **options)
        _, infos = envs.reset()
        assert infos["action_mask"].shape == (4, 19_000) and infos["action_mask"].dtype == np.uint8
        assert envs.action_masks().shape == (4, 152_000)
        env = single(min_length(1), **options)
        assert env.reset()[1]["action_mask"].shape == (19_000,)
        assert env.action_masks().sum() == 151_999


class TestActionMask:
    def test_allowed_ids(self):
        env = single(allowed(END, GOOD, VERY))
        env.reset()
        assert np.flatnonzero(env.action_masks()).tolist() == [END, GOOD, VERY]
        with pytest.raises(ValueError, match=r"got 2 \(row 0\)\. ActionMask: 2 is not among the allowed_ids"):
            env.step(BAD)

    def test_no_stop_id_among_them(self):
        with pytest.warns(UserWarning, match="every response will be cut"):
            single(allowed(GOOD, VERY))
        single(allowed(GOOD, VERY), stop_ids=[])  # nothing ever stops there

    @pytest.mark.parametrize("ids", [(), (GOOD, VOCAB_SIZE), (-1,)])
    def test_ids_that_do_not_exist(self, ids):
        with pytest.raises(ValueError, match=r"at least one token id in \[0, 12\)"):
            single(allowed(*ids))

    def test_one_of_the_two(self):
        for arguments in ({}, {"allowed_ids": [END], "top_k": 2}):
            with pytest.raises(ValueError, match="`allowed_ids` or `top_k`"):
                single_wrappers.ActionMask(TextGenerationEnv(text_task()), **arguments)

    @pytest.mark.parametrize("k", [0, VOCAB_SIZE + 1, True, 2.0])
    def test_k_out_of_range(self, k):
        with pytest.raises(ValueError, match="from 1 to the 12 tokens"):
            single(top_k(k, PrefixDistributions(1)))

    def test_top_k_needs_a_reference_that_ranks(self):
        with pytest.raises(ValueError, match="the task has none"):
            single(top_k(3))
        with pytest.raises(TypeError, match=r"got PrefixLogprobs.*Which tokens are the k most likely\?"):
            single(top_k(3, PrefixLogprobs(1)))

    def test_top_k_by_hand(self):
        """Ranks 0.4, 0.3, 0.2, 0.1, then a tie of 0.3 and 0.3 where one has room: the lower id wins."""
        logits = np.log([[0.2, 0.4, 0.1, 0.3], [0.1, 0.3, 0.3, 0.3]])
        language = ToyLanguage(reference_logits=logits, stop_id=0, token_scores=np.zeros(4))
        env = single_wrappers.ActionMask(gym.make("textenv/Toy-v0", language=language), top_k=2)
        env.reset()
        assert np.flatnonzero(env.action_masks()).tolist() == [1, 3]
        env.step(3)
        assert np.flatnonzero(env.action_masks()).tolist() == [1, 2]
        with pytest.raises(ValueError, match="3 is not among the 2 tokens that the reference finds most likely"):
            env.step(3)

    def test_top_k_follows_the_prefix(self):
        reference = PrefixDistributions(4)
        env = single(top_k(5, reference))
        observation, _ = env.reset(seed=2)
        seen = []
        for _ in range(RESPONSE_TOKENS - 1):
            masks = env.action_masks()
            ranked = reference.formula(observation["input_ids"][None], observation["attention_mask"][None])[0]
            assert set(np.flatnonzero(masks)) == set(np.argsort(-ranked)[:5])
            seen.append(masks)
            token = next(int(t) for t in np.flatnonzero(masks) if t != END)
            observation, *_ = env.step(token)
        assert len({mask.tobytes() for mask in seen}) > 1

    def test_top_k_asks_its_reference_once_a_state(self):
        reference = PrefixDistributions(4)
        env = single(top_k(12, reference), kl(None, None), min_length(1), reference=reference)
        env.attach_policy = None
        env.env.attach_policy(PrefixDistributions(1))
        reference.calls.clear()
        write(env, [GOOD, GOOD])
        # Three states, and the two log-probabilities of the toll; MinLength and the toll read the masks there are.
        assert reference.calls == ["next"] * 5

    @pytest.mark.parametrize("kind", [PrefixDistributions, WholeDistributions])
    @pytest.mark.parametrize("rows", [2, 100])
    def test_masks_of_whole_responses_are_those_of_their_states(self, kind, rows, monkeypatch):
        monkeypatch.setattr(distributions, "BLOCK_BYTES", rows * 4 * RESPONSE_TOKENS * VOCAB_SIZE)
        task, reference = text_task(), kind(4)
        constraint = TopK(task.mdp, reference, 3)
        state = whole_responses(task.mdp, [[1, 2, 3]] * 5, random_responses(np.random.default_rng(2), 5))
        masks = constraint.response_masks(state.input_ids, state.attention_mask, RESPONSE_TOKENS)
        assert masks.index.shape == (5, RESPONSE_TOKENS)
        columns = np.arange(task.mdp.length)
        for row, length in enumerate(state.response_lengths):
            for token in range(length):
                seen = (columns < 6 + token) & (state.attention_mask[row] == 1)
                prefix = {"input_ids": np.where(seen, state.input_ids[row], 0)[None], "attention_mask": seen[None] + 0}
                np.testing.assert_array_equal(masks[row, token].unpacked(), constraint.next_masks(prefix)[0].unpacked())
        assert masks.table.any(axis=1).all()

    def test_an_agents_reference_takes_the_place_of_the_tasks_unless_one_was_given(self):
        for road in (single, vector):
            own, brought = PrefixDistributions(4), PrefixDistributions(9)
            env = road(top_k(3), reference=own)
            env.attach_policy(None, brought)
            assert env.constraint.reference is brought
            env.attach_policy(None, None)
            assert env.constraint.reference is brought
            given = road(top_k(3, own))
            given.attach_policy(None, brought)
            assert given.constraint.reference is own
        single(allowed(END)).attach_policy(None, PrefixDistributions(9))  # nothing to rank


class Named(PieceTokenizer):
    named_size = 9


NAMED = {"tokenizer": Named(), "prompts": [" a film", " films"]}


class TestUnnamedIds:
    """Nine names, twelve rows of embeddings."""

    @pytest.mark.parametrize("layer", [min_length(1), allowed(END, GOOD), top_k(9, PrefixDistributions(1))])
    def test_they_are_never_allowed(self, layer):
        env = single(layer, **NAMED)
        env.reset()
        assert not env.action_masks()[9:].any() and env.action_masks()[:9].any()
        with pytest.raises(ValueError, match="10 has an embedding row, but the tokenizer names no such token"):
            env.step(DOT)

    def test_nor_are_they_options(self):
        with pytest.raises(ValueError, match=r"in \[0, 9\)"):
            single(allowed(GOOD, DOT), **NAMED)
        with pytest.raises(ValueError, match="the 9 tokens"):
            single(top_k(10, PrefixDistributions(1)), **NAMED)
        joint = constraint_of(single(min_length(1), allowed(END, GOOD), **NAMED))
        assert not joint.named[9:].any()


class TestJoint:
    @pytest.mark.parametrize("order", [1, -1])
    def test_all_must_allow(self, order):
        layers = [min_length(2), allowed(END, GOOD, VERY)][::order]
        env = single(*layers)
        _, info = env.reset()
        np.testing.assert_array_equal(bits(info["action_mask"]), env.action_masks())
        assert np.flatnonzero(env.action_masks()).tolist() == [GOOD, VERY]
        with pytest.raises(ValueError, match=r"MinLength\(2\)"):
            env.step(END)
        with pytest.raises(ValueError, match=r"ActionMask") as refused:
            env.step(BAD)
        assert "MinLength" not in str(refused.value)

    def test_what_is_in_between_does_not_matter(self):
        envs = vector(min_length(2), kl(PrefixDistributions(1), None), allowed(END, GOOD))
        assert [type(part) for part in constraint_of(envs).parts] == [AllowedIds, NoStopBefore]
        assert constraint_of(vector(kl(PrefixDistributions(1), None))) is None
        assert type(constraint_of(vector(min_length(2)))) is NoStopBefore

    def test_nothing_left_is_an_error(self):
        for road in (single, vector):
            env = road(allowed(END), min_length(1))
            with pytest.raises(ValueError, match="allow no token at all"):
                env.reset()
        envs = vector(allowed(END), min_length(1))
        with pytest.raises(ValueError, match="allow no token at all"):
            replay(envs, [" films"], [[GOOD, END]])


# Copies


class TestCopies:
    @pytest.mark.parametrize("layers", [(min_length(2),), (top_k(5, PrefixDistributions(4)), min_length(2))])
    def test_copies_behave_alike(self, layers):
        for road in (single, vector):
            env = road(*layers)
            env.reset(seed=3)
            for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
                assert_same(twin.action_masks(), env.action_masks())
                assert_same(twin.reset(seed=4), copy.deepcopy(env).reset(seed=4))

    def test_the_spec_survives_json(self):
        env = gym.make("textenv/Toy-v0", min_length=2)
        wrapped = single_wrappers.ActionMask(env, [np.int64(0), 3])
        again = gym.make(gym.envs.registration.EnvSpec.from_json(wrapped.spec.to_json()))
        again.reset()
        assert np.flatnonzero(again.get_wrapper_attr("action_masks")()).tolist() == [3]


# The toll: a KL between two constrained distributions


POLICY, REFERENCE = np.log([0.8, 0.1, 0.1]), np.log([0.1, 0.3, 0.6])
"""The policy would rather stop. Without the stop id they are (1/2, 1/2) and (1/3, 2/3)."""


class Fixed:
    """One distribution everywhere."""

    def __init__(self, log_pi):
        self.log_pi = np.asarray(log_pi)

    def next_logprobs(self, observations):
        return np.tile(self.log_pi, (len(observations["input_ids"]), 1))

    def __call__(self, _observations, actions):
        return self.log_pi[np.asarray(actions)]


def three_words(**options):
    language = ToyLanguage(reference_logits=np.tile(REFERENCE, (3, 1)), stop_id=0, token_scores=np.zeros(3))
    return {"language": language} | options


@pytest.mark.parametrize("road", ["single", "vector"])
@pytest.mark.parametrize("above", [True, False])
def test_the_toll_is_renormalised_wherever_the_constraint_is(road, above):
    wrappers = single_wrappers if road == "single" else vector_wrappers
    make = gym.make if road == "single" else lambda name, **o: gym.make_vec(name, num_envs=1, **o)
    env = make("textenv/Toy-v0", **three_words())
    layers = [lambda e: wrappers.KLPenalty(e, None, Fixed(POLICY), kl_coef=1.0), lambda e: wrappers.MinLength(e, 1)]
    for layer in layers if above else layers[::-1]:
        env = layer(env)
    env.reset()
    rewards = []
    for token in (2, 0):
        _, reward, *_, info = env.step(token if road == "single" else np.array([token]))
        rewards.append(float(np.squeeze(reward)))
    # First log(1/2) - log(2/3); with the masks in the sampler alone it would be log(0.1) - log(0.6).
    np.testing.assert_allclose(rewards, [-np.log(3 / 4), -np.log(8)], atol=1e-12)
    assert abs(rewards[0] + np.log(1 / 6)) > 1
    assert float(np.squeeze(info["kl"])) == pytest.approx(np.log(3 / 4) + np.log(8))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
def test_replay_charges_what_stepping_charges(estimator):
    responses = [[GOOD, BAD, END], [GOOD, GOOD, GOOD, GOOD, GOOD], [VERY, GOOD, BAD, END]]
    for kind in (PrefixDistributions, WholeDistributions):
        reference, policy = kind(1), kind(2)
        layers = min_length(2), kl(reference, policy, estimator=estimator), top_k(11, kind(6))
        envs = vector(*layers)
        constraint, task = constraint_of(envs), text_task()
        state = whole_responses(task.mdp, [[1, 2]] * 3, responses)
        masks = constraint.response_masks(state.input_ids, state.attention_mask, RESPONSE_TOKENS)
        kept = masks.allows(np.where(state.attention_mask[:, 6:] == 1, state.input_ids[:, 6:], GOOD)).all(axis=1)
        prompts = [[1, 2]] * int(kept.sum())
        written = [response for response, ok in zip(responses, kept, strict=True) if ok]
        assert written
        replayed = replay(envs, prompts, written)
        env = single(*layers)
        for row, response in enumerate(written):
            steps = write(env, response, options={"prompt": [1, 2]})
            np.testing.assert_allclose(replayed.rewards[row, : len(response)], steps["rewards"], atol=1e-9)
        plain = replay(vector(kl(reference, policy, estimator=estimator)), prompts, written)
        assert np.abs(plain.rewards - replayed.rewards).max() > 1e-3  # the masks matter


def test_a_masked_reference_gives_a_kl_and_a_mask_in_the_sampler_alone_does_not():
    """The mean over what is sampled, (1/2, 1/2) without the stop id: 0.0589 nats, against -1.4452."""
    masks = PackedMasks.of(np.array([[False, True, True]]))
    sampled = np.exp(renormalised(POLICY[None], masks))[0]
    np.testing.assert_allclose(sampled, [0, 0.5, 0.5])
    right = renormalised(POLICY[None], masks)[0, 1:] - renormalised(REFERENCE[None], masks)[0, 1:]
    wrong = POLICY[1:] - REFERENCE[1:]
    assert sampled[1:] @ right == pytest.approx(0.058892, abs=1e-6)
    assert sampled[1:] @ wrong == pytest.approx(-1.445186, abs=1e-6)


def test_the_kl_of_constrained_responses_is_never_negative_on_average():
    """Over four thousand responses drawn from the constrained policy, and exactly in every state."""
    rng = np.random.default_rng(0)
    envs = gym.make_vec("textenv/Toy-v0", num_envs=500, min_length=2, **three_words())
    exact, found, wrong = vector_wrappers.KLPenalty(envs, None, Fixed(POLICY), estimator="exact"), [], []
    _, infos = exact.reset()
    resetting = np.zeros(500, dtype=bool)
    naive = np.zeros(500)
    for _ in range(32):
        masks = bits(infos["action_mask"], 3)
        masks[~infos["_action_mask"]] = True
        pi = np.where(masks, np.exp(POLICY), 0)
        actions = (rng.random(500)[:, None] > (pi / pi.sum(1, keepdims=True)).cumsum(1)).sum(1)
        naive = np.where(resetting, 0.0, naive + (POLICY - REFERENCE)[actions])
        _, rewards, terminations, truncations, infos = exact.step(actions)
        assert (rewards <= 1e-12).all()  # scores are 0: what is left is minus an exact KL
        resetting = terminations | truncations
        found += infos.get("kl", naive)[resetting].tolist()
        wrong += naive[resetting].tolist()
        naive[resetting] = 0.0
    assert len(found) > 3000
    error = np.std(found) / np.sqrt(len(found))
    assert np.mean(found) > 3 * error > 0  # here well above 0
    assert np.mean(wrong) < -1


def test_log_probabilities_of_whole_responses_by_any_means():
    """response_logprobs with masks, whole distributions, prefixes: one number."""
    task = text_task()
    state = whole_responses(task.mdp, [[1, 2]] * 4, [[GOOD, END], [BAD, GOOD, END], [FILM] * 5, [VERY, END]])
    masks = NoStopBefore(task.mdp, 1).response_masks(state.input_ids, state.attention_mask, RESPONSE_TOKENS)
    by_prefix, by_whole = (
        whole_logprobs(kind(3), state, task.mdp, masks) for kind in (PrefixDistributions, WholeDistributions)
    )
    np.testing.assert_allclose(by_prefix, by_whole, atol=1e-12)
    model = PrefixDistributions(3)
    first = model.formula(state.input_ids * (np.arange(11) < 6), state.attention_mask * (np.arange(11) < 6))
    expected = first[0, GOOD] - np.log(1 - np.exp(first[0, END]))
    assert by_prefix[0, 0] == pytest.approx(expected) and expected != pytest.approx(first[0, GOOD], abs=1e-3)
    assert not by_prefix[state.attention_mask[:, 6:] == 0].any()


class TestModelsThatCannotBeMasked:
    def test_a_reference_of_chosen_tokens_is_refused_when_the_stack_is_built(self):
        for road in (single, vector):
            for layers in ((min_length(1), kl(PrefixLogprobs(1), None)), (kl(WholeLogprobs(1), None), min_length(1))):
                with pytest.raises(TypeError, match=r"got (Prefix|Whole)Logprobs.*negative even"):
                    road(*layers)

    def test_or_when_it_is_attached(self):
        env = single(min_length(1), kl(None, None))
        with pytest.raises(TypeError, match="got PrefixLogprobs"):
            env.attach_policy(PrefixDistributions(1), PrefixLogprobs(2))

    def test_or_when_it_is_the_tasks(self):
        env = single(min_length(1), kl(None, PrefixDistributions(1)), reference=PrefixLogprobs(2))
        env.reset()
        with pytest.raises(TypeError, match="got PrefixLogprobs"):
            env.step(GOOD)
        envs = vector(min_length(1), kl(None, PrefixDistributions(1)), reference=WholeLogprobs(2))
        with pytest.raises(TypeError, match="got WholeLogprobs"):
            replay(envs, [" films"], [[GOOD, END]])

    def test_a_policy_of_chosen_tokens_is_taken_at_its_word(self):
        """It acts among the allowed tokens, so what it reports is masked already."""
        reference, policy = PrefixDistributions(1), PrefixLogprobs(2)
        layers = min_length(1), kl(reference, policy)
        steps = write(single(*layers), [GOOD, END], options={"prompt": [1, 2]})
        replayed = replay(vector(*layers), [[1, 2]], [[GOOD, END]])
        np.testing.assert_allclose(replayed.rewards[0, :2], steps["rewards"], atol=1e-12)

    def test_a_reference_without_any_allowed_token(self):
        nowhere = Fixed([0.0, -np.inf, -np.inf])
        env = gym.make("textenv/Toy-v0", min_length=1, **three_words())
        env = single_wrappers.KLPenalty(env, nowhere, Fixed(POLICY))
        env.reset()
        with pytest.raises(ValueError, match="nothing to renormalise"):
            env.step(1)


class TestReplay:
    def test_forbidden_tokens_are_refused_before_the_scorer_is_asked(self):
        def scorer(_prompts, _responses):
            raise AssertionError("asked")

        envs = vector(min_length(2), scorer=scorer)
        with pytest.raises(ValueError, match=r"got 0 \(row 1, response token 1\)\. MinLength\(2\)"):
            replay(envs, [" films"] * 2, [[GOOD, GOOD, END], [GOOD, END]])

    def test_given_masks_are_believed(self):
        """A token that rounding pushed out of the top k is allowed where the engine says that it was."""
        envs = vector(top_k(1, PrefixDistributions(4)))
        everything = PackedMasks.of(np.ones((1, RESPONSE_TOKENS, VOCAB_SIZE), dtype=bool))
        with pytest.raises(ValueError, match="the 1 tokens that the reference"):
            replay(envs, [" films"], [[GOOD] * 5])
        assert replay(envs, [" films"], [[GOOD] * 5], action_masks=everything).response_mask.all()

    def test_no_step_of_it_asks_for_masks(self):
        reference = WholeDistributions(4)
        envs = vector(top_k(12, reference))
        replay(envs, [" films"] * 2, [[GOOD] * 5, [GOOD, END]])
        assert reference.calls == ["whole", "next"]  # the responses, and the reset before them

    def test_the_wrapper_forbids_again_afterwards(self):
        envs = vector(min_length(2))
        replay(envs, [" films"], [[GOOD] * 5])
        envs.reset()
        with pytest.raises(ValueError, match="MinLength"):
            envs.step(np.array([END, END]))


def test_check_allowed_leaves_out_what_means_nothing():
    mdp = text_task().mdp
    constraint = AllowedIds(mdp, [GOOD])
    masks = constraint.next_masks({"input_ids": np.zeros((2, 11))})
    check_allowed(constraint, masks, np.array([GOOD, 10**6]), np.array([True, False]))
    with pytest.raises(ValueError, match="row 1"):
        check_allowed(constraint, masks, np.array([GOOD, BAD]), np.array([True, True]))


def test_options_of_an_id():
    env = gym.make("textenv/Toy-v0", min_length=3)
    assert env.get_wrapper_attr("constraint").min_length == 3
    envs = gym.make_vec("textenv/Toy-v0", num_envs=2, min_length=3, kl_coef=0.1)
    assert constraint_of(envs).min_length == 3


# Other people's agents


@pytest.mark.slow
@pytest.mark.parametrize("layer", [min_length(4), allowed(0, 2, 3), top_k(3)])
def test_maskable_ppo_never_picks_a_forbidden_action(layer):
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    picked = []

    class Watch(gym.Wrapper):
        def step(self, action):
            picked.append(self.env.get_wrapper_attr("action_masks")()[int(action)])
            return self.env.step(int(action))  # and a forbidden one would be refused

    envs = DummyVecEnv([lambda: Watch(layer(single_wrappers, gym.make("textenv/Toy-v0")))] * 2)
    agent = MaskablePPO("MultiInputPolicy", envs, n_steps=64, batch_size=64, n_epochs=1, seed=0)
    agent.learn(256)
    assert len(picked) >= 256 and all(picked)
