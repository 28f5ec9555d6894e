"""PPO-ptx: the language-model loss by an independent route, its gradient beside PPO's, texts that cannot be used."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_envs, parameters, same, toy_agent, toy_envs
from lm_helpers import byte_tokenizer

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, TablePolicy
from textenv.agents.mismatch import Proximal
from textenv.agents.policy import arithmetic
from textenv.agents.ptx import PretrainingTexts, ptx_losses
from textenv.agents.stats import UpdateStats
from textenv.lm.tokenizer import TextTokenizer
from textenv.toy_text import ToyTokenizer

pytestmark = pytest.mark.filterwarnings(CUT)

TEXTS = ["the good", "a long and winding road", "go on", "the a the a the a", "bc d"]


def toy_texts(texts, max_tokens=8):
    return PretrainingTexts(texts, ToyTokenizer(), 6, max_tokens)


def batch_of(*rows, fill=0):
    """Right-padded ids and mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.int8)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# The texts


def test_texts_and_ids_are_held_cut_and_counted():
    texts = toy_texts([" 1 2 3", [3, 2, 1, 0], np.array([5, 4, 3, 2, 1])], max_tokens=4)
    assert [row.tolist() for row in texts.rows] == [[1, 2, 3], [3, 2, 1, 0], [5, 4, 3, 2]]  # the first tokens stay
    assert texts.cut == 1


def test_texts_start_as_sequences_do():
    """One BOS, no EOS at the end, whatever template the tokenizer has."""
    tokenizer = TextTokenizer(byte_tokenizer(bos=True, appends_eos=True))
    (row,) = PretrainingTexts(["the"], tokenizer, 200, 16).rows
    assert tokenizer.tokenizer.convert_ids_to_tokens(row.tolist()) == ["<bos>", "the"]


def test_draws_are_padded_on_the_right_and_equally_likely():
    texts = toy_texts([[1, 2], [3, 4, 5, 3], [5, 0, 5]])
    ids, mask = texts.draw(3000, generator())
    assert ids.shape == mask.shape == (3000, 4) and mask.dtype == torch.int8
    lengths = mask.sum(-1)
    for length, row in ((2, [1, 2, 0, 0]), (4, [3, 4, 5, 3]), (3, [5, 0, 5, 0])):
        chosen = ids[lengths == length]
        assert (chosen == torch.tensor(row)).all()
        assert mask[lengths == length][0].tolist() == [t < length for t in range(4)]
        assert 900 < len(chosen) < 1100  # of 1000; the standard deviation is 26
    assert toy_texts([[1, 2], [3, 4, 5, 3]]).draw(1, generator(2))[0].shape in ((1, 2), (1, 4))


