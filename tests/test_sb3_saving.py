"""Saving, loading, callbacks and logs as Stable-Baselines3's users expect them, without frozen weights in the files."""

import json
import zipfile

import numpy as np
import pytest
import torch
from agent_helpers import lm_envs
from sb3_helpers import TOY, lm_model, moved_policy, toy_model, toy_vec_env
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from textenv.agents import TablePolicy, tiny_transformer
from textenv.agents.sb3 import LanguageModelActorCriticPolicy, ResponseLog, SB3VecEnv, attach, policy_kwargs

SETTINGS = {"n_steps": 12, "batch_size": 48, "n_epochs": 2, "learning_rate": 1e-2}


def vec_env(folder, num_envs=8):
    return SB3VecEnv(lm_envs(folder, num_envs=num_envs))


def same_policy(one, other):
    states = one.policy.state_dict(), other.policy.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def said(model, observations):
    """What the whole distribution over tokens is, and the values."""
    tensors = {key: torch.as_tensor(value) for key, value in observations.items()}
    return model.policy.get_distribution(tensors).distribution.logits, model.policy.predict_values(tensors)


class TestRoundTrip:
    @pytest.mark.parametrize("given", [False, True])
    def test_it_predicts_and_goes_on_the_same(self, given, tiny_model, tmp_path):
        envs = vec_env(tiny_model)
        kwargs = policy_kwargs(moved_policy(tiny_model), envs) if given else {"model": tiny_model, "lora_rank": 4}
        model = lm_model(PPO, tiny_model, envs=envs, policy_kwargs=kwargs, **SETTINGS)
        model.learn(96)
        model.save(tmp_path / "model.zip")
        loaded = PPO.load(tmp_path / "model.zip", env=vec_env(tiny_model), device="cpu")
        attach(loaded)
        assert loaded.policy.network is not model.policy.network
        assert same_policy(model, loaded)
        observations = vec_env(tiny_model, 5).reset()
        for one, other in zip(said(model, observations), said(loaded, observations), strict=True):
            torch.testing.assert_close(one, other)
        assert (
            model.predict(observations, deterministic=True)[0] == loaded.predict(observations, deterministic=True)[0]
        ).all()
        optimizers = [which.policy.optimizer.state_dict()["state"] for which in (model, loaded)]
        assert optimizers[0].keys() == optimizers[1].keys() != set()
        for which in (model, loaded):
            which.set_random_seed(5)
            which._last_obs = None
            which.learn(96, reset_num_timesteps=False)
        assert model.num_timesteps == loaded.num_timesteps == 192
        assert same_policy(model, loaded)

    def test_frozen_weights_stay_out(self, tiny_model, tmp_path):
        envs = vec_env(tiny_model)
        for name, kwargs in (
            ("name", {"model": tiny_model, "lora_rank": 4}),
            ("given", policy_kwargs(moved_policy(tiny_model), envs)),
        ):
            model = lm_model(PPO, tiny_model, envs=envs, policy_kwargs=kwargs, **SETTINGS)
            model.save(tmp_path / name)
            with zipfile.ZipFile(tmp_path / f"{name}.zip") as archive:
                data, weights = json.loads(archive.read("data")), archive.getinfo("policy.pth").file_size
                assert len(archive.read("data")) < 20_000
            trained = sum(parameter.numel() for parameter in model.policy.parameters())
            assert weights < 4 * trained + 40_000 and 4 * trained > 10_000
        assert ":serialized:" in data["policy_kwargs"]
        with zipfile.ZipFile(tmp_path / "name.zip") as archive:  # a name and numbers need no pickle
            assert json.loads(archive.read("data"))["policy_kwargs"] == {"model": tiny_model, "lora_rank": 4}

    @pytest.mark.parametrize("algorithm", [PPO, A2C])
    def test_policies_without_a_name_are_kept_whole(self, algorithm, tmp_path):
        for policy in (TablePolicy(np.random.default_rng(0).normal(size=(8, 6))), tiny_transformer(6)):
            model = toy_model(algorithm, policy, n_steps=8)
            model.learn(64)
            model.save(tmp_path / "model")
            loaded = algorithm.load(tmp_path / "model", device="cpu")
            observations = toy_vec_env(3).reset()
            for one, other in zip(said(model, observations), said(loaded, observations), strict=True):
                torch.testing.assert_close(one, other)

    def test_the_policy_alone(self, tiny_model, tmp_path):
        """`policy.save` and `policy.load`, for acting."""
        model = lm_model(PPO, tiny_model, policy_kwargs=policy_kwargs(moved_policy(tiny_model), vec_env(tiny_model)))
        model.policy.save(tmp_path / "policy.pt")
        assert (tmp_path / "policy.pt").stat().st_size < 60_000
        loaded = LanguageModelActorCriticPolicy.load(tmp_path / "policy.pt", device="cpu")
        observations = vec_env(tiny_model, 5).reset()
        one, other = (which.predict(observations, deterministic=True)[0] for which in (model.policy, loaded))
        assert (one == other).all()

    def test_missing_weights_are_refused(self, tiny_model):
        model = lm_model(PPO, tiny_model, **SETTINGS)
        state = model.policy.state_dict()
        state.pop(next(iter(state)))
        with pytest.raises(ValueError, match="lacks 1 trained tensors"):
            model.policy.load_state_dict(state)

    def test_a_reward_model_given_as_an_object_is_asked_for(self, tiny_model):
        import pickle

        from textenv.agents.sb3.networks import GivenPolicy

        policy = moved_policy(tiny_model)
        policy.settings = policy.settings | {"reward_model": {"object": "RewardModel"}}
        with pytest.raises(ValueError, match="custom_objects"):
            pickle.loads(pickle.dumps(GivenPolicy(policy)))


