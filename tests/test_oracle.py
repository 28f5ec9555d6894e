"""The exact optimum: numbers by hand, two roads to one result, and the identity J* - J = kl_coef KL(pi || pi*)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv.oracle import enumerate_responses, evaluate, evaluate_sequences, frontier, solve
from textenv.toy import ToyLanguage, standard_toy, sum_over_tokens

FORBIDDEN = -np.inf
KL_COEFS = (0.05, 0.1, 0.2, 0.5, 1.0)
LOG_3 = np.log(3.0)


def has_double_one(responses):
    """Score log 5 where token 1 stands twice in a row."""
    return [np.log(5.0) * ((1, 1) in itertools.pairwise(y)) for y in responses]


def one_step(**changes) -> ToyLanguage:
    """Two tokens, one position, uniform reference; token 1 scores 1, token 0 stops."""
    return ToyLanguage(**({"reference_logits": [[0.0, 0.0]], "stop_id": 0, "token_scores": [0.0, 1.0]} | changes))


def two_steps() -> ToyLanguage:
    """Two tokens, two positions, uniform reference; exp(score) is 1 for (0), 3 for (1, 0) and 9/3 for (1, 1)."""
    return one_step(reference_logits=np.zeros((2, 2)), token_scores=[0.0, LOG_3], unfinished_score=-LOG_3)


def double_one() -> ToyLanguage:
    """Two tokens, two positions, uniform reference; exp(score) is 5 for (1, 1), else 1."""
    return ToyLanguage(reference_logits=np.zeros((2, 2)), stop_id=0, score_fn=has_double_one)


def random_language(seed: int, additive: bool = True, kind: str = "real") -> ToyLanguage:
    """A small language; "ties" has scores that are often equal, "forbidden" has tokens the reference never writes."""
    rng = np.random.default_rng(seed)
    horizon, vocab_size = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    logits = rng.normal(size=(horizon, vocab_size))
    if kind == "forbidden":
        logits[rng.random(logits.shape) < 0.3] = FORBIDDEN
        logits[:, rng.integers(vocab_size)] = 0.0
    scores = rng.integers(-1, 2, size=logits.shape) / 10 if kind == "ties" else rng.normal(size=logits.shape)
    stop_id = int(rng.integers(vocab_size))
    if additive:
        return ToyLanguage(
            reference_logits=logits, stop_id=stop_id, token_scores=scores, unfinished_score=float(scores[0, 0])
        )
    return ToyLanguage(
        reference_logits=logits,
        stop_id=stop_id,
        score_fn=lambda ys: [np.sin(sum((t + 1) * 7**i for i, t in enumerate(y))) for y in ys],
    )


def prefixes(language: ToyLanguage):
    """Every unfinished response prefix."""
    going_on = [token for token in range(language.vocab_size) if token != language.stop_id]
    return [p for length in range(language.horizon) for p in itertools.product(going_on, repeat=length)]


def random_policy(language: ToyLanguage, seed: int) -> np.ndarray:
    """Positional log-probabilities (T, V) with the support of the reference."""
    logits = np.random.default_rng(seed).normal(size=language.reference_logits.shape) + language.reference_logprobs
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def tilted_reference(language: ToyLanguage, kl_coef: float) -> np.ndarray:
    """pi* (M,) straight from its definition."""
    responses, lengths = enumerate_responses(language)
    ragged = [tuple(y[:n]) for y, n in zip(responses.tolist(), lengths.tolist(), strict=True)]
    reference = [np.exp(sum(language.reference_logprobs[t, y] for t, y in enumerate(ids))) for ids in ragged]
    weights = np.array(reference) * np.exp(language.score(ragged) / kl_coef)
    return weights / weights.sum()


class TestByHand:
    def test_one_step(self):
        # kl_coef = 1 / log 3 makes exp(score / kl_coef) = (1, 3): Z = (1 + 3) / 2 = 2, pi* = (1/4, 3/4).
        optimum = solve(one_step(), 1 / LOG_3)
        np.testing.assert_allclose(np.exp(optimum.policy_logprobs), [[0.25, 0.75]], rtol=1e-12)
        assert optimum.log_partition == pytest.approx(np.log(2.0))
        assert optimum.value == pytest.approx(np.log(2.0) / LOG_3)
        assert optimum.score == pytest.approx(0.75)
        assert optimum.kl == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))

    @pytest.mark.parametrize("method", ["induction", "enumeration"])
    def test_two_steps(self, method: str):
        # Z = 1/2 * 1 + 1/4 * 3 + 1/4 * 3 = 2, so pi* = (1/4, 3/8, 3/8) on (0), (1, 0), (1, 1).
        optimum = solve(two_steps(), 1.0, method)
        assert optimum.value == pytest.approx(np.log(2.0))
        np.testing.assert_allclose(np.exp(optimum.next_logprobs(())), [1 / 4, 3 / 4], rtol=1e-12)
        np.testing.assert_allclose(np.exp(optimum.next_logprobs((1,))), [1 / 2, 1 / 2], rtol=1e-12)

    def test_a_score_that_is_not_additive(self):
        # Z = 1/2 + 1/4 + 5/4 = 2, so pi* = (1/4, 1/8, 5/8).
        optimum = solve(double_one(), 1.0)
        assert optimum.value == pytest.approx(np.log(2.0))
        assert optimum.score == pytest.approx(5 / 8 * np.log(5.0))
        np.testing.assert_allclose(np.exp(optimum.sequence_logprobs), [1 / 4, 1 / 8, 5 / 8], rtol=1e-12)
        np.testing.assert_allclose(np.exp(optimum.next_logprobs(())), [1 / 4, 3 / 4], rtol=1e-12)
        np.testing.assert_allclose(np.exp(optimum.next_logprobs((1,))), [1 / 6, 5 / 6], rtol=1e-12)

    def test_evaluation(self):
        # pi = (1/4, 3/4) then (1/2, 1/2): the second position costs nothing, the first its KL to a fair coin.
        evaluation = evaluate(two_steps(), np.log([[0.25, 0.75], [0.5, 0.5]]), kl_coef=2.0)
        kl = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
        assert evaluation.score == pytest.approx(3 / 4 * LOG_3)
        assert evaluation.kl == pytest.approx(kl)
        assert evaluation.objective == pytest.approx(3 / 4 * LOG_3 - 2.0 * kl)

    def test_the_reference_leaves_nothing(self):
        evaluation = evaluate(two_steps(), two_steps().reference_logprobs, kl_coef=1.0)
        assert evaluation.kl == 0.0
        assert evaluation.objective == pytest.approx(LOG_3 / 2)  # (0 + log 3 / 4 + log 3 / 4), the same weights
        assert evaluation.regret == pytest.approx(np.log(2.0) - LOG_3 / 2)

    def test_the_standard_toy_prefers_to_stop_last(self):
        optimum = solve(standard_toy(), 0.0)
        assert optimum.value == optimum.score == 3.5
        assert optimum.kl == pytest.approx(8 * np.log(6.0))
        assert optimum.policy_logprobs.argmax(axis=1).tolist() == [3] * 7 + [0]


class TestEnumeration:
    def test_the_list_by_hand(self):
        responses, lengths = enumerate_responses(one_step(reference_logits=np.zeros((2, 3)), token_scores=np.zeros(3)))
        assert responses.tolist() == [[0, -1], [1, 0], [2, 0], [1, 1], [1, 2], [2, 1], [2, 2]]
        assert lengths.tolist() == [1, 2, 2, 2, 2, 2, 2]

    def test_the_stop_token_may_stand_anywhere(self):
        responses, _ = enumerate_responses(one_step(reference_logits=np.zeros((2, 2)), stop_id=1))
        assert responses.tolist() == [[1, -1], [0, 1], [0, 0]]

    def test_a_language_that_can_only_stop(self):
        language = ToyLanguage(reference_logits=np.zeros((3, 1)), stop_id=0, token_scores=[2.0])
        assert enumerate_responses(language)[0].tolist() == [[0, -1, -1]]
        assert solve(language, 1.0).value == solve(language, 1.0, "enumeration").value == 2.0

    def test_every_response_of_the_standard_toy_once_with_probability_1(self):
        language = standard_toy()
        responses, _ = enumerate_responses(language)
        assert len(responses) == sum(5**t for t in range(8)) + 5**8 == 488_281
        assert np.exp(sum_over_tokens(language.reference_logprobs, responses)).sum() == pytest.approx(1.0)

    def test_the_limit_is_the_largest_number_allowed(self):
        assert len(enumerate_responses(two_steps(), limit=3)[0]) == 3
        for call in (
            lambda: enumerate_responses(two_steps(), limit=2),
            lambda: solve(double_one(), 1.0, limit=2),
            lambda: evaluate(double_one(), double_one().reference_logprobs, 1.0, limit=2),
            lambda: frontier(double_one(), [1.0], limit=2),
            lambda: enumerate_responses(one_step(reference_logits=np.zeros((10**6, 3)), token_scores=np.zeros(3))),
        ):
            with pytest.raises(ValueError, match=r"`limit` allows .* responses"):
                call()


class TestTwoRoads:
    @pytest.mark.parametrize("kl_coef", [0.0, *KL_COEFS, 100.0])
    def test_standard_toy(self, kl_coef: float):
        one, other = (solve(standard_toy(), kl_coef, method) for method in ("induction", "enumeration"))
        for figure in ("value", "score", "kl"):
            assert getattr(one, figure) == pytest.approx(getattr(other, figure), abs=1e-10)
        for prefix in ((), (3,), (5, 5), (1, 2, 4, 3, 3, 3, 3)):
            np.testing.assert_allclose(one.next_logprobs(prefix), other.next_logprobs(prefix), atol=1e-10)

    @given(
        seed=st.integers(0, 10**6),
        kl_coef=st.sampled_from([0.0, 0.01, 0.3, 1.0, 30.0]),
        kind=st.sampled_from(["real", "ties", "forbidden"]),
    )
    @settings(max_examples=80, deadline=None, database=None)
    def test_random_languages_at_every_prefix(self, seed: int, kl_coef: float, kind: str):
        language = random_language(seed, kind=kind)
        one, other = (solve(language, kl_coef, method) for method in ("induction", "enumeration"))
        for figure in ("value", "score", "kl"):
            assert getattr(one, figure) == pytest.approx(getattr(other, figure), abs=1e-10)
        for prefix in prefixes(language):
            np.testing.assert_allclose(one.next_logprobs(prefix), other.next_logprobs(prefix), atol=1e-10)
        logprobs = sum_over_tokens(one.policy_logprobs, other.responses)
        np.testing.assert_allclose(np.exp(logprobs), np.exp(other.sequence_logprobs), atol=1e-10)

    @given(seed=st.integers(0, 10**6), kl_coef=st.sampled_from([0.0, 0.2, 2.0]))
    @settings(max_examples=40, deadline=None, database=None)
    def test_a_positional_policy_is_a_policy_on_responses(self, seed: int, kl_coef: float):
        language = random_language(seed)
        policy = random_policy(language, seed)
        table = evaluate(language, policy, kl_coef)
        listed = evaluate_sequences(language, lambda y, _: sum_over_tokens(policy, y), kl_coef)
        for figure in ("score", "kl", "objective", "regret"):
            assert getattr(table, figure) == pytest.approx(getattr(listed, figure), abs=1e-10)

    def test_lengths_mark_the_padding(self):
        def uniform(responses, lengths):
            assert ((responses >= 0).sum(axis=1) == lengths).all()
            return -lengths * np.log(2.0)

        assert evaluate_sequences(two_steps(), uniform, 1.0).kl == pytest.approx(0.0, abs=1e-12)


class TestIdentities:
    @given(seed=st.integers(0, 10**6), kl_coef=st.sampled_from(KL_COEFS), additive=st.booleans())
    @settings(max_examples=60, deadline=None, database=None)
    def test_tilted_reference_and_the_distance_to_it(self, seed: int, kl_coef: float, additive: bool):
        language = random_language(seed, additive=additive)
        optimum = solve(language, kl_coef, "enumeration")
        best = tilted_reference(language, kl_coef)
        np.testing.assert_allclose(np.exp(optimum.sequence_logprobs), best, atol=1e-10)
        assert optimum.value == pytest.approx(kl_coef * optimum.log_partition, abs=1e-12)
        assert optimum.value == pytest.approx(optimum.score - kl_coef * optimum.kl, abs=1e-10)

        pi = np.random.default_rng(seed).dirichlet(np.ones(len(best)))  # not positional, not even smooth
        evaluation = evaluate_sequences(language, lambda *_: np.log(pi), kl_coef)
        assert evaluation.regret >= 0.0
        assert evaluation.distance == pytest.approx((pi * (np.log(pi) - optimum.sequence_logprobs)).sum(), abs=1e-9)

    def test_the_other_direction_of_the_kl_is_not_the_distance(self):
        optimum = solve(double_one(), 0.5)
        pi = np.array([0.05, 0.9, 0.05])
        star = np.exp(optimum.sequence_logprobs)
        distance = evaluate_sequences(double_one(), lambda *_: np.log(pi), 0.5).distance
        assert distance == pytest.approx((pi * np.log(pi / star)).sum())
        assert abs(distance - (star * np.log(star / pi)).sum()) > 0.1

    @pytest.mark.parametrize("kl_coef", KL_COEFS)
    def test_the_optimum_has_no_regret_and_everything_else_has(self, kl_coef: float):
        language = standard_toy()
        optimum = solve(language, kl_coef)
        assert evaluate(language, optimum.policy_logprobs, kl_coef).regret == pytest.approx(0.0, abs=1e-12)
        assert evaluate(language, language.reference_logprobs, kl_coef).regret > 0.05
        for other in KL_COEFS:
            regret = evaluate(language, solve(language, other).policy_logprobs, kl_coef).regret
            assert (regret < 1e-12) == (other == kl_coef)


class TestLimits:
    def test_ties_share_by_the_reference(self):
        language = ToyLanguage(
            reference_logits=np.log([[0.5, 0.3, 0.2]]), stop_id=0, token_scores=[0.0, 0.3, 0.1 + 0.2]
        )
        optimum = solve(language, 0.0)  # 0.1 + 0.2 > 0.3 in floating point, yet a tie
        np.testing.assert_allclose(np.exp(optimum.policy_logprobs), [[0.0, 0.6, 0.4]], rtol=1e-12)
        assert optimum.kl == pytest.approx(np.log(2.0))
        assert np.isnan(optimum.log_partition)

    @pytest.mark.parametrize("method", ["induction", "enumeration"])
    def test_a_tie_between_stopping_and_going_on(self, method: str):
        # (0) and (1, 0) score 0, (1, 1) scores -1. The best two have 1/2 and 1/4 under the reference: pi* = (2/3, 1/3).
        language = one_step(reference_logits=np.zeros((2, 2)), token_scores=[0.0, 0.0], unfinished_score=-1.0)
        for kl_coef in (0.0, 1e-3):
            optimum = solve(language, kl_coef, method)
            np.testing.assert_allclose(np.exp(optimum.next_logprobs(())), [2 / 3, 1 / 3], rtol=1e-12)
            np.testing.assert_allclose(np.exp(optimum.next_logprobs((1,))), [1.0, 0.0], atol=1e-12)
            assert optimum.kl == pytest.approx(np.log(4 / 3))

    @pytest.mark.parametrize("language", [two_steps(), double_one(), standard_toy()])
    def test_small_coefficients_reach_the_greedy_limit(self, language: ToyLanguage):
        greedy = solve(language, 0.0)
        for kl_coef in (1e-3, 1e-320):  # the second overflows every exp(score / kl_coef)
            near = solve(language, kl_coef)
            assert near.value == pytest.approx(greedy.value - kl_coef * greedy.kl, abs=1e-9)
            assert near.kl == pytest.approx(greedy.kl, abs=1e-9)

    @pytest.mark.parametrize("language", [two_steps(), double_one(), standard_toy()])
    def test_large_coefficients_stay_at_the_reference(self, language: ToyLanguage):
        optimum = solve(language, 1e9)
        reference = evaluate(language, language.reference_logprobs, 1e9)
        assert optimum.kl == pytest.approx(0.0, abs=1e-9)
        assert optimum.score == pytest.approx(reference.score, abs=1e-8)
        np.testing.assert_allclose(optimum.next_logprobs(()), language.reference_logprobs[0], atol=1e-8)

    @pytest.mark.parametrize("method", ["induction", "enumeration"])
    @pytest.mark.parametrize("kl_coef", [0.0, 0.1])
    def test_what_the_reference_forbids_stays_forbidden(self, method: str, kl_coef: float):
        language = one_step(reference_logits=[[0.0, FORBIDDEN]])
        optimum = solve(language, kl_coef, method)
        assert optimum.value == optimum.kl == 0.0  # token 1 scores 1, but at an infinite price
        assert optimum.next_logprobs(()).tolist() == [0.0, FORBIDDEN]
        escape = evaluate(language, np.log([[0.5, 0.5]]), kl_coef)
        assert (escape.score, escape.kl, escape.objective, escape.regret) == (0.5, np.inf, -np.inf, np.inf)

    def test_what_comes_after_a_certain_stop_costs_nothing(self):
        language = one_step(reference_logits=[[0.0, 0.0], [0.0, FORBIDDEN]])
        with np.errstate(divide="ignore"):
            policy = np.log([[1.0, 0.0], [0.5, 0.5]])
        assert evaluate(language, policy, 1.0).kl == pytest.approx(np.log(2.0))

    def test_at_zero_the_regret_is_in_units_of_the_score(self):
        evaluation = evaluate(standard_toy(), standard_toy().reference_logprobs, 0.0)
        assert evaluation.objective == evaluation.score
        assert evaluation.regret == pytest.approx(3.5 - evaluation.score)
        assert np.isnan(evaluation.distance)


class TestFrontier:
    def test_by_hand(self):
        ((kl_coef, kl, score),) = frontier(one_step(), [1 / LOG_3])
        assert (kl_coef, score) == (pytest.approx(1 / LOG_3), pytest.approx(0.75))
        assert kl == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))

    @pytest.mark.parametrize("language", [standard_toy(), double_one()])
    def test_a_lower_price_buys_more_score_for_more_kl(self, language: ToyLanguage):
        points = frontier(language, [0.0, *KL_COEFS])
        assert [point.kl_coef for point in points] == [0.0, *KL_COEFS]
        for cheap, dear in itertools.pairwise(points):
            assert cheap.kl > dear.kl
            assert cheap.score > dear.score
        for point in points:
            optimum = solve(language, point.kl_coef)
            assert (point.kl, point.score) == (optimum.kl, optimum.score)


class TestErrors:
    @pytest.mark.parametrize("kl_coef", [-0.1, np.nan, np.inf])
    def test_coefficient(self, kl_coef: float):
        for call in (
            lambda: solve(two_steps(), kl_coef),
            lambda: evaluate(two_steps(), two_steps().reference_logprobs, kl_coef),
            lambda: evaluate_sequences(two_steps(), lambda y, _: sum_over_tokens(np.zeros((2, 2)), y), kl_coef),
            lambda: frontier(two_steps(), [kl_coef]),
        ):
            with pytest.raises(ValueError, match=rf"`kl_coef` should be .* got {kl_coef}"):
                call()

    def test_method(self):
        with pytest.raises(ValueError, match="got 'magic'"):
            solve(two_steps(), 1.0, "magic")
        with pytest.raises(ValueError, match="additive score"):
            solve(double_one(), 1.0, "induction")

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (np.zeros((1, 2)), r"\(T, V\) = \(2, 2\), got shape \(1, 2\)"),
            (np.log([[0.5, 0.5], [0.5, 0.4]]), "Row 1 of `logprobs`.*sum of 0.9"),
            (np.full((2, 2), np.nan), "Row 0 of `logprobs`.*sum of nan"),
            (np.full((2, 2), 1e4), "sum of inf"),
        ],
    )
    def test_positional_policy(self, table, message: str):
        with pytest.raises(ValueError, match=message):
            evaluate(two_steps(), table, 1.0)

    def test_policy_on_responses(self):
        with pytest.raises(ValueError, match=r"shape \(3,\), got shape \(2,\)"):
            evaluate_sequences(two_steps(), lambda *_: np.zeros(2), 1.0)
        with pytest.raises(ValueError, match=r"sum of 0\.75"):  # a policy that counts one token too many
            evaluate_sequences(two_steps(), lambda *_: np.log([0.25, 0.25, 0.25]), 1.0)

    def test_rounding_to_float32_is_no_error_and_costs_nothing(self):
        policy = solve(standard_toy(), 0.1).policy_logprobs.astype(np.float32)
        assert evaluate(standard_toy(), policy, 0.1).regret == pytest.approx(0.0, abs=1e-10)

    @pytest.mark.parametrize("prefix", [(0,), (1, 1), (2,), (-1,)])
    @pytest.mark.parametrize("method", ["induction", "enumeration"])
    def test_prefix(self, prefix: tuple[int, ...], method: str):
        with pytest.raises(ValueError, match="`prefix` should be 0 to 1 ids"):
            solve(two_steps(), 1.0, method).next_logprobs(prefix)
