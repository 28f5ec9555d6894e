"""KL estimators: their values, what each does to the gradient as a reward, and one figure on every road."""

from __future__ import annotations

import copy
import itertools
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from distribution_helpers import PrefixDistributions, WholeDistributions
from gymnasium.vector import AutoresetMode
from helpers import BAD, END, GOOD, RESPONSE_TOKENS, PrefixLogprobs, assert_same, random_responses, text_task, write

from textenv import TextGenerationEnv, TextGenerationVectorEnv, distributions, replay
from textenv import wrappers as single_wrappers
from textenv.agents import TablePolicy
from textenv.agents.policy import PolicyLogprobs
from textenv.distributions import kl_divergence
from textenv.layers import attach_policy
from textenv.mdp import initial_state
from textenv.toy import ToyLanguage
from textenv.whole import whole_kl, whole_responses
from textenv.wrappers import vector as vector_wrappers
from textenv.wrappers.kl_estimators import ESTIMATORS, cross_entropy, estimate, k1, k2, k3

HALF, NINE, TENTH = np.log([0.5, 0.9, 0.1])
BY_ESTIMATOR = pytest.mark.parametrize("estimator", ESTIMATORS)


# Values


def test_values_by_hand():
    """pi = (0.9, 0.1) against (0.5, 0.5): KL = 0.9 log 1.8 + 0.1 log 0.2 = 0.3681."""
    pi, log_pi, log_ref = np.array([0.9, 0.1]), np.array([NINE, TENTH]), np.array([HALF, HALF])
    np.testing.assert_allclose(k1(log_pi, log_ref), [0.587787, -1.609438], atol=1e-6)
    np.testing.assert_allclose(k2(log_pi, log_ref), [0.172747, 1.295145], atol=1e-6)
    np.testing.assert_allclose(k3(log_pi, log_ref), [0.143342, 2.390562], atol=1e-6)
    np.testing.assert_allclose(cross_entropy(log_ref), [0.693147, 0.693147], atol=1e-6)
    assert kl_divergence(log_pi, log_ref) == pytest.approx(0.368064, abs=1e-6)
    assert pi @ k1(log_pi, log_ref) == pytest.approx(0.368064, abs=1e-6)  # unbiased
    assert pi @ k3(log_pi, log_ref) == pytest.approx(0.368064, abs=1e-6)  # unbiased
    assert pi @ k2(log_pi, log_ref) == pytest.approx(0.284987, abs=1e-6)  # biased
    assert kl_divergence(log_ref, log_pi) == pytest.approx(0.510826, abs=1e-6)  # the other way round is another number


def test_k2_and_k3_are_never_negative_and_k1_is():
    log_pi, log_ref = np.log(np.random.default_rng(0).dirichlet(np.ones(4), (2, 500)))
    assert (k2(log_pi, log_ref) >= 0).all() and (k3(log_pi, log_ref) >= 0).all()
    assert (k1(log_pi, log_ref) < 0).any()
    assert (kl_divergence(log_pi, log_ref) >= 0).all()
    assert not kl_divergence(log_pi, log_pi).any()


def test_forbidden_tokens_in_the_exact_kl():
    nothing = -np.inf
    same = np.array([nothing, HALF, HALF])
    assert kl_divergence(same, np.array([nothing, TENTH, NINE])) == pytest.approx(0.510826, abs=1e-6)  # 0 * inf is 0
    assert kl_divergence(same, np.array([nothing, nothing, 0.0])) == np.inf
    assert kl_divergence(np.array([nothing, nothing, 0.0]), same) == pytest.approx(np.log(2))


def test_k3_of_a_token_that_the_policy_all_but_forbids():
    assert k3(np.array(-800.0), np.array(-1.0)) == np.inf  # and no overflow warning


# Gradients. All responses are listed, so expectations are sums; the rewards are those of the wrapped environments.

SCORES = np.array([0.4, -0.3, 1.1])


def toy(horizon, vocab_size=3):
    logits = np.random.default_rng(5).normal(size=(horizon, vocab_size))
    return ToyLanguage(reference_logits=logits, stop_id=0, token_scores=SCORES[:vocab_size], unfinished_score=-0.5)


def every_response(horizon, vocab_size=3):
    tokens = itertools.chain.from_iterable(
        itertools.product(range(vocab_size), repeat=length) for length in range(1, horizon + 1)
    )
    return [list(t) for t in tokens if 0 not in t[:-1] and (t[-1] == 0 or len(t) == horizon)]