def test_callbacks_and_logs(tiny_model, tmp_path):
    """Evaluations and checkpoints in mid-rollout, and TensorBoard's figures: Stable-Baselines3's and those of text."""
    model = lm_model(PPO, tiny_model, tensorboard_log=str(tmp_path / "logs"), **SETTINGS)
    held_out = attach(model, evaluation := vec_env(tiny_model, 3)) and evaluation
    log = ResponseLog()
    evaluating = EvalCallback(
        held_out, eval_freq=6, n_eval_episodes=3, log_path=str(tmp_path), best_model_save_path=str(tmp_path), verbose=0
    )
    model.learn(192, callback=[log, evaluating, CheckpointCallback(12, str(tmp_path / "checkpoints"))])

    evaluations = np.load(tmp_path / "evaluations.npz")
    assert evaluations["timesteps"].tolist() == [48, 96, 144, 192]
    assert (evaluations["ep_lengths"] >= 1).all()
    assert PPO.load(tmp_path / "best_model.zip", device="cpu").num_timesteps in evaluations["timesteps"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "rl_model_192_steps.zip",
        "rl_model_96_steps.zip",
    ]
    events = EventAccumulator(str(tmp_path / "logs" / "PPO_1"))
    events.Reload()
    names = {"rollout/ep_rew_mean", "rollout/score", "rollout/kl", "eval/mean_reward", "train/approx_kl", "train/loss"}
    assert names <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("rollout/kl")] == pytest.approx([r["kl"] for r in log.records])


def test_evaluations_leave_the_rollout_as_it_was(tiny_model):
    """Case 27: the same training with and without them, as far as random numbers are the same."""
    finished = []
    for evaluates in (False, True):
        model = lm_model(PPO, tiny_model, **SETTINGS)
        attach(model, held_out := vec_env(tiny_model, 3))

        def look(local, _, held_out=held_out, evaluates=evaluates):
            if evaluates:
                state = torch.get_rng_state()
                local["self"].predict(held_out.reset())
                torch.set_rng_state(state)
            return True

        model.learn(192, callback=look)
        finished.append(model)
    # The keys and values that an evaluation displaced are computed anew, in passes of another shape.
    for one, other in zip(*(model.policy.state_dict().values() for model in finished), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_records_are_means_over_the_responses_of_a_rollout():
    """A policy that always writes three 3s and stops: score 1.5, KL 4 log 6."""
    logits = np.full((TOY.horizon, TOY.vocab_size), -60.0)
    logits[:3, 3] = logits[3:, 0] = 0.0
    log = ResponseLog()
    model = toy_model(PPO, TablePolicy(logits), n_steps=8, batch_size=64, learning_rate=0.0)
    model.learn(128, callback=log)
    kl = 4 * np.log(6)
    for number, record in enumerate(log.records, start=1):
        assert (record["iteration"], record["tokens"], record["episodes"]) == (number, 64 * number, 16 * number)
        assert record["score"] == pytest.approx(1.5)
        assert record["kl"] == pytest.approx(kl, abs=1e-5)
        assert record["shaped_return"] == pytest.approx(1.5 - 0.1 * kl, abs=1e-5)
        assert (record["response_length"], record["eos_rate"]) == (4, 1)
        assert record["update_seconds"] > 0
    first, second = log.records
    assert second["seconds"] > first["seconds"] + first["update_seconds"]
