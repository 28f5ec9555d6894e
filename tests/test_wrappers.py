"""Reward shaping: worked examples on one and on many environments, the controller, statistics, and others' wrappers."""

from __future__ import annotations

import doctest
import json
import math
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers import BAD, CLOSE, DOT, END, GOOD, VERY, A, assert_same, text_task, write
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv import TextGenerationEnv, TextGenerationVectorEnv, attach_policy
from textenv import wrappers as single_wrappers
from textenv.toy import ToyLanguage
from textenv.wrappers import kl_penalty, score_wrappers
from textenv.wrappers import vector as vector_wrappers
from textenv.wrappers.kl import adapt_kl_coef, kl_toll
from textenv.wrappers.scores import Ends, Normalize, missing_eos_scores, shape_scores

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
ROADS = pytest.mark.parametrize("road", ["single", "vector"])
NO_ENDS = Ends([], np.zeros(0, dtype=np.int64), [])  # the running figures do not look at the responses


class PositionLogprobs:
    """The t-th number for the t-th response token, whatever it is."""

    def __init__(self, *values: float) -> None:
        self.values = np.pad(values, (0, 6))

    def __call__(self, observations: Any, _actions: Any) -> Any:
        return self.values[observations["attention_mask"][:, 6:].sum(axis=1)]


class Scores:
    """A scorer that gives the numbers of a list one after the other."""

    def __init__(self, *scores: Any) -> None:
        self.scores = list(scores)

    def __call__(self, prompts: list[str], _responses: list[str]) -> list[Any]:
        return [self.scores.pop(0) for _ in prompts]


def make(road: str, stack: Any, num_envs: int = 1, mode: Any = "NextStep", **task: Any) -> Any:
    """The stack of `stack(wrappers, env)` on one text environment, or on a vector of them."""
    if road == "single":
        return stack(single_wrappers, TextGenerationEnv(text_task(**task)))
    return stack(vector_wrappers, TextGenerationVectorEnv(num_envs, text_task(**task), autoreset_mode=mode))


def play(env: Any, response: list[int]) -> tuple[list[float], dict[str, Any]]:
    """Rewards and final info of one response, on a single environment or a vector of one."""
    if isinstance(env, gym.Env):
        steps = write(env, response)
        return steps["rewards"], steps["info"]
    env.reset()
    rewards, infos = [], {}
    for token in response:
        _, reward, _, _, infos = env.step(np.array([token]))
        rewards.append(float(reward[0]))
    ends = infos.get("final_info", infos)
    return rewards, {key: values[0] for key, values in ends.items() if not key.startswith("_")}


def kl(*ratios: float, **options: Any) -> Any:
    """A penalty whose tokens have the log-ratios given."""
    policy = PositionLogprobs(*(ratio - 1.5 for ratio in ratios))
    reference = PositionLogprobs(*(-1.5 for _ in ratios))
    return lambda wrappers, env: wrappers.KLPenalty(env, reference, policy, **options)


@pytest.mark.parametrize(
    ("module", "examples"), [(kl_penalty, 3), (score_wrappers, 7)], ids=lambda value: getattr(value, "__name__", "")
)
def test_docstring_examples_run(module, examples):
    results = doctest.testmod(module)
    assert (results.failed, results.attempted) == (0, examples)


