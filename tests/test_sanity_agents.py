"""Agents on the sanity environments: PPO from a random tiny transformer, and Stable-Baselines3's PPO as it comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT, parameters, same

from textenv.agents import PPO, PPOConfig
from textenv.agents.tiny import tiny_transformer
from textenv.bytes import ByteTokenizer
from textenv.evaluation import evaluate
from textenv.sanity import BANDIT, CONDITIONAL, LONG_WAIT, SANITY_TASKS, STOP_NOW

ROOT = Path(__file__).parent.parent
SETTING = {"learning_rate": 2e-3, "lr_schedule": "linear", "num_minibatches": 2, "gae_lambda": 1.0, "vf_coef": 0.5}
"""The one of examples/sanity.py."""

pytestmark = [
    pytest.mark.filterwarnings(CUT),
    pytest.mark.filterwarnings("ignore:Every advantage of a batch is 0"),  # uniform play may find nothing at first
]


def trained(task, episodes, **config):
    envs = gym.make_vec(task.env_id, num_envs=256)
    policy = tiny_transformer(envs.single_action_space.n)
    PPO(policy, envs, PPOConfig(**(SETTING | config))).learn(episodes, run_dir=None, progress=False)
    return policy


def mean_return(policy, task):
    return evaluate(policy, gym.make_vec(task.env_id, num_envs=256), 256, seed=1000).shaped_return.value


class TestTinyTransformer:
    def test_a_seed_gives_a_policy_and_leaves_the_process_alone(self):
        before = torch.random.get_rng_state()
        one, twin, other = tiny_transformer(seed=1), tiny_transformer(seed=1), tiny_transformer(seed=2)
        assert torch.equal(torch.random.get_rng_state(), before)
        weights = [dict(policy.lm.model.named_parameters()) for policy in (one, twin, other)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])

    def test_everything_trains_except_the_reference(self):
        policy = tiny_transformer(50, hidden_size=16, num_layers=2)
        assert all(parameter.requires_grad for parameter in policy.parameters())
        assert not any(parameter.requires_grad for parameter in policy.reference.model.parameters())
        assert policy.lm.model is not policy.reference.model
        assert policy.lm.vocab_size == 50
        assert isinstance(policy.tokenizer, ByteTokenizer)

    def test_it_starts_as_its_reference_and_near_uniform(self):
        policy = tiny_transformer()
        ids = torch.tensor([[0, 63], [104, 105]])
        mask = torch.tensor([[0, 1], [1, 1]])
        logprobs = torch.log_softmax(policy.next_logits(ids, mask), -1)
        observations = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        for action in (0, 255, 256):
            reference = policy.reference(observations, np.array([action, action]))
            np.testing.assert_allclose(logprobs[:, action].detach().numpy(), reference, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert (entropy > np.log(257) - 0.5).all()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"vocab_size": 0}, "`vocab_size` should be an integer of at least 1, got 0"),
            ({"hidden_size": 32.0}, r"`hidden_size` should be an integer of at least 1, got 32\.0"),
            ({"num_layers": True}, "`num_layers` should be an integer of at least 1, got True"),
            ({"context_length": -1}, "`context_length` should be an integer of at least 1, got -1"),
            ({"hidden_size": 30}, "multiple of 4, got 30"),
            ({"temperature": 0.0}, r"positive number, got 0\.0"),
        ],
        ids=str,
    )
    def test_refuses_sizes_of_no_model(self, options, message):
        with pytest.raises(ValueError, match=message):
            tiny_transformer(**options)

    def test_a_checkpoint_is_read_into_another_one(self, tmp_path):
        def envs():
            return gym.make_vec("textenv/Bandit-v0", num_envs=128, kl_coef=0.01)

        agent = PPO(tiny_transformer(seed=3), envs(), PPOConfig(**SETTING), seed=7)
        agent.step()
        agent.save(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"LanguageModelPolicy, which cannot be remade .* policy="):
            PPO.load(tmp_path / "saved", envs())
        twin = PPO.load(tmp_path / "saved", envs(), policy=tiny_transformer(seed=3))
        assert same(parameters(agent), parameters(twin))
        assert not same(parameters(agent), list(tiny_transformer(seed=3).parameters()))
        first, second = agent.step(), twin.step()
        assert (first.score, first.kl, first.policy_loss) == (second.score, second.kl, second.policy_loss)
        assert same(parameters(agent), parameters(twin))


@pytest.mark.slow
class TestPPO:
    """One seed each; `python examples/sanity.py --seeds 5` gives the whole table."""

    @pytest.mark.parametrize("env_id", list(SANITY_TASKS))
    def test_solves(self, env_id):
        task = SANITY_TASKS[env_id]
        policy = trained(task, 10_240 if task is LONG_WAIT else 25_600)
        assert mean_return(policy, task) >= task.solved_return

    def test_a_discount_loses_the_reward_on_the_long_way_back(self):
        policy = trained(LONG_WAIT, 10_240, gamma=0.8)
        assert mean_return(policy, LONG_WAIT) < 0.7 * LONG_WAIT.best_return

    def test_a_policy_to_which_all_tokens_look_alike_gets_what_one_answer_gets(self):
        envs = gym.make_vec(CONDITIONAL.env_id, num_envs=256)
        policy = tiny_transformer()
        policy.trunk.get_input_embeddings().weight.requires_grad_(False).fill_(0.1)
        PPO(policy, envs, PPOConfig(**SETTING, check_start=False)).learn(25_600, run_dir=None, progress=False)
        assert 0.15 < mean_return(policy, CONDITIONAL) < 0.35  # 1/4, within three standard errors


def features(env_id):
    """An id as Stable-Baselines3's plain network can read it: every column's token as a one-hot vector.

    Token ids are names, not quantities; handed over as numbers, a small network would have to tell 101 from 111
    by size. The budget counts as the episode's end, because Stable-Baselines3 bootstraps a value where an episode was
    truncated.
    """
    env = gym.make(env_id, length_limit="terminate")
    length, vocab_size = env.observation_space["input_ids"].shape[0], env.action_space.n

    def one_hot(observation):
        rows = np.eye(vocab_size, dtype=np.float32)[observation["input_ids"]]  # (L, V)
        return (rows * observation["attention_mask"][:, None]).ravel()

    space = gym.spaces.Box(0.0, 1.0, (length * int(vocab_size),), np.float32)
    return gym.wrappers.TransformObservation(env, one_hot, space)


@pytest.mark.slow
class TestStableBaselines3:
    @pytest.mark.parametrize("task", [BANDIT, STOP_NOW, CONDITIONAL], ids=lambda task: task.env_id)
    def test_ppo_solves(self, task):
        sb3 = pytest.importorskip("stable_baselines3")
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.vec_env import DummyVecEnv

        envs = DummyVecEnv([lambda: gym.wrappers.RecordEpisodeStatistics(features(task.env_id))] * 16)
        settings = {"n_steps": 64, "batch_size": 256, "learning_rate": 1e-3, "gamma": 1.0, "n_epochs": 4}
        model = sb3.PPO("MlpPolicy", envs, **settings, seed=0, device="cpu")
        model.learn(30_000)
        reached, _ = evaluate_policy(model, envs, n_eval_episodes=256, deterministic=False, warn=False)
        assert reached >= task.solved_return


def test_example_refuses_an_unknown_environment(tmp_path):
    done = example("--envs", "Nothing-v0", cwd=tmp_path)
    assert done.returncode != 0
    assert "should be among textenv/Bandit-v0" in done.stderr


@pytest.mark.slow
def test_example_shows_the_table(tmp_path):
    done = example("--envs", "Bandit-v0", "--seeds", "2", "--episodes", "10240", "--output", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["env_id"], row["best"], row["random"]) == ("textenv/Bandit-v0", 1.0, BANDIT.random_return)
    assert len(row["returns"]) == 2
    assert row["solved"] == 2
    assert "textenv/Bandit-v0" in done.stdout
    assert "2 of 2" in done.stdout


def example(*arguments, cwd):
    command = [sys.executable, str(ROOT / "examples" / "sanity.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
