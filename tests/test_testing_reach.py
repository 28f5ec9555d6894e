"""What the conformance kit reaches, what it says of the rest, and that it leaves the caller's things alone."""

from __future__ import annotations

import copy
import pickle
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers import BAD, GOOD, PROMPTS, VOCAB_SIZE, CountingScorer, PrefixLogprobs, assert_same, text_task
from mutants import RecordsOtherArguments, RightPadding, ScorePaidTwice, Step

from textenv import TextGenerationEnv, TextGenerationVectorEnv, TextTask, wrappers
from textenv.testing import CHECKS, ConformanceError, Report, Violation, check_text_env
from textenv.testing.comparing import difference
from textenv.testing.stand_in import StandIn
from textenv.toy import standard_toy
from textenv.wrappers import vector as vector_wrappers

MODES = {f"vector {mode.name}" for mode in AutoresetMode}
OF_VECTORS = {*MODES, "row seeds", "replay"}


class MyEnv(TextGenerationEnv):
    """A user's own."""


class MyVectorEnv(TextGenerationVectorEnv):
    """A user's own."""


class Both(ScorePaidTwice, RightPadding):
    """Breaks two rules."""


def text_env(**changes):
    return TextGenerationEnv(text_task(**changes))


class TestWhatItTakes:
    def test_an_environment(self):
        report = check_text_env(text_env())
        assert set(report.passed) == set(CHECKS) - {"spec"}
        assert report.skipped == {
            "spec": "the environment was not made by gym.make",
            "reset needed (before the first reset)": "it may have been reset; pass an id or a factory",
        }

    def test_a_factory(self):
        assert check_text_env(text_env).skipped == {"spec": "the environment was not made by gym.make"}

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_rows(self, mode):
        report = check_text_env(TextGenerationVectorEnv(2, text_task(), autoreset_mode=mode))
        assert set(report.passed) == set(CHECKS) - {"spec"}

    def test_a_subclass_alone(self):
        report = check_text_env(lambda: MyEnv(text_task()))
        assert set(report.passed) == set(CHECKS) - {"spec", *OF_VECTORS}
        for name in OF_VECTORS:
            assert "MyEnv has no known vector form; pass make_vector" in report.skipped[name]

    def test_a_subclass_with_its_vector_form(self):
        report = check_text_env(
            lambda: MyEnv(text_task()),
            make_vector=lambda n, mode: MyVectorEnv(n, text_task(), autoreset_mode=mode),
            num_envs=2,
        )
        assert set(report.passed) == set(CHECKS) - {"spec"}

    @pytest.mark.parametrize("given", ["factory", "instance"])
    def test_a_vector_subclass_alone(self, given):
        def make():
            return MyVectorEnv(3, text_task(), autoreset_mode="SameStep")

        report = check_text_env(make if given == "factory" else make())
        assert {"vector SAME_STEP", "row seeds", "replay", "deepcopy", "determinism"} <= set(report.passed)
        assert "these environments have autoreset_mode SAME_STEP" in report.skipped["vector NEXT_STEP"]
        assert "no single form" in report.skipped["vector SAME_STEP (equal to single)"]
        assert "no known single form" in report.skipped["episodes"]
        assert ("reset needed (before the first reset)" in report.skipped) is (given == "instance")

    def test_wrapped_rows(self):
        envs = vector_wrappers.MissingEOSPenalty(TextGenerationVectorEnv(2, text_task()), 0.5)
        report = check_text_env(envs)
        assert {"vector NEXT_STEP", "replay", "pickle"} <= set(report.passed)
        assert "no single form with the same wrappers" in report.skipped["vector NEXT_STEP (equal to single)"]

    def test_what_an_id_made_is_compared_with_all_its_wrappers(self):
        options = {"missing_eos_penalty": 0.5}
        for made in (gym.make("textenv/Toy-v0", **options), gym.make_vec("textenv/Toy-v0", 2, **options)):
            report = check_text_env(made)
            assert set(report.passed) == set(CHECKS)
            assert not [name for name in report.skipped if "equal" in name]

    def test_a_wrapper_more_than_the_id_makes_is_compared_without(self):
        report = check_text_env(wrappers.MissingEOSPenalty(gym.make("textenv/Toy-v0"), 0.5))
        assert set(report.passed) == set(CHECKS)

    def test_keyword_arguments_without_an_id(self):
        with pytest.raises(TypeError, match=r"need an id, got \['kl_coef'\] with TextGenerationEnv"):
            check_text_env(text_env(), kl_coef=0.1)

    @pytest.mark.parametrize("nothing", [3, None, lambda: "an id"])
    def test_nothing_to_check(self, nothing):
        with pytest.raises(TypeError, match="should be an id, a Gymnasium environment"):
            check_text_env(nothing)

    def test_an_environment_of_something_else(self):
        with pytest.raises(TypeError, match=r"should have its TextTask as .*, got NoneType"):
            check_text_env("CartPole-v1")