class TestKLPenalty:
    @ROADS
    def test_log_ratios_by_hand(self, road):
        env = make(road, kl(0.3, 0.1, -1.0, 0.0, kl_coef=0.1), scorer=Scores(1.2))
        rewards, info = play(env, [VERY, GOOD, DOT, END])
        np.testing.assert_allclose(rewards, [-0.03, -0.01, 0.1, 1.2], atol=1e-12)
        assert info["kl"] == pytest.approx(-0.6)
        assert info["kl_coef"] == 0.1
        assert info["score"] == 1.2

    @ROADS
    def test_probabilities_by_hand(self, road):
        policy = PositionLogprobs(*np.log([0.50, 0.45, 0.60, 0.85]))
        reference = PositionLogprobs(*np.log([0.50, 0.30, 0.55, 0.50]))
        env = make(road, lambda w, e: w.KLPenalty(e, reference, policy, kl_coef=0.2), scorer=Scores(2.0))
        rewards, info = play(env, [VERY, GOOD, DOT, END])
        assert np.round(rewards, 2).tolist() == [0.0, -0.08, -0.02, 1.89]
        assert info["kl"] == pytest.approx(math.log(0.45 / 0.30) + math.log(0.60 / 0.55) + math.log(0.85 / 0.50))
        backwards = make(road, lambda w, e: w.KLPenalty(e, policy, reference, kl_coef=0.2), scorer=Scores(2.0))
        assert np.round(play(backwards, [VERY, GOOD, DOT, END])[0], 2).tolist() == [0.0, 0.08, 0.02, 2.11]

    @ROADS
    def test_the_models_see_the_prefix_before_the_action(self, road):
        seen = []

        def policy(observations, actions):
            real = observations["attention_mask"] == 1
            seen.append((observations["input_ids"][real].tolist(), actions.tolist()))
            return np.zeros(1)

        play(make(road, lambda w, e: w.KLPenalty(e, lambda *_: np.zeros(1), policy), prompts=[[A, BAD]]), [GOOD, END])
        assert seen == [([A, BAD], [GOOD]), ([A, BAD, GOOD], [END])]

    @ROADS
    def test_each_episode_counts_its_own_kl(self, road):
        env = make(road, kl(0.3, 0.1, kl_coef=0.1))
        assert [play(env, r)[1]["kl"] for r in ([GOOD, END], [END], [GOOD, END])] == pytest.approx([0.4, 0.3, 0.4])
        env.reset()
        env.step(GOOD if road == "single" else np.array([GOOD]))  # an episode that is given up half-way
        assert play(env, [END])[1]["kl"] == pytest.approx(0.3)

    def test_the_task_brings_the_reference(self):
        language = ToyLanguage(
            reference_logits=np.log([[0.25, 0.75], [0.5, 0.5]]), stop_id=0, token_scores=np.array([0.0, 1.0])
        )
        env = gym.make("textenv/Toy-v0", language=language, kl_coef=1.0)
        env.get_wrapper_attr("attach_policy")(lambda _, actions: np.log(np.full(len(actions), 0.5)))
        rewards, info = play(env, [1, 1])
        np.testing.assert_allclose(rewards, [-math.log(0.5 / 0.75), 2.0], atol=1e-12)
        assert info["kl"] == pytest.approx(math.log(0.5 / 0.75))

    def test_a_policy_may_bring_its_own_reference(self):
        envs = make("vector", lambda w, e: w.KLPenalty(e, kl_coef=1.0), reference=PositionLogprobs(-9.0, -9.0))
        attach_policy(envs, PositionLogprobs(-1.0, -1.0), PositionLogprobs(-1.5, -1.0))
        assert play(envs, [GOOD, END])[1]["kl"] == pytest.approx(0.5)
        attach_policy(envs, PositionLogprobs(-1.25, -1.0))  # without one the reference stays
        assert play(envs, [GOOD, END])[1]["kl"] == pytest.approx(0.25)

    def test_a_reference_chosen_for_the_wrapper_stays(self):
        envs = make("vector", lambda w, e: w.KLPenalty(e, PositionLogprobs(-2.0, -2.0), kl_coef=1.0))
        attach_policy(envs, PositionLogprobs(-1.0, -1.0), PositionLogprobs(-1.5, -1.0))
        assert play(envs, [GOOD, END])[1]["kl"] == pytest.approx(2.0)

    @ROADS
    def test_without_a_policy_one_warning_and_no_toll(self, road):
        env = make(road, lambda w, e: w.KLPenalty(e, PositionLogprobs(-1.0), kl_coef=0.5), scorer=Scores(*range(9)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rewards = [play(env, response)[0] for response in ([GOOD, END], [END], [GOOD, GOOD, END])]
        assert rewards == [[0.0, 0.0], [1.0], [0.0, 0.0, 2.0]]
        assert [(w.category, w.filename) for w in caught if "no policy attached" in str(w.message)] == [
            (UserWarning, __file__ if road == "vector" else write.__code__.co_filename)
        ]
        env.attach_policy(PositionLogprobs(-0.5))
        assert play(env, [END])[0] == [3.0 - 0.5 * 0.5]

    @ROADS
    def test_a_policy_without_reference_is_an_error(self, road):
        env = make(road, lambda w, e: w.KLPenalty(e, policy_logprobs=PositionLogprobs(-1.0)))
        with pytest.raises(ValueError, match=r"no reference to measure it against\. Pass ref_logprobs"):
            play(env, [END])

    @ROADS
    @pytest.mark.parametrize("values", [np.zeros((1, 1)), np.zeros(3), 0.0])
    def test_log_probabilities_of_a_wrong_shape_are_an_error(self, road, values):
        env = make(road, lambda w, e: w.KLPenalty(e, lambda *_: np.zeros(1), lambda *_: values))
        with pytest.raises(ValueError, match=r"`policy_logprobs` should return one number per row, shape \(1,\), got"):
            play(env, [END])

    @ROADS
    def test_a_coefficient_of_0_measures_and_charges_nothing(self, road):
        env = make(road, kl(0.5, math.inf, kl_coef=0.0), scorer=Scores(1.2))
        rewards, info = play(env, [GOOD, END])
        assert rewards == [0.0, 1.2]
        assert info["kl"] == math.inf  # the reference never writes that token

    def test_models_are_not_asked_about_the_action_that_a_reset_ignores(self):
        forbidden = PositionLogprobs(0.0, -math.inf)  # as policies that mask the same tokens give: -inf - -inf is NaN
        envs = make("vector", lambda w, e: w.KLPenalty(e, forbidden, forbidden, kl_coef=1.0), scorer=Scores(1.0, 2.0))
        assert play(envs, [END])[0] == [1.0]
        assert envs.step(np.array([GOOD]))[1].tolist() == [0.0]
        _, rewards, _, _, infos = envs.step(np.array([END]))
        assert (rewards.tolist(), infos["kl"].tolist()) == ([2.0], [0.0])

    def test_the_formula(self):
        assert kl_toll(np.array([-1.0, -2.0]), np.array([-1.5, -1.0]), 0.2).tolist() == [0.1, -0.2]


class TestController:
    @pytest.mark.parametrize(
        ("kl_now", "factor"),
        [(0.0, 0.98), (1.0, 0.98), (1.6, 0.98), (1.9, 0.995), (2.0, 1.0), (2.2, 1.01), (2.4, 1.02), (99.0, 1.02)],
    )
    def test_by_hand(self, kl_now: float, factor: float):
        assert adapt_kl_coef(0.3, kl_now, target_kl=2.0) == pytest.approx(0.3 * factor, rel=1e-12)

    @given(st.floats(1e-6, 10.0), st.floats(-5.0, 100.0), st.floats(0.01, 50.0))
    @settings(max_examples=100, deadline=None, database=None)
    def test_at_most_2_percent_and_in_the_right_direction(self, kl_coef: float, kl_now: float, target_kl: float):
        moved = adapt_kl_coef(kl_coef, kl_now, target_kl) / kl_coef
        assert 0.98 - 1e-9 <= moved <= 1.02 + 1e-9
        assert (moved >= 1.0) == (kl_now >= target_kl) or math.isclose(kl_now, target_kl, rel_tol=1e-9)

    @ROADS
    def test_it_moves_after_the_episode_that_is_charged(self, road):
        env = make(road, kl(0.5, 0.5, kl_coef=0.1, target_kl=0.5), scorer=Scores(0.0, 0.0, 0.0, 0.0))
        responses = [[GOOD, END], [GOOD, END], [END], [END]]  # KL 1.0, 1.0, 0.5, 0.5
        played = [play(env, response) for response in responses]
        charged = [0.1, 0.1 * 1.02, 0.1 * 1.02**2, 0.1 * 1.02**2]
        assert [info["kl_coef"] for _, info in played] == pytest.approx(charged)
        assert [rewards[0] for rewards, _ in played] == pytest.approx([-0.5 * coef for coef in charged])

    @ROADS
    def test_it_moves_on_the_mean_of_several_episodes(self, road):
        stack = kl(0.2, 0.4, 0.4, kl_coef=0.1, target_kl=0.6, episodes_per_update=3)
        env = make(road, stack)
        for response, coefficient in (
            ([GOOD, END], 0.1),  # 0.6
            ([END], 0.1),  # 0.2
            ([GOOD, GOOD, END], 0.1),  # 1.0: the mean is the target, though each episode alone would have moved it
            ([END], 0.1),
            ([END], 0.1),
            ([END], 0.1 * 0.98),  # 0.2 on average, and 0.6 in sum, which would have been the target
        ):
            play(env, response)
            assert env.leash.kl_coef == pytest.approx(coefficient, rel=1e-12)

    def test_a_vector_moves_once_per_n_episodes(self):
        envs = make("vector", kl(0.5, 0.5, kl_coef=0.1, target_kl=0.1), num_envs=3)
        envs.reset()
        envs.step(np.array([END, END, GOOD]))
        assert envs.leash.kl_coef == 0.1
        _, _, _, _, infos = envs.step(np.array([GOOD, GOOD, END]))
        assert infos["kl"].tolist() == pytest.approx([0.0, 0.0, 1.0])
        assert infos["_kl"].tolist() == [False, False, True]
        assert envs.leash.kl_coef == pytest.approx(0.1 * 1.02)


class TestMissingEOSPenalty:
    @ROADS
    @pytest.mark.parametrize(
        ("mode", "response", "shaped"),
        [
            ("subtract", [GOOD] * 5, 1.2 - 0.75),
            ("replace", [GOOD] * 5, -0.75),
            ("subtract", [GOOD] * 4 + [END], 1.2),
            ("replace", [GOOD] * 4 + [END], 1.2),
            ("replace", [END], 1.2),
        ],
    )
    @pytest.mark.parametrize("length_limit", ["truncate", "terminate"])
    def test_by_hand(self, road, mode, response, shaped, length_limit):
        stack = lambda w, e: w.MissingEOSPenalty(e, 0.75, mode=mode)  # noqa: E731
        rewards, info = play(make(road, stack, scorer=Scores(1.2), length_limit=length_limit), response)
        assert rewards[:-1] == [0.0] * (len(response) - 1)
        assert rewards[-1] == pytest.approx(shaped)
        assert info["shaped_score"] == pytest.approx(shaped)
        assert info["score"] == 1.2

    @ROADS
    @pytest.mark.parametrize("stop", [END, DOT, CLOSE])
    def test_every_stop_id_is_an_end(self, road, stop):
        env = make(road, lambda w, e: w.MissingEOSPenalty(e, 9.0), scorer=Scores(1.0, 1.0), stop_ids=[END, DOT, CLOSE])
        assert play(env, [GOOD, stop])[0] == [0.0, 1.0]
        assert play(env, [GOOD] * 5)[0][-1] == -8.0

    def test_the_formula(self):
        scores, reasons = np.array([1.2, 1.2, -3.0]), ["stop", "length", "length"]
        assert missing_eos_scores(scores, reasons, 1.0, "subtract").tolist() == pytest.approx([1.2, 0.2, -4.0])
        assert missing_eos_scores(scores, reasons, 1.0, "replace").tolist() == [1.2, -1.0, -1.0]
        assert scores.tolist() == [1.2, 1.2, -3.0]


class TestNormalizeScore:
    @ROADS
    def test_running_figures_are_those_of_all_scores_so_far(self, road):
        scores = [2.0, 4.0, -1.0, 4.0, 10.0]
        env = make(road, lambda w, e: w.NormalizeScore(e), scorer=Scores(*scores))
        for count, response in enumerate(([GOOD, END], [END], [GOOD, GOOD, END], [END], [GOOD] * 5), start=1):
            seen = np.array(scores[:count])
            rewards, info = play(env, response)
            expected = (seen[-1] - seen.mean()) / (seen.std() or 1.0)
            assert rewards == [*[0.0] * (len(response) - 1), pytest.approx(expected, abs=1e-12)]
            assert info["score"] == scores[count - 1]

    def test_a_batch_counts_before_it_is_normalised(self):
        envs = make("vector", lambda w, e: w.NormalizeScore(e), num_envs=4, scorer=Scores(1.0, 3.0, 5.0, 9.0))
        envs.reset()
        rewards = envs.step(np.full(4, END))[1]
        np.testing.assert_allclose(rewards, (np.array([1.0, 3.0, 5.0, 9.0]) - 4.5) / np.std([1, 3, 5, 9]), atol=1e-12)

    @given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=6))
    @settings(max_examples=100, deadline=None, database=None)
    def test_batches_of_any_size_add_up(self, batches: list[list[float]]):
        running = Normalize(None, None)
        for batch in batches:
            last = running(np.array(batch), NO_ENDS)
        seen = np.concatenate(batches)
        assert running.count == len(seen)
        assert running.mean == pytest.approx(seen.mean(), abs=1e-9)
        assert math.sqrt(running.squares / running.count) == pytest.approx(seen.std(), abs=1e-6)
        if seen.std() > 1e-3:
            np.testing.assert_allclose(last, (batches[-1] - seen.mean()) / seen.std(), atol=1e-6)

    @ROADS
    def test_fixed_figures(self, road):
        env = make(road, lambda w, e: w.NormalizeScore(e, mean=1.0, std=4.0), scorer=Scores(3.0, 3.0))
        assert [play(env, [END])[0] for _ in range(2)] == [[0.5], [0.5]]

    @ROADS
    def test_only_the_score_is_normalised(self, road):
        stack = lambda w, e: w.NormalizeScore(kl(0.5, 0.5, kl_coef=0.2)(w, e), mean=1.0, std=10.0)  # noqa: E731
        rewards, _ = play(make(road, stack, scorer=Scores(3.0)), [GOOD, END])
        assert rewards == pytest.approx([-0.1, 0.2 - 0.1])  # dividing the toll too would give -0.01 and 0.19

    @ROADS
    def test_dropped_samples_leave_the_figures_alone(self, road):
        env = make(road, lambda w, e: w.NormalizeScore(e), scorer=Scores(2.0, None, 4.0), scorer_errors="drop")
        played = [play(env, [END]) for _ in range(3)]
        assert [rewards[0] for rewards, _ in played] == [0.0, 0.0, 1.0]  # 4 among (2, 4)
        assert math.isnan(played[1][1]["score"]) and math.isnan(played[1][1]["shaped_score"])
        assert [info["dropped"] for _, info in played] == [False, True, False]

    def test_nothing_but_dropped_samples(self):
        running = Normalize(None, None)
        ends = Ends(["stop", "stop"], np.array([1, 1]), ["", ""])
        assert np.isnan(shape_scores(running, np.array([np.nan, np.nan]), ends)).all()
        assert running.count == 0


