"""`SB3VecEnv`: our environments' data in the interface of Stable-Baselines3, and nothing bootstrapped at the end."""

import dataclasses
import itertools
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import END, PROMPTS, RESPONSE_TOKENS, VOCAB_SIZE, assert_same, text_task
from sb3_helpers import TOY, toy_model, toy_vec_env
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

import textenv
from textenv.agents import TablePolicy
from textenv.agents.advantages import gae
from textenv.agents.sb3 import SB3VecEnv, attach
from textenv.agents.sb3.vec_env import vector_envs
from textenv.wrappers import vector as wrappers

MODES = pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
N = 4


def envs(mode="SameStep", **options):
    """A stack with a toll that depends on every token of the prefix."""
    from helpers import PrefixLogprobs

    inner = textenv.TextGenerationVectorEnv(N, text_task(), autoreset_mode=mode, **options)
    return wrappers.KLPenalty(inner, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3)


def steps_of(venv, steps=40, seed=3):
    """Random play, everything that came back."""
    rng = np.random.default_rng(0)
    venv.seed(seed)
    got = [("reset", venv.reset(), [dict(info) for info in venv.reset_infos])]
    for _ in range(steps):
        actions = rng.choice([END, 1, 2, 3], size=N)
        result = venv.step(actions)
        for info in result[3]:
            info.get("episode", {}).pop("t", None)
        got.append((*result, [dict(info) for info in venv.reset_infos]))
    return got


class TestData:
    @MODES
    def test_it_is_what_dummy_vec_env_gives_of_single_environments(self, mode):
        """Row by row the same episodes, rewards and infos, but for the one entry that makes SB3 bootstrap."""

        def make():
            from helpers import PrefixLogprobs

            from textenv.wrappers import KLPenalty

            single = textenv.TextGenerationEnv(text_task())
            return Monitor(KLPenalty(single, PrefixLogprobs(1), PrefixLogprobs(2), kl_coef=0.3))

        ours, theirs = steps_of(SB3VecEnv(envs(mode))), steps_of(DummyVecEnv([make] * N))
        cut = 0
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            for info in other[3]:
                cut += info.pop("TimeLimit.truncated")
            assert_same(one[0], dict(other[0]))
            np.testing.assert_array_equal(one[1], other[1])
            np.testing.assert_array_equal(one[2], other[2])
            for left, right in zip(one[3], other[3], strict=True):
                assert_same(left, right)
            assert_same(one[4], other[4])
        assert cut > 5  # responses of five tokens without an end came up, and SB3 would have bootstrapped there

    def test_modes_agree(self):
        same, following, disabled = (steps_of(SB3VecEnv(envs(mode))) for mode in ("SameStep", "NextStep", "Disabled"))
        for one, two, three in zip(same, following, disabled, strict=True):
            assert_same(one, two)
            assert_same(one, three)

    @MODES
    def test_no_bootstrap_is_asked_for_at_the_budget(self, mode):
        venv = SB3VecEnv(envs(mode))
        venv.reset()
        for step in range(RESPONSE_TOKENS):
            _, _, dones, infos = venv.step(np.full(N, 2))
            assert dones.all() == (step == RESPONSE_TOKENS - 1)
        for info in infos:
            assert info["finish_reason"] == "length"
            assert "TimeLimit.truncated" not in info
            assert info["terminal_observation"]["attention_mask"][-RESPONSE_TOKENS:].tolist() == [1] * RESPONSE_TOKENS
            assert info["episode"]["l"] == RESPONSE_TOKENS

    def test_observations_are_not_written_to_afterwards(self):
        class OneArray(VectorWrapper):
            """Shows the same arrays at every step, as some environments do."""

            def step(self, actions):
                observations, *rest = self.env.step(actions)
                for key, value in observations.items():
                    self.shown[key][...] = value
                return self.shown, *rest

            def reset(self, **kwargs):
                self.shown, infos = self.env.reset(**kwargs)
                return self.shown, infos

        venv = SB3VecEnv(OneArray(envs()))
        kept = [venv.reset(), *(venv.step(np.full(N, 2))[0] for _ in range(3))]
        lengths = [observation["attention_mask"].sum(1) - kept[0]["attention_mask"].sum(1) for observation in kept]
        assert [length.tolist() for length in lengths] == [[0] * N, [1] * N, [2] * N, [3] * N]

    def test_seeds_and_options_hold_for_one_reset(self):
        venv = SB3VecEnv(envs())
        venv.seed(7)
        first = venv.reset()
        again = venv.reset()
        venv.seed(7)
        assert_same(venv.reset(), first)
        assert any((again[key] != first[key]).any() for key in first)
        venv.set_options({"prompt": PROMPTS[1]})
        venv.reset()
        assert [info["prompt"] for info in venv.reset_infos] == [PROMPTS[1]] * N
        venv.set_options([{"prompt": prompt} for prompt in PROMPTS])
        venv.reset()
        assert [info["prompt"] for info in venv.reset_infos] == list(PROMPTS)
        venv.set_options([{"prompt": PROMPTS[0]}, {}, {}, {}])
        with pytest.raises(ValueError, match="same for all rows, or a 'prompt' for each"):
            venv.reset()

    @MODES
    def test_gymnasiums_own_wrapper_goes_below(self, mode):
        venv = SB3VecEnv(RecordEpisodeStatistics(envs(mode)))
        for step in steps_of(venv)[1:]:
            for info, done in zip(step[3], step[2], strict=True):
                assert ("episode" in info) == done


