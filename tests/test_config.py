"""Every setting of PPO is checked when it is made."""

from __future__ import annotations

import dataclasses

import pytest

from textenv.agents import PPOConfig

NAN, INF = float("nan"), float("inf")
BAD = {
    "episodes_per_iteration": [0, -1, 1.0, True, "32"],
    "epochs": [0, -1, None, 2.0, True],
    "samples_per_prompt": [0, None, 1.5, "4"],
    "num_minibatches": [0, None, 1.5, "4"],
    "micro_batch_tokens": [0, -8, 2.0, False],
    "logprobs_from": ["vllm", None, True],
    "importance_clip": [0.99, 0, -2, NAN, INF, None, "2"],
    "learning_rate": [0, 0.0, -1e-3, NAN, INF, None, "1e-4", True],
    "lr_schedule": ["cosine", None, ""],
    "weight_decay": [-0.1, NAN, INF, None],
    "gamma": [-0.1, 1.1, NAN, None, True],
    "gae_lambda": [-0.1, 1.01, NAN, "0.95"],
    "clip_range": [0, -0.2, NAN, INF, None],
    "clip_range_vf": [0, -0.2, NAN, INF, "0.2"],
    "clip_range_high": [0, -0.2, NAN, INF, "0.2", True],
    "dual_clip": [1, 1.0, 0.5, -3, NAN, INF, "3", True],
    "target_kl": [0, -0.1, NAN, INF, "0.1", True],
    "entropy_coef": [-0.01, NAN, INF, None, "0.1", True],
    "kl_loss_coef": [-0.1, NAN, INF, None, False],
    "kl_loss_estimator": ["k4", "exact", None, 2],
    "ptx_coef": [-1, NAN, INF, None, "27.8"],
    "ptx_batch_size": [0, -1, None, 1.5, True],
    "ptx_max_tokens": [1, 0, -5, None, 2.0, "many", True],
    "vf_coef": [-0.1, NAN, INF, None],
    "max_grad_norm": [0, -1, NAN, INF, None],
    "whiten_advantages": [None, 1, "yes"],
    "loss_mode": ["mean", None, "seq-mean"],
    "check_start": [None, 0, "no"],
}
ODD_BUT_GOOD = {
    "episodes_per_iteration": [1, None],
    "samples_per_prompt": [1, 64],
    "num_minibatches": [1, 1000],
    "micro_batch_tokens": [1, None],
    "logprobs_from": ["trainer", "engine"],
    "importance_clip": [1, 2.0, 10],
    "learning_rate": [1, 1e-9],
    "lr_schedule": ["constant", "linear"],
    "weight_decay": [0, 0.1],
    "gamma": [0, 1, 0.99],
    "gae_lambda": [0, 1],
    "clip_range_vf": [None, 0.2],
    "clip_range_high": [None, 0.28, 2],
    "dual_clip": [None, 1.01, 3],
    "target_kl": [None, 1e-6, 1],
    "entropy_coef": [0, 0.01, 2],
    "kl_loss_coef": [0, 0.05],
    "kl_loss_estimator": ["k1", "k2", "k3"],
    "ptx_coef": [0, 27.8],
    "ptx_batch_size": [1, 64],
    "ptx_max_tokens": [2, 1024],
    "vf_coef": [0, 1],
    "loss_mode": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"],
}


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_every_field_is_tried():
    assert set(BAD) == {field.name for field in dataclasses.fields(PPOConfig)}


@pytest.mark.parametrize("name, value", pairs(BAD))
def test_bad_values_say_what_was_expected_and_what_came(name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be ") as caught:
        PPOConfig(**{name: value})
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("name, value", pairs(ODD_BUT_GOOD))
def test_values_at_the_edge_are_taken(name, value):
    assert getattr(PPOConfig(**{name: value}), name) == value


def test_settings_are_named_and_stay():
    with pytest.raises(TypeError):
        PPOConfig(4)
    with pytest.raises(TypeError, match="learningrate"):
        PPOConfig(learningrate=1e-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().epochs = 2


def test_what_changes_the_objective_is_off_by_default():
    config = PPOConfig()
    assert config.entropy_coef == config.kl_loss_coef == config.ptx_coef == 0
    assert config.clip_range_high is config.dual_clip is config.target_kl is None
    assert config.kl_loss_estimator == "k2"  # the one with the right gradient per token


def test_settings_survive_a_checkpoints_json():
    import json

    config = PPOConfig(
        micro_batch_tokens=64, clip_range_vf=0.3, lr_schedule="linear", check_start=False, dual_clip=3, target_kl=0.1
    )
    assert PPOConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
