"""Scores by length, repetition and bounds: worked examples, beside what plausible wrong variants would give."""

from __future__ import annotations

import doctest
import json
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from helpers import BAD, END, FILM, GOOD, VERY, A, S, assert_same, text_task, write

from textenv import TextGenerationEnv, TextGenerationVectorEnv
from textenv import wrappers as single_wrappers
from textenv.wrappers import response_penalties, response_wrappers
from textenv.wrappers import vector as vector_wrappers
from textenv.wrappers.response_penalties import Length, Repetition, overlong, repeated_share
from textenv.wrappers.scores import Clip, Ends, Normalize, shape_scores

ROADS = pytest.mark.parametrize("road", ["single", "vector"])


class Scores:
    """A scorer that gives the numbers of a list one after the other."""

    def __init__(self, *scores: Any) -> None:
        self.scores = list(scores)

    def __call__(self, prompts: list[str], _responses: list[str]) -> list[Any]:
        return [self.scores.pop(0) for _ in prompts]


def make(road: str, stack: Any, num_envs: int = 1, **task: Any) -> Any:
    if road == "single":
        return stack(single_wrappers, TextGenerationEnv(text_task(**task)))
    return stack(vector_wrappers, TextGenerationVectorEnv(num_envs, text_task(**task)))


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
    return rewards, {key: values[0] for key, values in infos.items() if not key.startswith("_")}


def ends(*lengths: int, responses: Any = None, reasons: Any = None) -> Ends:
    count = len(lengths)
    return Ends(reasons or ["stop"] * count, np.array(lengths, dtype=np.int64), responses or [""] * count)


@pytest.mark.parametrize("module", [response_penalties, response_wrappers], ids=lambda module: module.__name__)
def test_docstring_examples_run(module):
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted >= 2


