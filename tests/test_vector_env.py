"""N episodes side by side: equal to single ones under Gymnasium's own `SyncVectorEnv`, in every autoreset mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import (
    END,
    GOOD,
    PROMPTS,
    RESPONSE_TOKENS,
    VOCAB_SIZE,
    CountingScorer,
    PrefixLogprobs,
    assert_same,
    text_task,
    write,
)

from textenv import TextGenerationEnv, TextGenerationVectorEnv
from textenv import wrappers as single_wrappers
from textenv.wrappers import vector as vector_wrappers

MODES = list(AutoresetMode)
BY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def charge(wrappers: Any, env: Any) -> Any:
    return wrappers.KLPenalty(env, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3)


def everything(wrappers: Any, env: Any) -> Any:
    env = wrappers.NormalizeScore(wrappers.MissingEOSPenalty(env, 0.5), mean=0.25, std=2.0)
    return charge(wrappers, env)


STACKS: dict[str, Callable[[Any, Any], Any]] = {
    "bare": lambda _, env: env,
    "kl": charge,
    "eos subtract": lambda wrappers, env: wrappers.MissingEOSPenalty(env, 0.5),
    "eos replace": lambda wrappers, env: wrappers.MissingEOSPenalty(env, 2.0, mode="replace"),
    "norm": lambda wrappers, env: wrappers.NormalizeScore(env, mean=0.25, std=2.0),
    "everything": everything,
    "kl below eos": lambda wrappers, env: wrappers.MissingEOSPenalty(charge(wrappers, env), 0.5),
}
BY_STACK = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)

TASKS = {
    "plain": {},
    "terminate": {"length_limit": "terminate"},
    "drop": {"scorer": lambda prompts, texts: [None if "bad" in t else 1.5 for t in texts], "scorer_errors": "drop"},
    "three stops": {"stop_ids": [0, 10, 11], "pad_id": 0},
}


def ours(mode: AutoresetMode, num_envs: int = 4, stack: Any = STACKS["bare"], **task: Any) -> Any:
    return stack(vector_wrappers, TextGenerationVectorEnv(num_envs, text_task(**task), autoreset_mode=mode))


def gymnasiums(mode: AutoresetMode, num_envs: int = 4, stack: Any = STACKS["bare"], **task: Any) -> SyncVectorEnv:
    def make() -> Any:
        return stack(single_wrappers, TextGenerationEnv(text_task(**task)))

    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


def random_actions(rng: np.random.Generator, num_envs: int) -> np.ndarray:
    return np.where(rng.random(num_envs) < 0.25, END, rng.integers(VOCAB_SIZE, size=num_envs))


class TestEqualsSyncVectorEnv:
    @BY_MODE
    @BY_STACK
    @pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
    def test_step_by_step(self, mode, stack, task):
        one, other = ours(mode, stack=stack, **task), gymnasiums(mode, stack=stack, **task)
        assert one.observation_space == other.observation_space
        assert one.action_space == other.action_space
        assert one.metadata["autoreset_mode"] is mode
        assert_same(one.reset(seed=7), other.reset(seed=7), "reset")
        rng, ends = np.random.default_rng(7), 0
        for step in range(40):
            actions = random_actions(rng, 4)
            left, right = one.step(actions), other.step(actions)
            assert_same(left, right, f"step {step}")
            ended = left[2] | left[3]
            ends += int(ended.sum())
            if mode is AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                assert_same(one.reset(options=dict(options)), other.reset(options=dict(options)), f"reset at {step}")
        assert ends > 20  # else the comparison says little

    @BY_MODE
    def test_seeds_and_options_of_reset(self, mode):
        one, other = ours(mode), gymnasiums(mode)
        mask = np.array([True, False, True, False])
        for arguments in (
            {"seed": 3},
            {"seed": [5, None, 7, 8]},
            {"options": {"prompt": " films"}},
            {"seed": 4, "options": {"reset_mask": mask}},
            {"options": {"reset_mask": mask, "prompt": " a film"}},
            {},
        ):
            assert_same(one.reset(**copy.deepcopy(arguments)), other.reset(**copy.deepcopy(arguments)), str(arguments))
            assert_same(one.step(np.full(4, GOOD)), other.step(np.full(4, GOOD)))
            assert one.render() == other.render()
        assert one.np_random_seed == other.np_random_seed

    @BY_MODE
    def test_one_row_is_the_single_environment(self, mode):
        env, envs = TextGenerationEnv(text_task()), ours(mode, 1)
        for seed, response in enumerate(([GOOD, END], [END], [GOOD] * 5)):
            steps = write(env, response, seed=seed)
            observations, _ = envs.reset(seed=seed)
            assert_same({k: v[0] for k, v in observations.items()}, steps["observations"][0])
            for t, token in enumerate(response):
                observations, rewards, terminations, truncations, infos = envs.step(np.array([token]))
                assert rewards[0] == steps["rewards"][t]
                assert (terminations[0], truncations[0]) == steps["ends"][t]
            final = (
                infos["final_obs"] if mode is AutoresetMode.SAME_STEP else [{k: v[0] for k, v in observations.items()}]
            )
            assert_same(final[0], steps["observation"])
            ends = infos.get("final_info", infos)
            assert {k: v[0] for k, v in ends.items() if not k.startswith("_")} == steps["info"]

    @pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
    def test_through_make_vec(self, mode):
        one = gym.make_vec("textenv/Toy-v0", num_envs=3, autoreset_mode=mode)
        other = gym.make_vec(
            "textenv/Toy-v0", num_envs=3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
        )
        assert_same(one.reset(seed=1), other.reset(seed=1))
        for actions in np.random.default_rng(0).integers(1, 6, (8, 3)):
            assert_same(one.step(actions), other.step(actions))
        assert one.spec.id == other.spec.id == "textenv/Toy-v0"


class TestByHand:
    def test_next_step(self):
        envs = ours(AutoresetMode.NEXT_STEP, 2)
        envs.reset(options={"prompts": [" a film", " films"]})
        _, rewards, terminations, _, infos = envs.step(np.array([END, GOOD]))
        assert (rewards.tolist(), terminations.tolist()) == ([pytest.approx(0.7), 0.0], [True, False])
        assert infos["finish_reason"].tolist() == ["stop", None]
        assert (infos["score"].tolist(), infos["_score"].tolist()) == ([pytest.approx(0.7), 0.0], [True, False])
        observations, rewards, terminations, _, infos = envs.step(np.array([GOOD, GOOD]))
        assert (rewards.tolist(), terminations.tolist()) == ([0.0, 0.0], [False, False])
        assert observations["attention_mask"][:, 6:].tolist() == [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
        assert list(infos) == ["prompt", "_prompt"] or list(infos) == ["_prompt", "prompt"]
        assert infos["_prompt"].tolist() == [True, False]

    def test_same_step_keeps_the_end(self):
        envs = ours(AutoresetMode.SAME_STEP, 2)
        envs.reset(options={"prompts": [" a film", " films"]})
        observations, rewards, terminations, _, infos = envs.step(np.array([END, GOOD]))
        assert (rewards.tolist(), terminations.tolist()) == ([pytest.approx(0.7), 0.0], [True, False])
        assert observations["attention_mask"][:, 6:].tolist() == [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
        assert infos["final_obs"][0]["input_ids"][6] == END
        assert infos["final_obs"][0]["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
        assert infos["final_obs"][1] is None
        assert infos["final_info"]["response_length"].tolist() == [1, 0]
        assert infos["prompt"][0] in PROMPTS and infos["prompt"][1] is None

    def test_disabled_leaves_the_end_in_place(self):
        envs = ours(AutoresetMode.DISABLED, 2)
        envs.reset(options={"prompts": [" a film", " films"]})
        envs.step(np.array([END, GOOD]))
        with pytest.raises(gym.error.ResetNeeded, match="Row 0 has ended"):
            envs.step(np.array([GOOD, GOOD]))
        options = {"reset_mask": np.array([True, False]), "prompts": [" very good", " ignored film"]}
        observations, infos = envs.reset(options=options)
        assert infos["prompt"].tolist() == [" very good", None]
        assert observations["attention_mask"][:, 6:].tolist() == [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
        assert list(options) == ["reset_mask", "prompts"]

    def test_rows_that_end_together_are_scored_together(self):
        scorer = CountingScorer()
        envs = ours(AutoresetMode.NEXT_STEP, 3, scorer=scorer)
        envs.reset(options={"prompts": [" a film", " films", " good"]})
        envs.step(np.array([END, GOOD, END]))
        assert scorer.calls == [([" a film", " good"], ["", ""])]

    def test_texts(self):
        envs = ours(AutoresetMode.NEXT_STEP, 2)
        envs.reset(options={"prompts": [" a film", " films"]})
        envs.step(np.array([GOOD, END]))
        assert envs.render() == (" a film good", " films")
        silent = TextGenerationVectorEnv(2, text_task(), render_mode=None)
        silent.reset()
        with pytest.warns(UserWarning, match='render_mode="ansi"'):
            assert silent.render() is None


class TestSeeds:
    def test_row_i_has_seed_plus_i(self):
        envs = ours(AutoresetMode.NEXT_STEP, 3)
        envs.reset(seed=10)
        assert envs.np_random_seed == (10, 11, 12)
        for row, seed in enumerate((10, 11, 12)):
            env = TextGenerationEnv(text_task())
            env.reset(seed=seed)
            assert env.reset()[1]["prompt"] == envs.reset(options={"reset_mask": np.arange(3) == row})[1]["prompt"][row]

    def test_the_same_seed_twice_and_rows_that_differ(self):
        envs = ours(AutoresetMode.NEXT_STEP, 16)
        first, second = envs.reset(seed=0), envs.reset(seed=0)
        assert_same(first, second)
        assert set(first[1]["prompt"]) == set(PROMPTS)
        assert not all(envs.reset()[1]["prompt"] == first[1]["prompt"])


class TestOwnership:
    @BY_MODE
    def test_observations_of_the_past_do_not_change(self, mode):
        envs = ours(mode, 2)
        results = [envs.reset(seed=0)[0]]
        for _ in range(3):
            results.append(envs.step(np.array([GOOD, GOOD]))[0])
            results[-2]["input_ids"][:] = 0  # neither does what an agent writes into one reach the next
            results[-2]["attention_mask"][:] = 1
        assert results[-1]["input_ids"][:, 6:].tolist() == [[GOOD, GOOD, GOOD, 11, 11]] * 2
        assert results[-1]["attention_mask"][:, 6:].tolist() == [[1, 1, 1, 0, 0]] * 2

    @BY_MODE
    @pytest.mark.parametrize("length_limit", ["truncate", "terminate"])
    def test_what_an_agent_writes_into_results_changes_nothing(self, mode, length_limit):
        envs, untouched = (ours(mode, 3, everything, length_limit=length_limit) for _ in range(2))
        assert_same(envs.reset(seed=0), untouched.reset(seed=0))
        for actions in random_actions(np.random.default_rng(0), 3 * 20).reshape(20, 3):
            _, rewards, terminations, truncations, infos = result = envs.step(actions)
            assert_same(result, untouched.step(actions))
            ended = terminations | truncations
            for array in (rewards, terminations, truncations, *(a for a in infos.values() if a is not None)):
                if isinstance(array, np.ndarray) and array.dtype != object:
                    array[:] = 1 - array.astype(int)
            if mode is AutoresetMode.DISABLED and ended.any():
                masks = [{"reset_mask": ended.copy()} for _ in range(2)]
                assert_same(envs.reset(options=masks[0]), untouched.reset(options=masks[1]))

    @BY_MODE
    def test_actions_and_options_are_not_edited(self, mode):
        envs = ours(mode, 2)
        options = {"prompts": [" a film", " films"]}
        envs.reset(options=options)
        actions = np.array([GOOD, END], dtype=np.int32)
        envs.step(actions)
        assert options == {"prompts": [" a film", " films"]}
        assert actions.tolist() == [GOOD, END]

    @BY_MODE
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda envs: pickle.loads(pickle.dumps(envs))])
    def test_a_copy_goes_on_as_the_original_does(self, mode, duplicate):
        envs = ours(mode, 3, everything)
        envs.reset(seed=0)
        envs.step(np.array([GOOD, GOOD, GOOD]))
        twin = duplicate(envs)
        assert_same(envs.step(np.array([END, GOOD, GOOD])), twin.step(np.array([END, GOOD, GOOD])))
        assert_same(envs.reset(), twin.reset())


# The autoreset mode is no part of the data. Actions depend on row, episode and place only, so that episodes match.


def action_of(row: int, episode: int, t: int) -> int:
    draw = int(np.random.default_rng([row, episode, t]).integers(VOCAB_SIZE + 3))
    return draw if draw < VOCAB_SIZE else END


def training_data(mode: AutoresetMode, num_envs: int, episodes: int, mask_resets: bool = True) -> list[Any]:
    """Transitions of the first episodes of every row, by row and episode, with each episode's final info."""
    envs = ours(mode, num_envs, everything)
    observations, _ = envs.reset(seed=0)
    data: list[list[list[Any]]] = [[[]] for _ in range(num_envs)]
    resetting = np.zeros(num_envs, dtype=bool)
    while any(len(row) <= episodes for row in data):
        actions = np.array([action_of(r, len(data[r]), len(data[r][-1])) for r in range(num_envs)])
        before = observations
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        ended, ends = terminations | truncations, infos.get("final_info", infos)
        for row in range(num_envs):
            if resetting[row] and mask_resets:
                continue
            after = {key: array[row] for key, array in observations.items()}
            if ended[row] and mode is AutoresetMode.SAME_STEP:
                after = infos["final_obs"][row]
            end = {k: v[row] for k, v in ends.items() if ended[row] and not k.startswith("_")}
            seen = {key: array[row] for key, array in before.items()}
            data[row][-1].append((seen, actions[row], rewards[row], terminations[row], truncations[row], after, end))
            if ended[row]:
                data[row].append([])
        resetting = ended if mode is AutoresetMode.NEXT_STEP else ended & False
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})
    return [row[:episodes] for row in data]


class TestAutoresetModes:
    def test_the_same_training_data_without_the_reset_step(self):
        one, same, disabled = (training_data(mode, 3, 12) for mode in MODES)
        lengths = {len(episode) for row in one for episode in row}
        assert lengths == set(range(1, RESPONSE_TOKENS + 1))
        assert_same(one, same)
        assert_same(one, disabled)

    def test_the_reset_step_is_no_data(self):
        with_resets = training_data(AutoresetMode.NEXT_STEP, 3, 12, mask_resets=False)
        assert with_resets[0][1][0][2] == 0.0  # a transition whose action was ignored
        assert sum(len(e) for row in with_resets for e in row) > sum(
            len(e) for row in training_data(AutoresetMode.SAME_STEP, 3, 12) for e in row
        )