class TestWhatItSays:
    def test_the_report_can_be_printed(self):
        report = Report("x", ("spaces",), {"spec": "why not"})
        assert str(report).splitlines() == [
            "Conformance of x: 1 checks passed, 1 not reached",
            "  passed   spaces",
            "  skipped  spec: why not",
        ]

    def test_all_violations_in_one_error(self):
        with pytest.raises(ConformanceError) as caught:
            check_text_env(lambda: Both(text_task()))
        text, error = str(caught.value), caught.value
        assert isinstance(error, AssertionError)
        assert "breaks 2 of the rules" in text
        assert "[prompt columns] Otherwise models read pads as text" in text
        assert re.search(r"the last reward should be the score [\d.]+, once, got [\d.]+", text)
        assert "and 2 more of the kind" in text
        assert "Not reached:\n" in text and "- replay: Both has no known vector form" in text
        assert {v.check for v in error.violations} == {"prompt columns", "rewards"}
        assert "spaces" in error.report.passed and "rewards" not in error.report.passed

    def test_the_error_can_be_pickled(self):
        error = ConformanceError((Violation("ends", "m"),), Report("x", (), {}), CHECKS)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert "Not reached" not in str(error)

    def test_every_check_has_a_consequence(self):
        assert all(text and not text.endswith(".") for text in CHECKS.values())


