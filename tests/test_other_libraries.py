"""Other libraries on our environments: their data is what stepping gives, and their PPOs approach the exact optimum.

Each example runs at a small size. What it reaches at its defaults is in docs/other_libraries.md.
"""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from textenv import attach_policy
from textenv.agents.policy import PolicyLogprobs
from textenv.wrappers import vector as vector_wrappers

EXAMPLES = Path(__file__).parent.parent / "examples"
ALL = ("cleanrl_ppo", "tianshou_ppo", "torchrl_ppo", "rllib_ppo", "minari_dataset")
NEEDED = {"tianshou_ppo": ("tianshou", "numba"), "torchrl_ppo": ("torchrl",), "rllib_ppo": ("ray",)}
RLLIB = 'RLlib is not installed: it pins another Gymnasium. In an environment of its own: pip install "ray[rllib]"'


@pytest.fixture
def example(monkeypatch):
    """An example as a module; what it sets for the whole process is put back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()

    def load(name):
        for module in NEEDED.get(name, ()):
            pytest.importorskip(module, reason=RLLIB if module == "ray" else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the libraries say while they are loaded
            return importlib.import_module(name)

    with torch.random.fork_rng():
        yield load
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALL)
def test_help_explains(name, example, monkeypatch, capsys):
    example(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code in (0, None)
    assert "--seed" in capsys.readouterr().out


def assert_steps(env, observations, actions, rewards, ends, next_observations):
    """One row's transitions in their order, each episode beginning with a reset: what a single environment gives.

    Ends are (terminated, truncated); the last episode may be unfinished.
    """
    fresh, finished = True, 0
    for step, action in enumerate(actions):
        if fresh:
            now, _ = env.reset()
        for key, array in now.items():
            np.testing.assert_array_equal(observations[key][step], array, err_msg=f"step {step}: {key}")
        now, reward, terminated, truncated, _ = env.step(int(action))
        assert rewards[step] == pytest.approx(reward, abs=1e-6), step
        assert tuple(map(bool, ends[step])) == (terminated, truncated), step
        for key, array in now.items():
            np.testing.assert_array_equal(next_observations[key][step], array, err_msg=f"after step {step}: {key}")
        fresh = terminated or truncated
        finished += fresh
    assert finished > 1


def count_letters(_prompts, responses):
    return [len(response) for response in responses]


def improves(rows, by=1.0):
    """The start is at the reference, and the run gains on the objective; nobody beats the optimum."""
    assert rows["before"].kl == pytest.approx(0, abs=0.05)
    assert rows["after"].objective > rows["before"].objective + by
    assert rows["after"].regret >= -1e-9


# A file of the researcher's own, in the style of CleanRL.


class TestCleanRL:
    def test_learns(self, example):
        cleanrl = example("cleanrl_ppo")
        args = cleanrl.Args(total_timesteps=80_000, num_envs=128)
        improves(cleanrl.main(args))

    def rollout(self, cleanrl, num_envs=3, num_steps=60):
        envs = gym.make_vec("textenv/Toy-v0", num_envs=num_envs, kl_coef=0.0)
        torch.manual_seed(0)
        agent = cleanrl.Agent(envs)
        attach_policy(envs, PolicyLogprobs(agent))
        next_obs, _ = envs.reset(seed=0)
        generator = torch.Generator().manual_seed(0)
        return cleanrl.rollout(agent, envs, next_obs, np.zeros(num_envs, bool), num_steps, generator)

    def test_what_is_learned_from_is_what_stepping_gives(self, example):
        """The steps that NEXT_STEP spends on resets are masked out, and with them everything else is as it was."""
        data = self.rollout(example("cleanrl_ppo"))
        env = gym.make("textenv/Toy-v0")
        env.reset(seed=0)
        following = {k: np.concatenate([v[1:], data.next_obs[k][None]]) for k, v in data.obs.items()}
        for row in range(data.dones.shape[1]):
            kept = data.valid[:, row].numpy()
            assert kept.tolist() == [True, *(~data.dones[:-1, row]).tolist()]
            assert not kept.all()
            seen = {key: array[kept, row].numpy() for key, array in data.obs.items()}
            actions, dones = data.actions[kept, row], data.dones[kept, row]
            ends = torch.stack([dones & (actions == 0), dones & (actions != 0)], -1)  # the file knows the union only
            after = {key: array[kept, row] for key, array in following.items()}
            assert_steps(env, seen, actions, data.rewards[kept, row], ends, after)

    def test_reset_steps_leave_no_trace_in_advantages(self, example):
        """By hand, gamma 1 and lambda 1: the rest of the episode's rewards less the value, whatever the reset holds."""
        cleanrl, nan = example("cleanrl_ppo"), float("nan")
        column = lambda *values: torch.tensor(values)[:, None]  # noqa: E731
        data = cleanrl.Rollout(
            obs={},
            actions=column(3, 0, 5, 3, 3),
            logprobs=column(0.0, 0.0, nan, 0.0, 0.0),
            values=column(1.0, 2.0, nan, 0.5, 0.25),
            rewards=column(0.1, 4.0, nan, 0.0, 0.2),
            dones=column(False, True, False, False, False),
            valid=column(True, True, False, True, True),
            next_value=torch.tensor([3.0]),
            next_obs=None,
            next_done=None,
            scores=[],
            kls=[],
        )
        found = cleanrl.advantages_of(data, 1.0, 1.0)[:, 0]
        expected = torch.tensor([4.1 - 1.0, 4.0 - 2.0, 3.2 - 0.5, 3.2 - 0.25])
        torch.testing.assert_close(found[data.valid[:, 0]], expected)
        halved = cleanrl.advantages_of(data, 0.5, 0.0)[:, 0]  # one step ahead
        torch.testing.assert_close(halved[3:], torch.tensor([0.5 * 0.25 - 0.5, 0.2 + 0.5 * 3.0 - 0.25]))

    def test_runs_on_a_language_model_s_environment(self, example, tiny_model, capsys):
        options = {"model": str(tiny_model), "prompts": ["a b", "c"], "max_response_tokens": 4}
        options["scorer"] = count_letters
        room = "textenv.rlhf"
        gym.register("Tiny-v0", f"{room}:make_env", vector_entry_point=f"{room}:make_vector_env", kwargs=options)
        try:
            cleanrl = example("cleanrl_ppo")
            rows = cleanrl.main(cleanrl.Args(env_id="Tiny-v0", num_envs=4, num_steps=6, total_timesteps=48))
        finally:
            del gym.registry["Tiny-v0"]
        assert len(rows["scores"]) == len(rows["kls"]) > 0
        assert all(np.isfinite(rows["kls"]))  # also where the vocabulary has ids without a token
        assert "last rollout: score" in capsys.readouterr().out


