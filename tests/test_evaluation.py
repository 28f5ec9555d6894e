"""`evaluate`: figures against the exact oracle and by hand, nothing left changed, and what it refuses."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import END, GOOD, VOCAB_SIZE, CountingScorer, PrefixLogprobs, count_good, text_task
from lm_helpers import PROMPTS

import textenv
from textenv import TextGenerationVectorEnv
from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.alignment_tax import alignment_tax, losses
from textenv.estimates import Estimate
from textenv.evaluation import evaluate
from textenv.layers import layers
from textenv.oracle import evaluate as exactly
from textenv.oracle import solve
from textenv.toy import standard_toy
from textenv.wrappers import vector as wrappers
from textenv.writing import actor_of, write_responses

TOY = standard_toy()


def toy_envs(num_envs=64, **options):
    return gym.make_vec("textenv/Toy-v0", num_envs=num_envs, **options)


def tilted(kl_coef=0.3):
    """The optimal policy of the toy at that price: far from the reference, and known exactly."""
    scores = np.zeros(TOY.vocab_size)
    scores[3], scores[5] = 0.5, -0.5
    return np.asarray(torch.log_softmax(torch.as_tensor(TOY.reference_logprobs + scores / kl_coef), -1))


class Writes:
    """Acts by writing one fixed response whatever the prompt is."""

    def __init__(self, *tokens):
        self.tokens, self.calls = tokens, 0

    def __call__(self, observations):
        self.calls += 1
        lengths = np.asarray(observations["attention_mask"])[:, -5:].sum(1)
        return np.array([self.tokens[min(t, len(self.tokens) - 1)] for t in lengths])


def worlds(num_envs=3, **changes):
    return TextGenerationVectorEnv(num_envs, text_task(**changes))


def test_figures_hold_the_exact_ones():
    logprobs = tilted()
    exact = exactly(TOY, logprobs, 0.2)
    found = evaluate(TablePolicy(logprobs), toy_envs(kl_coef=0.2), 4000, seed=1, confidence=0.999)
    assert found.score.low < exact.score < found.score.high
    assert found.kl.low < exact.kl < found.kl.high
    assert found.shaped_return.low < exact.objective < found.shaped_return.high
    assert exact.kl > 1 and found.kl.high - found.kl.low < 0.5  # narrow enough to say something
    # A policy mistaken for its reference would show other figures.
    other = exactly(TOY, TOY.reference_logprobs, 0.2)
    assert not found.score.low < other.score < found.score.high


def test_reference_perplexity_of_a_uniform_reference():
    # Whatever is written, the uniform reference gives each token probability 1/6.
    found = evaluate(TablePolicy(tilted()), toy_envs(), 50)
    assert found.ref_perplexity == pytest.approx((6.0, 6.0, 6.0))


def test_by_hand():
    envs = worlds(scorer=count_good, prompts=(" a film",))
    found = evaluate(Writes(GOOD, GOOD, END), envs, 5)
    assert found.score.value == pytest.approx(2 + 0.7)  # two good, seven characters of the prompt
    assert (found.length.value, found.eos_rate.value, found.episodes, found.dropped) == (3.0, 1.0, 5, 0)
    assert found.distinct[1].value == 1 / 10 and found.distinct[2].value == 1 / 5
    assert found.samples[0] == (" a film", " good good", pytest.approx(2.7))
    cut = evaluate(Writes(GOOD), envs, 5)
    assert (cut.eos_rate.value, cut.length.value) == (0.0, 5.0)
    assert math.isnan(cut.kl.value) and math.isnan(cut.ref_perplexity.value)  # a function has no log-probabilities


def test_equal_seeds_ask_the_same_prompts():
    prompts = {
        name: [p for p, *_ in evaluate(Writes(token, END), worlds(), 8, seed=seed).samples]
        for name, token, seed in (("one", GOOD, 3), ("same", 1, 3), ("other", GOOD, 4))
    }
    assert prompts["one"] == prompts["same"] != prompts["other"]


def test_same_seed_same_record_another_seed_another():
    policy, envs = TablePolicy(TOY.reference_logprobs), toy_envs(16)
    one, again, other = (evaluate(policy, envs, 50, seed=seed) for seed in (0, 0, 1))
    assert one.metrics() == pytest.approx(again.metrics(), nan_ok=True)
    assert one.score != other.score


def test_deterministic_takes_the_most_likely_token():
    found = evaluate(TablePolicy(tilted()), toy_envs(8), 8, deterministic=True)
    assert found.score == (found.score.value,) * 3
    assert found.distinct[1].value == pytest.approx(1 / 64)  # 3 3 3 3 3 3 3 3, eight times


def test_win_rate_by_hand():
    def judge(prompts, responses):  # the number of words, in a film prompt; ties elsewhere
        return [len(r.split()) if p == " a film" else 0 for p, r in zip(prompts, responses, strict=True)]

    envs = worlds(prompts=(" a film", " films"), num_envs=2, scorer=lambda p, r: [0.0] * len(r))
    found = evaluate(Writes(GOOD, GOOD, END), envs, 40, opponent=Writes(GOOD, END), judge=judge)
    films = np.mean([prompt == " a film" for prompt, *_ in evaluate(Writes(END), envs, 40).samples])
    assert found.win_rate is not None and 0.5 < found.win_rate.value < 1
    again = evaluate(Writes(GOOD, END), envs, 40, opponent=Writes(GOOD, GOOD, END), judge=judge)
    assert found.win_rate.value == pytest.approx(1 - again.win_rate.value)
    assert 0 <= films <= 1
    # Without a judge the task's scorer decides, which ties.
    assert evaluate(Writes(GOOD, END), envs, 6, opponent=Writes(END)).win_rate.value == 0.5


def test_win_rate_of_a_policy_against_itself_is_near_a_half():
    policy = TablePolicy(TOY.reference_logprobs)
    found = evaluate(policy, toy_envs(), 2000, opponent=policy)
    assert found.win_rate.low < 0.5 < found.win_rate.high


def test_environments_get_their_state_back():
    def stack():
        envs = wrappers.NormalizeScore(toy_envs(4))
        return wrappers.KLPenalty(envs, lambda o, a: np.zeros(len(a)), kl_coef=0.1, target_kl=1.0)

    def states(envs):
        return [layer.state_dict() for layer in layers(envs) if hasattr(layer, "state_dict")]

    envs = stack()
    envs.reset(seed=7)
    before = states(envs)
    first = evaluate(TablePolicy(tilted()), envs, 20)
    assert states(envs) == before
    assert first.metrics() == pytest.approx(evaluate(TablePolicy(tilted()), envs, 20).metrics(), nan_ok=True)
    untouched = stack()
    untouched.reset(seed=7)
    for one, other in zip(envs.reset()[0].values(), untouched.reset()[0].values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_state_comes_back_when_the_scorer_fails():
    def fails(prompts, responses):
        raise RuntimeError("out of paper")

    envs = worlds(scorer=fails)
    envs.reset(seed=0)
    before = envs.state_dict()
    with pytest.raises(textenv.ScorerError, match="out of paper"):
        evaluate(Writes(END), envs, 3)
    assert envs.state_dict() == before


def test_one_scorer_call_for_all_episodes():
    scorer = CountingScorer()
    evaluate(Writes(GOOD, END), worlds(num_envs=2, scorer=scorer), 7)
    assert [len(prompts) for prompts, _ in scorer.calls] == [7]


def test_dropped_samples_count_in_nothing():
    def scorer(prompts, responses):
        return [float("nan") if p == " films" else 1.0 for p in prompts]

    found = evaluate(Writes(GOOD, END), worlds(scorer=scorer, scorer_errors="drop"), 40)
    assert 0 < found.dropped < 40
    assert found.score == (1.0, 1.0, 1.0)


def test_constraints_bind_the_writer():
    envs = wrappers.MinLength(toy_envs(16), 4)
    found = evaluate(TablePolicy(TOY.reference_logprobs), envs, 64)
    shortest = [len(text.split()) for _, text, _ in found.samples]
    assert min(shortest) >= 5  # four tokens that are no stop, and one that may be
    free = evaluate(TablePolicy(TOY.reference_logprobs), toy_envs(16), 64)
    assert min(len(text.split()) for _, text, _ in free.samples) < 5
    assert found.length.low > free.length.high
    # The reference's most likely tokens: what was allowed is remembered, not worked out again.
    top = evaluate(TablePolicy(TOY.reference_logprobs), wrappers.ActionMask(toy_envs(16), top_k=2), 64)
    assert {word for _, text, _ in top.samples for word in text.split()} == {"0", "1"}
    assert abs(found.kl.value) < 1e-6  # policy and reference are renormalised alike


def test_flat_metrics_and_text():
    found = evaluate(TablePolicy(TOY.reference_logprobs), toy_envs(8), 16, opponent=Writes(3))
    flat = found.metrics()
    assert {"score", "score_low", "score_high", "kl", "win_rate", "distinct_2", "eos_rate_low"} <= flat.keys()
    assert all(isinstance(value, float) for value in flat.values())
    assert "win_rate" in str(found) and str(found).count("\n") >= 8


def test_agents_act_by_their_policy():
    class Agent:
        policy = TablePolicy(tilted())

        def predict(self, observation, deterministic=True):
            raise AssertionError("the policy can act by itself")

    by_agent = evaluate(Agent(), toy_envs(8), 30)
    assert by_agent.metrics() == pytest.approx(evaluate(Agent.policy, toy_envs(8), 30).metrics(), nan_ok=True)
    assert by_agent.kl.value > 1


def test_predict_of_other_libraries():
    class Model:
        def predict(self, observation, deterministic=False):
            return np.full(len(observation["input_ids"]), 0), None

    found = evaluate(Model(), toy_envs(4), 8)
    assert found.length.value == 1.0


def test_bad_arguments():
    envs = worlds()
    with pytest.raises(ValueError, match="`episodes` should be an integer of at least 1"):
        evaluate(Writes(END), envs, 0)
    with pytest.raises(ValueError, match="no `opponent`"):
        evaluate(Writes(END), envs, 2, judge=count_good)
    with pytest.raises(ValueError, match="between 0 and 1"):
        evaluate(Writes(END), envs, 2, confidence=95)
    with pytest.raises(TypeError, match="does not take 'answer'"):
        with_context = worlds(
            prompts=[textenv.PromptRecord(" a film", {"answer": "x"})], scorer=lambda p, r, answer: [0.0] * len(r)
        )
        evaluate(Writes(END), with_context, 2, opponent=Writes(END), judge=lambda p, r: [0.0] * len(r))
    with pytest.raises(TypeError, match="should act on observations"):
        evaluate(object(), envs, 2)
    with pytest.raises(TypeError, match="vector text environments"):
        evaluate(Writes(END), gym.make("textenv/Toy-v0"), 2)
    with pytest.raises(ValueError, match="token id in"):
        evaluate(Writes(VOCAB_SIZE), envs, 2)
    with pytest.raises(TypeError, match="response_logprobs"):
        evaluate(Writes(END), envs, 2, texts=[" a film"])


def test_writing_leaves_ended_rows_alone():
    mdp = text_task().mdp
    policy = Writes(GOOD, GOOD, END)
    written = write_responses(actor_of(policy, np.random.default_rng(0), False), mdp, [[1], [2, 3]])
    assert [r.tolist() for r in written.responses] == [[GOOD, GOOD, END]] * 2
    assert policy.calls == 3 and written.action_masks is None
    with pytest.raises(TypeError):
        actor_of(3, np.random.default_rng(0), False)


class Position:
    """Log-probability -(t + 1) / 2 of response token t: losses that can be added up by hand."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def response_logprobs(self, input_ids, attention_mask, response_tokens):
        return np.full((len(input_ids), 1), -self.scale) * np.arange(1, response_tokens + 1) / 2