class TestWhatItCannotReach:
    def test_a_scorer_that_cannot_be_pickled(self):
        report = check_text_env(lambda: text_env(scorer=lambda p, r: [0.5] * len(r)))
        assert "pickle" in report.passed  # the rest of it
        assert "Can't pickle" in report.skipped["pickle (task.scorer)"]

    def test_a_scorer_that_cannot_be_copied(self):
        class Connected(CountingScorer):
            def __deepcopy__(self, memo):
                raise TypeError("an open connection")

            def __getstate__(self):
                raise TypeError("an open connection")

        scorer = Connected()
        report = check_text_env(text_env(scorer=scorer))  # copies share it
        assert {"deepcopy", "pickle"} <= set(report.passed)
        assert "an open connection" in report.skipped["deepcopy (task.scorer)"]
        assert "fresh copies (single)" not in report.skipped

    def test_a_wrapper_that_cannot_be_pickled(self):
        report = check_text_env(lambda: gym.wrappers.TransformReward(text_env(), lambda reward: 2 * reward))
        assert "TransformReward" in report.skipped["pickle (wrappers)"]
        assert "TransformReward may pay per token" in report.skipped["rewards (0 before the end, with wrappers)"]

    def test_an_environment_that_cannot_be_copied_is_used_itself(self):
        class Stuck(gym.Wrapper):
            def __deepcopy__(self, memo):
                raise TypeError("stuck")

        report = check_text_env(Stuck(text_env()))
        assert "a copy gave TypeError: stuck" in report.skipped["fresh copies (single)"]
        assert "only one environment" in report.skipped["aliasing (edited observations)"]
        assert "determinism" in report.passed

    def test_arguments_that_json_does_not_hold(self):
        report = check_text_env("textenv/Toy-v0", language=standard_toy())
        assert "the argument 'language' is a ToyLanguage" in report.skipped["spec"]
        assert MODES <= set(report.passed)

    def test_a_spec_that_makes_nothing(self):
        env = gym.make("textenv/Toy-v0")
        env.unwrapped.spec.kwargs["length_limit"] = "no such limit"
        with pytest.raises(ConformanceError, match=r"(?s)\[spec\].*got ValueError: `length_limit` should be one of"):
            check_text_env(env)

    def test_an_entry_point_that_is_no_text(self):
        gym.register("test/Function-v0", entry_point=text_env)
        try:
            assert "a function as its entry point" in check_text_env("test/Function-v0").skipped["spec"]
        finally:
            del gym.registry["test/Function-v0"]

    def test_wrappers_that_do_not_record_their_arguments(self):
        class Silent(gym.Wrapper):
            pass

        report = check_text_env(Silent(gym.make("textenv/Toy-v0")))
        assert "Silent does not record its arguments" in report.skipped["spec"]

    def test_one_prompt_only(self):
        report = check_text_env(lambda: text_env(prompts=PROMPTS[:1]))
        assert "eight seeds began with one and the same prompt (of 1)" in report.skipped["determinism (other seeds)"]

    def test_no_stop_ids(self):
        report = check_text_env(lambda: text_env(stop_ids=[]))
        assert report.skipped["ends (by a stop id)"] == "the task has no stop ids"
        assert "ends" in report.passed

    def test_nothing_but_stop_ids(self):
        report = check_text_env(lambda: text_env(stop_ids=range(VOCAB_SIZE)))
        assert "left no id that is no stop id" in report.skipped["ends (by the budget)"]

    @pytest.mark.filterwarnings("ignore:None of the stop ids:UserWarning")
    def test_a_stop_that_is_not_allowed(self):
        report = check_text_env(lambda: wrappers.ActionMask(text_env(), allowed_ids=[GOOD, BAD]))
        assert "ends (by a stop id)" not in report.skipped  # reached without the wrapper
        assert "episodes" in report.passed

    def test_no_render_mode(self):
        report = check_text_env(lambda: TextGenerationEnv(text_task(), render_mode=None))
        assert "render (vector)" not in report.skipped and "render" in report.passed  # rows are built with "ansi"
        report = check_text_env(lambda: MyEnv(text_task(), render_mode=None))
        assert report.skipped["render"] == 'render_mode is not "ansi"'

    def test_rows_without_a_render_mode(self):
        report = check_text_env(
            text_env, make_vector=lambda n, mode: MyVectorEnv(n, text_task(), autoreset_mode=mode, render_mode=None)
        )
        assert "render_mode is None" in report.skipped["render (vector)"]

    def test_a_mode_that_cannot_be_made(self):
        def make_vector(num_envs, mode):
            if mode is AutoresetMode.DISABLED:
                raise NotImplementedError("no such mode")
            return MyVectorEnv(num_envs, text_task(), autoreset_mode=mode)

        report = check_text_env(text_env, make_vector=make_vector)
        assert report.skipped["vector DISABLED"] == "making 3 rows gave NotImplementedError: no such mode"
        assert "vector SAME_STEP" in report.passed

    def test_an_id_without_a_vector_form(self):
        gym.register("test/OnlySingle-v0", entry_point=text_env)
        try:
            report = check_text_env("test/OnlySingle-v0")
            assert "no vector entry point" in report.skipped["vector NEXT_STEP"]
            with_rows = check_text_env(
                "test/OnlySingle-v0", make_vector=lambda n, m: MyVectorEnv(n, text_task(), autoreset_mode=m)
            )
            assert MODES <= set(with_rows.passed)
        finally:
            del gym.registry["test/OnlySingle-v0"]

    def test_rows_of_single_environments(self):
        def make_vector(num_envs, mode):
            envs = gym.vector.SyncVectorEnv([text_env] * num_envs, autoreset_mode=mode)
            envs.task = text_task()
            return envs

        with pytest.raises(ConformanceError) as caught:
            check_text_env(text_env, make_vector=make_vector)
        # It steps the rows before a bad one, and has an error of its own for ended rows; all else is as it should be.
        assert {v.check for v in caught.value.violations} == {"bad actions", "reset needed"}
        assert {"row seeds", *MODES} <= set(caught.value.report.passed)

    def test_prompts_in_order(self):
        report = check_text_env(lambda: text_env(order="sequential"))
        assert "sequential order" in report.skipped["row seeds"]
        assert "sequential order" in report.skipped["vector (several rows equal to single)"]
        assert MODES <= set(report.passed)


