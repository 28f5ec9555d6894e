"""Resuming with every option of PPO on: as if training had never stopped, with the same pretraining texts only."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_envs, parameters, same, toy_envs

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, TablePolicy

pytestmark = pytest.mark.filterwarnings(CUT)

OPTIONS = {
    "clip_range_high": 0.28,
    "dual_clip": 3.0,
    "entropy_coef": 0.01,
    "kl_loss_coef": 0.02,
    "kl_loss_estimator": "k3",
    "target_kl": 0.004,
    "ptx_coef": 0.5,
    "ptx_batch_size": 3,
    "ptx_max_tokens": 8,
    "num_minibatches": 2,
    "micro_batch_tokens": 40,
    "lr_schedule": "linear",
}


class Table:
    texts = ([1, 3, 3, 3], [2, 3], [4, 3, 0], [1, 1, 1, 1, 1, 1, 1])
    config = OPTIONS | {"learning_rate": 0.05}

    def envs(self, _folder):
        return toy_envs(20, target_kl=2.0, normalize_score=True)

    def new_policy(self, _folder):
        return TablePolicy(TOY.reference_logits)

    def brought(self, folder):
        return self.new_policy(folder)


class Adapters:
    texts = ("the good", "a long and winding road", "go on")
    config = OPTIONS | {"learning_rate": 0.01}

    def envs(self, folder):
        return lm_envs(folder, 6, target_kl=2.0, normalize_score=True)

    def new_policy(self, folder):
        return LanguageModelPolicy.from_pretrained(folder, lora_rank=4, temperature=0.8)

    def brought(self, _folder):
        return None  # remade from the checkpoint


@pytest.fixture(params=[Table(), Adapters()], ids=lambda kind: type(kind).__name__)
def kind(request):
    return request.param


def new_agent(kind, folder):
    agent = PPO(
        kind.new_policy(folder), kind.envs(folder), PPOConfig(**kind.config), seed=4, pretraining_texts=kind.texts
    )
    agent.total_episodes = 1000
    return agent


def figures(stats):
    return {name: value for name, value in stats.metrics().items() if "second" not in name}, stats.samples


def test_training_goes_on_bit_for_bit(kind, tiny_model, tmp_path):
    whole = new_agent(kind, tiny_model)
    expected = [figures(whole.step()) for _ in range(5)]
    first = new_agent(kind, tiny_model)
    before = [figures(first.step()) for _ in range(3)]
    first.save(tmp_path / "saved")

    envs = kind.envs(tiny_model)
    envs.reset(seed=99)
    torch.manual_seed(99)
    second = PPO.load(tmp_path / "saved", envs, kind.brought(tiny_model), pretraining_texts=kind.texts)
    assert second.config == first.config
    after = [figures(second.step()) for _ in range(2)]
    np.testing.assert_equal(before + after, expected)
    assert same(parameters(second), parameters(whole))
    numbers = [figures for figures, _ in expected]
    assert all(np.isfinite([n["ptx_loss"], n["kl_loss"]]).all() for n in numbers)
    assert {n["early_stop"] for n in numbers} >= {1}  # it was on, and did something


def saved(tmp_path, texts=Table.texts):
    config = PPOConfig(ptx_coef=0.5 if texts else 0.0)
    agent = PPO(TablePolicy(TOY.reference_logits), toy_envs(), config, pretraining_texts=texts)
    agent.save(tmp_path / "saved")
    return tmp_path / "saved"


def load(folder, **options):
    return PPO.load(folder, toy_envs(), TablePolicy(TOY.reference_logits), **options)


def test_other_texts_are_refused(tmp_path):
    folder = saved(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"pretraining_texts should be as for training, got others.*load\(folder, envs, pretraining_texts=",
    ):
        load(folder, pretraining_texts=[*Table.texts[:-1], [1, 1]])


def test_texts_left_out_are_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"should come together, got ptx_coef=0\.5 and no texts"):
        load(saved(tmp_path))


def test_checkpoints_from_before_there_were_texts_are_read(tmp_path):
    folder = saved(tmp_path, texts=None)
    state = json.loads((folder / "state.json").read_text())
    assert state.pop("data") == {}
    for name in set(OPTIONS) - {"num_minibatches", "micro_batch_tokens", "lr_schedule"}:
        del state["config"][name]
    (folder / "state.json").write_text(json.dumps(state))
    assert load(folder).config == PPOConfig()