class TestStacking:
    @ROADS
    def test_the_order_of_score_wrappers_is_the_order_of_their_formulas(self, road):
        response = [GOOD] * 5
        penalised_first = lambda w, e: w.NormalizeScore(w.MissingEOSPenalty(e, 0.5), mean=0.2, std=2.0)  # noqa: E731
        normalised_first = lambda w, e: w.MissingEOSPenalty(w.NormalizeScore(e, mean=0.2, std=2.0), 0.5)  # noqa: E731
        rewards, info = play(make(road, penalised_first, scorer=Scores(1.2)), response)
        assert (rewards[-1], info["shaped_score"]) == (pytest.approx(0.25), pytest.approx(0.25))
        rewards, info = play(make(road, normalised_first, scorer=Scores(1.2)), response)
        assert (rewards[-1], info["shaped_score"]) == (pytest.approx(0.0), pytest.approx(0.0))
        assert info["score"] == 1.2

    @ROADS
    def test_the_toll_may_be_anywhere(self, road):
        toll, response = kl(0.3, 0.1, -1.0, 0.2, 0.4, kl_coef=0.1), [GOOD] * 5
        above = lambda w, e: toll(w, w.MissingEOSPenalty(e, 0.5))  # noqa: E731
        below = lambda w, e: w.MissingEOSPenalty(toll(w, e), 0.5)  # noqa: E731
        for stack in (above, below):
            rewards, info = play(make(road, stack, scorer=Scores(1.2)), response)
            np.testing.assert_allclose(rewards, [-0.03, -0.01, 0.1, -0.02, 0.7 - 0.04], atol=1e-12)
            assert (info["kl"], info["shaped_score"]) == (pytest.approx(0.0), pytest.approx(0.7))

    @ROADS
    def test_two_tolls_add_up(self, road):
        stack = lambda w, e: kl(1.0, 1.0, kl_coef=0.1)(w, kl(2.0, 0.0, kl_coef=0.2)(w, e))  # noqa: E731
        rewards, _ = play(make(road, stack, scorer=Scores(1.0)), [GOOD, END])
        assert rewards == pytest.approx([-0.1 - 0.4, 1.0 - 0.1])