class Case:
    """A toy language, a policy away from its reference, and everything about them that can be summed exactly."""

    def __init__(self, horizon, language=None, logits=None, kl_coef=0.3):
        self.language = language or toy(horizon)
        size = self.language.vocab_size
        start = np.random.default_rng(7).normal(size=(horizon, size)) if logits is None else logits
        self.policy = TablePolicy(start).double()
        self.kl_coef, self.horizon = kl_coef, horizon
        self.responses = every_response(horizon, size)
        envs = gym.make_vec("textenv/Toy-v0", num_envs=2, language=self.language)
        self.mdp = envs.unwrapped.task.mdp
        self.state = whole_responses(self.mdp, [[0]] * len(self.responses), self.responses)

    def logprobs(self):
        ids, mask = (torch.as_tensor(x) for x in self.state[:2])
        with torch.enable_grad():
            return self.policy.evaluate(ids, mask, self.horizon).logprobs  # (B, T)

    def gradient(self, value):
        (gradient,) = torch.autograd.grad(value, self.policy.logits, allow_unused=True)
        return np.zeros_like(self.policy.logits.detach()) if gradient is None else gradient.numpy()

    def expectation(self, per_response):
        """Of something per response (B,), its own derivative included."""
        return (self.logprobs().sum(1).exp() * per_response).sum()

    def ref_logprobs(self):
        return torch.as_tensor(self.language.reference.response_logprobs(*self.state[:2], self.horizon))

    def logr(self):
        return (self.logprobs() - self.ref_logprobs()).sum(1)

    def true_gradient(self):
        """Of E[score] - kl_coef * KL."""
        score = torch.as_tensor(self.language.score(self.responses))
        return self.gradient(self.expectation(score - self.kl_coef * self.logr()))

    def reward_gradient(self, estimator, kl_coef=None, score=1.0):
        """E[sum_t grad log pi(a_t) * (rewards from t on)], rewards from the environments, constants of the gradient."""
        envs = gym.make_vec(
            "textenv/Toy-v0",
            num_envs=4,
            language=self.language,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
            kl_estimator=estimator,
        )
        attach_policy(envs, PolicyLogprobs(self.policy))
        replayed = replay(envs, [[0]] * len(self.responses), self.responses)
        rewards = replayed.rewards.copy()
        if not score:
            rewards[np.arange(len(rewards)), self.state.response_lengths - 1] -= replayed.scores
        to_go = torch.as_tensor(rewards[:, ::-1].cumsum(1)[:, ::-1].copy())
        logprobs = self.logprobs()
        weights = logprobs.sum(1, keepdim=True).exp().detach()
        return self.gradient((weights * logprobs * to_go).sum())


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_k1_as_a_reward_has_the_exact_gradient(horizon):
    case = Case(horizon)
    np.testing.assert_allclose(case.reward_gradient("k1"), case.true_gradient(), atol=1e-6)


@pytest.mark.parametrize("horizon", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["k2", "k3", "exact", "cross_entropy"])
def test_no_other_has(estimator, horizon):
    case = Case(horizon)
    assert np.abs(case.reward_gradient(estimator) - case.true_gradient()).max() > 0.02


def test_k2_as_a_reward_descends_its_own_mean_and_climbs_the_kl():
    case = Case(1)
    own = case.gradient(case.expectation(case.logr() ** 2 / 2))
    kl = case.gradient(case.expectation(case.logr()))
    np.testing.assert_allclose(case.reward_gradient("k2", 1.0, score=0), -own + kl, atol=1e-6)


def test_k3_as_a_reward_descends_one_kl_and_climbs_the_other():
    case = Case(1)
    log_pi = torch.log_softmax(case.policy.logits[0], -1)
    log_ref = torch.tensor(case.language.reference_logprobs[0])
    forward = case.gradient((log_pi.exp() * (log_pi - log_ref)).sum())
    log_pi = torch.log_softmax(case.policy.logits[0], -1)
    backward = case.gradient((log_ref.exp() * (log_ref - log_pi)).sum())
    np.testing.assert_allclose(case.reward_gradient("k3", 1.0, score=0), -forward + backward, atol=1e-6)


def two_words(p, reference=0.5):
    """The policy (p, 1 - p) against the reference (1/2, 1/2) or another."""
    logits = np.log([[reference, 1 - reference]])
    return Case(1, ToyLanguage(reference_logits=logits, stop_id=0, token_scores=np.zeros(2)), np.log([[p, 1 - p]]))