# Libraries.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTianshou:
    @pytest.fixture
    def tianshou(self, example, monkeypatch):
        """The example, with Tianshou's compiled functions as the Python they are made from: compiling takes longest."""
        module = example("tianshou_ppo")
        for name, library in list(sys.modules.items()):
            if name.startswith("tianshou."):
                for key, function in list(vars(library).items()):
                    if hasattr(function, "py_func"):
                        monkeypatch.setattr(library, key, function.py_func)
        return module

    def test_learns(self, tianshou):
        sizes = {"num_envs": 16, "steps_per_update": 512, "batch_size": 128}
        rows = tianshou.main(tianshou.Arguments(steps=5 * 512, progress=False, **sizes))
        improves(rows, 0.2)

    def test_the_buffer_holds_what_stepping_gives(self, tianshou):
        _, collector, _ = tianshou.build(tianshou.Arguments(steps_per_update=60, num_envs=2, kl_coef=0.0))
        collector.reset()
        collector.collect(n_step=60)
        env = gym.make("textenv/Toy-v0", length_limit="terminate")
        env.reset(seed=0)
        for part in collector.buffer.buffers:
            batch = part[:]
            keys = ("input_ids", "attention_mask")
            ends = list(zip(batch.terminated, batch.truncated, strict=True))
            seen, following = ({key: batch[name][key] for key in keys} for name in ("obs", "obs_next"))
            assert_steps(env, seen, batch.act, batch.rew, ends, following)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTorchRL:
    def test_learns(self, example):
        torchrl = example("torchrl_ppo")
        improves(torchrl.main(torchrl.Arguments(iterations=20, num_envs=128)))

    def make_envs(self, torchrl, num_envs):
        envs = torchrl.make_envs(num_envs, 0.0, 0)
        attach_policy(envs._env, PolicyLogprobs(torchrl.PrefixNetwork(6, 9, 6)))
        return envs

    @pytest.mark.parametrize("num_envs", [None, 3])
    def test_specs_are_those_of_the_data(self, example, num_envs):
        torchrl = example("torchrl_ppo")
        from torchrl.envs import GymEnv
        from torchrl.envs.utils import check_env_specs

        one = GymEnv("textenv/Toy-v0", categorical_action_encoding=True)
        check_env_specs(one if num_envs is None else self.make_envs(torchrl, num_envs))

    def test_takes_a_language_model_s_environment(self, example, tiny_model):
        torchrl = example("torchrl_ppo")
        from torchrl.envs.utils import check_env_specs

        options = {"model": str(tiny_model), "prompts": ["a b", "c"], "scorer": count_letters, "kl_coef": None}
        envs = gym.make_vec("RLHF-v0", num_envs=2, autoreset_mode="Disabled", **options)
        check_env_specs(torchrl.GymWrapper(envs, categorical_action_encoding=True))

    def test_a_rollout_holds_what_stepping_gives(self, example):
        torchrl = example("torchrl_ppo")
        envs = self.make_envs(torchrl, 3)
        batch = envs.rollout(40, break_when_any_done=False)
        env = gym.make("textenv/Toy-v0", length_limit="terminate")
        env.reset(seed=0)
        for row in batch:
            ends = torch.cat([row["next", "terminated"], row["next", "truncated"]], -1)
            seen, following = ({key: where[key].numpy() for key in torchrl.OBSERVATION} for where in (row, row["next"]))
            assert_steps(env, seen, row["action"], row["next", "reward"].flatten().tolist(), ends, following)

    def test_the_next_rollout_goes_on_where_one_stopped(self, example):
        """Also from rows that ended with the last step: they are reset, and no ended row is stepped."""
        torchrl = example("torchrl_ppo")
        envs = self.make_envs(torchrl, 4)
        state = envs.reset()
        for _ in range(10):
            batch = envs.rollout(3, tensordict=state, auto_reset=False, break_when_any_done=False)
            last = batch[:, -1]
            state = envs.maybe_reset(envs.step_mdp(last))
            fresh = state["attention_mask"].sum(-1) == 1
            assert fresh.tolist() == last["next", "done"].flatten().tolist()