class TestWrappers:
    def test_running_statistics_are_compared_with_one_row(self):
        report = check_text_env(
            lambda: wrappers.NormalizeScore(text_env()),
            make_vector=lambda n, m: vector_wrappers.NormalizeScore(
                TextGenerationVectorEnv(n, text_task(), autoreset_mode=m)
            ),
        )
        assert "depend on earlier episodes" in report.skipped["determinism (rewards after other episodes)"]
        assert {"replay", *MODES} <= set(report.passed)

    def test_running_statistics_of_rows_of_a_fixed_number(self):
        report = check_text_env(vector_wrappers.NormalizeScore(TextGenerationVectorEnv(2, text_task())))
        assert "these environments have 2 rows, and 1 were wanted" in report.skipped["replay (NEXT_STEP)"]

    def test_running_statistics_where_one_row_cannot_be_made(self):
        def make_vector(num_envs, mode):
            if num_envs == 1:
                raise ValueError("at least two")
            return vector_wrappers.NormalizeScore(TextGenerationVectorEnv(num_envs, text_task(), autoreset_mode=mode))

        report = check_text_env(lambda: wrappers.NormalizeScore(text_env()), make_vector=make_vector)
        assert "at least two" in report.skipped["vector NEXT_STEP (equal to single)"]

    @pytest.mark.parametrize("estimator", ["k1", "k3", "exact", "cross_entropy"])
    def test_a_policy_is_made_up_for_the_toll_and_only_in_copies(self, estimator):
        task = text_task(reference=StandIn(VOCAB_SIZE, 3))
        env = wrappers.KLPenalty(TextGenerationEnv(task), estimator=estimator)
        report = check_text_env(
            env,
            make_vector=lambda n, m: vector_wrappers.KLPenalty(
                TextGenerationVectorEnv(n, task, autoreset_mode=m), estimator=estimator
            ),
        )
        assert {"replay", *MODES} <= set(report.passed)
        assert env.leash.policy_logprobs is None and env.leash.ref_logprobs is task.reference

    def test_a_policy_that_is_there_stays(self):
        policy = PrefixLogprobs(1)
        check_text_env(lambda: wrappers.KLPenalty(text_env(), PrefixLogprobs(2), policy))
        assert policy.calls > 0

    def test_constraints_together_with_a_toll(self):
        task = text_task(reference=StandIn(VOCAB_SIZE, 3))

        def stacked(family, env):
            return family.KLPenalty(family.ActionMask(family.MinLength(env, 2), top_k=4))

        report = check_text_env(
            lambda: stacked(wrappers, TextGenerationEnv(task)),
            make_vector=lambda n, m: stacked(vector_wrappers, TextGenerationVectorEnv(n, task, autoreset_mode=m)),
        )
        assert {"replay", "ends", *MODES} <= set(report.passed)

    def test_action_masks_of_somebody_elses_wrapper(self):
        class NoBad(gym.Wrapper):
            def action_masks(self):
                return np.arange(VOCAB_SIZE) != BAD

            def step(self, action):
                assert action != BAD, "forbidden"
                return self.env.step(action)

        assert "episodes" in check_text_env(lambda: NoBad(text_env())).passed

    def test_gymnasiums_own(self):
        def stacked(family, env):
            return family.RecordEpisodeStatistics(env)

        report = check_text_env(
            lambda: gym.wrappers.TimeLimit(stacked(gym.wrappers, text_env()), 10),
            make_vector=lambda n, m: stacked(
                gym.wrappers.vector, TextGenerationVectorEnv(n, text_task(), autoreset_mode=m)
            ),
        )
        assert set(report.passed) == set(CHECKS) - {"spec"}

    def test_observations_that_a_wrapper_transforms(self):
        report = check_text_env(lambda: gym.wrappers.FlattenObservation(text_env()))
        assert report.skipped["observations (through the wrappers)"] == "a wrapper transforms them"
        assert "observations" in report.passed  # without the wrapper

    def test_tensors(self):
        pytest.importorskip("torch")
        from gymnasium.wrappers.numpy_to_torch import NumpyToTorch

        report = check_text_env(lambda: NumpyToTorch(wrappers.ArrayInfos(text_env())))
        assert report.skipped["infos (through the wrappers)"] == "a wrapper takes the texts out of them"
        assert {"determinism", "infos"} <= set(report.passed)

    def test_a_time_limit_below_the_budget_loses_the_score(self):
        with pytest.raises(ConformanceError, match=r"(?s)\[ends\].*should be \(False, False\), got \(False, True\)"):
            check_text_env(lambda: gym.wrappers.TimeLimit(text_env(), 2))

    def test_a_wrapper_that_breaks_a_rule(self):
        with pytest.raises(ConformanceError) as caught:
            check_text_env(lambda: gym.wrappers.TransformReward(text_env(), lambda reward: np.nan * reward))
        assert {v.check for v in caught.value.violations} == {"rewards"}

    def test_vector_wrappers_that_break_a_rule(self):
        def make_vector(num_envs, mode):
            envs = TextGenerationVectorEnv(num_envs, text_task(), autoreset_mode=mode)
            return gym.wrappers.vector.TransformReward(envs, lambda rewards: 0 * rewards)

        with pytest.raises(ConformanceError) as caught:
            check_text_env(lambda: gym.wrappers.TransformReward(text_env(), lambda r: 2 * r), make_vector=make_vector)
        assert {v.check for v in caught.value.violations} == {"vector NEXT_STEP"}

    def test_a_spec_that_makes_something_else(self):
        module = RecordsOtherArguments.__module__
        with pytest.raises(ConformanceError) as caught:
            check_text_env(RecordsOtherArguments(gym.make("textenv/Toy-v0"), factor=3.0))
        assert {v.check for v in caught.value.violations} == {"spec"}, module
        assert "spec" in check_text_env(RecordsOtherArguments(gym.make("textenv/Toy-v0"))).passed

    def test_inside_first(self):
        with pytest.raises(ConformanceError) as caught:
            check_text_env(lambda: gym.wrappers.RecordEpisodeStatistics(ScorePaidTwice(text_task())))
        assert "what is inside breaks rules already" in caught.value.report.skipped["single (with its wrappers)"]

    def test_inside_first_for_rows(self):
        class Twice(TextGenerationVectorEnv):
            def step(self, actions):
                observations, rewards, *rest = super().step(actions)
                return observations, 2 * rewards, *rest

        def make_vector(num_envs, mode):
            return gym.wrappers.vector.RecordEpisodeStatistics(Twice(num_envs, text_task(), autoreset_mode=mode))

        with pytest.raises(ConformanceError) as caught:
            check_text_env(text_env, make_vector=make_vector)
        assert {v.check for v in caught.value.violations} == {"rewards"}


