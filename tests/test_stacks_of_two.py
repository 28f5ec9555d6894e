"""Every ordered pair of our wrappers: single and vector, stepped and replayed, copied, and under Gymnasium's own.

Where something of Gymnasium 1.4 is not defined for text environments, a test says so beside what works instead:

- `NormalizeObservation` wants arrays, our observations are Dicts: flatten or filter them first. The vector version
  exists for NEXT_STEP alone, the vector `FlattenObservation` for NEXT_STEP and DISABLED.
- `NumpyToTorch` and its like convert every info: `ArrayInfos` goes below them.
- There is no vector `TimeLimit`: the budget of tokens belongs to the task (`max_response_tokens`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import BAD, END, GOOD, PROMPTS, VOCAB_SIZE, assert_same, text_task
from numpy.typing import NDArray

from textenv import TextGenerationEnv, TextGenerationVectorEnv, attach_policy, replay
from textenv import wrappers as single_wrappers
from textenv.constraints import constraint_of
from textenv.wrappers import vector as vector_wrappers

MODES = list(AutoresetMode)


class Distribution:
    """Full distributions that depend on every token of the prefix and its place: all that a stack may ask for."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def next_logprobs(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        ids, mask = (np.asarray(observations[key]).astype(np.int64) for key in ("input_ids", "attention_mask"))
        prefix = ((ids + 1) * mask * np.arange(1, ids.shape[1] + 1)).sum(axis=1)
        logits = np.sin(prefix[:, None] * (0.7 + self.salt) + np.arange(VOCAB_SIZE) * (1.3 + 0.4 * self.salt))
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        return self.next_logprobs(observations)[np.arange(len(actions)), np.asarray(actions)]

    def response_distributions(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float32]:
        width = input_ids.shape[1]
        seen = [attention_mask * (np.arange(width) < c) for c in range(width - response_tokens, width)]
        columns = [self.next_logprobs({"input_ids": input_ids, "attention_mask": mask}) for mask in seen]
        return np.stack(columns, axis=1).astype(np.float32)

    def response_logprobs(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float64]:
        log_pi = self.response_distributions(input_ids, attention_mask, response_tokens).astype(np.float64)
        tokens = input_ids[:, -response_tokens:, None].astype(np.int64)
        return np.take_along_axis(log_pi, tokens, axis=2)[:, :, 0]


