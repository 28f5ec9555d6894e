"""The score paid as it comes, and episodes kept in a file; infos for libraries of arrays."""

from __future__ import annotations

import copy
import doctest
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import (
    BAD,
    DOT,
    END,
    GOOD,
    PROMPTS,
    VERY,
    A,
    CountingScorer,
    PrefixLogprobs,
    assert_same,
    random_responses,
    text_task,
    write,
)

from textenv import ScorerError, TextGenerationEnv, TextGenerationVectorEnv, TextTask, replay
from textenv import wrappers as single_wrappers
from textenv.oracle import enumerate_responses, solve
from textenv.prompts import PromptRecord
from textenv.toy import ToyLanguage, ToyTokenizer
from textenv.wrappers import array_infos, records, score_every
from textenv.wrappers import vector as vector_wrappers
from textenv.wrappers.records import EpisodeFile, record_line
from textenv.wrappers.vector.infos import end_rows

MODES = list(AutoresetMode)
BY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
ROADS = pytest.mark.parametrize("road", ["single", "vector"])


def make(road: str, stack: Any, num_envs: int = 1, mode: Any = "NextStep", **task: Any) -> Any:
    if road == "single":
        return stack(single_wrappers, TextGenerationEnv(text_task(**task)))
    return stack(vector_wrappers, TextGenerationVectorEnv(num_envs, text_task(**task), autoreset_mode=mode))


def play(env: Any, response: list[int], **reset: Any) -> tuple[list[float], dict[str, Any]]:
    """Rewards and final info of one response, on a single environment or a vector of one."""
    if isinstance(env, gym.Env):
        steps = write(env, response, **reset)
        return steps["rewards"], steps["info"]
    env.reset(**reset)
    rewards, infos = [], {}
    for token in response:
        _, reward, _, _, infos = env.step(np.array([token]))
        rewards.append(float(reward[0]))
    ends = infos.get("final_info", infos)
    return rewards, {key: values[0] for key, values in ends.items() if not key.startswith("_")}


@pytest.mark.parametrize("module", [score_every, records, array_infos], ids=lambda module: module.__name__)
def test_docstring_examples_run(module):
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted >= 1