class TestOwnership:
    def test_the_callers_environment_stays_where_it_is(self):
        env = text_env()
        env.reset(seed=4)
        env.step(GOOD)
        before = copy.deepcopy(env)
        check_text_env(env)
        assert_same(env.step(BAD), before.step(BAD))
        assert_same(env.reset(), before.reset())

    def test_global_generators_stay_where_they_are(self):
        state = np.random.get_state()  # noqa: NPY002 - the global one is what this is about
        check_text_env(text_env)
        assert_same(list(state), list(np.random.get_state()))  # noqa: NPY002

    def test_another_seed_writes_other_tokens(self):
        written = []
        for seed in (0, 0, 1):
            scorer = CountingScorer()
            check_text_env(lambda scorer=scorer: text_env(scorer=scorer), seed=seed)
            written.append(scorer.calls)
        assert written[0] == written[1] != written[2]

    def test_the_tolerance_is_for_scores_that_depend_on_the_batch(self):
        def uneven(_prompts, responses):
            return [1.0 + 0.01 * (len(responses) > 1)] * len(responses)

        assert "vector NEXT_STEP" in check_text_env(lambda: text_env(scorer=uneven), tolerance=0.1).passed
        with pytest.raises(ConformanceError, match="should equal a single environment"):
            check_text_env(lambda: text_env(scorer=uneven))


