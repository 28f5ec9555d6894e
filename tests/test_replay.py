"""Whole responses through the wrapped environments: the rewards of stepping, from one call of each model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers import (
    BAD,
    CLOSE,
    DOT,
    END,
    FILM,
    GOOD,
    PROMPTS,
    RESPONSE_TOKENS,
    VERY,
    CountingScorer,
    PieceTokenizer,
    PrefixLogprobs,
    S,
    WholeLogprobs,
    assert_same,
    count_good,
    random_responses,
    text_task,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv import Replay, TextGenerationEnv, TextGenerationVectorEnv, replay
from textenv import wrappers as single_wrappers
from textenv.wrappers import vector as vector_wrappers

MODES = list(AutoresetMode)
BY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def bend(rewards: Any) -> Any:
    """What somebody else's wrapper may do to rewards, step by step: neither linear nor 0 at 0."""
    return np.clip(1.5 * rewards + 0.01, -0.9, 2.0)


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "kl": lambda wrappers, env: wrappers.KLPenalty(env, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3),
    "eos": lambda wrappers, env: wrappers.MissingEOSPenalty(env, 0.5, mode="replace"),
    "norm": lambda wrappers, env: wrappers.NormalizeScore(env, mean=0.25, std=2.0),
    "bend": lambda wrappers, env: (
        gym.wrappers.TransformReward(env, bend)
        if wrappers is single_wrappers
        else gym.wrappers.vector.TransformReward(env, bend)
    ),
}
STACKS = [stack for count in range(5) for stack in itertools.permutations(LAYERS, count)]
"""Every subset of the layers in every order, from the inside out."""


def stacked(stack: Sequence[str], wrappers: Any, env: Any) -> Any:
    for name in stack:
        env = LAYERS[name](wrappers, env)
    return env


def vector(stack: Sequence[str] = (), num_envs: int = 3, mode: Any = "NextStep", **task: Any) -> Any:
    return stacked(stack, vector_wrappers, TextGenerationVectorEnv(num_envs, text_task(**task), autoreset_mode=mode))


def stepped(env: Any, prompts: Sequence[Any], responses: Sequence[Sequence[int]]) -> Replay:
    """What stepping a single environment gives, one response after the other, in the form of a `Replay`."""
    rows = [write(env, r, options={"prompt": p}) for p, r in zip(prompts, responses, strict=True)]
    rewards, response_mask = np.zeros((len(rows), RESPONSE_TOKENS)), np.zeros((len(rows), RESPONSE_TOKENS), bool)
    for row, (steps, response) in enumerate(zip(rows, responses, strict=True)):
        rewards[row, : len(response)] = steps["rewards"]
        response_mask[row, : len(response)] = True
    infos = {}
    for key in rows[0]["info"]:
        values = [steps["info"][key] for steps in rows]
        infos[key] = np.array(values, dtype=object if isinstance(values[0], str) else None)
    return Replay(
        np.stack([steps["observation"]["input_ids"] for steps in rows]),
        np.stack([steps["observation"]["attention_mask"] for steps in rows]),
        rewards,
        response_mask,
        np.array([steps["ends"][-1][0] for steps in rows]),
        np.array([steps["ends"][-1][1] for steps in rows]),
        np.array([steps["info"]["score"] for steps in rows]),
        infos,
    )