def test_tax_by_hand():
    tokenizer = text_task().tokenizer
    # Three tokens and two: losses 0.5 + 1.0 over two predicted tokens, 0.5 over one; 2 nats over 3 tokens.
    texts = [" a film is", " a film"]
    found = alignment_tax(Position(2.0), Position(1.0), texts, tokenizer, VOCAB_SIZE)
    assert found.reference.value == pytest.approx(2 / 3)
    assert found.policy.value == pytest.approx(4 / 3)
    assert found.tax.value == pytest.approx(2 / 3)
    assert found.reference.value != pytest.approx(np.mean([1.5 / 2, 0.5]))  # not the mean over texts
    # Padding is not counted, and a long text is read up to the limit.
    np.testing.assert_allclose(losses(Position(), [[1, 2, 3], [1, 2]]), [1.5, 0.5])
    short = alignment_tax(Position(2.0), Position(1.0), texts, tokenizer, VOCAB_SIZE, max_tokens=2)
    assert short.reference.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "at least one text"), (" a film", "list with at least one"), ([" a film", " a"], r"texts\[1\].*two tokens")],
)
def test_tax_of_texts_that_cannot_be_used(texts, message):
    with pytest.raises(ValueError, match=message):
        alignment_tax(Position(), Position(), texts, text_task().tokenizer, VOCAB_SIZE)