class TestDifferences:
    @pytest.mark.parametrize(
        ("left", "right", "found"),
        [
            (1.0, 1.05, None),
            (1.0, 1.2, "at: 1.0 and 1.2"),
            (float("nan"), float("nan"), None),
            (1, 1.0, None),
            ("a", "b", "at: 'a' and 'b'"),
            ([1, 2], [1], "at has 2 and 1 entries"),
            ({"a": 1}, {"b": 1}, "at has the keys ['a'] and ['b']"),
            ({"a": [0, 1]}, {"a": [0, 2]}, "at['a'][1]: 1 and 2"),
            ({"episode": {"t": 1.0}}, {}, None),
            (np.array([1, 2]), np.array([1, 3]), "at: [1, 2] and [1, 3]"),
            (np.array([1.0]), np.array([1.05]), None),
            (np.zeros(2), np.zeros(3), "at: float64 of shape (2,) and float64 of shape (3,)"),
            (np.zeros(2, int), np.zeros(2), "at: int64 of shape (2,) and float64 of shape (2,)"),
            (np.array([None, 1.0]), np.array([None, 1.2]), "at[1]: 1.0 and 1.2"),
        ],
    )
    def test_by_hand(self, left, right, found):
        assert difference(left, right, 0.1, "at") == found

    def test_tensors(self):
        torch = pytest.importorskip("torch")
        assert difference(torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0) is None
        assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0) is not None


class TestStandIn:
    def test_it_is_a_distribution_of_the_whole_prefix(self):
        model = StandIn(200, 1)
        observations = {"input_ids": np.array([[3, 4, 5], [3, 5, 4]]), "attention_mask": np.ones((2, 3), np.int8)}
        log_pi = model.next_logprobs(observations)
        np.testing.assert_allclose(np.exp(log_pi).sum(axis=1), 1.0, rtol=1e-12)
        actions = np.array([7, 150])
        np.testing.assert_array_equal(model(observations, actions), log_pi[[0, 1], actions])
        assert not np.allclose(log_pi[0], log_pi[1])
        assert not np.allclose(log_pi, StandIn(200, 2).next_logprobs(observations))

    def test_whole_responses(self):
        model = StandIn(11, 1)
        ids, real = np.array([[1, 2, 3, 4]]), np.array([[0, 1, 1, 1]], np.int8)
        whole = model.response_distributions(ids, real, 2)
        seen = {"input_ids": ids, "attention_mask": np.array([[0, 1, 1, 0]])}
        np.testing.assert_allclose(whole[0, 1], model.next_logprobs(seen)[0], rtol=1e-6)


def test_a_task_is_what_a_rule_is_read_from():
    """The check and the environment must not share a mistake: a wrong score is found by what `info` says of it."""

    class Generous(Step):
        def changed(self, observation, reward, terminated, truncated, info):
            return observation, reward + 1 if info else reward, terminated, truncated, info

    assert isinstance(text_task(), TextTask)
    with pytest.raises(ConformanceError, match="the last reward should be the score"):
        check_text_env(lambda: Generous(text_task()))
