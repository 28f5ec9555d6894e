"""Agents of Stable-Baselines3 and sb3-contrib train policies of ours: toy, language models, 152 thousand actions."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from agent_helpers import lm_envs
from lm_helpers import EOS, GRUPolicy
from sb3_contrib import TRPO, MaskablePPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from sb3_helpers import TOY, lm_model, moved_policy, toy_model, toy_vec_env
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.distributions import kl_divergence
from stable_baselines3.common.evaluation import evaluate_policy

from textenv.agents import TablePolicy
from textenv.agents.sb3 import (
    MaskableLanguageModelActorCriticPolicy,
    PackedMaskBuffer,
    ResponseLog,
    SB3VecEnv,
    attach,
    policy_kwargs,
)
from textenv.oracle import evaluate
from textenv.wrappers import vector as wrappers

ROOT = Path(__file__).parent.parent


def objective(policy):
    """Score minus toll of a table, exactly."""
    return evaluate(TOY, torch.log_softmax(policy.logits.detach().double(), -1).numpy(), 0.1).objective


def falling(rate):
    return lambda remaining: rate * remaining


LEARNERS = {
    "PPO": (PPO, {"n_steps": 16, "batch_size": 1024, "n_epochs": 4, "learning_rate": falling(0.08)}, 1.9),
    "TRPO": (TRPO, {"n_steps": 16, "batch_size": 1024, "target_kl": 0.05, "learning_rate": 0.05}, 1.9),
    "A2C": (A2C, {"n_steps": 8, "learning_rate": falling(0.05)}, 1.2),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_it_comes_near_the_optimum_of_the_toy(name):
    """From -0.23, the reference's, towards 2.085, the optimum's."""
    algorithm, settings, reached = LEARNERS[name]
    policy = TablePolicy(TOY.reference_logits)
    before = objective(policy)
    toy_model(algorithm, policy, toy_vec_env(128), gae_lambda=1.0, **settings).learn(60_000)
    assert before == pytest.approx(-0.23257, abs=1e-4)
    assert reached < objective(policy) < 2.0854


def test_a_recurrent_policy_trains():
    model = toy_model(PPO, GRUPolicy(6), toy_vec_env(32), n_steps=16, batch_size=256, n_epochs=4, learning_rate=2e-2)
    model.learn(8_192, callback=(log := ResponseLog()))
    assert log.records[-1]["shaped_return"] > log.records[0]["shaped_return"] + 0.8


def test_dqn_plays_the_toy():
    """A plain policy of theirs on our vector environment: it sees ids as numbers, which is enough here."""
    settings = {"learning_starts": 500, "train_freq": 1, "target_update_interval": 250, "buffer_size": 20_000}
    model = DQN("MultiInputPolicy", toy_vec_env(8, kl_coef=None), learning_rate=3e-3, gamma=1.0, seed=0, **settings)
    model.learn(12_000)
    assert not model.replay_buffer.timeouts.any()  # the budget is no timeout
    assert evaluate_policy(model, toy_vec_env(2, kl_coef=None), n_eval_episodes=2)[0] >= 2.0  # the best is 3.5


ON_LANGUAGE_MODELS = {
    "PPO": (PPO, {"n_steps": 12, "batch_size": 32, "n_epochs": 2, "learning_rate": 1e-2}),
    "A2C": (A2C, {}),
    "TRPO": (TRPO, {"n_steps": 12, "batch_size": 96, "cg_max_steps": 4, "n_critic_updates": 2}),
}


@pytest.mark.parametrize("name", ON_LANGUAGE_MODELS)
@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"lora_rank": None}, {"lora_rank": 4, "value": "separate"}])
def test_it_trains_a_language_model(name, settings, tiny_model):
    algorithm, options = ON_LANGUAGE_MODELS[name]
    model = lm_model(algorithm, tiny_model, policy_kwargs={"model": tiny_model, **settings}, **options)
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(192, callback=(log := ResponseLog()))
    after = list(model.policy.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert abs(log.records[0]["kl"]) < 1e-5
    assert abs(log.records[-1]["kl"]) > 1e-5


@pytest.mark.parametrize("width", [9, 300])
@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"lora_rank": None}])
def test_trpos_curvature_is_that_of_the_kl(width, settings, tiny_model):
    """Its Hessian-vector product against J' F J v: first derivatives, and differences of logits along v.

    Also where attention is torch's own (wide rows), and where layers and their adapters are one operation.
    """
    from test_sb3_policy import sb3_policy, states_of

    if width > 128:
        from lm_helpers import llama, save_model

        folder = tiny_model + "-wide"
        if not Path(folder).exists():
            save_model(Path(folder), llama(max_position_embeddings=512))
    else:
        folder = tiny_model
    policy = sb3_policy(moved_policy(folder, **settings), columns=width)
    observations, actions = states_of(6, prompt_tokens=width - 6)
    parameters = [p for name, p in policy.named_parameters() if "value" not in name]
    # Along a gradient, where logits change by more than their rounding.
    chosen = policy.get_distribution(observations).log_prob(actions).mean()
    vector = torch.autograd.grad(chosen, parameters, allow_unused=True, materialize_grads=True)
    length = torch.cat([v.flatten() for v in vector]).norm()
    vector = [v / length for v in vector]

    old = policy.get_distribution(observations)
    old.distribution.logits = old.distribution.logits.detach()
    kl = kl_divergence(policy.get_distribution(observations), old).mean()
    gradients = torch.autograd.grad(kl, parameters, create_graph=True)
    product = sum((g * v).sum() for g, v in zip(gradients, vector, strict=True))
    curvature = torch.autograd.grad(product, parameters)

    def logits_at(step):
        with torch.no_grad():
            for parameter, v in zip(parameters, vector, strict=True):
                parameter.add_(v, alpha=step)
            logits = policy.get_distribution(observations).distribution.logits
            for parameter, v in zip(parameters, vector, strict=True):
                parameter.add_(v, alpha=-step)
        return logits

    step = 1e-3
    along = (logits_at(step) - logits_at(-step)) / (2 * step)
    logits = policy.get_distribution(observations).distribution.logits
    probabilities = torch.where(torch.isfinite(logits), logits.exp(), torch.zeros_like(logits)).detach()
    along = torch.where(probabilities > 0, along, torch.zeros_like(along))
    fisher = probabilities * (along - (probabilities * along).sum(-1, keepdim=True)) / len(logits)
    expected = torch.autograd.grad((logits.clamp_min(-1e30) * fisher).sum(), parameters)
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (curvature, expected))
    assert other.norm() > 1e-3
    assert (one - other).norm() < 0.02 * other.norm()  # differences of float32 logits


class TestMasks:
    ALLOWED = (EOS, *range(1, 20), *range(60, 90))

    def envs(self, folder, num_envs=8):
        inner = lm_envs(folder, num_envs=num_envs, stop=list("aeiou "))
        return SB3VecEnv(wrappers.ActionMask(wrappers.MinLength(inner, 3), allowed_ids=self.ALLOWED))

    def model(self, folder, **settings):
        options = {"n_steps": 12, "batch_size": 48, "n_epochs": 2, "learning_rate": 1e-2}
        return lm_model(
            MaskablePPO, folder, MaskableLanguageModelActorCriticPolicy, self.envs(folder), **options | settings
        )

    def test_no_forbidden_token_is_written(self, tiny_model):
        """The environments would refuse one."""
        model = self.model(tiny_model)
        model.learn(288, callback=(log := ResponseLog()))
        assert all(record["response_length"] >= 4 for record in log.records)
        assert set(np.unique(model.rollout_buffer.actions)) <= set(self.ALLOWED)
        assert abs(log.records[0]["kl"]) < 1e-5 < abs(log.records[-1]["kl"])
        attach(model, held_out := self.envs(tiny_model, 3))
        _, lengths = evaluate_masked(model, held_out, n_eval_episodes=6, return_episode_rewards=True)
        assert min(lengths) >= 4

    def test_ppo_without_masks_is_told_so(self, tiny_model):
        model = lm_model(PPO, tiny_model, envs=self.envs(tiny_model), n_steps=12, batch_size=96)
        with pytest.raises(ValueError, match="Actions should be allowed by the constraints"):
            model.learn(96)

    def test_ratios_are_one(self, tiny_model):
        model = self.model(tiny_model, policy_kwargs=policy_kwargs(moved_policy(tiny_model), self.envs(tiny_model)))
        model._setup_learn(1)
        callback = CallbackList([])
        callback.init_callback(model)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, 12)
        (data,) = model.rollout_buffer.get(None)
        assert 0 < data.action_masks.mean() < 1
        _, logprobs, _ = model.policy.evaluate_actions(
            data.observations, data.actions.long().flatten(), data.action_masks
        )
        assert abs(torch.exp(logprobs - data.old_log_prob) - 1).max() < 1e-4
        _, free, _ = model.policy.evaluate_actions(data.observations, data.actions.long().flatten())
        assert abs(torch.exp(free - data.old_log_prob) - 1).max() > 0.1

    def test_bits_do_what_floats_do(self, tiny_model):
        floats = self.model(tiny_model).learn(192)  # each seeds the process's generators when it is made
        bits = self.model(tiny_model, rollout_buffer_class=PackedMaskBuffer).learn(192)
        states = [model.policy.state_dict() for model in (floats, bits)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        large, small = (model.rollout_buffer.action_masks.nbytes for model in (floats, bits))
        assert large > 30 * small

    def test_a_table_learns_within_them(self):
        policy = TablePolicy(TOY.reference_logits)
        settings = {"n_steps": 16, "batch_size": 1024, "n_epochs": 4, "learning_rate": falling(0.08), "gae_lambda": 1.0}
        envs = toy_vec_env(128, min_length=2)
        model = toy_model(MaskablePPO, policy, envs, MaskableLanguageModelActorCriticPolicy, **settings)
        model.learn(30_000, callback=(log := ResponseLog()))
        assert log.records[-1]["shaped_return"] > log.records[0]["shaped_return"] + 1.0
        assert log.records[-1]["response_length"] >= 3


LARGE = """
import json, sys
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from support.process import peak_memory, resident_memory
from test_large_vocabularies import STOP, task
from textenv import TextGenerationVectorEnv
from textenv.agents import tiny_transformer
from textenv.agents.sb3 import *
from textenv.wrappers import vector as wrappers

