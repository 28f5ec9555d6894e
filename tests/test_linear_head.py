"""Linear heads fitted to comparisons: the optimum itself, and a reward model that shares another one's trunk."""

import math

import numpy as np
import pytest
import torch

from textenv.rewards import Preference, RewardModel, fit_head_to
from textenv.rewards.linear_head import WEIGHT_DECAYS, choose_weight_decay, solve


class LastTokens:
    """A trunk whose hidden states are a fixed table's row of the last token, with a constant and a huge coordinate."""

    source = "last tokens"
    hidden_size = 6

    def __init__(self):
        self.table = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
        self.table[:, 4] *= 1e4
        self.table[:, 5] = 3.0
        self.calls = []

    def states_at(self, input_ids, attention_mask, columns):
        assert (columns == input_ids.shape[1] - 1).all() and attention_mask[:, -1].all()
        self.calls.append(len(input_ids))
        return self.table[torch.as_tensor(input_ids[:, -1])]


class Letters:
    pad_id = 0
    named_size = 300

    def encode(self, text):
        return [ord(letter) for letter in text]


@pytest.fixture
def like():
    return RewardModel(LastTokens(), Letters(), np.ones(6), 7.0, batch_size=4)


def judged(like, count, seed=0):
    """Comparisons of letters by a known direction in the trunk's states, each decided as Bradley & Terry say."""
    rng = np.random.default_rng(seed)
    truth = like.trunk.table.numpy() @ np.array([1.0, -2.0, 0.5, 0.0, 0.0, 0.0])
    found = []
    while len(found) < count:
        a, b = rng.integers(ord("a"), ord("z") + 1, 2)
        if a != b:
            wins = rng.random() < 1 / (1 + math.exp(truth[b] - truth[a]))
            found.append(Preference("x", *(map(chr, (a, b)) if wins else map(chr, (b, a)))))
    return found, truth


@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_one_comparison_has_the_weight_that_its_equation_says(margin):
    """Where the difference of the features is 1, sigmoid(margin - w) = decay * w: found by halving an interval."""
    features, pairs = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([[1, 0]])
    weight = solve(features, pairs, torch.tensor([margin], dtype=torch.float64), 0.1).item()
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 / (1 + math.exp(middle - margin)) > 0.1 * middle else (low, middle)
    assert weight == pytest.approx(low, rel=1e-5)


def test_the_gradient_is_zero_at_the_optimum():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    pairs = torch.randint(20, (40, 2), generator=generator)
    w = solve(features, pairs, torch.zeros(40, dtype=torch.float64), 0.05)
    difference = features[pairs[:, 0]] - features[pairs[:, 1]]
    gradient = -(torch.sigmoid(-difference @ w)[:, None] * difference).mean(0) + 0.05 * w
    assert gradient.abs().max() < 1e-5


def test_finds_what_decided_the_comparisons(like):
    preferences, truth = judged(like, 4000)
    found = fit_head_to(preferences, like)
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    scores = found(["x"] * 26, letters)
    assert np.corrcoef(scores, truth[ord("a") : ord("z") + 1])[0, 1] > 0.98
    assert scores.mean() == pytest.approx(0, abs=1e-3)  # every letter stands in some comparison
    assert found.trunk is like.trunk and found.source == like.source
    assert found.metadata["comparisons"] == "4000" and float(found.metadata["weight_decay"]) in WEIGHT_DECAYS


def test_every_text_is_read_once_and_the_head_at_hand_is_not_used(like):
    preferences = [Preference("x", "a", "b"), Preference("x", "a", "c"), Preference("x", "c", "b")]
    other = RewardModel(like.trunk, like.tokenizer, -5 * np.ones(6), -1.0, batch_size=4)
    one, two = fit_head_to(preferences, like, weight_decay=0.1), fit_head_to(preferences, other, weight_decay=0.1)
    assert like.trunk.calls == [3, 3]
    assert np.array_equal(one.weight, two.weight) and one.bias == two.bias
    assert (like.weight == 1).all() and like.bias == 7.0
    scores = one(["x"] * 3, ["a", "c", "b"])
    assert scores[0] > scores[1] > scores[2]


def test_pure_noise_gets_the_strongest_decay():
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(60, 40, dtype=torch.float64, generator=generator)
    pairs = torch.randint(60, (50, 2), generator=generator)
    assert choose_weight_decay(features, pairs, torch.zeros(50, dtype=torch.float64)) == max(WEIGHT_DECAYS)


def test_what_cannot_be_learned_from_is_refused(like):
    with pytest.raises(ValueError, match="at least two"):
        fit_head_to([Preference("x", "a", "b")], like)
    with pytest.raises(ValueError, match="at least 0"):
        fit_head_to([Preference("x", "a", "b")] * 2, like, weight_decay=-1.0)
