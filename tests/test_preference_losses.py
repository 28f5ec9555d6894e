"""DPO, conservative DPO and IPO: by hand, against finite differences, and at their optima on enumerable languages."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch

from textenv.agents import preference_losses
from textenv.agents.preference_losses import dpo_loss, log_ratio_gap
from textenv.oracle import enumerate_responses, solve
from textenv.toy import ToyLanguage, sum_over_tokens

HAND = [torch.tensor([p]).log() for p in (0.5, 0.1, 0.25, 0.2)]
"""The chosen response has gone from 1/4 to 1/2, the rejected one from 1/5 to 1/10: h = log 4."""


def test_examples_run():
    assert doctest.testmod(preference_losses).failed == 0


@pytest.mark.parametrize(
    ("beta", "loss", "smoothing", "expected"),
    [
        (0.5, "sigmoid", 0.0, math.log(3 / 2)),  # sigma(log 2) = 2/3
        (1.0, "sigmoid", 0.0, math.log(5 / 4)),  # sigma(log 4) = 4/5
        (0.5, "sigmoid", 0.2, 0.8 * math.log(3 / 2) + 0.2 * math.log(3)),
        (0.5, "ipo", 0.0, (math.log(4) - 1) ** 2),
        (0.1, "ipo", 0.0, (math.log(4) - 5) ** 2),
        (0.5, "ipo", 0.2, 0.8 * (math.log(4) - 1) ** 2 + 0.2 * (math.log(4) + 1) ** 2),
    ],
)
def test_by_hand(beta, loss, smoothing, expected):
    assert dpo_loss(*HAND, beta, loss, smoothing).item() == pytest.approx(expected, rel=1e-6)
    assert f"{expected:.4f}" in preference_losses.dpo_loss.__doc__ or (beta, loss) == (1.0, "sigmoid")


def test_where_nothing_was_learned_the_labels_do_not_matter():
    same = torch.tensor([-3.0, -700.0])
    for smoothing in (0.0, 0.3, torch.tensor([0.1, 0.9])):
        assert dpo_loss(same, same, same, same, 0.2, "sigmoid", smoothing).tolist() == pytest.approx([math.log(2)] * 2)
        assert dpo_loss(same, same, same, same, 0.2, "ipo", smoothing).tolist() == pytest.approx([6.25] * 2)


def test_large_gaps_neither_overflow_nor_vanish():
    """log sigma of -1000 is -1000, not -inf."""
    gap = torch.tensor([-1000.0, 1000.0])
    zero = torch.zeros(2)
    assert dpo_loss(gap, zero, zero, zero, 1.0).tolist() == [1000.0, 0.0]


def test_a_smoothing_per_pair_is_that_of_each():
    logs = [x.expand(3) for x in HAND]
    each = dpo_loss(*logs, 0.5, "sigmoid", torch.tensor([0.0, 0.2, 1.0]))
    alone = [dpo_loss(*HAND, 0.5, "sigmoid", e).item() for e in (0.0, 0.2, 1.0)]
    assert each.tolist() == pytest.approx(alone)
    assert alone[2] == pytest.approx(math.log(3))  # the other way round


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
def test_gradients_are_those_of_finite_differences(loss, smoothing):
    rng = np.random.default_rng(0)
    logs = [torch.tensor(-rng.uniform(1, 9, 5), requires_grad=place < 2) for place in range(4)]
    assert torch.autograd.gradcheck(lambda *given: dpo_loss(*given, 0.3, loss, smoothing), logs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "`beta` should be a positive number"),
        ((math.nan,), "`beta` should be a positive number"),
        ((True,), "`beta` should be a positive number"),
        ((0.1, "hinge"), "`loss` should be one of"),
        ((0.1, "sigmoid", 1.5), "`label_smoothing` should be a probability"),
        ((0.1, "ipo", torch.tensor([0.1, -0.1])), "`label_smoothing` should be a probability"),
    ],
)
def test_settings_that_are_no_loss(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpo_loss(*HAND, *arguments)


# Optima. A policy here is one logit per response of a language: nothing but the loss limits it.


def uneven(responses):
    """A score that is no sum over tokens."""
    return [len(set(response)) - 0.7 * (response[0] == 1) + 0.3 * len(response) for response in responses]


LANGUAGE = ToyLanguage(
    reference_logits=[[0.3, -0.2, 0.9], [1.0, 0.0, -1.0], [0.0, 0.5, 0.2]], stop_id=0, score_fn=uneven
)
OPTIMUM = solve(LANGUAGE, 0.8)
REF = torch.tensor(sum_over_tokens(LANGUAGE.reference_logprobs, enumerate_responses(LANGUAGE)[0]))
PAIRS = torch.combinations(torch.arange(len(REF)))  # each pair of different responses once


def minimised(objective, parameters):
    """Newton-like minimisation to the last digits, in float64."""
    optimiser = torch.optim.LBFGS(
        [parameters], max_iter=3000, tolerance_grad=1e-11, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimiser.step(closure)
    return parameters.detach()


def fitted(loss, beta, first_wins, weights):
    """log pi (M,) that minimises the exact expected loss over all pairs, labels drawn with probability `first_wins`."""
    logits = torch.zeros(len(REF), dtype=torch.float64, requires_grad=True)
    a, b = PAIRS.unbind(-1)

    def objective():
        log_pi = logits.log_softmax(-1)
        as_first = dpo_loss(log_pi[a], log_pi[b], REF[a], REF[b], beta, loss)
        as_second = dpo_loss(log_pi[b], log_pi[a], REF[b], REF[a], beta, loss)
        return (weights * (first_wins * as_first + (1 - first_wins) * as_second)).sum()

    return minimised(objective, logits).log_softmax(-1)


SCORES = torch.tensor(np.asarray(OPTIMUM.scores))
WINS = torch.sigmoid(SCORES[PAIRS[:, 0]] - SCORES[PAIRS[:, 1]])
"""How likely the first of each pair is preferred, by Bradley and Terry."""


def kl(log_p, log_q):
    return float((log_p.exp() * (log_p - log_q)).sum())


@pytest.mark.parametrize("weights", ["even", "of the reference's samples"])
def test_the_optimum_of_dpo_is_the_tilted_reference(weights):
    """Rafailov et al. 2023, theorem 1 and eq. 4: ref exp(score / beta) / Z, the optimum of the KL-regularised task."""
    even = torch.ones(len(PAIRS), dtype=torch.float64) / len(PAIRS)
    found = fitted("sigmoid", 0.8, WINS, even if weights == "even" else REF.exp()[PAIRS].prod(-1))
    tilted = torch.tensor(OPTIMUM.sequence_logprobs)
    assert kl(found, tilted) < 1e-9
    torch.testing.assert_close(found, tilted, atol=1e-5, rtol=0)
    assert kl(REF, tilted) > 0.1  # it has been somewhere
    assert kl(fitted("sigmoid", 0.4, WINS, even), tilted) > 0.01  # another beta has another optimum


def test_soft_labels_are_the_expected_loss():
    """One smoothing per pair, sigma(-(score difference)), has the same minimum without a label being drawn."""
    a, b = PAIRS.unbind(-1)
    logits = torch.zeros(len(REF), dtype=torch.float64, requires_grad=True)

    def objective():
        log_pi = logits.log_softmax(-1)
        return dpo_loss(log_pi[a], log_pi[b], REF[a], REF[b], 0.8, "sigmoid", 1 - WINS).mean()

    found = minimised(objective, logits).log_softmax(-1)
    torch.testing.assert_close(found, torch.tensor(OPTIMUM.sequence_logprobs), atol=1e-5, rtol=0)


def test_the_optimum_of_ipo_is_the_reference_tilted_by_win_rates():
    """Azar et al. 2023, eq. 7 with Psi the identity: ref exp(P(y beats a sample of the reference) / beta) / Z."""
    beta, mu = 0.3, REF.exp()
    found = fitted("ipo", beta, WINS, mu[PAIRS].prod(-1))
    beats = torch.sigmoid(SCORES[:, None] - SCORES[None])  # P(y beats y'), 1/2 against itself
    expected = (REF + (beats @ mu) / beta).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    averaged = (REF + SCORES / beta).log_softmax(-1)
    assert kl(found, averaged) > 0.01  # it is not DPO's


@pytest.mark.parametrize(
    ("loss", "smoothing", "expected"),
    [
        ("sigmoid", 0.1, math.log(9) / 0.5),  # sigma(beta h) = 1 - e
        ("ipo", 0.0, 1.0),  # 1 / (2 beta)
        ("ipo", 0.1, 0.8),  # (1 - 2 e) / (2 beta)
    ],
)
def test_where_a_pair_that_is_always_labelled_alike_ends(loss, smoothing, expected):
    """DPO without smoothing would never end: its gradient has the same sign at every h."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.3, 0.7], dtype=torch.float64).log()

    def gap():
        return log_ratio_gap(*logits.log_softmax(-1), *ref)

    minimised(lambda: dpo_loss(*logits.log_softmax(-1), *ref, 0.5, loss, smoothing), logits)
    assert gap().item() == pytest.approx(expected, abs=1e-5)
    far = torch.tensor(30.0, requires_grad=True)
    dpo_loss(far, torch.zeros(()), torch.zeros(()), torch.zeros(()), 0.5).backward()
    assert far.grad < 0