def every(k: int, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda wrappers, env: wrappers.ScoreEvery(env, k, **options)


PROMPT = {"options": {"prompt": " films"}}
"""Six characters: 0.6 to every score of `count_good`, prefixes included."""


class TestScoreEveryByHand:
    @ROADS
    @pytest.mark.parametrize(
        ("k", "rewards"),
        [
            # prefixes score 1.6, 1.6, 0.6, 1.6 and the response 1.6
            (1, [1.6, 0.0, -1.0, 1.0, 0.0]),
            (2, [0.0, 1.6, 0.0, 0.0, 0.0]),
            (3, [0.0, 0.0, 0.6, 0.0, 1.0]),
            (5, [0.0, 0.0, 0.0, 0.0, 1.6]),
            (9, [0.0, 0.0, 0.0, 0.0, 1.6]),
        ],
    )
    def test_every_k_tokens(self, road, k, rewards):
        played, info = play(make(road, every(k)), [GOOD, VERY, BAD, GOOD, END], **PROMPT)
        assert played == pytest.approx(rewards, abs=1e-12)
        assert info["score"] == pytest.approx(1.6)
        assert "shaped_score" not in info

    @ROADS
    def test_a_discount(self, road):
        """gamma Phi(s') - Phi(s) at every token, also while Phi is held; 0.5^t weights sum to 0.5^3 times the score."""
        rewards, _ = play(make(road, every(2, gamma=0.5)), [GOOD, VERY, BAD, END], **PROMPT)
        assert rewards == pytest.approx([0.0, 0.5 * 1.6, 0.5 * 1.6 - 1.6, 0.6 - 1.6], abs=1e-12)
        assert sum(reward * 0.5**t for t, reward in enumerate(rewards)) == pytest.approx(0.5**3 * 0.6)
        undiscounted, _ = play(make(road, every(2)), [GOOD, VERY, BAD, END], **PROMPT)
        assert sum(reward * 0.5**t for t, reward in enumerate(undiscounted)) != pytest.approx(0.5**3 * 0.6, abs=0.1)

    @ROADS
    def test_the_prefix_is_scored_as_it_stands(self, road):
        scorer = CountingScorer()
        play(make(road, every(2), scorer=scorer), [GOOD, VERY, BAD, DOT, END], **PROMPT)
        assert scorer.calls == [
            ([" films"], [" good very"]),
            ([" films"], [" good very bad."]),
            ([" films"], [" good very bad."]),  # the end: the stop id leaves no text
        ]

    @ROADS
    def test_a_finished_response_is_scored_once(self, road):
        scorer = CountingScorer()
        play(make(road, every(1), scorer=scorer), [GOOD, END], **PROMPT)
        assert [texts for _, texts in scorer.calls] == [[" good"], [" good"]]  # after one token, and at the end

    @ROADS
    def test_each_episode_begins_at_zero(self, road):
        env = make(road, every(1))
        expected = [1.6, -1.0, 0.0]
        for _ in range(2):
            assert play(env, [GOOD, BAD, END], **PROMPT)[0] == pytest.approx(expected, abs=1e-12)
        env.reset(**PROMPT)
        env.step(GOOD if road == "single" else np.array([GOOD]))  # given up half-way
        assert play(env, [GOOD, BAD, END], **PROMPT)[0] == pytest.approx(expected, abs=1e-12)

    @ROADS
    def test_between_shaped_scores_and_tolls(self, road):
        policy, reference = (lambda _, a: np.full(len(a), -1.0)), (lambda _, a: np.full(len(a), -1.5))

        def stack(wrappers: Any, env: Any) -> Any:
            env = wrappers.ScoreEvery(wrappers.LengthPenalty(env, 0.1), 2)
            return wrappers.KLPenalty(wrappers.ClipScore(env, -1.0, 1.0), reference, policy, kl_coef=0.2)

        rewards, info = play(make(road, stack), [GOOD, VERY, END], **PROMPT)
        assert rewards == pytest.approx([-0.1, 1.6 - 0.1, (1.0 - 1.6) - 0.1])  # the sum: clip(1.6 - 0.3) less the toll
        assert info["shaped_score"] == 1.0

    def test_a_limit_from_outside_is_no_end_of_the_response(self):
        env = single_wrappers.ScoreEvery(gym.wrappers.TimeLimit(TextGenerationEnv(text_task()), 2), 1)
        steps = write(env, [GOOD, BAD], **PROMPT)
        assert steps["ends"] == [(False, False), (False, True)]
        assert steps["rewards"] == pytest.approx([1.6, -1.0])  # as at any token: a value behind it is worth V - Phi
        assert play(env, [GOOD, END], **PROMPT)[0] == pytest.approx([1.6, 0.0])


def picky(_prompts: list[str], responses: list[str]) -> list[Any]:
    """No score for texts that end in "bad"; a scorer that raises on one text is told apart in the same way."""
    return [None if text.endswith("bad") else 1.0 + len(text) for text in responses]


class TestScoreEveryDropped:
    @ROADS
    def test_a_prefix_without_a_score_holds_the_last_one(self, road):
        env = make(road, every(1), scorer=picky, scorer_errors="drop")
        rewards, info = play(env, [GOOD, BAD, A, END])
        assert rewards == [6.0, 0.0, 6.0, 0.0]  # 1 + 5 characters, held, 1 + 11 characters
        assert info["score"] == 12.0

    @ROADS
    def test_a_dropped_response_is_worth_nothing(self, road):
        rewards, info = play(make(road, every(1), scorer=picky, scorer_errors="drop"), [GOOD, BAD, END])
        assert rewards == [6.0, 0.0, -6.0]
        assert math.isnan(info["score"])

    @BY_MODE
    def test_replay_too(self, mode):
        responses = [[GOOD, BAD, A, END], [GOOD, BAD, END], [BAD, END], [BAD, BAD, BAD, BAD, GOOD]]
        result = replay(make("vector", every(1), 3, mode, scorer=picky, scorer_errors="drop"), PROMPTS, responses)
        for row, response in enumerate(responses):
            env = make("single", every(1), scorer=picky, scorer_errors="drop")
            assert result.rewards[row, : len(response)].tolist() == play(env, response)[0]

    @ROADS
    def test_a_scorer_that_cannot_judge_prefixes_is_an_error(self, road):
        env = make(road, every(1), scorer=picky)
        with pytest.raises(ScorerError, match=r"ScoreEvery asks .* still being written\. A scorer should .*' bad'"):
            play(env, [BAD, GOOD, END])
        envs = make("vector", every(1), scorer=picky)
        with pytest.raises(ScorerError, match=r"ScoreEvery asks .* used without ScoreEvery"):
            replay(envs, [" films"], [[BAD, GOOD, END]])
        assert play(envs, [GOOD, END], **PROMPT)[0] == [6.0, 0.0]  # and stepping goes on


class TestScoreEveryContext:
    @staticmethod
    def contains(_prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
        return [float(a in r) for a, r in zip(answer, responses, strict=True)]

    @pytest.fixture
    def task(self):
        prompts = [PromptRecord(" films", {"answer": "bad"}), PromptRecord(" a film", {"answer": "good"})]
        return {"prompts": prompts, "scorer": self.contains}

    def test_each_row_is_judged_by_its_own(self, task):
        responses = [[GOOD, BAD, A, END], [GOOD, BAD, A, END]]
        expected = [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]  # had they been mixed up: the other way round
        single = make("single", every(1), **task)
        for prompt, response, rewards in zip(task["prompts"], responses, expected, strict=True):
            assert play(single, response, options={"prompt": prompt})[0] == rewards
        envs = make("vector", every(1), 2, **task)
        envs.reset(options={"prompts": task["prompts"]})
        stepped = [envs.step(np.array(actions))[1].tolist() for actions in zip(*responses, strict=True)]
        assert np.transpose(stepped).tolist() == expected
        result = replay(make("vector", every(1), 1, **task), task["prompts"], responses)
        assert result.rewards[:, :4].tolist() == expected


class TestScoreEveryCalls:
    @BY_MODE
    def test_one_call_per_step_for_all_prefixes(self, mode):
        scorer = CountingScorer()
        envs = make("vector", every(1), 4, mode, scorer=scorer)
        envs.reset()
        envs.step(np.array([GOOD, A, END, BAD]))
        assert [len(texts) for texts, _ in scorer.calls] == [1, 3]  # the end, and the three that go on
        assert sorted(scorer.calls[1][1]) == [" a", " bad", " good"]

    @BY_MODE
    @pytest.mark.parametrize("batch", [2, 7])
    def test_one_call_per_replay_for_all_prefixes(self, mode, batch):
        scorer = CountingScorer()
        envs = make("vector", every(2), 3, mode, scorer=scorer)
        responses = [[GOOD, GOOD, BAD, BAD, GOOD], [GOOD, GOOD, END], [END]] * 3
        replay(envs, [" films"] * batch, responses[:batch])
        assert len(scorer.calls) == 2  # the responses, and the prefixes
        prefixes = [" good good", " good good bad bad", " good good"]
        assert scorer.calls[1][1] == (prefixes * 3)[: {2: 3, 7: 8}[batch]]

    def test_no_prefixes_no_call(self):
        scorer = CountingScorer()
        replay(make("vector", every(2), scorer=scorer), [" films"] * 2, [[END], [GOOD, END]])
        assert len(scorer.calls) == 1

    @ROADS
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0,), r"`every` should be a number of tokens of at least 1, got 0"),
            ((2.0,), r"`every` .* got 2\.0"),
            ((True,), r"`every` .* got True"),
            ((1, 0.0), r"`gamma` should be in \(0, 1\], got 0\.0"),
            ((1, 1.1), r"`gamma` .* got 1\.1.*discount that the agent learns with"),
            ((1, math.nan), r"`gamma` .* got nan"),
        ],
    )
    def test_bad_input(self, road, arguments, message):
        with pytest.raises(ValueError, match=message):
            make(road, lambda w, e: w.ScoreEvery(e, *arguments))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