class TestLengthPenalty:
    @ROADS
    @pytest.mark.parametrize(
        ("response", "shaped"),
        [
            ([END], 2.0 - 0.3),  # the stop id is a token of the response: not 2.0
            ([GOOD, GOOD, END], 2.0 - 0.9),
            ([GOOD] * 5, 2.0 - 1.5),
        ],
    )
    def test_linear_by_hand(self, road, response, shaped):
        rewards, info = play(make(road, lambda w, e: w.LengthPenalty(e, 0.3), scorer=Scores(2.0)), response)
        assert rewards[:-1] == [0.0] * (len(response) - 1)  # not 0.3 at each token: the score alone is lowered
        assert rewards[-1] == pytest.approx(shaped)
        assert (info["score"], info["shaped_score"]) == (2.0, pytest.approx(shaped))

    @ROADS
    @pytest.mark.parametrize(
        ("response", "shaped"),
        [
            ([END], 2.0),
            ([GOOD, END], 2.0),  # 5 - 3 tokens: the ramp begins behind them
            ([GOOD, GOOD, END], 2.0 - 0.6 / 3),
            ([GOOD] * 3 + [END], 2.0 - 0.6 * 2 / 3),
            ([GOOD] * 4 + [END], 2.0 - 0.6),
            ([GOOD] * 5, 2.0 - 0.6),  # cut
        ],
    )
    def test_soft_overlong_by_hand(self, road, response, shaped):
        env = make(road, lambda w, e: w.LengthPenalty(e, 0.6, mode="soft-overlong", cache=3), scorer=Scores(2.0))
        assert play(env, response)[0][-1] == pytest.approx(shaped)

    def test_the_papers_numbers(self):
        """DAPO's own setting: 20,480 tokens, the last 4,096 of them the cache."""
        lengths = np.array([1, 16_384, 16_385, 18_432, 20_480])
        assert overlong(lengths, 20_480, 4_096).tolist() == [0.0, 0.0, 1 / 4_096, 0.5, 1.0]
        # eq. 13 as it is printed, a reward: the other sign, and its middle piece written the other way round
        middle = ((20_480 - 4_096) - lengths[2:4]) / 4_096
        np.testing.assert_allclose(-overlong(lengths[2:4], 20_480, 4_096), middle, atol=1e-12)

    def test_it_never_goes_beyond_the_coefficient(self):
        assert overlong(np.array([10, 11, 99]), 10, 4).tolist() == [1.0, 1.0, 1.0]

    def test_a_ramp_over_the_whole_budget_is_linear(self):
        lengths = np.arange(1, 11)
        scores = np.zeros(10)
        whole = Length(1.0, "soft-overlong", 10, 10)(scores, ends(*lengths))
        np.testing.assert_allclose(whole, Length(0.1, "linear", None, 10)(scores, ends(*lengths)), atol=1e-12)
        hard = Length(1.0, "soft-overlong", 1, 10)(scores, ends(*lengths))
        assert hard.tolist() == [0.0] * 9 + [-1.0]

    @ROADS
    def test_the_budget_is_the_tasks(self, road):
        stack = lambda w, e: w.LengthPenalty(e, 1.0, "soft-overlong", 2)  # noqa: E731
        env = make(road, stack, max_response_tokens=3, scorer=Scores(0.0, 0.0, 0.0))
        assert [play(env, response)[0][-1] for response in ([END], [A, END], [A, A, END])] == [0.0, -0.5, -1.0]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"coef": -0.1}, r"`coef` should be a finite number of at least 0 .* got -0\.1.*reward long responses"),
            ({"coef": math.nan}, r"`coef` should be a finite number"),
            ({"coef": math.inf}, r"`coef` should be a finite number"),
            ({"coef": "0.1"}, r"`coef` should be a finite number .* got '0\.1'"),
            ({"coef": 0.1, "mode": "soft"}, r"`mode` should be one of \('linear', 'soft-overlong'\), got 'soft'"),
            ({"coef": 0.1, "cache": 3}, r"`cache` should be left out in mode 'linear', got 3: it would be ignored"),
            ({"coef": 0.1, "mode": "soft-overlong"}, r"`cache` should be .* from 1 to the budget of 5 .* got None"),
            ({"coef": 0.1, "mode": "soft-overlong", "cache": 0}, r"got 0\. The penalty grows over the last"),
            ({"coef": 0.1, "mode": "soft-overlong", "cache": 6}, r"from 1 to the budget of 5 .* got 6"),
            ({"coef": 0.1, "mode": "soft-overlong", "cache": 2.0}, r"got 2\.0"),
            ({"coef": 0.1, "mode": "soft-overlong", "cache": True}, r"got True"),
        ],
    )
    @ROADS
    def test_bad_input(self, road, options, message):
        with pytest.raises(ValueError, match=message):
            make(road, lambda w, e: w.LengthPenalty(e, **options))

    @pytest.mark.parametrize("name", ["LengthPenalty", "ScoreEvery"])
    def test_below_it_must_be_a_text_environment(self, name):
        with pytest.raises(TypeError, match=rf"{name} should wrap a text environment.*got CartPoleEnv"):
            getattr(single_wrappers, name)(gym.make("CartPole-v1"), 1)
        singles = gym.vector.SyncVectorEnv([lambda: TextGenerationEnv(text_task())])
        with pytest.raises(TypeError, match=r"got SyncVectorEnv\. .*use the wrapper of `textenv\.wrappers` on each"):
            getattr(vector_wrappers, name)(singles, 1)