@pytest.mark.parametrize("estimator, direction", [("k1", -1), ("k2", 1), ("k3", 1), ("exact", 0)])
def test_which_way_a_policy_far_from_the_reference_is_pushed(estimator, direction):
    """At p = 0.9 the logit of the likely token should fall (-0.198): k2 and k3 raise it, exact leaves it alone."""
    pushed = two_words(0.9).reward_gradient(estimator, 1.0)[0, 0]
    by_hand = {"k1": -0.09 * np.log(9), "k2": -0.045 * (np.log(1.8) ** 2 - np.log(0.2) ** 2), "exact": 0.0}
    by_hand["k3"] = by_hand["k1"] + 0.4
    assert pushed == pytest.approx(by_hand[estimator], abs=1e-6)
    assert np.sign(round(pushed, 6)) == direction


@pytest.mark.parametrize("estimator, weaker", [("k1", 10), ("k2", 100), ("k3", 100)])
def test_near_the_reference_k2_and_k3_hold_less_and_less(estimator, weaker):
    """Ten times nearer, the pull of k1 is ten times weaker; theirs is a hundred times."""
    far, near = (two_words(0.3 + gap, 0.3).reward_gradient(estimator, 1.0)[0, 0] for gap in (0.01, 0.001))
    assert far / near == pytest.approx(weaker, rel=0.1)


def test_exact_as_a_reward_lacks_the_direct_derivative():
    case = Case(3)
    log_pi = torch.log_softmax(case.policy.logits, -1)  # (T, V)
    log_ref = torch.tensor(case.language.reference_logprobs)
    per_state = (log_pi.exp() * (log_pi - log_ref)).sum(-1)  # (T,)
    visited = torch.as_tensor(case.state.attention_mask[:, 1:]).double()  # (B, T)
    weights = case.logprobs().sum(1).exp().detach()
    direct = case.gradient((weights[:, None] * visited * per_state).sum())
    indirect = case.reward_gradient("exact")
    np.testing.assert_allclose(indirect - case.kl_coef * direct, case.true_gradient(), atol=1e-6)
    assert np.abs(case.kl_coef * direct).max() > 0.02


def test_with_one_token_exact_as_a_reward_holds_nothing():
    np.testing.assert_allclose(Case(1).reward_gradient("exact", 1.0, score=0), 0.0, atol=1e-7)


def test_cross_entropy_and_an_entropy_bonus_make_the_exact_gradient():
    case = Case(3)
    entropy = case.gradient(case.expectation(-case.logprobs().sum(1)))
    np.testing.assert_allclose(
        case.reward_gradient("cross_entropy") + case.kl_coef * entropy, case.true_gradient(), atol=1e-6
    )


# One figure on every road


def models(kind=WholeDistributions):
    return kind(1), kind(2)


def wrapped(wrappers, env, estimator, kl_coef=0.25, kind=WholeDistributions):
    reference, policy = models(kind)
    return wrappers.KLPenalty(env, reference, policy, kl_coef=kl_coef, estimator=estimator)


def by_hand(estimator, prompt_ids, response, kl_coef=0.25):
    """Tolls and KL of one response, token by token from the two formulas."""
    reference, policy = models()
    state = initial_state(text_task().mdp, [prompt_ids])
    ids, mask = state.input_ids, state.attention_mask
    tolls, kl = [], 0.0
    for place, token in enumerate(response):
        log_pi, log_ref = policy.formula(ids, mask)[0], reference.formula(ids, mask)[0]
        exact = np.sum(np.exp(log_pi) * (log_pi - log_ref))
        tolls.append(kl_coef * float(estimate(estimator, log_pi[token], log_ref[token], exact)))
        kl += log_pi[token] - log_ref[token]
        ids[0, 6 + place], mask[0, 6 + place] = token, 1
    return tolls, kl


@BY_ESTIMATOR
def test_stepping_charges_what_the_formula_says_and_reports_k1(estimator):
    env = wrapped(single_wrappers, TextGenerationEnv(text_task()), estimator)
    response = [GOOD, BAD, GOOD, END]
    steps = write(env, response, options={"prompt": " a film"})
    tolls, kl = by_hand(estimator, text_task().tokenizer.encode(" a film"), response)
    expected = -np.array(tolls)
    expected[-1] += steps["info"]["score"]
    np.testing.assert_allclose(steps["rewards"], expected, atol=1e-9)
    assert steps["info"]["kl"] == pytest.approx(kl)
    assert steps["info"]["kl_toll"] == pytest.approx(sum(tolls))
    if estimator != "k1":
        assert abs(sum(tolls) - 0.25 * kl) > 1e-3