def trained(size, masked, states):
    envs = TextGenerationVectorEnv(32, task(size, max_response_tokens=16), render_mode=None)
    if masked:
        envs = wrappers.ActionMask(envs, allowed_ids=[STOP, *range(0, size, 2)])
    envs = SB3VecEnv(envs)
    kind = MaskableLanguageModelActorCriticPolicy if masked else LanguageModelActorCriticPolicy
    kwargs = policy_kwargs(tiny_transformer, envs, vocab_size=size, hidden_size=16)
    settings = dict(n_steps=states // 32, batch_size=states, n_epochs=1, seed=0, device="cpu", policy_kwargs=kwargs)
    if masked:
        settings["rollout_buffer_class"] = PackedMaskBuffer
    model = (MaskablePPO if masked else PPO)(kind, envs, **settings)
    held = resident_memory()
    model.learn(states)
    actions = model.rollout_buffer.actions
    return {
        "grown": peak_memory() - held,
        "weights": 4 * sum(parameter.numel() for parameter in model.policy.parameters()),
        "finite": all(bool(torch.isfinite(parameter).all()) for parameter in model.policy.parameters()),
        "forbidden": int(((actions % 2 == 1) & (actions != STOP)).sum()),
    }

torch.set_num_threads(1)
cases = (50_000, True, 256), (152_000, True, 128), (152_000, False, 128), (152_000, False, 512)
print(json.dumps([trained(*case) for case in cases]))
"""


@pytest.mark.slow
def test_large_vocabularies_take_little_memory():
    """Case 37. The logits of a minibatch would take up to 0.3 GB, as often as an algorithm holds them."""
    # Freed blocks go back to the system at once; glibc would keep those of up to 32 MB, and the peak be its own.
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "benchmarks"))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for case in results:
        assert case["finite"]
        # Gradients and Adam's moments are three times the weights. On top of them some chunks of logits, 25 MB each.
        assert case["grown"] - 3 * case["weights"] < 200e6
    packed_few, packed_some, some, many = results
    assert some["forbidden"] and many["forbidden"]
    assert packed_few["forbidden"] == packed_some["forbidden"] == 0
    assert many["grown"] < some["grown"] + 50e6  # four times the states, 0.2 GB of logits more


@pytest.mark.slow
class TestExample:
    def module(self, monkeypatch):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module("sb3_ppo")

    def test_it_trains_smollm2_and_leaves_its_files(self, tmp_path, monkeypatch, capsys):
        example = self.module(monkeypatch)
        monkeypatch.chdir(tmp_path)
        settings = example.Settings(
            name="x",
            iterations=2,
            num_envs=3,
            n_steps=6,
            batch_size=18,
            epochs=1,
            max_response_tokens=6,
            dtype="float32",
        )
        records = example.main(settings)
        assert [record["tokens"] for record in records] == [18, 36]
        assert abs(records[0]["kl"]) < 1e-3 < abs(records[1]["kl"])
        assert all(np.isfinite([record["score"], record["kl"]]).all() for record in records)
        folder = tmp_path / "runs" / "x"
        assert json.loads((folder / "records.json").read_text()) == records
        assert (folder / "sb3_ppo.png").read_bytes()[:4] == b"\x89PNG"
        assert list((folder / "tensorboard").rglob("events*"))
        assert "From " in capsys.readouterr().out
        assert PPO.load(folder / "model.zip", device="cpu").num_timesteps == 36


def test_the_example_explains_itself(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(SystemExit):
        tyro.cli(importlib.import_module("sb3_ppo").Settings, args=["--help"])
    text = capsys.readouterr().out
    assert "--share-prefixes" in text and "--kl-coef" in text


def test_missing_stable_baselines3_names_the_install(monkeypatch):
    import textenv.optional

    for name in [name for name in sys.modules if name.startswith("textenv.agents.sb3")]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        textenv.optional.importlib.util, "find_spec", lambda name: None if name == "stable_baselines3" else find(name)
    )
    with pytest.raises(ImportError, match=r"pip install 'textenv\[sb3\]'"):
        importlib.import_module("textenv.agents.sb3")


def test_make_vec_with_any_mode_trains():
    """Whatever mode the environments were made with."""
    scores = []
    for mode in ("SameStep", "NextStep", "Disabled"):
        envs = SB3VecEnv(gym.make_vec("textenv/Toy-v0", num_envs=8, kl_coef=0.1, autoreset_mode=mode))
        model = toy_model(PPO, envs=envs, n_steps=16, batch_size=128)
        model.learn(256, callback=(log := ResponseLog()))
        scores.append([(record["score"], record["kl"]) for record in log.records])
    assert scores[0] == scores[1] == scores[2]