class TestRepetitionPenalty:
    @pytest.mark.parametrize(
        ("text", "n", "share"),
        [
            ("so good so good so good", 2, 3 / 5),
            ("so good so good so good", 1, 4 / 6),
            ("so good so good so good", 3, 2 / 4),
            ("So GOOD so good", 2, 1 / 3),  # one case
            ("a b c d", 2, 0.0),
            ("a a a a a a a a a a a", 2, 9 / 10),
            ("a b", 3, 0.0),  # too short to repeat
            ("", 1, 0.0),
        ],
    )
    def test_the_share_by_hand(self, text, n, share):
        assert repeated_share([text], n).tolist() == [pytest.approx(share)]

    def test_it_is_the_complement_of_the_logged_figure_of_one_text(self):
        from textenv.metrics import distinct_n

        for text in ("a b a b c", "x y z", "q q q"):
            assert repeated_share([text], 2)[0] == pytest.approx(1 - distinct_n([text], 2))

    def test_texts_do_not_repeat_one_another(self):
        together = repeated_share(["a b c", "a b c"], 2)
        assert together.tolist() == [0.0, 0.0]  # pooled over the batch it would be 1/2

    @ROADS
    def test_by_hand(self, road):
        env = make(road, lambda w, e: w.RepetitionPenalty(e, 0.5, n=2), scorer=Scores(1.0, 1.0))
        rewards, info = play(env, [VERY, GOOD, VERY, GOOD, END])  # (very good) (good very) (very good): 1/3 repeats
        assert rewards == [0.0, 0.0, 0.0, 0.0, pytest.approx(1.0 - 0.5 / 3)]
        assert (info["score"], info["shaped_score"]) == (1.0, pytest.approx(1.0 - 0.5 / 3))
        rewards, info = play(env, [VERY, GOOD, FILM, S, END])  # "very good films": the text counts, not its tokens
        assert (info["response"], rewards[-1]) == (" very good films", 1.0)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"coef": -1.0}, r"got -1\.0.*reward repetitive responses"),
            ({"coef": math.nan}, r"`coef` should be a finite number"),
            ({"n": 0}, r"`n` should be a number of words of at least 1, got 0"),
            ({"n": 2.0}, r"`n` should be .* got 2\.0"),
            ({"n": True}, r"`n` should be .* got True"),
        ],
    )
    @ROADS
    def test_bad_input(self, road, options, message):
        with pytest.raises(ValueError, match=message):
            make(road, lambda w, e: w.RepetitionPenalty(e, **options))


class TestClipScore:
    @ROADS
    def test_by_hand(self, road):
        env = make(road, lambda w, e: w.ClipScore(e, -1.0, 2.0), scorer=Scores(-3.0, 0.5, 7.0))
        played = [play(env, [GOOD, END]) for _ in range(3)]
        assert [rewards for rewards, _ in played] == [[0.0, -1.0], [0.0, 0.5], [0.0, 2.0]]
        assert [info["score"] for _, info in played] == [-3.0, 0.5, 7.0]
        assert [info["shaped_score"] for _, info in played] == [-1.0, 0.5, 2.0]

    @ROADS
    def test_the_order_in_the_stack_says_what_is_clipped(self, road):
        above = make(road, lambda w, e: w.ClipScore(w.NormalizeScore(e, 10.0, 2.0), -1.0, 1.0), scorer=Scores(11.0))
        below = make(road, lambda w, e: w.NormalizeScore(w.ClipScore(e, -1.0, 1.0), 10.0, 2.0), scorer=Scores(11.0))
        assert play(above, [END])[0] == [0.5]
        assert play(below, [END])[0] == [-4.5]

    @ROADS
    def test_running_figures_below_are_of_unclipped_scores(self, road):
        env = make(road, lambda w, e: w.ClipScore(w.NormalizeScore(e), -0.5, 0.5), scorer=Scores(0.0, 4.0, 8.0))
        assert [play(env, [END])[0][0] for _ in range(3)] == pytest.approx([0.0, 0.5, 0.5], abs=1e-12)
        assert env.env.shaper.mean == 4.0

    @ROADS
    def test_the_toll_is_not_clipped(self, road):
        policy, reference = (lambda _, a: np.full(len(a), -1.0)), (lambda _, a: np.full(len(a), -4.0))
        stack = lambda w, e: w.ClipScore(w.KLPenalty(e, reference, policy, kl_coef=1.0), -1.0, 1.0)  # noqa: E731
        assert play(make(road, stack, scorer=Scores(5.0)), [GOOD, END])[0] == [-3.0, 1.0 - 3.0]

    def test_one_side_may_be_open(self):
        scores = np.array([-9.0, 9.0])
        assert Clip(-math.inf, 1.0)(scores, ends(1, 1)).tolist() == [-9.0, 1.0]
        assert Clip(-1, math.inf)(scores, ends(1, 1)).tolist() == [-1.0, 9.0]

    @ROADS
    @pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (None, 1.0)])
    def test_bad_input(self, road, low, high):
        with pytest.raises(ValueError, match=r"`low` and `high` should be numbers with low < high, got"):
            make(road, lambda w, e: w.ClipScore(e, low, high))