class TestScoreEveryTwoRoads:
    @BY_MODE
    def test_replay_is_step_is_vector(self, mode, k, gamma):
        rng = np.random.default_rng(k)
        prompts, responses = [PROMPTS[i] for i in rng.integers(4, size=8)], random_responses(rng, 8)
        result = replay(make("vector", every(k, gamma=gamma), 3, mode), prompts, responses)
        single = make("single", every(k, gamma=gamma))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            rewards, info = play(single, response, options={"prompt": prompt})
            assert result.rewards[row, : len(response)].tolist() == rewards
            discounted = sum(reward * gamma**t for t, reward in enumerate(rewards))
            assert discounted == pytest.approx(gamma ** (len(response) - 1) * info["score"], abs=1e-12)

    @BY_MODE
    def test_vector_is_single_through_resets(self, mode, k, gamma):
        ours = make("vector", every(k, gamma=gamma), 3, mode)
        theirs = SyncVectorEnv([lambda: make("single", every(k, gamma=gamma))] * 3, autoreset_mode=mode)
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        rng = np.random.default_rng(3)
        for _ in range(30):
            actions = np.where(rng.random(3) < 0.3, END, rng.integers(12, size=3))
            left, right = ours.step(actions), theirs.step(actions)
            assert_same(left, right)
            ended = left[2] | left[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                assert_same(ours.reset(options={"reset_mask": ended}), theirs.reset(options={"reset_mask": ended}))


LANGUAGE = ToyLanguage(
    reference_logits=np.log([[0.3, 0.2, 0.5], [0.2, 0.4, 0.4], [0.5, 0.25, 0.25]]),
    stop_id=0,
    score_fn=lambda responses: [partial_score(response) for response in responses],
)
"""Three tokens, at most three of them, and a score with ups and downs along the way."""


def partial_score(tokens: Any) -> float:
    """A number for every text, finished or not, that no sum over tokens gives."""
    return float(np.random.default_rng([7, *tokens]).normal())


def toy_vector(*layers: Callable[[Any], Any]) -> Any:
    tokenizer = ToyTokenizer()
    task = TextTask.build(
        prompts=[[0]],
        scorer=lambda _prompts, texts: [partial_score(tokenizer.encode(text)) for text in texts],
        tokenizer=tokenizer,
        vocab_size=3,
        stop_ids=[0],
        max_response_tokens=3,
    )
    envs = TextGenerationVectorEnv(4, task)
    for layer in layers:
        envs = layer(envs)
    return envs


def action_values(envs: Any, gamma: float, kl_coef: float = 0.0) -> dict[tuple[int, ...], np.ndarray]:
    """Q(prefix, token) of every prefix by backward induction; soft, against the reference, where KL has a price."""
    padded, lengths = enumerate_responses(LANGUAGE)
    responses = [tuple(row[:n]) for row, n in zip(padded.tolist(), lengths.tolist(), strict=True)]
    rewards = replay(envs, [[0]] * len(responses), responses).rewards
    reward = {r[: t + 1]: rewards[row, t] for row, r in enumerate(responses) for t in range(len(r))}
    values: dict[tuple[int, ...], np.ndarray] = {}

    def value(prefix: tuple[int, ...]) -> float:
        if prefix in responses:
            return 0.0
        values[prefix] = q = np.array([reward[(*prefix, a)] + gamma * value((*prefix, a)) for a in range(3)])
        if kl_coef == 0:
            return float(q.max())
        return float(kl_coef * np.logaddexp.reduce(LANGUAGE.reference_logprobs[len(prefix)] + q / kl_coef))

    value(())
    return values


class NaiveDense(gym.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """The wrong variant: pays Phi(s') itself at each step, not its change."""

    def reset(self, **arguments: Any) -> Any:
        self.written: list[tuple[int, ...]] = [()] * self.num_envs
        return self.env.reset(**arguments)

    def step(self, actions: Any) -> Any:
        self.written = [(*w, int(a)) for w, a in zip(self.written, actions, strict=True)]
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        ended = terminations | truncations
        paid = np.array([0.0 if end else partial_score(w) for w, end in zip(self.written, ended, strict=True)])
        return observations, rewards + paid, terminations, truncations, infos


class TestTheOptimumIsUnchanged:
    @pytest.mark.parametrize("k", [1, 2])
    @pytest.mark.parametrize("gamma", [1.0, 0.8])
    def test_greedy(self, k, gamma):
        plain = action_values(toy_vector(), gamma)
        shaped = action_values(toy_vector(lambda e: vector_wrappers.ScoreEvery(e, k, gamma)), gamma)
        assert len(plain) == 1 + 2 + 4
        moved = 0
        for prefix, q in plain.items():
            held = prefix[: len(prefix) // k * k]
            phi = partial_score(held) if held else 0.0
            np.testing.assert_allclose(shaped[prefix], q - phi, atol=1e-12)  # theorem 1: V' = V - Phi
            assert shaped[prefix].argmax() == q.argmax()
            moved += phi != 0
        assert moved >= 4

    def test_what_the_agents_discount_is_not(self):
        """The contrast: shaping at gamma = 1 under an agent that discounts by 0.8 is another task."""
        plain = action_values(toy_vector(), 0.8)
        wrong = action_values(toy_vector(lambda e: vector_wrappers.ScoreEvery(e, 1, 1.0)), 0.8)
        assert not np.allclose(wrong[()] - plain[()], (wrong[()] - plain[()])[0])

    @pytest.mark.parametrize("kl_coef", [0.1, 1.0])
    def test_with_a_leash_it_is_the_oracles(self, kl_coef):
        optimum = solve(LANGUAGE, kl_coef)
        soft = action_values(toy_vector(lambda e: vector_wrappers.ScoreEvery(e, 1)), 1.0, kl_coef)
        for prefix, q in soft.items():
            logits = LANGUAGE.reference_logprobs[len(prefix)] + q / kl_coef
            logprobs = logits - np.logaddexp.reduce(logits)
            np.testing.assert_allclose(logprobs, optimum.next_logprobs(prefix), atol=1e-9)

    def test_paying_the_potential_itself_changes_it(self):
        plain, naive = action_values(toy_vector(), 1.0), action_values(toy_vector(NaiveDense), 1.0)
        assert plain[()].argmax() != naive[()].argmax()
        optimum, kl_coef = solve(LANGUAGE, 0.1), 0.1
        soft = action_values(toy_vector(NaiveDense), 1.0, kl_coef)[()]
        logits = LANGUAGE.reference_logprobs[0] + soft / kl_coef
        assert not np.allclose(logits - np.logaddexp.reduce(logits), optimum.next_logprobs(()), atol=0.1)


def lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def recording(path: Any, *, kl: bool = True, **options: Any) -> Callable[[Any, Any], Any]:
    def stack(wrappers: Any, env: Any) -> Any:
        if kl:
            env = wrappers.KLPenalty(env, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3)
        return wrappers.RecordResponses(wrappers.MissingEOSPenalty(env, 0.5), path, **options)

    return stack


class TestRecordResponses:
    @ROADS
    def test_by_hand(self, road, tmp_path):
        path = tmp_path / "new" / "episodes.jsonl"
        env = make(road, lambda w, e: w.RecordResponses(w.MissingEOSPenalty(e, 0.5), path))
        play(env, [GOOD, VERY, END], **PROMPT)
        play(env, [BAD] * 5, **PROMPT)
        assert path.read_text("utf-8").endswith("}\n")
        assert lines(path) == [
            {
                "episode": 0,
                "prompt": " films",
                "response": " good very",
                "score": pytest.approx(1.6),
                "shaped_score": pytest.approx(1.6),
                "finish_reason": "stop",
                "response_length": 3,
                "kl": None,
                "return": pytest.approx(1.6),
            },
            {
                "episode": 1,
                "prompt": " films",
                "response": " bad" * 5,
                "score": pytest.approx(-4.4),
                "shaped_score": pytest.approx(-4.9),
                "finish_reason": "length",
                "response_length": 5,
                "kl": None,
                "return": pytest.approx(-4.9),
            },
        ]

    @ROADS
    def test_the_return_is_the_sum_of_all_rewards_of_the_layers_below(self, road, tmp_path):
        env = make(road, recording(tmp_path / "a"))
        played = [play(env, response) for response in ([GOOD, VERY, END], [END], [BAD] * 5)]
        for line, (rewards, info) in zip(lines(tmp_path / "a"), played, strict=True):
            assert line["return"] == pytest.approx(sum(rewards), abs=1e-12)
            assert line["kl"] == info["kl"] != 0
            assert line["return"] != pytest.approx(line["shaped_score"], abs=1e-3)  # the last reward alone is not it
        inside = make(road, lambda w, e: w.MissingEOSPenalty(w.RecordResponses(e, tmp_path / "b"), 0.5))
        play(inside, [BAD] * 5, **PROMPT)
        assert lines(tmp_path / "b")[0]["return"] == pytest.approx(-4.4)
        assert lines(tmp_path / "b")[0]["shaped_score"] is None

    @BY_MODE
    def test_rewards_pass_and_single_is_vector(self, mode, tmp_path):
        """Through the resets of every mode: the same episodes, and nothing of one in the return of the next."""
        ours = make("vector", recording(tmp_path / "ours"), 3, mode)
        plain = make("vector", lambda w, e: recording("", kl=True)(Passing(w), e), 3, mode)
        singles = [lambda i=i: make("single", recording(tmp_path / f"single-{i}")) for i in range(3)]
        theirs = SyncVectorEnv(singles, autoreset_mode=mode)
        for envs in (ours, plain, theirs):
            envs.reset(seed=5)
        rng = np.random.default_rng(5)
        for _ in range(25):
            actions = np.where(rng.random(3) < 0.3, END, rng.integers(12, size=3))
            left, right, other = ours.step(actions), theirs.step(actions), plain.step(actions)
            assert_same(left, right)
            assert_same(left, other)
            ended = left[2] | left[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                for envs in (ours, plain, theirs):
                    envs.reset(options={"reset_mask": ended})
        together = [line for i in range(3) for line in lines(tmp_path / f"single-{i}")]
        written = lines(tmp_path / "ours")
        assert [line["episode"] for line in written] == list(range(len(written)))
        key = lambda line: json.dumps({k: v for k, v in line.items() if k != "episode"})  # noqa: E731
        assert sorted(map(key, written)) == sorted(map(key, together))
        assert len(written) > 15

    @BY_MODE
    def test_a_replay_is_recorded_as_steps_are(self, mode, tmp_path):
        responses = random_responses(np.random.default_rng(0), 7)
        prompts = [PROMPTS[i % 4] for i in range(7)]
        result = replay(make("vector", recording(tmp_path / "v"), 3, mode), prompts, responses)
        single = make("single", recording(tmp_path / "s"))
        for prompt, response in zip(prompts, responses, strict=True):
            play(single, response, options={"prompt": prompt})
        ignored = {"episode": 0}  # of rows that finish together the shorter response is written first
        key = lambda line: json.dumps(line | ignored)  # noqa: E731
        assert sorted(map(key, lines(tmp_path / "v"))) == sorted(map(key, lines(tmp_path / "s")))
        returns = sorted(line["return"] for line in lines(tmp_path / "v"))
        assert returns == pytest.approx(sorted(result.rewards.sum(axis=1)), abs=1e-12)

    @BY_MODE
    def test_what_a_reset_step_pays_is_of_no_episode(self, mode, tmp_path):
        """Somebody's wrapper below pays 1 at every step, those too at which a row only resets."""
        base = make("vector", lambda _, e: e, 2, mode, scorer=lambda p, _: np.zeros(len(p)))
        envs = vector_wrappers.RecordResponses(
            gym.wrappers.vector.TransformReward(base, lambda r: r + 1), tmp_path / "a"
        )
        envs.reset()
        for actions in ([END, GOOD], [GOOD, END], [GOOD, GOOD], [END, END]):
            _, _, terminations, _, _ = envs.step(np.array(actions))
            if mode is AutoresetMode.DISABLED and terminations.any():
                envs.reset(options={"reset_mask": terminations})
        assert len(lines(tmp_path / "a")) == 4
        assert all(line["return"] == line["response_length"] for line in lines(tmp_path / "a"))

    def test_what_is_known_of_some_rows_only(self):
        ends = {
            "score": np.array([1.0, 2.0]),
            "_score": np.ones(2, bool),
            "kl": np.zeros(2),
            "_kl": np.array([0, 1]) > 0,
        }
        assert end_rows(ends, np.array([0, 1]), ("score", "kl", "prompt")) == [
            {"score": 1.0},
            {"score": 2.0, "kl": 0.0},
        ]

    @ROADS
    def test_dropped_scores_are_null(self, road, tmp_path):
        env = make(road, recording(tmp_path / "a"), scorer=picky, scorer_errors="drop")
        play(env, [BAD, END])
        text = (tmp_path / "a").read_text()
        assert "NaN" not in text  # which is no JSON
        assert lines(tmp_path / "a")[0]["score"] is lines(tmp_path / "a")[0]["shaped_score"] is None

    @ROADS
    def test_unfinished_episodes_are_not_written(self, road, tmp_path):
        env = make(road, recording(tmp_path / "a"))
        env.reset()
        env.step(GOOD if road == "single" else np.array([GOOD]))
        rewards, _ = play(env, [VERY, END], **PROMPT)
        assert [line["return"] for line in lines(tmp_path / "a")] == [pytest.approx(sum(rewards), abs=1e-12)]

    def test_a_limit_from_outside_is_no_finish(self, tmp_path):
        env = single_wrappers.RecordResponses(gym.wrappers.TimeLimit(TextGenerationEnv(text_task()), 2), tmp_path / "a")
        assert write(env, [GOOD, GOOD])["ends"][-1] == (False, True)
        play(env, [END], **PROMPT)
        assert [line["response_length"] for line in lines(tmp_path / "a")] == [1]


class Passing:
    """A namespace of wrappers whose `RecordResponses` does nothing."""

    def __init__(self, wrappers: Any) -> None:
        self.wrappers = wrappers

    def __getattr__(self, name: str) -> Any:
        return (lambda env, *_args: env) if name == "RecordResponses" else getattr(self.wrappers, name)


class TestTheFile:
    @ROADS
    def test_an_existing_file_is_refused_before_any_work(self, road, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("precious\n")
        with pytest.raises(FileExistsError, match=r"a\.jsonl exists .* pass mode='a' to go on in it or mode='w'"):
            make(road, lambda w, e: w.RecordResponses(e, path))
        assert path.read_text() == "precious\n"

    @ROADS
    def test_append_and_overwrite(self, road, tmp_path):
        path = tmp_path / "a.jsonl"
        for mode, episodes in (("x", [0]), ("a", [0, 1]), ("a", [0, 1, 2]), ("w", [0])):
            play(make(road, lambda w, e, mode=mode: w.RecordResponses(e, str(path), mode)), [END])
            assert [line["episode"] for line in lines(path)] == episodes
        play(make(road, lambda w, e: w.RecordResponses(e, tmp_path / "b", "a")), [END])  # nothing there yet
        assert len(lines(tmp_path / "b")) == 1

    @ROADS
    @pytest.mark.parametrize(
        ("path", "mode", "error", "message"),
        [
            ("a", "append", ValueError, r"`mode` should be 'x' .* got 'append'"),
            ("a", "r", ValueError, r"`mode` should be"),
            ("", "w", IsADirectoryError, r"`path` should be a file, got the folder .*Add a name: episodes\.jsonl"),
            (None, "x", TypeError, r"`path` should be the path of a file, got NoneType"),
        ],
    )
    def test_bad_input(self, road, tmp_path, path, mode, error, message):
        where = path if path is None else tmp_path / path
        with pytest.raises(error, match=message):
            make(road, lambda w, e: w.RecordResponses(e, where, mode))
        assert list(tmp_path.iterdir()) == []

    def test_an_open_file_is_refused(self, tmp_path):
        with open(tmp_path / "a", "w") as file, pytest.raises(TypeError, match="could not be copied or pickled"):
            EpisodeFile(file, "x")

    def test_a_torn_last_line_does_not_swallow_the_next(self, tmp_path):
        path = tmp_path / "a"
        path.write_bytes(b'{"episode": 0}\n{"episo')
        EpisodeFile(path, "a").write([1.0], [{"prompt": "p"}])
        whole, torn, new, rest = path.read_bytes().split(b"\n")
        assert (whole, torn, rest) == (b'{"episode": 0}', b'{"episo', b"")
        assert json.loads(new)["episode"] == 2

    def test_any_text_survives(self, tmp_path):
        texts = [
            "two\nlines",
            'quotes " and \\',
            "näher 東京 🙂",
            "\u2028 \x85 \x00",
            "lone \udc80 surrogate",
            "\ufffd",
        ]
        file = EpisodeFile(tmp_path / "a", "x")
        file.write([0.0] * len(texts), [{"response": text} for text in texts])
        data = (tmp_path / "a").read_bytes()
        assert data.count(b"\n") == len(texts)
        assert "東京".encode() in data  # readable as it stands
        assert [json.loads(line)["response"] for line in data.split(b"\n")[:-1]] == texts

    def test_numbers_of_numpy(self):
        info = {"score": np.float32(0.5), "response_length": np.int64(3), "kl": np.float64("inf")}
        line = json.loads(record_line(np.int64(4), np.float64(0.25), info))
        assert (line["score"], line["response_length"], line["kl"], line["return"]) == (0.5, 3, None, 0.25)

    def test_a_crash_loses_no_line(self, tmp_path):
        """The process dies without any clean-up right after a step; what had finished is in the file."""
        code = (
            "import os, sys\n"
            "from helpers import text_task, write\n"
            "from textenv import TextGenerationEnv\n"
            "from textenv.wrappers import RecordResponses\n"
            "env = RecordResponses(TextGenerationEnv(text_task()), sys.argv[1])\n"
            "for _ in range(3):\n"
            "    write(env, [1, 0])\n"
            "os._exit(9)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=environment, check=False)
        assert done.returncode == 9
        assert [line["episode"] for line in lines(tmp_path / "a")] == [0, 1, 2]

    def test_many_writers_keep_their_lines_whole(self, tmp_path):
        first = EpisodeFile(tmp_path / "a", "x")
        others = [copy.deepcopy(first), pickle.loads(pickle.dumps(first)), EpisodeFile(tmp_path / "a", "a")]
        for _ in range(20):
            for place, file in enumerate([first, *others]):
                file.write([0.0], [{"response": str(place) * 10_000}])
        assert sorted({line["response"][0] for line in lines(tmp_path / "a")}) == ["0", "1", "2", "3"]
        assert len(lines(tmp_path / "a")) == 80

    @ROADS
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
    def test_a_copy_goes_on_in_the_same_file(self, road, tmp_path, monkeypatch, duplicate):
        monkeypatch.chdir(tmp_path)
        env = make(road, lambda w, e: w.RecordResponses(e, "a.jsonl"))
        play(env, [END])
        env.reset(**PROMPT)
        env.step(GOOD if road == "single" else np.array([GOOD]))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        twin = duplicate(env)
        for which in (twin, env):
            which.step(END if road == "single" else np.array([END]))
        assert [line["response"] for line in lines(tmp_path / "a.jsonl")] == ["", " good", " good"]
        env.close()
        env.close()
        play(twin, [END])
        assert len(lines(tmp_path / "a.jsonl")) == 4

    @pytest.mark.parametrize("mode", ["x", "w"])
    def test_an_environment_from_the_spec_appends(self, tmp_path, mode):
        env = single_wrappers.RecordResponses(gym.make("textenv/Toy-v0"), tmp_path / "a", mode)
        write(env, [3, 0])
        twin = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
        write(twin, [3, 3, 0])
        assert [line["response"] for line in lines(tmp_path / "a")] == [" 3 0", " 3 3 0"]


class TestArrayInfos:
    @ROADS
    def test_texts_go_and_numbers_stay(self, road):
        env = make(road, lambda w, e: w.ArrayInfos(w.LengthPenalty(e, 0.1)))
        assert env.reset(**PROMPT)[1] == {}
        rewards, info = play(env, [GOOD, END], **PROMPT)
        assert rewards == pytest.approx([0.0, 1.4])
        assert info == {"score": pytest.approx(1.6), "shaped_score": pytest.approx(1.4), "response_length": 2}

    @BY_MODE
    def test_keys_and_their_masks_go_together(self, mode):
        envs = make("vector", lambda w, e: w.ArrayInfos(e), 2, mode)
        envs.reset()
        infos = envs.step(np.array([END, GOOD]))[4]
        ends = infos.get("final_info", infos)
        kept = {"score", "_score", "response_length", "_response_length"}
        assert {key for key in ends if key not in ("final_obs", "_final_obs")} == kept
        if mode is AutoresetMode.SAME_STEP:
            assert set(infos) == {"final_obs", "_final_obs", "final_info", "_final_info"}

    def test_final_observations_as_rows(self):
        envs = make("vector", lambda w, e: w.ArrayInfos(e), 2, "SameStep")
        plain = make("vector", lambda _, e: e, 2, "SameStep")
        envs.reset(seed=0), plain.reset(seed=0)
        final, objects = envs.step(np.array([GOOD, END]))[4], plain.step(np.array([GOOD, END]))[4]
        assert final["_final_obs"].tolist() == [False, True]
        for key, values in final["final_obs"].items():
            assert values.dtype == plain.observation_space[key].dtype
            np.testing.assert_array_equal(values[1], objects["final_obs"][1][key])
            assert not values[0].any()

    def test_flat_final_observations(self):
        singles = [lambda: gym.wrappers.FlattenObservation(TextGenerationEnv(text_task()))] * 2
        envs = vector_wrappers.ArrayInfos(SyncVectorEnv(singles, autoreset_mode="SameStep"))
        envs.reset(seed=0)
        final = envs.step(np.array([GOOD, END]))[4]["final_obs"]
        assert final.shape == (2, *envs.single_observation_space.shape)
        assert final[1].any() and not final[0].any()

    def test_the_infos_below_are_not_edited(self):
        seen = {}

        class Keep(gym.Wrapper[Any, Any, Any, Any]):
            def step(self, action: Any) -> Any:
                results = self.env.step(action)
                seen.update(info=results[4])
                return results

        env = single_wrappers.ArrayInfos(Keep(TextGenerationEnv(text_task())))
        play(env, [END])
        assert seen["info"]["response"] == ""