class TestInterface:
    def test_attributes_methods_and_layers(self):
        venv = SB3VecEnv(envs())
        assert venv.get_attr("num_envs") == [N] * N
        assert venv.get_attr("leash", indices=[0, 2]) == [venv.envs.leash] * 2
        assert venv.has_attr("leash") and not venv.has_attr("action_masks")
        venv.set_attr("note", "x")
        assert venv.envs.note == "x"
        with pytest.raises(ValueError, match="all rows at once"):
            venv.set_attr("note", "y", indices=1)
        assert venv.env_is_wrapped(wrappers.KLPenalty) == [True] * N
        assert venv.env_is_wrapped(wrappers.MinLength, indices=0) == [False]
        venv.reset()
        assert venv.env_method("render", indices=[1, 3]) == [venv.render()[1], venv.render()[3]]
        assert venv.env_method("state_dict", indices=0)[0].keys() >= {"kl_coef"}
        assert venv.get_images() == [None] * N
        venv.close()

    def test_masks_of_all_constraints_by_row(self):
        inner = textenv.TextGenerationVectorEnv(N, text_task(), autoreset_mode="SameStep")
        inner = wrappers.ActionMask(wrappers.MinLength(inner, 2), allowed_ids=[END, 1, 2])
        venv = SB3VecEnv(VectorWrapper(inner))
        venv.reset()
        (row,) = venv.env_method("action_masks", indices=[2])
        assert row.tolist() == [token in (1, 2) for token in range(VOCAB_SIZE)]
        venv.step(np.array([1, 1, 2, 2]))
        venv.step(np.array([1, 1, 2, 2]))
        assert np.stack(venv.env_method("action_masks"))[:, END].all()

    def test_environments_of_others_are_refused(self):
        with pytest.raises(TypeError, match="should be vector text environments"):
            SB3VecEnv(gym.make_vec("CartPole-v1", num_envs=2))

    def test_vector_envs_are_found_in_wrappers(self):
        inner = envs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # VecMonitor says that its figures are there already
            monitored = VecMonitor(SB3VecEnv(inner))
        assert vector_envs(monitored) is vector_envs(SB3VecEnv(inner)) is vector_envs(inner) is inner

    def test_vec_monitor_counts_the_same(self):
        with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
            monitored = VecMonitor(SB3VecEnv(envs()))
        plain = steps_of(SB3VecEnv(envs()))
        for one, other in zip(steps_of(monitored)[1:], plain[1:], strict=True):
            for left, right in zip(one[3], other[3], strict=True):
                if "episode" in left:
                    assert left["episode"]["r"] == pytest.approx(right["episode"]["r"], abs=1e-5)
                    assert left["episode"]["l"] == right["episode"]["l"]


def table_with_values():
    policy = TablePolicy(TOY.reference_logits)
    with torch.no_grad():
        policy.values.copy_(torch.linspace(-1, 2, TOY.horizon))
    return policy