def test_draws_follow_the_generator():
    texts = toy_texts([[1, i, 2] for i in range(6)])
    drawn = [texts.draw(20, generator(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    same_generator = generator()
    assert not torch.equal(texts.draw(20, same_generator)[0], texts.draw(20, same_generator)[0])


def test_fingerprints_tell_texts_apart():
    """Where one ends and the next begins too."""
    marks = [toy_texts(texts).fingerprint for texts in ([[1, 2], [3, 4]], [[1, 2], [3, 4]])]
    assert marks[0] == marks[1]
    others = ([[3, 4], [1, 2]], [[1, 2, 3, 4]], [[1, 2, 3], [4, 5]], [[1, 2], [3, 5]], [[1, 2]])
    assert len({marks[0], *(toy_texts(texts).fingerprint for texts in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "texts, message",
    [
        ([], r"should be a list of at least one text, got \[\]"),
        ("1 2 3", "should be a list of at least one text, got '1 2 3'"),
        ([" 1 2", " 3"], r"pretraining_texts\[1\] should have at least 2 tokens, got \[3\]: .* nothing would be left"),
        ([[1, 2], []], r"pretraining_texts\[1\] should have at least one token"),
        ([[1, 6]], r"pretraining_texts\[0\] should hold token ids .*6"),
        ([[1, -1]], r"pretraining_texts\[0\] should hold token ids .*-1"),
        ([[1, 2], [1.5, 2.0]], r"pretraining_texts\[1\] should be a text"),
    ],
)
def test_texts_that_cannot_be_used_are_named(texts, message):
    with pytest.raises(ValueError, match=message):
        toy_texts(texts)


def test_ids_without_a_token_are_refused():
    """They have a row of the embedding, but probability 0: the loss would be infinite."""
    tokenizer = TextTokenizer(byte_tokenizer(), vocab_size=200)
    assert tokenizer.named_size < 150
    with pytest.raises(ValueError, match=r"pretraining_texts\[0\].*150"):
        PretrainingTexts([[1, 150]], tokenizer, 200, 16)


def test_texts_beyond_the_context_are_refused():
    tokenizer = TextTokenizer(byte_tokenizer(), context_length=8)
    with pytest.raises(ValueError, match=r"`ptx_max_tokens` should be at most 8, .* got texts of 9 tokens"):
        PretrainingTexts(["x" * 20], tokenizer, 200, 9)
    assert PretrainingTexts(["x" * 20], tokenizer, 200, 8).cut == 1


# The loss


def table(seed=0):
    return TablePolicy(np.random.default_rng(seed).normal(size=(8, 6)))


def test_loss_by_hand():
    """Two texts, 1 and 3 tokens to predict: a mean over 4 tokens, the first of each text given."""
    policy = TablePolicy(np.log([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]]))
    (loss,) = ptx_losses(policy, *batch_of([3, 1], [0, 0, 2, 3]))
    expected = -(np.log(0.25) + np.log(0.5) + np.log(0.25) + np.log(0.4)) / 4
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    by_text = -(np.log(0.25) + (np.log(0.5) + np.log(0.25) + np.log(0.4)) / 3) / 2
    assert abs(expected - by_text) > 0.05  # the mean over texts is another number


@pytest.mark.parametrize("budget, shares", [(1, 5), (7, 4), (12, 3), (20, 2), (35, 1)])
def test_shares_of_micro_batches_add_up(budget, shares):
    batch = batch_of([3, 1], [0, 0, 2, 3], [1, 2, 3], [4, 4, 4, 4, 4, 4, 4], [2, 5])
    grads = []
    for tokens in (None, budget):
        policy = table()
        losses = list(ptx_losses(policy, *batch, tokens))
        assert len(losses) == (1 if tokens is None else shares)
        sum(losses).backward()
        grads.append((sum(losses).detach(), policy.logits.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
    alone = [next(ptx_losses(table(), ids[None], mask[None])) for ids, mask in zip(*batch, strict=True)]
    assert abs(sum(alone) / 5 - grads[0][0]) > 0.01  # the mean of means, which it must not be


def test_garbage_beyond_the_ends_moves_nothing_by_a_bit(tiny_model):
    rows = [3, 1], [0, 7, 2, 3, 9], [1, 2, 3]
    for make in (table, lambda: LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)):
        results = []
        for fill in (0, 5):
            policy = make()
            ids, mask = batch_of(*(rows if make is not table else ([3, 1], [0, 5, 2, 3, 4], [1, 2, 3])), fill=fill)
            loss = sum(ptx_losses(policy, ids, mask, 2))
            loss.backward()
            results.append([loss, *(p.grad for p in policy.parameters() if p.grad is not None)])
        assert len(results[0]) == len(results[1]) > 1
        assert same(*results)


class CarelessTable(TablePolicy):
    """Says NaN beyond the ends, which mean nothing, and notes how many rows it is asked about."""

    rows = ()

    def evaluate(self, input_ids, attention_mask, response_tokens, **options):
        self.rows = (*self.rows, len(input_ids))
        output = super().evaluate(input_ids, attention_mask, response_tokens, **options)
        real = attention_mask[:, -response_tokens:].bool()
        return dataclasses.replace(output, logprobs=torch.where(real, output.logprobs, float("nan")))


def test_what_a_policy_says_beyond_the_ends_is_not_read():
    batch = batch_of([3, 1], [0, 5, 2, 3, 4], [1, 2, 3])
    results = []
    for kind in (TablePolicy, CarelessTable):
        policy = kind(np.random.default_rng(0).normal(size=(8, 6)))
        loss = sum(ptx_losses(policy, *batch))
        loss.backward()
        results.append([loss, policy.logits.grad])
    assert same(*results)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_loss_and_gradient_are_those_of_the_model_itself(lora_rank, tiny_model):
    """Against transformers' own loss, text by text."""
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank)
    texts = PretrainingTexts(TEXTS, policy.tokenizer, policy.lm.vocab_size, 16)
    assert texts.cut > 0
    trained = [p for p in policy.parameters() if p.requires_grad]
    ids, mask = texts.draw(12, generator())
    ours = sum(ptx_losses(policy, ids, mask, 5))
    total, tokens = 0.0, 0
    for row, real in zip(ids, mask.bool(), strict=True):
        text = row[real][None]
        logits = policy.trunk(input_ids=text).logits[0, :-1, : policy.lm.named_size]
        total = total + torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="sum")
        tokens += text.shape[1] - 1
    torch.testing.assert_close(ours, total / tokens, atol=1e-5, rtol=0)
    largest = 0.0
    for one, other in zip(
        torch.autograd.grad(ours, trained, allow_unused=True),
        torch.autograd.grad(total / tokens, trained, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None) or float(one.abs().max()) == 0  # the value head has no part in it
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
            largest = max(largest, float(one.abs().max()))
    assert largest > 0.01


def test_the_temperature_is_in_it(tiny_model):
    """pi is the sampling distribution here as in the rest of the objective."""
    losses = []
    for temperature in (1.0, 0.5):
        policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, temperature=temperature)
        ids, mask = PretrainingTexts(TEXTS, policy.tokenizer, policy.lm.vocab_size, 16).draw(8, generator())
        losses.append(sum(ptx_losses(policy, ids, mask)).item())
        logits = policy.trunk(input_ids=ids).logits[:, :-1, : policy.lm.named_size] / temperature
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        assert losses[-1] == pytest.approx(nll[mask[:, 1:].bool()].mean().item(), abs=1e-5)
    assert abs(losses[0] - losses[1]) > 0.05


# Beside PPO


def ptx_agent(policy=None, texts=([1, 3, 3, 3], [2, 3], [4, 3, 0]), envs=None, **config):
    config = {"ptx_coef": 2.0, "ptx_batch_size": 5} | config
    return PPO(policy or table(), envs or toy_envs(), PPOConfig(check_start=False, **config), pretraining_texts=texts)


def gradients_of(agent, rollout, index):
    agent._update(rollout, index, Proximal(rollout, None), stats := UpdateStats(0.2), begins=False)
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in agent.parameters]
    ), stats


@pytest.mark.parametrize("micro_batch_tokens", [None, 18])
def test_the_gradient_of_a_step_is_that_of_ppo_plus_ptx_coef_times_that_of_the_texts(micro_batch_tokens):
    config = {"max_grad_norm": 1e9, "micro_batch_tokens": micro_batch_tokens}
    rollout = toy_agent(table(), check_start=False).rollout()
    index = torch.arange(9)
    plain, _ = gradients_of(toy_agent(table(), check_start=False, **config), rollout, index)
    both, stats = gradients_of(ptx_agent(**config), rollout, index)
    reference = ptx_agent()
    loss = sum(ptx_losses(reference.policy, *reference.pretraining.draw(5, generator())))  # the agent's seed is 0
    grads = torch.autograd.grad(loss, reference.parameters, allow_unused=True)
    texts = torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(reference.parameters, grads, strict=True)
        ]
    )
    torch.testing.assert_close(both, plain + 2.0 * texts, atol=1e-6, rtol=1e-5)
    assert texts.abs().max() > 0.05 and plain.abs().max() > 1e-3
    assert stats.figures()["ptx_loss"] == pytest.approx(loss.item(), abs=1e-6)  # before its coefficient
    assert stats.grad_norms[0] == pytest.approx(both.norm().item(), rel=1e-5)


