"""Any policy of a toy language, evaluated from its next-token distributions: against the optimum and other roads."""

import itertools

import gymnasium as gym
import numpy as np
import pytest

import textenv  # noqa: F401 - registers textenv/Toy-v0
from textenv.oracle import evaluate, evaluate_policy, evaluate_sequences, solve
from textenv.toy import ToyLanguage, standard_toy


def repeats(responses):
    """A score that is no sum over tokens: how often a token follows itself."""
    return [sum(a == b for a, b in itertools.pairwise(y)) for y in responses]


def language(stop_id=1):
    logits = np.random.default_rng(0).normal(size=(4, 3))
    return ToyLanguage(reference_logits=logits, stop_id=stop_id, score_fn=repeats)


def prefixes_of(observations, toy):
    """What a policy is shown, read back into tuples of response tokens."""
    lengths = observations["attention_mask"].sum(1)
    assert (observations["input_ids"][:, 0] == toy.stop_id).all()
    return [tuple(row[1:n].tolist()) for row, n in zip(observations["input_ids"], lengths, strict=True)]


@pytest.mark.parametrize("stop_id", [0, 1, 2])
def test_the_optimum_has_no_regret(stop_id):
    toy = language(stop_id)
    optimum = solve(toy, 0.3)

    def next_logprobs(observations):
        return np.stack([optimum.next_logprobs(prefix) for prefix in prefixes_of(observations, toy)])

    found = evaluate_policy(toy, next_logprobs, 0.3)
    assert found.regret == pytest.approx(0, abs=1e-12)
    assert found.score == pytest.approx(optimum.score, abs=1e-12)
    assert found.kl == pytest.approx(optimum.kl, abs=1e-12)


def test_a_policy_that_remembers_equals_the_sum_over_its_responses():
    toy = language()
    rows = {}

    def after(prefix):
        key = sum((token + 1) * 5**place for place, token in enumerate(prefix))
        return np.log(np.random.default_rng(key).dirichlet(np.ones(3)))

    def next_logprobs(observations):
        rows[len(rows)] = prefixes = prefixes_of(observations, toy)
        return np.stack([after(prefix) for prefix in prefixes])

    def by_hand(responses, lengths):
        whole = [tuple(row[:n].tolist()) for row, n in zip(responses, lengths, strict=True)]
        return [sum(after(y[:t])[y[t]] for t in range(len(y))) for y in whole]

    found, expected = evaluate_policy(toy, next_logprobs, 0.3), evaluate_sequences(toy, by_hand, 0.3)
    for figure in ("score", "kl", "objective", "regret", "distance"):
        assert getattr(found, figure) == pytest.approx(getattr(expected, figure), abs=1e-12)
    shown = [prefix for prefixes in rows.values() for prefix in prefixes]
    assert len(shown) == len(set(shown)) == 1 + 2 + 4 + 8  # each unfinished prefix once


def test_a_positional_policy_of_the_standard_toy_equals_its_table():
    toy, rng = standard_toy(), np.random.default_rng(1)
    table = np.log(rng.dirichlet(np.ones(6), size=8))
    found = evaluate_policy(toy, lambda o: table[o["attention_mask"].sum(1) - 1], 0.1)
    expected = evaluate(toy, table, 0.1)
    assert found.score == pytest.approx(expected.score, abs=1e-9)
    assert found.distance == pytest.approx(expected.distance, abs=1e-9)


def test_prefixes_look_as_the_environment_shows_them():
    toy, seen = standard_toy(), {}

    def next_logprobs(observations):
        for ids, mask in zip(observations["input_ids"], observations["attention_mask"], strict=True):
            seen[tuple(ids[: mask.sum()].tolist())] = {"input_ids": ids, "attention_mask": mask}
        return np.full((len(observations["input_ids"]), 6), -np.log(6))

    assert evaluate_policy(toy, next_logprobs, 0.1).kl == pytest.approx(0, abs=1e-9)
    env = gym.make("textenv/Toy-v0")
    observation, _ = env.reset(seed=0)
    for token in (3, 5, 1, 4, 2, 3, 3):
        shown = seen[tuple(observation["input_ids"][: observation["attention_mask"].sum()].tolist())]
        for key, array in observation.items():
            assert array.dtype == shown[key].dtype
            np.testing.assert_array_equal(array, shown[key])
        observation, *_ = env.step(token)


def test_wrong_shapes_and_sums_are_refused():
    toy = language()
    with pytest.raises(ValueError, match=r"should return \(N, V\) = \(1, 3\) log-probabilities, got shape \(3,\)"):
        evaluate_policy(toy, lambda o: np.log([0.2, 0.3, 0.5]), 0.1)
    with pytest.raises(ValueError, match="sum to 1"):
        evaluate_policy(toy, lambda o: np.zeros((len(o["input_ids"]), 3)), 0.1)