def shaped(wrappers: Any, env: Any) -> Any:
    """The worked example: rewards -0.03, -0.01, 0.1 and the score."""
    return kl(0.3, 0.1, -1.0, 0.0, kl_coef=0.1)(wrappers, wrappers.MissingEOSPenalty(env, 0.5))


EXAMPLE, EXAMPLE_REWARDS = [VERY, GOOD, DOT, END], [-0.03, -0.01, 0.1, 1.2]


class TestOthersWrappers:
    def test_record_episode_statistics(self):
        above = gym.wrappers.RecordEpisodeStatistics(make("single", shaped, scorer=Scores(1.2)))
        info = play(above, EXAMPLE)[1]
        assert (info["episode"]["r"], info["episode"]["l"]) == (pytest.approx(1.26), 4)
        below = shaped(single_wrappers, gym.wrappers.RecordEpisodeStatistics(make("single", lambda _, e: e)))
        rewards, info = play(below, EXAMPLE)
        assert info["episode"]["r"] == pytest.approx(info["score"])
        assert sum(rewards) == pytest.approx(info["score"] + 0.06)

    def test_transform_reward_above_and_below(self):
        double = lambda env: gym.wrappers.TransformReward(env, lambda r: 2 * r)  # noqa: E731
        above = double(make("single", shaped, scorer=Scores(1.2)))
        np.testing.assert_allclose(play(above, EXAMPLE)[0], np.multiply(2, EXAMPLE_REWARDS), atol=1e-12)
        below = shaped(single_wrappers, double(make("single", lambda _, e: e, scorer=Scores(1.2))))
        np.testing.assert_allclose(play(below, EXAMPLE)[0], [-0.03, -0.01, 0.1, 2.4], atol=1e-12)

    def test_time_limit_above_and_below(self):
        above = gym.wrappers.TimeLimit(make("single", shaped), 2)
        steps = write(above, [GOOD, GOOD])
        assert steps["ends"] == [(False, False), (False, True)]
        assert "score" not in steps["info"]  # cut from outside: the response was never finished
        below = shaped(single_wrappers, gym.wrappers.TimeLimit(make("single", lambda _, e: e), 2))
        steps = write(below, [GOOD, GOOD])
        assert steps["ends"] == [(False, False), (False, True)]
        np.testing.assert_allclose(steps["rewards"], [-0.03, -0.01], atol=1e-12)
        assert steps["info"]["kl"] == pytest.approx(0.4)
        assert play(below, [END])[1]["kl"] == pytest.approx(0.3)

    def test_order_enforcing(self):
        env = gym.wrappers.OrderEnforcing(make("single", shaped))
        with pytest.raises(gym.error.ResetNeeded):
            env.step(GOOD)
        assert len(play(env, EXAMPLE)[0]) == 4

    @MODES
    def test_vector_transform_reward(self, mode):
        envs = make("vector", shaped, mode=mode, scorer=Scores(1.2, 1.2, 1.2))
        doubled = gym.wrappers.vector.TransformReward(envs, lambda r: 2 * r)
        np.testing.assert_allclose(play(doubled, EXAMPLE)[0], np.multiply(2, EXAMPLE_REWARDS), atol=1e-12)
        one_by_one = gym.wrappers.vector.VectorizeTransformReward(
            envs, wrapper=gym.wrappers.TransformReward, func=lambda r: 2 * r
        )
        np.testing.assert_allclose(play(one_by_one, EXAMPLE)[0], np.multiply(2, EXAMPLE_REWARDS), atol=1e-12)

    @MODES
    @pytest.mark.parametrize("inside", [False, True])
    def test_vector_record_episode_statistics(self, mode, inside):
        recorder = gym.wrappers.vector.RecordEpisodeStatistics
        base = TextGenerationVectorEnv(2, text_task(), autoreset_mode=mode)
        envs = shaped(vector_wrappers, recorder(base)) if inside else recorder(shaped(vector_wrappers, base))
        returns, lengths, totals = [], [], np.zeros(2)
        _, infos = envs.reset(seed=0)
        resetting = np.zeros(2, dtype=bool)
        for step in range(30):
            actions = np.array([END if step % 3 == 2 else GOOD, END if step % 7 == 6 else GOOD])
            _, rewards, terminations, truncations, infos = envs.step(actions)
            ended, ends = terminations | truncations, infos.get("final_info", infos)
            totals = np.where(resetting, 0.0, totals + rewards)
            if ended.any():
                counted = ends["score"] if inside else totals
                np.testing.assert_allclose(infos["episode"]["r"][ended], counted[ended], atol=1e-12)
                assert infos["episode"]["l"][ended].tolist() == ends["response_length"][ended].tolist()
                returns.extend(totals[ended])
                lengths.extend(ends["response_length"][ended])
                totals[ended] = 0.0
            resetting = ended if mode is AutoresetMode.NEXT_STEP else ended & False
            if mode is AutoresetMode.DISABLED and ended.any():
                envs.reset(options={"reset_mask": ended})
        assert len(set(lengths)) > 2