class TestRLlib:
    @pytest.mark.filterwarnings("ignore")
    def test_learns(self, example):
        rllib = example("rllib_ppo")
        rows = rllib.main(rllib.Arguments(iterations=4, num_envs=8, steps_per_update=512, batch_size=128))
        improves(rows, 0.1)


# What these libraries asked of the environments.


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_wrapped_environments_say_how_rows_are_reset(mode, tmp_path):
    """As environments without wrappers do: libraries read the attribute of whatever they are given."""
    envs = gym.make_vec("textenv/Toy-v0", num_envs=2, autoreset_mode=mode)
    assert envs.autoreset_mode is mode
    options = {
        "KLPenalty": {},
        "MinLength": {"min_length": 2},
        "ActionMask": {"allowed_ids": [0, 3]},
        "MissingEOSPenalty": {"penalty": 1.0},
        "LengthPenalty": {"per_token": 0.1},
        "RepetitionPenalty": {"coef": 0.1},
        "NormalizeScore": {},
        "ClipScore": {"low": -1.0, "high": 1.0},
        "ScoreEvery": {"k": 2},
        "RecordResponses": {"path": tmp_path / "episodes.jsonl"},
        "ArrayInfos": {},
    }
    assert set(options) == set(vector_wrappers.__all__)
    for name, arguments in options.items():
        assert getattr(vector_wrappers, name)(envs, *arguments.values()).autoreset_mode is mode, name


def test_wrappers_load_where_vector_wrappers_are_not_generic():
    """As before Gymnasium 1.4, and RLlib pins 1.2: `VectorWrapper[...]` is a TypeError there."""
    code = (
        "from gymnasium.vector import VectorWrapper\n"
        "def refuse(cls, item): raise TypeError('not a generic class')\n"
        "VectorWrapper.__class_getitem__ = classmethod(refuse)\n"
        "import textenv.wrappers, gymnasium, textenv\n"
        "print(gymnasium.make_vec('textenv/Toy-v0', num_envs=2, kl_coef=0.1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KLPenalty" in done.stdout


def test_options_for_a_collector_around_it_are_let_pass():
    """Minari's `DataCollector` hands on `minari_autoseed`; what is nobody's is refused as before."""
    env = gym.make("textenv/Toy-v0")
    env.reset(seed=0, options={"minari_autoseed": False})
    envs = gym.make_vec("textenv/Toy-v0", num_envs=2)
    envs.reset(seed=0, options={"minari_autoseed": True, "prompt": [0]})
    with pytest.raises(ValueError, match="Reset options should be among 'prompt', got 'minari_autosed'"):
        env.reset(options={"minari_autosed": False})