class TestEnds:
    def test_shapers_see_the_responses_that_belong_to_their_scores(self):
        """Rows end at different steps, and dropped ones in between: lengths and texts must stay with their scores."""
        seen = []

        class Spy(Normalize):
            def __call__(self, scores, ends):
                seen.append((scores.tolist(), list(ends.finish_reasons), ends.lengths.tolist(), list(ends.responses)))
                return scores

        envs = TextGenerationVectorEnv(
            4, text_task(scorer=lambda p, r: [None if "bad" in t else len(t) for t in r], scorer_errors="drop")
        )
        envs = vector_wrappers.NormalizeScore(envs)
        envs.shaper = Spy(None, None)
        envs.reset()
        for actions in ([GOOD, A, BAD, END], [END, A, END, GOOD], [GOOD, END, GOOD, END]):
            envs.step(np.array(actions))
        assert seen == [
            ([0.0], ["stop"], [1], [""]),
            ([5.0], ["stop"], [2], [" good"]),  # the third row is dropped
            ([4.0, 0.0], ["stop", "stop"], [3, 1], [" a a", ""]),  # rows 2 and 4, whose second episode this is
        ]

    def test_where(self):
        some = Ends(["stop", "length", "stop"], np.array([1, 5, 3]), ["x", "y", "z"])
        kept = some.where(np.array([True, False, True]))
        assert (kept.finish_reasons, kept.lengths.tolist(), kept.responses) == (["stop", "stop"], [1, 3], ["x", "z"])

    @pytest.mark.parametrize("shaper", [Clip(-1.0, 1.0), Length(0.1, "linear", None, 5), Repetition(0.5, 2)])
    def test_dropped_samples_stay_dropped_and_shapers_leave_their_input(self, shaper):
        scores = np.array([np.nan, 3.0])
        scores.setflags(write=False)
        shaped = shape_scores(shaper, scores, ends(2, 4, responses=["a a a", "b b b b"]))
        assert math.isnan(shaped[0])
        assert shaped[1] == pytest.approx(
            {"Clip": 1.0, "Length": 2.6, "Repetition": 3.0 - 0.5 * 2 / 3}[type(shaper).__name__]
        )
        assert shaper.state_dict() == {}
        shaper.load_state_dict({})


class TestShapingOptions:
    def test_order_and_formula(self):
        env = gym.make(
            "textenv/Toy-v0", normalize_score=True, clip_score=0.75, missing_eos_penalty=0.5, length_penalty=0.1
        )
        names = str(env)
        order = ["LengthPenalty", "MissingEOSPenalty", "ClipScore", "NormalizeScore"]
        assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
        # scores 1, 3.5 and -1 (seven 5s would be lower): centred, then over their deviation, then clipped to 0.75
        assert write(env, [3, 3, 0])["rewards"][-1] == pytest.approx(0.0 - 0.3)
        assert write(env, [3] * 7 + [0])["rewards"][-1] == pytest.approx(0.75 - 0.8)  # 1 deviation, clipped
        assert write(env, [4] * 8)["rewards"][-1] == pytest.approx(-0.75 - 0.5 - 0.8)

    def test_single_is_vector(self):
        options = {"clip_score": 0.75, "length_penalty": 0.1}
        env, envs = gym.make("textenv/Toy-v0", **options), gym.make_vec("textenv/Toy-v0", num_envs=1, **options)
        for response in ([3, 3, 0], [3] * 8, [5, 5, 5, 5, 0]):
            assert play(envs, response)[0] == write(env, response)["rewards"]

    def test_spec_through_json(self):
        env = gym.make("textenv/Toy-v0", clip_score=2.0, length_penalty=0.25)
        twin = gym.make(EnvSpec.from_json(env.spec.to_json()))
        assert json.loads(twin.spec.to_json()) == json.loads(env.spec.to_json())
        assert_same(write(env, [3] * 8), write(twin, [3] * 8))
        assert write(twin, [3] * 8)["rewards"][-1] == 2.0 - 2.0  # 4 - 1 for not stopping, clipped to 2, 8 tokens

    @pytest.mark.parametrize("clip_score", [0.0, -1.0, math.nan])
    def test_bad_input(self, clip_score):
        with pytest.raises(ValueError, match=r"`clip_score` should be above 0, got"):
            gym.make("textenv/Toy-v0", clip_score=clip_score)