@BY_ESTIMATOR
@pytest.mark.parametrize("kind", [WholeDistributions, PrefixDistributions])
def test_single_vector_and_replay_agree(estimator, kind):
    rng = np.random.default_rng(3)
    responses, prompts = random_responses(rng, 5), [" a film"] * 5
    envs = wrapped(vector_wrappers, TextGenerationVectorEnv(2, text_task()), estimator, kind=kind)
    replayed = replay(envs, prompts, responses)
    env = wrapped(single_wrappers, TextGenerationEnv(text_task()), estimator, kind=kind)
    for row, response in enumerate(responses):
        steps = write(env, response, options={"prompt": " a film"})
        np.testing.assert_allclose(replayed.rewards[row, : len(response)], steps["rewards"], atol=1e-9)
        for key in ("kl", "kl_toll", "kl_coef"):
            assert replayed.infos[key][row] == pytest.approx(steps["info"][key])


@BY_ESTIMATOR
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_vector_step_equals_single_steps(estimator, mode):
    envs = wrapped(vector_wrappers, TextGenerationVectorEnv(2, text_task(), autoreset_mode=mode), estimator)
    responses = [[GOOD, BAD, END], [BAD, GOOD, END]]
    envs.reset(options={"prompts": [" a film", " films"]})
    rewards = []
    for actions in np.transpose(responses):
        _, reward, _, _, infos = envs.step(actions)
        rewards.append(reward)
    ends = infos.get("final_info", infos)
    for row, prompt in enumerate([" a film", " films"]):
        env = wrapped(single_wrappers, TextGenerationEnv(text_task()), estimator)
        steps = write(env, responses[row], options={"prompt": prompt})
        np.testing.assert_allclose(np.array(rewards)[:, row], steps["rewards"], atol=1e-12)
        assert ends["kl_toll"][row] == pytest.approx(steps["info"]["kl_toll"])
    assert ends["_kl_toll"].all()


def test_replay_asks_each_model_once_for_its_distributions():
    envs = wrapped(vector_wrappers, TextGenerationVectorEnv(3, text_task()), "exact")
    responses = random_responses(np.random.default_rng(0), 7)
    given = np.zeros((7, RESPONSE_TOKENS))
    replay(envs, [" films"] * 7, responses, logprobs=given, ref_logprobs=given)
    assert [model.calls for model in (envs.leash.policy_logprobs, envs.leash.ref_logprobs)] == [["whole"]] * 2


def test_stepping_asks_each_model_once_a_step():
    env = wrapped(single_wrappers, TextGenerationEnv(text_task()), "exact")
    write(env, [GOOD, END])
    assert [model.calls for model in (env.leash.policy_logprobs, env.leash.ref_logprobs)] == [["next"] * 2] * 2


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch):
    task, responses = text_task(), random_responses(np.random.default_rng(1), 9)
    state = whole_responses(task.mdp, [[1, 2]] * 9, responses)
    reference, policy = models()
    whole = whole_kl(policy, reference, state, task.mdp)
    monkeypatch.setattr(distributions, "BLOCK_BYTES", 2 * 4 * RESPONSE_TOKENS * task.mdp.vocab_size)  # two rows
    np.testing.assert_array_equal(whole_kl(policy, reference, state, task.mdp), whole)
    assert policy.calls == ["whole"] * 6  # one block, then five
    assert (whole[np.arange(9), state.response_lengths - 1] > 0).all()
    assert not whole[state.attention_mask[:, 6:] == 0].any()


def test_two_leashes_share_the_exact_figures():
    reference, policy = models()
    envs = TextGenerationVectorEnv(2, text_task())
    for _ in range(2):
        envs = vector_wrappers.KLPenalty(envs, reference, policy, estimator="exact")
    given = np.zeros((2, RESPONSE_TOKENS))
    replay(envs, [" films"] * 2, [[END], [GOOD, END]], logprobs=given, ref_logprobs=given)
    assert policy.calls.count("whole") == 1


# Without a policy


def test_cross_entropy_needs_no_policy():
    task = text_task(reference=PrefixDistributions(1))
    env = single_wrappers.KLPenalty(TextGenerationEnv(task), kl_coef=0.5, estimator="cross_entropy")
    steps = write(env, [GOOD, END], options={"prompt": " films"})  # and no warning
    envs = vector_wrappers.KLPenalty(TextGenerationVectorEnv(1, task), kl_coef=0.5, estimator="cross_entropy")
    replayed = replay(envs, [" films"], [[GOOD, END]])
    np.testing.assert_allclose(replayed.rewards[0, :2], steps["rewards"], atol=1e-12)
    assert steps["rewards"][0] < -0.01
    assert np.isnan(steps["info"]["kl"]) and np.isnan(replayed.infos["kl"][0])
    assert replayed.infos["kl_toll"][0] == pytest.approx(steps["info"]["kl_toll"])


