"""One episode at a time: how responses end, what is scored, and that Gymnasium's own checks hold."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from helpers import (
    BAD,
    CLOSE,
    DOT,
    END,
    FILM,
    FILMS,
    GOOD,
    PROMPTS,
    VERY,
    A,
    CountingScorer,
    PieceTokenizer,
    S,
    assert_same,
    text_task,
    write,
)

from textenv import TextGenerationEnv
from textenv.wrappers import KLPenalty, MissingEOSPenalty, NormalizeScore

NEVER_STOPS = [GOOD, VERY, GOOD, A, BAD]


def text_env(**changes) -> TextGenerationEnv:
    return TextGenerationEnv(text_task(**changes))


def one_of_each_info(response, **changes):
    """The episode of a response after the prompt " a film" (0.7 for its seven characters)."""
    return write(text_env(**changes), response, options={"prompt": " a film"})


class TestEndsOfResponses:
    def test_the_stop_token_is_scored_and_belongs_to_the_response(self):
        steps = one_of_each_info([VERY, GOOD, END])
        assert steps["rewards"] == [0.0, 0.0, pytest.approx(1.7)]
        assert steps["ends"] == [(False, False), (False, False), (True, False)]
        assert steps["info"] == {
            "prompt": " a film",
            "response": " very good",
            "score": pytest.approx(1.7),
            "finish_reason": "stop",
            "response_length": 3,
        }
        assert steps["infos"][:3] == [{"prompt": " a film"}, {}, {}]

    def test_the_budget_cuts_and_the_last_token_stays_as_sampled(self):
        steps = one_of_each_info(NEVER_STOPS)
        assert steps["rewards"] == [0.0, 0.0, 0.0, 0.0, pytest.approx(1.7)]
        assert steps["ends"][-1] == (False, True)
        assert steps["info"]["finish_reason"] == "length"
        assert steps["info"]["response_length"] == 5
        assert steps["observation"]["input_ids"][-5:].tolist() == NEVER_STOPS
        assert steps["info"]["response"] == " good very good a bad"

    def test_stopping_at_once_is_an_empty_response(self):
        scorer = CountingScorer()
        steps = one_of_each_info([END], scorer=scorer)
        assert scorer.calls == [([" a film"], [""])]
        assert steps["rewards"] == [pytest.approx(0.7)]
        assert steps["ends"] == [(True, False)]
        assert (steps["info"]["response_length"], steps["info"]["response"]) == (1, "")
        assert steps["observation"]["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]

    def test_stopping_with_the_last_token_is_a_stop(self):
        steps = one_of_each_info([GOOD, GOOD, GOOD, GOOD, END])
        assert steps["ends"][-1] == (True, False)
        assert steps["info"]["finish_reason"] == "stop"

    @pytest.mark.parametrize("stop", [END, DOT, CLOSE])
    def test_any_of_three_stop_ids_ends_the_episode(self, stop):
        steps = one_of_each_info([GOOD, stop], stop_ids=[END, DOT, CLOSE])
        assert steps["ends"] == [(False, False), (True, False)]
        assert steps["info"]["finish_reason"] == "stop"

    def test_what_is_no_stop_id_ends_nothing(self):
        assert one_of_each_info([GOOD, DOT, CLOSE])["ends"] == [(False, False)] * 3

    @pytest.mark.parametrize("pad_id", [END, CLOSE])
    def test_a_pad_id_that_is_a_stop_id_changes_no_mask(self, pad_id):
        steps = one_of_each_info([GOOD, END], pad_id=pad_id)
        observation = steps["observation"]
        assert observation["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
        assert observation["input_ids"].tolist() == [pad_id] * 4 + [A, FILM, GOOD, END] + [pad_id] * 3
        assert steps["rewards"] == [0.0, pytest.approx(1.7)]

    def test_the_budget_as_termination(self):
        steps = one_of_each_info(NEVER_STOPS, length_limit="terminate")
        assert steps["ends"][-1] == (True, False)
        assert steps["info"]["finish_reason"] == "length"
        assert one_of_each_info([GOOD, END], length_limit="terminate")["ends"][-1] == (True, False)


class TestTokenInTokenOut:
    def test_the_ids_are_those_stepped_although_their_text_encodes_to_others(self):
        tokenizer = PieceTokenizer()
        assert tokenizer.encode(tokenizer.decode([FILM, S])) == [FILMS]  # the case this test is about
        steps = one_of_each_info([FILM, S, END])
        assert steps["observation"]["input_ids"][6:9].tolist() == [FILM, S, END]
        assert steps["info"]["response"] == " films"
        assert steps["info"]["response_length"] == 3

    def test_a_prompt_of_ids_keeps_its_ids(self):
        observation, info = text_env().reset(options={"prompt": [FILM, S]})
        assert observation["input_ids"][4:6].tolist() == [FILM, S]
        assert info == {"prompt": " films"}


class TestPrompts:
    def test_each_is_drawn(self):
        env = text_env()
        assert {env.reset(seed=seed)[1]["prompt"] for seed in range(30)} == set(PROMPTS)

    def test_a_prompt_asked_for_leaves_the_generator_alone(self):
        one, other = text_env(), text_env()
        one.reset(seed=3)
        other.reset(seed=3)
        for _ in range(5):
            other.reset(options={"prompt": " films"})
        assert [one.reset()[1] for _ in range(8)] == [other.reset()[1] for _ in range(8)]

    def test_the_same_seed_twice(self):
        env = text_env()
        for seed in range(5):
            assert_same(env.reset(seed=seed), env.reset(seed=seed))


class TestOwnership:
    def test_observations_of_the_past_do_not_change(self):
        env = text_env()
        first, _ = env.reset(options={"prompt": " a film"})
        kept = copy.deepcopy(first)
        second = env.step(GOOD)[0]
        assert_same(first, kept)
        second["input_ids"][:] = 0  # what an agent does with its observation does not reach the environment
        assert env.step(END)[0]["input_ids"][6:8].tolist() == [GOOD, END]

    def test_reset_options_are_not_edited(self):
        options = {"prompt": " a film"}
        text_env().reset(options=options)
        assert options == {"prompt": " a film"}


class TestRender:
    def test_the_text_so_far(self):
        env = text_env()
        env.reset(options={"prompt": " a film"})
        assert env.render() == " a film"
        env.step(FILM)
        env.step(S)
        assert env.render() == " a film films"
        env.step(END)
        assert env.render() == " a film films"

    def test_human_prints_what_is_new(self, capsys):
        env = TextGenerationEnv(text_task(), render_mode="human")
        env.reset(options={"prompt": " a film"})
        assert capsys.readouterr().out == " a film"
        for token, new in ((GOOD, " good"), (S, "s"), (END, "\n")):
            env.step(token)
            assert capsys.readouterr().out == new
        env.reset(options={"prompt": " films"})
        assert capsys.readouterr().out == " films"

    def test_without_a_mode_it_warns_and_shows_nothing(self):
        env = TextGenerationEnv(text_task(), render_mode=None)
        env.reset()
        with pytest.warns(UserWarning, match='render_mode="ansi"'):
            assert env.render() is None


def made_text_env(**kwargs):
    """A text environment with a spec, as `gym.make` gives one."""
    spec = EnvSpec("Text-v0", entry_point=lambda **options: TextGenerationEnv(text_task(), **options))
    return gym.make(spec, **kwargs)


def wrapped_text_env():
    return NormalizeScore(MissingEOSPenalty(text_env()), mean=0.0, std=2.0)


class TestGymnasium:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: gym.make("textenv/Toy-v0").unwrapped,
            lambda: gym.make("textenv/Toy-v0", length_limit="terminate").unwrapped,
            lambda: made_text_env().unwrapped,
        ],
        ids=["toy", "toy terminate", "text"],
    )
    def test_check_env(self, make):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(make())

    @pytest.mark.parametrize("make", [lambda: gym.make("textenv/Toy-v0"), text_env, wrapped_text_env])
    def test_stable_baselines3_check_env(self, make):
        checker = pytest.importorskip("stable_baselines3.common.env_checker")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checker.check_env(make())

    def test_stable_baselines3_trains(self):
        sb3 = pytest.importorskip("stable_baselines3")
        envs = sb3.common.vec_env.DummyVecEnv([lambda: gym.make("textenv/Toy-v0", length_limit="terminate")] * 2)
        agent = sb3.PPO("MultiInputPolicy", envs, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0)
        agent.learn(128)
        assert agent.num_timesteps == 128

    def test_an_id_that_imports_its_package(self):
        env = gym.make("textenv:textenv/Toy-v0")
        assert write(env, [3, 3, 0])["rewards"] == [0.0, 0.0, 1.0]

    @pytest.mark.parametrize(
        "kwargs",
        [
            {},
            {"length_limit": "terminate"},
            {"kl_coef": 0.1},
            {"kl_coef": 0.1, "target_kl": 2.0, "missing_eos_penalty": 0.5, "normalize_score": True},
        ],
        ids=lambda kwargs: "-".join(kwargs) or "plain",
    )
    @pytest.mark.filterwarnings("ignore:KLPenalty has no policy:UserWarning")
    def test_a_spec_survives_json(self, kwargs):
        env = gym.make("textenv/Toy-v0", **kwargs)
        spec = EnvSpec.from_json(env.spec.to_json())
        assert json.loads(spec.to_json()) == json.loads(env.spec.to_json())
        twin = gym.make(spec)
        assert str(twin) == str(env)
        for response in ([3, 0], [3] * 8, [0]):
            assert_same(write(env, response, seed=0), write(twin, response, seed=0))

    @pytest.mark.filterwarnings("ignore:KLPenalty has no policy:UserWarning")
    def test_wrappers_applied_by_hand_are_in_the_spec(self):
        env = MissingEOSPenalty(KLPenalty(gym.make("textenv/Toy-v0"), kl_coef=0.25), 2.0, mode="replace")
        env = NormalizeScore(env, mean=1.0, std=2.0)
        twin = gym.make(EnvSpec.from_json(env.spec.to_json()))
        assert str(twin) == str(env)
        assert twin.get_wrapper_attr("leash").kl_coef == 0.25
        assert write(twin, [3] * 8)["rewards"][-1] == -1.5  # replaced by -2, then (-2 - 1) / 2
        assert_same(write(env, [3] * 8), write(twin, [3] * 8))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
    @pytest.mark.parametrize("make", [lambda: gym.make("textenv/Toy-v0"), text_env, wrapped_text_env])
    def test_a_copy_goes_on_as_the_original_does(self, make, duplicate):
        env = make()
        env.reset(seed=5)
        env.step(3)
        twin = duplicate(env)
        for _ in range(3):
            assert_same(env.step(4), twin.step(4))
            assert env.render() == twin.render()
        assert_same(env.reset(), twin.reset())
        assert_same(env.step(END), twin.step(END))