def test_micro_batches_bound_the_texts_at_once_too():
    policy = CarelessTable(TOY.reference_logits)
    ptx_agent(policy, micro_batch_tokens=1, ptx_batch_size=5, epochs=1).step()
    assert policy.rows[-5:] == (1,) * 5


def test_every_step_draws_anew_and_the_figure_is_their_mean(monkeypatch):
    agent = ptx_agent(num_minibatches=2, epochs=3, ptx_batch_size=4, learning_rate=1e-12)
    draw, drawn = agent.pretraining.draw, []
    monkeypatch.setattr(agent.pretraining, "draw", lambda n, g: drawn.append(draw(n, g)) or drawn[-1])
    stats = agent.step()
    assert len(drawn) == stats.updates == 6 and all(len(ids) == 4 for ids, _ in drawn)
    assert len({str(ids.tolist()) for ids, _ in drawn}) > 2
    means = [sum(ptx_losses(agent.policy, *batch)).item() for batch in drawn]
    assert stats.ptx_loss == pytest.approx(np.mean(means), abs=1e-5)
    assert stats.metrics()["ptx_loss"] == stats.ptx_loss


def test_the_policy_learns_the_texts_and_nothing_else_where_every_reward_is_equal():
    envs = toy_envs(kl_coef=0.0)
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=lambda p, r: [0.0] * len(p))
    agent = ptx_agent(TablePolicy(TOY.reference_logits), texts=[[1, 3, 2]], envs=envs, learning_rate=0.3, epochs=20)
    with pytest.warns(UserWarning, match="Every advantage of a batch is 0"):
        agent.step()
    pi = torch.softmax(agent.policy.logits.detach(), -1)
    assert pi[0, 3] > 0.9 and pi[1, 2] > 0.9
    np.testing.assert_allclose(pi[2:], 1 / 6, atol=1e-6)  # texts do not reach there