class TestByHand:
    def test_where_the_score_goes_in_a_batch(self):
        # [t t stop], [t t t t t], [stop]: on the stop, on the last token, on the first; nothing behind them.
        responses = [[VERY, GOOD, END], [GOOD, A_WORD, A_WORD, A_WORD, A_WORD], [END]]
        result = replay(vector(), [" a film"] * 3, responses)
        np.testing.assert_allclose(
            result.rewards, [[0, 0, 1.7, 0, 0], [0, 0, 0, 0, 1.7], [0.7, 0, 0, 0, 0]], atol=1e-12
        )
        assert result.response_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] + [False] * 4]
        assert result.terminated.tolist() == [True, False, True]
        assert result.truncated.tolist() == [False, True, False]
        assert result.infos["finish_reason"].tolist() == ["stop", "length", "stop"]
        assert result.infos["response_length"].tolist() == [3, 5, 1]
        assert result.infos["response"].tolist() == [" very good", " good" + PIECE * 4, ""]

    @pytest.mark.parametrize("pad_id", [END, CLOSE])
    def test_masks_come_from_lengths(self, pad_id):
        result = replay(vector(pad_id=pad_id), [" a film"] * 2, [[GOOD, END], [END]])
        assert result.response_mask.tolist() == [[True, True, False, False, False], [True] + [False] * 4]
        assert result.attention_mask[:, 6:].tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]

    @pytest.mark.parametrize("stop", [END, DOT, CLOSE])
    def test_any_stop_id_ends_without_a_penalty(self, stop):
        result = replay(vector(["eos"], stop_ids=[END, DOT, CLOSE]), [" a film"], [[GOOD, stop]])
        assert (result.terminated.tolist(), result.rewards[0, 1]) == ([True], pytest.approx(1.7))

    def test_the_budget_as_termination(self):
        result = replay(vector(length_limit="terminate"), [" a film"], [[GOOD] * 5])
        assert (result.terminated.tolist(), result.truncated.tolist()) == ([True], [False])
        assert result.infos["finish_reason"].tolist() == ["length"]

    def test_the_ids_are_those_that_were_sampled(self):
        result = replay(vector(), [[FILM, S]], [[FILM, S, END]])  # their text encodes to one id, not two
        assert result.input_ids[0, 4:9].tolist() == [FILM, S, FILM, S, END]
        assert result.infos["prompt"].tolist() == result.infos["response"].tolist() == [" films"]

    def test_log_ratios(self):
        envs = vector_wrappers.KLPenalty(TextGenerationVectorEnv(1, text_task(scorer=lambda p, r: [1.2])), kl_coef=0.1)
        logprobs = np.array([[-1.0, -2.0, -3.0, -1.0, np.nan]])
        result = replay(envs, [" films"], [[VERY, GOOD, DOT, END]], logprobs=logprobs, ref_logprobs=logprobs - EXAMPLE)
        np.testing.assert_allclose(result.rewards, [[-0.03, -0.01, 0.1, 1.2, 0.0]], atol=1e-12)
        assert result.infos["kl"] == pytest.approx([-0.6])


A_WORD, PIECE = 6, " a"
EXAMPLE = np.array([[0.3, 0.1, -1.0, 0.0, 0.0]])