def test_tax_needs_models_of_whole_texts():
    with pytest.raises(TypeError, match="reference with `response_logprobs`"):
        alignment_tax(Position(), PrefixLogprobs(1), [" a film"], text_task().tokenizer, VOCAB_SIZE)


def test_language_model_pays_no_tax_before_training(tiny_model):
    envs = gym.make_vec(
        "RLHF-v0", num_envs=4, model=tiny_model, prompts=PROMPTS, scorer=lambda p, r: [len(x) for x in r],
        max_response_tokens=5, kl_coef=0.1,
    )  # fmt: skip
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=2)
    texts = ["the good road", "a long text of many tokens"]
    found = evaluate(policy, envs, 6, texts=texts)
    assert abs(found.kl.value) < 1e-4
    assert found.tax.tax == pytest.approx((0.0, 0.0, 0.0), abs=1e-5)
    # The loss is transformers' own, over all tokens but the first of each text.
    nats = tokens = 0.0
    for text in texts:
        ids = torch.tensor([policy.tokenizer.encode(text)])
        with torch.no_grad():
            loss = policy.lm.model(input_ids=ids, labels=ids).loss
        nats, tokens = nats + float(loss) * (ids.shape[1] - 1), tokens + ids.shape[1] - 1
    # The model has rows that the tokenizer does not name; they have no probability here.
    assert found.tax.reference.value < nats / tokens
    assert found.tax.reference.value == pytest.approx(nats / tokens, abs=0.3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += 0.3
    taxed = evaluate(policy, envs, 6, texts=texts)
    assert abs(taxed.tax.tax.value) > 0.01  # of a random model's loss nothing says that it must rise
    assert taxed.tax.tax.value == pytest.approx(taxed.tax.policy.value - taxed.tax.reference.value)
    assert taxed.tax.reference == pytest.approx(found.tax.reference)
    assert isinstance(taxed.kl, Estimate) and taxed.kl.value > 0.1


def test_solved_toy_is_what_the_oracle_says():
    optimum = solve(TOY, 0.3)
    found = evaluate(TablePolicy(tilted(0.3)), toy_envs(kl_coef=0.3), 3000, confidence=0.999)
    assert found.shaped_return.low < exactly(TOY, tilted(0.3), 0.3).objective < found.shaped_return.high
    assert exactly(TOY, tilted(0.3), 0.3).objective <= optimum.value + 1e-9


def test_a_bar_moves_and_changes_nothing(monkeypatch):
    from rich import progress

    moved = []
    advance = progress.Progress.advance
    monkeypatch.setattr(progress.Progress, "advance", lambda self, task: (moved.append(task), advance(self, task)))
    shown = evaluate(TablePolicy(tilted()), toy_envs(8), 16, progress=True)
    assert 2 <= len(moved) <= 2 * TOY.horizon  # two blocks, a step for each token of the longest response
    hidden = evaluate(TablePolicy(tilted()), toy_envs(8), 16)
    assert shown.metrics() == pytest.approx(hidden.metrics(), nan_ok=True)
    assert len(moved) <= 2 * TOY.horizon


def test_a_bar_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'textenv\[train\]'"):
        evaluate(Writes(END), worlds(), 2, progress=True)