@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
def test_others_without_a_policy_charge_nothing_and_say_so(estimator):
    task = text_task(reference=PrefixDistributions(1))
    env = single_wrappers.KLPenalty(TextGenerationEnv(task), kl_coef=0.5, estimator=estimator)
    with pytest.warns(UserWarning, match="no policy attached"):
        steps = write(env, [GOOD, END])
    assert (steps["info"]["kl"], steps["info"]["kl_toll"], steps["rewards"][0]) == (0.0, 0.0, 0.0)


def test_a_coefficient_of_zero_charges_nothing_but_measures():
    env = wrapped(single_wrappers, TextGenerationEnv(text_task()), "k3", kl_coef=0.0)
    info = write(env, [GOOD, END])["info"]
    assert info["kl_toll"] == 0 and info["kl"] != 0


# Bad input


def test_unknown_estimators_are_refused():
    for wrappers, env in (
        (single_wrappers, TextGenerationEnv(text_task())),
        (vector_wrappers, TextGenerationVectorEnv(2, text_task())),
    ):
        with pytest.raises(ValueError, match=r"one of \('k1', 'k2', 'k3', 'exact', 'cross_entropy'\), got 'k4'"):
            wrappers.KLPenalty(env, estimator="k4")


def test_exact_refuses_models_that_know_chosen_tokens_only():
    env, bare = TextGenerationEnv(text_task()), PrefixLogprobs(1)
    for arguments in ((bare, None), (PrefixDistributions(1), bare)):
        with pytest.raises(TypeError, match=r"next_logprobs\(observations\) -> \(N, V\), got PrefixLogprobs"):
            single_wrappers.KLPenalty(env, *arguments, estimator="exact")
    late = single_wrappers.KLPenalty(env, PrefixDistributions(1), estimator="exact")
    with pytest.raises(TypeError, match="next_logprobs"):
        late.attach_policy(bare)


def test_a_controller_needs_a_kl():
    task = text_task(reference=PrefixDistributions(1))
    env = single_wrappers.KLPenalty(TextGenerationEnv(task), target_kl=1.0, estimator="cross_entropy")
    env.reset()
    with pytest.raises(ValueError, match="without one measures none"):
        env.step(END)


def test_options_of_an_id():
    env = gym.make("textenv/Toy-v0", kl_coef=0.1, kl_estimator="k3")
    assert env.get_wrapper_attr("leash").estimator == "k3"
    with pytest.raises(ValueError, match="'k3' needs a `kl_coef`"):
        gym.make("textenv/Toy-v0", kl_estimator="k3")


def test_the_estimator_is_part_of_the_spec():
    env = gym.make("textenv/Toy-v0", kl_coef=0.1, kl_estimator="cross_entropy")
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.get_wrapper_attr("leash").estimator == "cross_entropy"


# Steppers


class Incremental(PrefixDistributions):
    """A model that has a stepper, which remembers whom it belongs to."""

    def stepper(self):
        stepper = PrefixDistributions(self.salt)
        stepper.nbytes = 7
        self.made = [*getattr(self, "made", []), stepper]
        return stepper


def test_a_leash_steps_with_steppers_of_its_own():
    reference, policy = Incremental(1), Incremental(2)
    env = single_wrappers.KLPenalty(TextGenerationEnv(text_task()), reference, policy)
    assert env.leash.nbytes == 0
    expected = write(wrapped(single_wrappers, TextGenerationEnv(text_task()), "k1", 0.05), [GOOD, END], seed=3)
    steps = write(env, [GOOD, END], seed=3)
    np.testing.assert_allclose(steps["rewards"], expected["rewards"], atol=1e-12)
    assert (len(policy.made), policy.calls, policy.made[0].calls) == (1, [], ["token"] * 2)
    assert env.leash.nbytes == 14
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert twin.leash.nbytes == 0  # caches stay behind
        assert_same(write(twin, [GOOD, END], seed=3)["rewards"], steps["rewards"])
    env.attach_policy(Incremental(5))
    other = write(env, [GOOD, END], seed=3)
    assert other["rewards"] != steps["rewards"]  # a new policy gets a new stepper