class TestEqualsStepping:
    @pytest.mark.parametrize("stack", STACKS, ids=lambda stack: "-".join(stack) or "bare")
    @given(
        seed=st.integers(0, 10**6),
        mode=st.sampled_from(MODES),
        num_envs=st.integers(1, 5),
        batch=st.integers(1, 11),  # below, equal to, above and no multiple of the number of environments
        task=st.sampled_from([{}, {"length_limit": "terminate"}, {"stop_ids": [END, DOT, CLOSE], "pad_id": END}]),
    )
    @settings(max_examples=10, deadline=None, database=None)
    def test_on_every_stack(self, stack, seed, mode, num_envs, batch, task):
        rng = np.random.default_rng(seed)
        prompts = [PROMPTS[i] for i in rng.integers(len(PROMPTS), size=batch)]
        responses = random_responses(rng, batch, task.get("stop_ids", [END]))
        single = stacked(stack, single_wrappers, TextGenerationEnv(text_task(**task)))
        expected = stepped(single, prompts, responses)
        result = replay(vector(stack, num_envs, mode, **task), prompts, responses)
        assert_same(vars(result), vars(expected))

    @BY_MODE
    def test_lockstep_of_the_same_environments(self, mode):
        """Not the single environment but the vector itself, stepped: its rows begin other episodes after their ends."""
        stack = ("norm", "kl", "eos", "bend")
        responses = [[GOOD, END], [GOOD] * 5, [END], [BAD, BAD, END]]
        result = replay(vector(stack, 4, mode), PROMPTS, responses)
        envs = vector(stack, 4, mode)
        envs.reset(options={"prompts": list(PROMPTS)})
        ended = np.zeros(4, dtype=bool)
        for t in range(5):
            actions = np.array([r[t] if t < len(r) else GOOD for r in responses])
            _, rewards, terminations, truncations, _ = envs.step(actions)
            np.testing.assert_array_equal(result.rewards[:, t], np.where(ended, 0.0, rewards))
            ended |= terminations | truncations
            if mode is AutoresetMode.DISABLED and (terminations | truncations).any():
                envs.reset(options={"reset_mask": terminations | truncations})
        assert ended.all()

    @BY_MODE
    def test_state_that_episodes_leave_behind(self, mode):
        """The running figures and the controller: one environment, so that the order of episodes is the same."""

        def adaptive(wrappers: Any, env: Any) -> Any:
            env = wrappers.NormalizeScore(env)
            models = PrefixLogprobs(1), PrefixLogprobs(2)
            return wrappers.KLPenalty(env, *models, kl_coef=0.3, target_kl=0.1, episodes_per_update=2)

        rng = np.random.default_rng(0)
        prompts, responses = [PROMPTS[i] for i in rng.integers(4, size=9)], random_responses(rng, 9)
        single = adaptive(single_wrappers, TextGenerationEnv(text_task()))
        envs = adaptive(vector_wrappers, TextGenerationVectorEnv(1, text_task(), autoreset_mode=mode))
        assert_same(vars(replay(envs, prompts, responses)), vars(stepped(single, prompts, responses)))
        assert envs.state_dict() == single.state_dict()
        assert envs.env.state_dict() == single.env.state_dict()
        assert envs.state_dict()["kl_coef"] != 0.3

    @BY_MODE
    def test_two_tolls_with_references_of_their_own(self, mode):
        def two(wrappers: Any, env: Any) -> Any:
            env = wrappers.KLPenalty(env, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3)
            return wrappers.KLPenalty(env, WholeLogprobs(3), PrefixLogprobs(2), kl_coef=0.7)

        responses = random_responses(np.random.default_rng(1), 4)
        expected = stepped(two(single_wrappers, TextGenerationEnv(text_task())), PROMPTS, responses)
        result = replay(two(vector_wrappers, vector(mode=mode)), PROMPTS, responses)
        assert_same(vars(result), vars(expected))

    @BY_MODE
    def test_dropped_samples(self, mode):
        def picky(_prompts: list[str], responses: list[str]) -> list[Any]:
            return [None if "bad" in r else 1.5 for r in responses]

        task = {"scorer": picky, "scorer_errors": "drop"}
        responses = [[GOOD, END], [BAD, END], [BAD] * 5, [GOOD] * 5]
        expected = stepped(
            stacked(("norm", "eos", "kl"), single_wrappers, TextGenerationEnv(text_task(**task))), PROMPTS, responses
        )
        result = replay(vector(("norm", "eos", "kl"), mode=mode, **task), PROMPTS, responses)
        assert_same(vars(result), vars(expected))
        assert np.isnan(result.scores).tolist() == [False, True, True, False]