class TestCheckpoints:
    @ROADS
    def test_a_restored_stack_goes_on_as_the_original(self, road):
        def stack(wrappers, env):
            env = wrappers.MissingEOSPenalty(wrappers.NormalizeScore(env), 0.5)
            return kl(0.5, 0.25, 0.1, 0.1, 0.1, kl_coef=0.1, target_kl=0.4, episodes_per_update=2)(wrappers, env)

        def layers(env):
            while hasattr(env, "env"):
                yield env
                env = env.env

        env, twin = make(road, stack), make(road, stack)
        for response in ([GOOD, END], [BAD, BAD, END], [END]):
            play(env, response)
        saved = json.loads(json.dumps([layer.state_dict() for layer in layers(env)]))
        assert saved[0] == {"kl_coef": pytest.approx(0.1 * 1.02), "finished": [0.5]}
        assert saved[1] == {}
        assert saved[2]["count"] == 3
        for layer, state in zip(layers(twin), saved, strict=True):
            layer.load_state_dict(state)
        for response in ([GOOD, GOOD, END], [END], [GOOD] * 5):
            env.reset(options={"prompt": " a film"})
            twin.reset(options={"prompt": " a film"})
            for token in response:
                action = token if road == "single" else np.array([token])
                assert_same(env.step(action), twin.step(action))

    def test_the_generators_of_a_vector(self):
        envs, twin = (make("vector", lambda _, e: e, num_envs=3) for _ in range(2))
        envs.reset(seed=4)
        twin.load_state_dict(json.loads(json.dumps(envs.state_dict())))
        for _ in range(4):
            assert envs.reset()[1]["prompt"].tolist() == twin.reset()[1]["prompt"].tolist()