class TestReturns:
    """Case 38: the advantages and returns in SB3's buffer are those of our own `gae` on the same episodes."""

    STEPS = 40

    def compare(self, model, gamma, gae_lambda):
        """Which episodes of one rollout the budget cut, and the largest differences, from the rewards of the steps."""
        model._setup_learn(1)
        rewards = []
        callback = ConvertCallback(lambda local, _: rewards.append(local["rewards"].copy()) or True)
        callback.init_callback(model)
        buffer = model.rollout_buffer
        model.collect_rollouts(model.env, callback, buffer, self.STEPS)
        long, gaps = [], []
        for row in range(buffer.n_envs):
            begins = np.flatnonzero(buffer.episode_starts[:, row])
            for begin, end in itertools.pairwise(begins):
                steps = slice(begin, end)
                given = torch.as_tensor(np.stack(rewards)[steps, row]), torch.as_tensor(buffer.values[steps, row])
                ours = gae(*(x[None] for x in given), torch.ones(1, end - begin, dtype=torch.bool), gamma, gae_lambda)
                theirs = buffer.advantages[steps, row], buffer.returns[steps, row]
                long.append(end - begin == TOY.horizon)
                gaps.append(max(abs(a[0].numpy() - b).max() for a, b in zip(ours, theirs, strict=True)))
        return np.array(long), np.array(gaps)

    @pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7)])
    def test_returns_are_ours(self, gamma, gae_lambda):
        settings = {"n_steps": self.STEPS, "gamma": gamma, "gae_lambda": gae_lambda, "batch_size": 80}
        model = toy_model(PPO, table_with_values(), **settings)
        long, gaps = self.compare(model, gamma, gae_lambda)
        assert long.sum() > 5 and (~long).sum() > 5
        assert gaps.max() < 1e-5

    def test_a_bootstrap_would_show(self):
        """With the entry that DummyVecEnv adds and a value beyond the budget, responses that are cut differ."""

        class Bootstraps(SB3VecEnv):
            def step_wait(self):
                observations, rewards, dones, infos = super().step_wait()
                for info in infos:
                    info["TimeLimit.truncated"] = info.get("finish_reason") == "length"
                return observations, rewards, dones, infos

        envs = Bootstraps(gym.make_vec("textenv/Toy-v0", num_envs=8, kl_coef=0.1))
        model = toy_model(PPO, table_with_values(), envs, n_steps=self.STEPS, gae_lambda=0.95, batch_size=80)
        assert self.compare(model, 1.0, 0.95)[1].max() < 1e-5  # our policy says that nothing comes after the budget
        model.policy.predict_values = lambda obs: torch.full((len(obs["input_ids"]), 1), 2.0)
        long, gaps = self.compare(model, 1.0, 0.95)
        assert gaps[~long].max() < 1e-5 or not (~long).any()
        assert gaps.max() > 1.0


def test_evaluation_and_the_toll_of_the_model_that_acts():
    """The return that SB3 reports is score minus toll, for a policy that always writes the same."""
    logits = np.full((TOY.horizon, TOY.vocab_size), -50.0)
    logits[:, 3] = 0.0
    model = toy_model(PPO, TablePolicy(logits), n_steps=8, batch_size=64)
    evaluation = toy_vec_env(num_envs=2, kl_coef=0.1)
    attach(model, evaluation)
    mean, std = evaluate_policy(model, evaluation, n_eval_episodes=4)
    assert mean == pytest.approx(3.0 - 0.1 * 8 * np.log(6), abs=1e-5)
    assert std == 0
    unattached = toy_vec_env(num_envs=2, kl_coef=0.1)
    with pytest.warns(UserWarning, match="no policy attached"):
        assert evaluate_policy(model, unattached, n_eval_episodes=2)[0] == pytest.approx(3.0)


def test_replaying_the_task_elsewhere_is_left_alone():
    """Wrapping changes nothing of the environments: they can be stepped as before."""
    inner = envs()
    before = dataclasses.replace(inner.unwrapped.task)
    SB3VecEnv(inner)
    assert inner.unwrapped.task == before
    observation, _ = inner.reset(seed=1)
    assert observation["input_ids"].shape == (N, 11)