class TestCalls:
    @BY_MODE
    @pytest.mark.parametrize("batch", [1, 3, 7])
    def test_each_model_is_called_once_per_batch(self, mode, batch):
        scorer, policy, reference = CountingScorer(), WholeLogprobs(2), WholeLogprobs(1)
        envs = vector(("eos",), mode=mode, scorer=scorer, reference=reference)
        envs = vector_wrappers.KLPenalty(envs, policy_logprobs=policy, kl_coef=0.3)
        rng = np.random.default_rng(0)
        prompts, responses = [PROMPTS[i] for i in rng.integers(4, size=batch)], random_responses(rng, batch)
        result = replay(envs, prompts, responses)
        assert [len(texts) for texts, _ in scorer.calls] == [batch]
        assert (policy.whole_calls, reference.whole_calls) == (1, 1)
        assert (policy.calls, reference.calls) == (0, 0)
        np.testing.assert_array_equal(result.scores, count_good(*scorer.calls[0]))

    def test_a_model_that_two_tolls_share_is_called_once(self):
        policy, reference = WholeLogprobs(2), WholeLogprobs(1)
        envs = vector_wrappers.KLPenalty(vector_wrappers.KLPenalty(vector(), reference, policy), reference, policy)
        replay(envs, PROMPTS, random_responses(np.random.default_rng(0), 4))
        assert (policy.whole_calls, reference.whole_calls) == (1, 1)

    def test_a_callable_per_token_is_called_once_per_column_for_the_whole_batch(self):
        policy, reference = PrefixLogprobs(2), PrefixLogprobs(1)
        envs = vector_wrappers.KLPenalty(vector(num_envs=2), reference, policy)
        replay(envs, [" films"] * 7, [[GOOD, GOOD, END]] * 6 + [[END]])
        assert (policy.calls, reference.calls) == (3, 3)  # the longest response has three tokens

    def test_a_callable_per_token_sees_only_states_of_episodes(self):
        states = set()
        envs = vector()
        task = envs.unwrapped.task

        def model(observations: Any, actions: Any) -> Any:
            for ids, mask, action in zip(
                observations["input_ids"], observations["attention_mask"], actions, strict=True
            ):
                assert set(ids[mask == 0]) <= {task.mdp.pad_id}
                states.add((*ids[mask == 1].tolist(), int(action)))
            return np.zeros(len(actions))

        replay(vector_wrappers.KLPenalty(envs, model, model), [" films", " good"], [[GOOD, BAD, END], [END]])
        assert states == {(5, GOOD), (5, GOOD, BAD), (5, GOOD, BAD, END), (GOOD, END)}

    def test_what_is_known_is_not_asked_for(self):
        scorer, policy, reference = CountingScorer(), WholeLogprobs(2), WholeLogprobs(1)
        envs = vector_wrappers.KLPenalty(vector(scorer=scorer), reference, policy, kl_coef=1.0)
        zeros = np.zeros((2, RESPONSE_TOKENS))
        result = replay(
            envs, [" films"] * 2, [[GOOD, END], [END]], scores=[3.0, 4.0], logprobs=zeros - 1, ref_logprobs=zeros - 1.5
        )
        assert result.rewards[:, :2].tolist() == [[-0.5, 2.5], [3.5, 0.0]]
        assert (scorer.calls, policy.whole_calls, reference.whole_calls) == ([], 0, 0)

    def test_what_is_known_is_of_the_outermost_toll(self):
        def two(models: Sequence[Any]) -> Any:
            inner = vector_wrappers.KLPenalty(vector(), models[0], models[1], kl_coef=0.3)
            return vector_wrappers.KLPenalty(inner, models[2], models[3], kl_coef=0.7)

        models, responses = [WholeLogprobs(salt) for salt in range(4)], random_responses(np.random.default_rng(2), 4)
        expected = replay(two(models), PROMPTS, responses)
        whole = expected.input_ids, expected.attention_mask, RESPONSE_TOKENS
        ref_logprobs, logprobs = (model.response_logprobs(*whole) for model in models[2:])
        result = replay(two(models), PROMPTS, responses, logprobs=logprobs, ref_logprobs=ref_logprobs)
        assert_same(vars(result), vars(expected))
        assert [model.whole_calls for model in models] == [2, 2, 2, 2]  # the outer two: once for the test, once above

    @pytest.mark.parametrize("known", ["logprobs", "ref_logprobs"])
    def test_one_of_the_two_may_be_known(self, known):
        policy, reference = WholeLogprobs(2), WholeLogprobs(1)
        envs = vector_wrappers.KLPenalty(vector(), reference, policy, kl_coef=1.0)
        responses = random_responses(np.random.default_rng(3), 4)
        expected = replay(envs, PROMPTS, responses)
        model = policy if known == "logprobs" else reference
        array = model.response_logprobs(expected.input_ids, expected.attention_mask, RESPONSE_TOKENS)
        array[~expected.response_mask] = np.nan  # whatever stands beyond a response does not matter
        policy.whole_calls = reference.whole_calls = 0
        assert_same(vars(replay(envs, PROMPTS, responses, **{known: array})), vars(expected))
        assert (policy.whole_calls, reference.whole_calls) == ((0, 1) if known == "logprobs" else (1, 0))

    def test_without_a_policy_one_warning_and_no_toll(self):
        reference = WholeLogprobs(1)
        envs = vector_wrappers.KLPenalty(vector(), reference, kl_coef=1.0)
        with pytest.warns(UserWarning, match="no policy attached") as caught:
            result = replay(envs, [" a film"] * 4, [[GOOD, END]] * 4)
            replay(envs, [" a film"] * 4, [[GOOD, END]] * 4)
        assert len(caught) == 1
        assert result.rewards.sum(axis=1) == pytest.approx([1.7] * 4)
        assert result.infos["kl"].tolist() == [0.0] * 4
        assert reference.whole_calls == 0

    def test_a_policy_without_reference_is_an_error(self):
        envs = vector_wrappers.KLPenalty(vector(), policy_logprobs=WholeLogprobs(2))
        with pytest.raises(ValueError, match="no reference to measure it against"):
            replay(envs, [" a film"], [[GOOD, END]])