class Folder:
    """New file names in a folder, one per `RecordResponses`."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def new(self) -> Path:
        self.count += 1
        return self.path / f"{self.count}.jsonl"

    def episodes(self) -> list[str]:
        """Everything that was recorded, without its order."""
        texts = [line for path in self.path.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
        return sorted(json.dumps({**json.loads(text), "episode": 0}) for text in texts)


BUILD: dict[str, Any] = {
    "ActionMask": lambda w, env, _: w.ActionMask(env, allowed_ids=[END, GOOD, BAD, 3, 5]),
    "ArrayInfos": lambda w, env, _: w.ArrayInfos(env),
    "ClipScore": lambda w, env, _: w.ClipScore(env, -0.4, 0.9),
    "KLPenalty": lambda w, env, _: w.KLPenalty(env, kl_coef=0.3),
    "LengthPenalty": lambda w, env, _: w.LengthPenalty(env, 0.25, "soft-overlong", 4),
    "MinLength": lambda w, env, _: w.MinLength(env, 2),
    "MissingEOSPenalty": lambda w, env, _: w.MissingEOSPenalty(env, 0.5),
    "NormalizeScore": lambda w, env, _: w.NormalizeScore(env, mean=0.25, std=2.0),
    "RecordResponses": lambda w, env, folder: w.RecordResponses(env, folder.new()),
    "RepetitionPenalty": lambda w, env, _: w.RepetitionPenalty(env, 0.5, n=1),
    "ScoreEvery": lambda w, env, _: w.ScoreEvery(env, 2),
}
NAMES = [name for name in single_wrappers.__all__ if name != "vector"]
READS_TEXTS = set(NAMES) - {"ActionMask", "ArrayInfos", "KLPenalty", "MinLength", "ScoreEvery"}
ALL_PAIRS = list(itertools.product(NAMES, NAMES))
REFUSED = [pair for pair in ALL_PAIRS if pair[0] == "ArrayInfos" and pair[1] in READS_TEXTS]
PAIRS = [pair for pair in ALL_PAIRS if pair not in REFUSED]
"""From the inside out."""
BY_PAIR = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


def stacked(pair: Sequence[str], wrappers: Any, env: Any, folder: Folder) -> Any:
    for name in pair:
        env = BUILD[name](wrappers, env, folder)
    return env


def with_policy(env: Any) -> Any:
    attach_policy(env, POLICY)
    return env


POLICY, REFERENCE = Distribution(1), Distribution(2)


@functools.cache
def task() -> Any:
    return text_task(reference=REFERENCE)


def single(pair: Sequence[str], folder: Folder, below: Any = lambda env: env) -> Any:
    return with_policy(stacked(pair, single_wrappers, below(TextGenerationEnv(task())), folder))


def vector(pair: Sequence[str], folder: Folder, mode: Any = "NextStep", num_envs: int = 3) -> Any:
    return with_policy(
        stacked(pair, vector_wrappers, TextGenerationVectorEnv(num_envs, task(), autoreset_mode=mode), folder)
    )


def choose(env: Any, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """What everybody here does in a state, by its tokens alone: something allowed, a stop where the sum says so."""
    ids, mask = np.atleast_2d(observations["input_ids"]), np.atleast_2d(observations["attention_mask"])
    constraint = constraint_of(env)
    allowed = np.ones((len(ids), VOCAB_SIZE), dtype=bool)
    if constraint is not None:
        allowed = constraint.next_masks({"input_ids": ids, "attention_mask": mask}).unpacked()
    number = ((ids.astype(np.int64) + 3) * mask * np.arange(7, 7 + ids.shape[1])).sum(axis=1)
    actions = [np.flatnonzero(row)[n % row.sum()] for row, n in zip(allowed, number, strict=True)]
    return np.where((number % 3 == 0) & allowed[:, END], END, actions).astype(np.int64)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_no_wrapper_is_forgotten():
    assert set(NAMES) == set(vector_wrappers.__all__) == set(BUILD)


class TestVectorIsSingle:
    @BY_PAIR
    def test_row_by_row(self, pair, tmp_path):
        for mode in MODES:
            self.compare(pair, mode, Folder(tmp_path / mode.value / "ours"), Folder(tmp_path / mode.value / "theirs"))

    def compare(self, pair, mode, left_folder, right_folder):
        ours = vector(pair, left_folder, mode)
        theirs = SyncVectorEnv([lambda: single(pair, right_folder)] * 3, autoreset_mode=mode)
        left, right = ours.reset(seed=3), theirs.reset(seed=3)
        assert_same(told(left), told(right))
        ends = 0
        for _ in range(14):
            actions = choose(ours, left[0])
            left, right = ours.step(actions), theirs.step(actions)
            assert_same(told(left), told(right))
            ended = left[2] | left[3]
            ends += int(ended.sum())
            if mode is AutoresetMode.DISABLED and ended.any():
                left, right = (envs.reset(options={"reset_mask": ended}) for envs in (ours, theirs))
                assert_same(told(left, ended), told(right, ended))
        assert ends > 4
        assert left_folder.episodes() == right_folder.episodes()
        assert len(left_folder.episodes()) == ends * pair.count("RecordResponses")

    @BY_PAIR
    def test_every_mode_gives_the_same_training_data(self, pair, folder):
        by_mode = [transitions(vector(pair, folder, mode), mode) for mode in MODES]
        for rows in zip(*by_mode, strict=True):
            count = min(map(len, rows))
            assert count >= 8
            for transition in zip(*(row[:count] for row in rows), strict=True):
                assert_same(transition[0], transition[1])
                assert_same(transition[0], transition[2])


def told(results: Any, rows: NDArray[np.bool_] | None = None) -> Any:
    """Without info keys that are True of no row, which say nothing, and with final observations as rows.

    With `rows` the masks of actions are of those alone: after a partial reset ours tell those of all rows.
    """
    *rest, infos = results
    if rows is not None and "action_mask" in infos:
        masks = np.where(rows[:, None], infos["action_mask"], 0).astype(np.uint8)
        infos = {**infos, "action_mask": masks, "_action_mask": infos["_action_mask"] & rows}
    infos = {key: value for key, value in infos.items() if key.startswith("_") or infos[f"_{key}"].any()}
    infos = {key: value for key, value in infos.items() if not key.startswith("_") or key[1:] in infos}
    if "final_info" in infos:
        rows = np.flatnonzero(infos["_final_obs"])
        infos["final_obs"] = {row: final_observation(infos["final_obs"], row) for row in rows}
        infos["final_info"] = told([infos["final_info"]])[-1]
    return *rest, infos


def final_observation(final_obs: Any, row: int) -> dict[str, NDArray[Any]]:
    """Of one row, from an array of objects, or from the rows that `ArrayInfos` makes of it."""
    return {k: v[row] for k, v in final_obs.items()} if isinstance(final_obs, dict) else final_obs[row]


def transitions(envs: Any, mode: AutoresetMode) -> list[list[Any]]:
    """Per row what an agent learns from, reset steps left out: two observations, action, reward, ends, info."""
    rows: list[list[Any]] = [[] for _ in range(envs.num_envs)]
    observations, _ = envs.reset(seed=11)
    resetting = np.zeros(envs.num_envs, dtype=bool)
    for _ in range(14):
        actions = choose(envs, observations)
        following, rewards, terminations, truncations, infos = envs.step(actions)
        ended, ends = terminations | truncations, infos.get("final_info", infos)
        for row in np.flatnonzero(~resetting):
            after = {key: values[row] for key, values in following.items()}
            if mode is AutoresetMode.SAME_STEP and ended[row]:
                after = final_observation(infos["final_obs"], row)
            keys = [key for key in ends if f"_{key}" in ends and ends[f"_{key}"][row]] if ended[row] else []
            info = {key: ends[key][row] for key in keys if key != "action_mask"}
            before = {key: values[row] for key, values in observations.items()}
            flags = bool(terminations[row]), bool(truncations[row])
            rows[row].append((before, int(actions[row]), float(rewards[row]), after, flags, info))
        resetting = ended if mode is AutoresetMode.NEXT_STEP else ended & False
        observations = following
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})
    return rows


def written(env: Any, prompts: Sequence[str]) -> list[tuple[list[int], list[float], dict[str, Any]]]:
    """One episode of a single environment per prompt: response, rewards and the info of its end."""
    episodes = []
    for prompt in prompts:
        observation, _ = env.reset(options={"prompt": prompt})
        response, rewards, over, info = [], [], False, {}
        while not over:
            response.append(int(choose(env, observation)[0]))
            observation, reward, terminated, truncated, info = env.step(response[-1])
            rewards.append(float(reward))
            over = terminated or truncated
        episodes.append((response, rewards, info))
    return episodes


@BY_PAIR
def test_replay_is_step(pair, folder):
    prompts = [*PROMPTS, PROMPTS[0]]
    episodes = written(single(pair, folder), prompts)
    for mode in MODES:
        result = replay(vector(pair, folder, mode), prompts, [response for response, _, _ in episodes])
        for row, (response, rewards, info) in enumerate(episodes):
            # whole responses come as float32 distributions, so a toll may differ in the seventh digit
            np.testing.assert_allclose(result.rewards[row, : len(response)], rewards, atol=1e-5)
            assert not result.rewards[row, len(response) :].any()
            for key, value in info.items():
                if key != "action_mask":
                    expected = pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
                    assert result.infos[key][row] == expected, key
    recorded = [json.loads(text) for text in folder.episodes()]
    assert len(recorded) == 4 * len(prompts) * pair.count("RecordResponses")


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
@pytest.mark.parametrize("make", [single, vector])
def test_wrappers_that_read_texts_go_below_array_infos(pair, make, folder):
    with pytest.raises(TypeError, match=rf"{pair[1]} should be below ArrayInfos, got it above.*\({pair[1]}\(env\)\)"):
        make(pair, folder)


class TestCopies:
    @BY_PAIR
    def test_in_the_middle_of_an_episode(self, pair, folder):
        copies = copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))
        for make, duplicate in itertools.product((single, vector), copies):
            env = make(pair, folder)
            env.reset(seed=5)
            shape = () if isinstance(env, gym.Env) else (3,)
            observation, *_ = env.step(np.full(shape, GOOD))  # allowed by all, and no end
            twin = duplicate(env)
            action = choose(env, observation).reshape(shape)
            assert_same(env.step(action), twin.step(action))
            assert_same(env.reset(), twin.reset())
            observation, *_ = env.reset(seed=6)
            assert_same(observation, twin.reset(seed=6)[0])
            for _ in range(2):
                action = choose(env, observation).reshape(shape)
                results = env.step(action)
                assert_same(results, twin.step(action))
                observation = results[0]
                if shape == () and (results[2] or results[3]):
                    break

    @BY_PAIR
    @pytest.mark.filterwarnings("ignore:KLPenalty has no policy:UserWarning")
    def test_a_spec_through_json(self, pair, folder):
        options = {"ScoreEvery": lambda w, env, _: w.ScoreEvery(env, 9)}  # the toy's score is of finished responses
        env = gym.make("textenv/Toy-v0")
        for name in pair:
            env = (BUILD | options)[name](single_wrappers, env, folder)
        twin = gym.make(EnvSpec.from_json(env.spec.to_json()))
        assert str(twin) == str(env)
        assert json.loads(twin.spec.to_json()) == json.loads(env.spec.to_json())
        for response in ([3, 3, 0], [3] * 8):
            assert_same(env.reset(seed=1), twin.reset(seed=1))
            for token in response:
                assert_same(env.step(token), twin.step(token))


TWICE = functools.partial(np.multiply, 2.0)


class TestUnderGymnasiums:
    """`OrderEnforcing` and `PassiveEnvChecker` too, which `gym.make` always applies."""

    @BY_PAIR
    def test_single(self, pair, folder):
        prompt = {"options": {"prompt": PROMPTS[1]}}
        [(response, rewards, info)] = written(single(pair, folder), PROMPTS[1:2])
        plain = steps_of(single(pair, folder), response, prompt)

        checked = gym.wrappers.OrderEnforcing(gym.wrappers.PassiveEnvChecker(single(pair, folder)))
        with pytest.raises(gym.error.ResetNeeded):
            checked.step(response[0])
        assert_same(steps_of(checked, response, prompt), plain)

        steps = steps_of(gym.wrappers.RecordEpisodeStatistics(single(pair, folder)), response, prompt)
        episode = steps[-1][4].pop("episode")
        assert (episode["l"], episode["r"]) == (len(response), pytest.approx(sum(rewards), abs=1e-5))
        assert_same(steps, plain)

        steps = steps_of(gym.wrappers.TransformReward(single(pair, folder), TWICE), response, prompt)
        assert [step[1] for step in steps] == [2 * reward for reward in rewards]

        steps = steps_of(gym.wrappers.TimeLimit(single(pair, folder), 1), response[:1], prompt)
        assert steps[0][2] or steps[0][3]
        below = single(pair, folder, lambda env: gym.wrappers.TimeLimit(env, 9))
        assert_same(steps_of(below, response, prompt), plain)

        flat = gym.wrappers.FlattenObservation(single(pair, folder))
        steps = steps_of(flat, response, prompt)
        for ours, theirs in zip(plain, steps, strict=True):
            np.testing.assert_array_equal(theirs[0], gym.spaces.flatten(flat.env.observation_space, ours[0]))
        normalised = steps_of(gym.wrappers.NormalizeObservation(flat), response, prompt)
        assert [step[1] for step in normalised] == rewards
        assert info.keys() == normalised[-1][4].keys()

    @BY_PAIR
    def test_single_to_torch(self, pair, folder):
        torch = pytest.importorskip("torch")
        prompt = PROMPTS[1]
        [(response, rewards, _)] = written(single(pair, folder), [prompt])
        env = single_wrappers.ArrayInfos(single(pair, folder))
        env.reset(options={"prompt": prompt})  # texts cannot pass NumpyToTorch as options either
        as_tensors = gym.wrappers.NumpyToTorch(env)
        for token, reward in zip(response, rewards, strict=True):
            observation, given, *_, info = as_tensors.step(torch.tensor(token))
            assert given == reward
            assert all(isinstance(value, torch.Tensor) for value in (*observation.values(), *info.values()))
        assert info["response_length"] == len(response)

    @BY_PAIR
    def test_vector(self, pair, folder):
        for mode in MODES:
            self.record_and_double(pair, mode, folder)

    def record_and_double(self, pair, mode, folder):
        recorder = gym.wrappers.vector.RecordEpisodeStatistics(vector(pair, folder, mode))
        doubled = gym.wrappers.vector.TransformReward(vector(pair, folder, mode), TWICE)
        plain, totals, ends = vector(pair, folder, mode), np.zeros(3), 0
        resetting = np.zeros(3, dtype=bool)
        everybody = (plain, recorder, doubled)
        observations, *_ = [envs.reset(seed=2)[0] for envs in everybody]
        for _ in range(10):
            actions = choose(plain, observations)
            results, recorded, double = (envs.step(actions) for envs in everybody)
            observations, rewards, terminations, truncations, _ = results
            np.testing.assert_array_equal(double[1], 2 * rewards)
            totals += np.where(resetting, 0.0, rewards)
            ended = terminations | truncations
            if ended.any():
                np.testing.assert_allclose(recorded[4]["episode"]["r"][ended], totals[ended], atol=1e-5)
                totals[ended] = 0.0
                ends += int(ended.sum())
            assert_same(recorded[:4], results[:4])
            resetting = ended if mode is AutoresetMode.NEXT_STEP else ended & False
            if mode is AutoresetMode.DISABLED and ended.any():
                observations, *_ = [envs.reset(options={"reset_mask": ended})[0] for envs in everybody]
        assert ends > 2

    @BY_PAIR
    def test_vector_to_torch(self, pair, folder):
        torch = pytest.importorskip("torch")
        for mode in MODES:
            self.convert(pair, mode, folder, torch)

    def convert(self, pair, mode, folder, torch):
        as_tensors = gym.wrappers.vector.NumpyToTorch(vector_wrappers.ArrayInfos(vector(pair, folder, mode)))
        plain = vector(pair, folder, mode)
        observations, _ = plain.reset(seed=2)
        as_tensors.reset(seed=2)
        for _ in range(4):
            actions = choose(plain, observations)
            observations, rewards, terminations, truncations, infos = plain.step(actions)
            results = as_tensors.step(torch.as_tensor(actions))
            assert all(isinstance(value, torch.Tensor) for value in (*results[0].values(), *results[1:4]))
            np.testing.assert_array_equal(results[0]["input_ids"].numpy(), observations["input_ids"])
            np.testing.assert_array_equal(results[1].numpy(), rewards)
            ended = terminations | truncations
            if ended.any():
                ends, theirs = infos.get("final_info", infos), results[4].get("final_info", results[4])
                np.testing.assert_array_equal(theirs["score"].numpy(), ends["score"])
                assert "prompt" not in theirs
                break
        assert ended.any()

    @BY_PAIR
    def test_vector_normalised_observations(self, pair, folder):
        flat = gym.wrappers.vector.FlattenObservation(vector(pair, folder))
        envs, plain = gym.wrappers.vector.NormalizeObservation(flat), vector(pair, folder)
        observations, _ = plain.reset(seed=2)
        envs.reset(seed=2)
        for _ in range(5):
            actions = choose(plain, observations)
            observations, rewards, *_ = plain.step(actions)
            normalised, given, *_ = envs.step(actions)
            np.testing.assert_array_equal(given, rewards)
            assert normalised.shape == (3, 22) and np.isfinite(normalised).all()

    def test_what_normalize_observation_does_not_take(self):
        with pytest.raises(ValueError, match="requires the observation space to have a shape"):
            gym.wrappers.NormalizeObservation(TextGenerationEnv(task()))
        filtered = gym.wrappers.FilterObservation(TextGenerationEnv(task()), ["input_ids"])  # one of the two instead
        env = gym.wrappers.NormalizeObservation(gym.wrappers.FlattenObservation(filtered))
        assert env.reset(seed=0)[0].shape == (11,)
        for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            with pytest.raises(ValueError, match="Expected"):
                gym.wrappers.vector.NormalizeObservation(TextGenerationVectorEnv(2, task(), autoreset_mode=mode))
        with pytest.raises(ValueError, match="Expected autoreset_mode to be NEXT_STEP or DISABLED"):
            gym.wrappers.vector.FlattenObservation(TextGenerationVectorEnv(2, task(), autoreset_mode="SameStep"))
        singles = [lambda: gym.wrappers.FlattenObservation(TextGenerationEnv(task()))] * 2  # there flatten the singles
        envs = SyncVectorEnv(singles, autoreset_mode="SameStep")
        assert envs.reset(seed=0)[0].shape == (2, 22)

    def test_why_array_infos_are_needed(self):
        """If this fails Gymnasium has learned to leave texts alone, and `ArrayInfos` can go."""
        pytest.importorskip("torch")
        _, info = gym.wrappers.NumpyToTorch(TextGenerationEnv(task())).reset(seed=0)
        assert info["prompt"].startswith("<generator object")
        with pytest.raises(BufferError):
            gym.wrappers.vector.NumpyToTorch(TextGenerationVectorEnv(2, task())).reset(seed=0)

    def test_there_is_no_vector_time_limit(self):
        assert not hasattr(gym.wrappers.vector, "TimeLimit")
        with pytest.raises(
            TypeError, match="takes its episode length from max_response_tokens, got max_episode_steps=3"
        ):
            gym.make_vec("textenv/Toy-v0", num_envs=2, max_episode_steps=3)


def steps_of(env: Any, response: Sequence[int], reset: dict[str, Any]) -> list[Any]:
    """What every step of a response gave."""
    env.reset(**reset)
    return [env.step(token) for token in response]