def test_texts_pull_against_the_score():
    """The language's best is token 3 everywhere; texts of 4s hold the first tokens there."""
    ends = []
    for coef in (0.0, 3.0):
        texts = {"texts": [[1, 4, 4]] if coef else None, "ptx_coef": coef}
        agent = ptx_agent(TablePolicy(TOY.reference_logits), **texts, learning_rate=0.1)
        for _ in range(10):
            agent.step()
        ends.append(torch.softmax(agent.policy.logits.detach(), -1))
    assert ends[0][0, 3] > 0.6 and ends[1][0, 4] > 0.6


def test_language_models_hold_on_to_their_texts(tiny_model):
    """The same run with and without: with the texts their loss falls, without it rises or stays."""
    losses = []
    for coef in (0.0, 1.0):
        policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
        config = PPOConfig(
            ptx_coef=coef, ptx_batch_size=4, ptx_max_tokens=12, learning_rate=0.01, micro_batch_tokens=40
        )
        agent = PPO(policy, lm_envs(tiny_model), config, pretraining_texts=TEXTS if coef else None)
        texts = PretrainingTexts(TEXTS, policy.tokenizer, policy.lm.vocab_size, 12)
        batch = texts.draw(20, generator(7))
        before = sum(ptx_losses(policy, *batch)).item()
        stats = [agent.step() for _ in range(3)]
        losses.append(sum(ptx_losses(policy, *batch)).item() - before)
        assert np.isnan(stats[-1].ptx_loss) if coef == 0 else 0 < stats[-1].ptx_loss < stats[0].ptx_loss
    assert losses[1] < -0.5 and losses[1] < losses[0] - 0.5


def test_bfloat16_losses_are_float32(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype="bfloat16")
    exact = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    ids, mask = PretrainingTexts(TEXTS, policy.tokenizer, policy.lm.vocab_size, 16).draw(6, generator())
    with arithmetic(policy):
        loss = sum(ptx_losses(policy, ids, mask))
        loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum(ptx_losses(exact, ids, mask)).item(), abs=0.1)
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def test_infinite_losses_are_not_taken():
    logits = np.zeros((8, 6))
    logits[0, 3] = -np.inf
    agent = ptx_agent(TablePolicy(logits), texts=[[1, 3]])
    before = parameters(agent)
    with pytest.raises(
        FloatingPointError, match=r"should be finite, got inf; the step was not taken.* forbids one of their tokens"
    ):
        agent.step()
    assert same(parameters(agent), before)


# What is refused


@pytest.mark.parametrize("coef, texts", [(0.5, None), (0.0, [[1, 2]])])
def test_coefficient_and_texts_come_together(coef, texts):
    with pytest.raises(ValueError, match=r"should come together, got ptx_coef=.* and (no )?texts"):
        ptx_agent(texts=texts, ptx_coef=coef)


def test_bad_texts_are_refused_before_any_work():
    with pytest.raises(ValueError, match=r"pretraining_texts\[1\] should have at least 2 tokens"):
        ptx_agent(texts=[[1, 2], [3]])


def test_texts_are_cut_as_configured(tiny_model):
    agent = PPO(
        LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4),
        lm_envs(tiny_model),
        PPOConfig(ptx_coef=1.0, ptx_max_tokens=3),
        pretraining_texts=TEXTS,
    )
    assert max(map(len, agent.pretraining.rows)) == 3 and agent.pretraining.cut >= 3


def test_the_callers_texts_stay_as_they_are():
    texts = [[1, 3, 3, 3], np.array([2, 3, 4])]
    given = copy.deepcopy(texts)
    agent = ptx_agent(texts=texts)
    agent.step()
    assert texts[0] == given[0] and (texts[1] == given[1]).all()
    texts[1][:] = 0
    assert agent.pretraining.rows[1].tolist() == [2, 3, 4]