class TestAroundReplay:
    @BY_MODE
    def test_the_environments_need_a_reset_afterwards(self, mode):
        envs = vector(("kl",), mode=mode)
        envs.reset(seed=0)
        replay(envs, [" films"], [[END]])
        with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) first"):
            envs.step(np.array([GOOD] * 3))
        with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) first"):
            envs.reset(options={"reset_mask": np.array([True, False, False])})

    @BY_MODE
    def test_everything_goes_on_as_if_there_had_been_none(self, mode):
        """Prompts and rewards after a replay are those of an environment that never replayed."""
        stack = ("norm", "kl", "eos", "bend")
        envs, untouched = vector(stack, mode=mode), vector(stack, mode=mode)
        assert_same(envs.reset(seed=1), untouched.reset(seed=1))
        replay(envs, [" films"] * 5, [[GOOD, END], [END], [BAD] * 5, [END], [GOOD, GOOD, END]])
        rng = np.random.default_rng(0)
        for _ in range(12):  # enough draws among four prompts for every row to show that it is not one behind
            assert_same(envs.reset(), untouched.reset())
            for actions in rng.integers(1, 12, (4, 3)):
                assert_same(envs.step(actions), untouched.step(actions))

    @BY_MODE
    def test_before_the_first_reset(self, mode):
        result = replay(vector(("kl",), mode=mode), [" films"], [[END]])
        assert result.rewards.shape == (1, RESPONSE_TOKENS)

    @BY_MODE
    def test_an_error_half_way_leaves_no_trace(self, mode):
        def fail(_rewards: Any) -> Any:
            raise OverflowError

        envs = vector(("kl",), mode=mode)
        with pytest.raises(OverflowError):
            replay(gym.wrappers.vector.TransformReward(envs, fail), [" films"], [[GOOD, END]])
        untouched = vector(("kl",), mode=mode)
        assert_same(envs.reset(seed=0), untouched.reset(seed=0))
        for token in (GOOD, BAD, END):
            assert_same(envs.step(np.full(3, token)), untouched.step(np.full(3, token)))

    def test_prompts_as_texts_keep_their_text(self):
        class Shouting(PieceTokenizer):
            """Reads capitals and writes none: a text does not survive its ids."""

            def encode(self, text):
                return super().encode(text.lower())

        scorer = CountingScorer()
        result = replay(vector(tokenizer=Shouting(), scorer=scorer, prompts=[" A Film"]), [" A Film"], [[END]])
        assert scorer.calls[0][0] == [" A Film"]
        assert result.infos["prompt"].tolist() == [" A Film"]

    @BY_MODE
    def test_infos_that_a_layer_adds_now_and_then(self, mode):
        class Remark(gym.vector.VectorWrapper):
            def step(self, actions):
                *results, infos = self.env.step(actions)
                ends = infos.get("final_info", infos)
                if "response" in ends:
                    good = np.array(["good" in (text or "") for text in ends["response"]])
                    if good.any():
                        ends |= {"remark": np.where(good, 2.5, 0.0), "_remark": good}
                        ends |= {"word": np.where(good, "fine", None).astype(object), "_word": good}
                return *results, infos

        result = replay(Remark(vector(num_envs=1, mode=mode)), [" films"] * 3, [[END], [GOOD, END], [END]])
        assert result.infos["remark"].tolist() == [0.0, 2.5, 0.0]
        assert result.infos["word"].tolist() == [None, "fine", None]

    @BY_MODE
    def test_layers_never_see_what_stands_beyond_a_response(self, mode):
        seen = []
        envs = gym.wrappers.vector.TransformReward(vector(("kl",), 4, mode), lambda r: seen.append(r) or r)
        garbage = np.full((3, RESPONSE_TOKENS), np.inf)
        garbage[0, :2] = garbage[1] = garbage[2, :1] = -1.0
        replay(envs, [" films"] * 3, [[GOOD, END], [GOOD] * 5, [END]], logprobs=garbage, ref_logprobs=garbage)
        assert np.isfinite(seen).all()

    def test_nothing_of_the_callers_is_edited(self):
        envs = vector(("kl",))
        given_arrays = [np.zeros((1, RESPONSE_TOKENS)), np.zeros((1, RESPONSE_TOKENS)), np.array([1.0])]
        response = np.array([GOOD, END])
        for array in (*given_arrays, response):
            array.setflags(write=False)
        logprobs, ref_logprobs, scores = given_arrays
        result = replay(envs, [[FILM, S]], [response], scores=scores, logprobs=logprobs, ref_logprobs=ref_logprobs)
        result.rewards[:] = 7.0
        result.scores[:] = 7.0
        assert scores.tolist() == [1.0]
