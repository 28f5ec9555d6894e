"""Entropies with a gradient: every road against autograd through a log-softmax, forbidden ids included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lm_helpers import padded, random_rows, tensors

from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.policy import output_from_logits
from textenv.lm.logprobs import token_logprobs
from textenv.lm.output_head import OutputHead
from textenv.packed_masks import PackedMasks

M, H, V = 11, 6, 9


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def entropy(logits):
    """-sum p log p over the tokens that are possible, term by term."""
    total = []
    for row in logits:
        log_p = torch.log_softmax(row[row > -torch.inf], -1)
        total.append(-(log_p.exp() * log_p).sum())
    return torch.stack(total)


def allowed():
    """Masks of M states: each allows the even ids and one more."""
    table = np.arange(V) % 2 == 0
    table = np.stack([table | (np.arange(V) == odd) for odd in (1, 3, 5)])
    return PackedMasks(np.packbits(table, axis=-1), np.arange(M) % 3, V), torch.from_numpy(table)[torch.arange(M) % 3]


HEADS = {
    "plain": {},
    "bias": {"bias": draws(V, seed=3)},
    "temperature": {"temperature": 0.6},
    "unnamed ids": {"named_size": 7},
    "softcap": {"softcap": 2.0},
    "all of it": {"temperature": 1.7, "named_size": 6, "softcap": 3.0},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_output_head_against_autograd(options, frozen, masked, scale):
    """In chunks, with a frozen head (gradients worked out beforehand) and one that trains (recomputed)."""
    masks, table = allowed() if masked else (None, torch.ones(M, V, dtype=torch.bool))
    weights = draws(2, M, seed=4) * scale  # of log-probabilities and of entropies
    targets = (torch.arange(M) % 3) * 2
    results = []
    for ours in (True, False):
        hidden, weight = draws(M, H).requires_grad_(), draws(V, H, seed=1).requires_grad_(not frozen)
        head = OutputHead(weight, **options)
        if ours:
            logprobs, entropies = token_logprobs(hidden, targets, head, 4, entropy_grad=True, action_masks=masks)
        else:
            logits = head.logits(hidden).masked_fill(~table, -torch.inf)
            logprobs = torch.log_softmax(logits, -1)[torch.arange(M), targets]
            entropies = entropy(logits)
        trained = [hidden] if frozen else [hidden, weight]
        loss = (weights[0] * logprobs + weights[1] * entropies).sum()
        alone = torch.autograd.grad((weights[1] * entropies).sum(), trained, retain_graph=True)
        results.append((logprobs, entropies, *torch.autograd.grad(loss, trained), *alone))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=1e-4)
    assert results[0][-1].abs().max() > 0.01


@pytest.mark.parametrize("frozen", [False, True])
def test_entropies_carry_no_gradient_unless_asked(frozen):
    """And log-probabilities are the same either way, gradients included."""
    weight = draws(V, H, seed=1).requires_grad_(not frozen)
    results = []
    for asked in (False, True):
        hidden = draws(M, H).requires_grad_()
        logprobs, entropies = token_logprobs(
            hidden, torch.zeros(M, dtype=torch.long), OutputHead(weight), 4, entropy_grad=asked
        )
        assert entropies.requires_grad is asked and logprobs.requires_grad
        results.append((logprobs, entropies, *torch.autograd.grad(logprobs.sum(), hidden)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_nothing_is_recorded_where_gradients_are_off():
    hidden = draws(M, H).requires_grad_()
    with torch.no_grad():
        _, entropies = token_logprobs(
            hidden, torch.zeros(M, dtype=torch.long), OutputHead(draws(V, H)), entropy_grad=True
        )
    assert not entropies.requires_grad


@pytest.mark.parametrize("asked", [False, True])
def test_small_policies_entropies(asked):
    """A forbidden token has no share in the entropy, and gets no gradient; position 1 allows a single one."""
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [-torch.inf, 0.5, -torch.inf], [0.3, -1.0, 50.0]])
    x = logits.clone().requires_grad_()
    output = output_from_logits(
        x[None], torch.zeros(1, 3), torch.tensor([[0, 1, 1, 2]]), torch.ones(1, 3), entropy_grad=asked
    )
    torch.testing.assert_close(output.entropies[0], entropy(logits), atol=1e-6, rtol=0)
    assert output.entropies.requires_grad is asked
    if asked:
        (found,) = torch.autograd.grad(3.0 * output.entropies.sum(), x)
        y = logits.clone().requires_grad_()
        (expected,) = torch.autograd.grad(3.0 * entropy(y).sum(), y)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_entropies_of_a_uniform_table_by_hand():
    """log V, where the gradient is 0; and d H / d logit = -p (log p + H) elsewhere."""
    start = np.zeros((2, 4))
    start[1] = np.log([0.5, 0.25, 0.125, 0.125])
    policy = TablePolicy(start)
    ids, mask = torch.tensor([[0, 1, 1]]), torch.ones(1, 3)
    entropies = policy.evaluate(ids, mask, 2, entropy_grad=True).entropies
    bits = 0.5 * 1 + 0.25 * 2 + 0.25 * 3
    np.testing.assert_allclose(entropies[0].detach(), [np.log(4), bits * np.log(2)], atol=1e-6)
    (gradient,) = torch.autograd.grad(entropies.sum(), policy.logits)
    p = np.array([0.5, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(gradient[0], 0, atol=1e-7)
    np.testing.assert_allclose(gradient[1], -p * (np.log(p) + bits * np.log(2)), atol=1e-6)


def entropies_by_all_logits(policy, ids, mask, width):
    """Through the model's own logits, (B, L, V) and all."""
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    logits = policy.trunk(input_ids=ids.long(), attention_mask=mask.long(), position_ids=positions).logits
    logits = logits[:, -width - 1 : -1, : policy.lm.named_size].float() / policy.temperature
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_language_models_entropies_reach_their_weights(lora_rank, tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank, temperature=0.7)
    ids, mask = tensors(*padded(random_rows([3, 5, 1], [4, 2, 6], 90), 5, 6))
    trained = [p for name, p in policy.named_parameters() if p.requires_grad and "value" not in name]
    found = policy.evaluate(ids, mask, 6, entropy_grad=True).entropies
    real = mask[:, -6:].bool()
    expected = torch.where(real, entropies_by_all_logits(policy, ids, mask, 6), 0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    pairs = zip(
        torch.autograd.grad(found.sum(), trained, allow_unused=True),
        torch.autograd.grad(expected.sum(), trained, allow_unused=True),
        strict=True,
    )
    largest = 0.0
    for one, other in pairs:
        if one is None or other is None:
            assert one is None and other is None
            continue
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
        largest = max(largest, float(one.abs().max()))
    assert largest > 0.01
    assert not policy.evaluate(ids, mask, 6).entropies.requires_grad


def test_bfloat16_passes_give_float32_entropies(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype="bfloat16")
    ids, mask = tensors(*padded(random_rows([3, 5], [4, 2], 90), 5, 6))
    with policy.arithmetic():
        output = policy.evaluate(ids, mask, 6, entropy_grad=True)
    assert output.entropies.dtype == output.logprobs.dtype == torch.float32
    output.entropies.sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) > 1e-3


def test_a_table_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="should be at most 2, the table's rows, got 3"):
        TablePolicy(np.zeros((2, 4))).evaluate(torch.zeros(1, 4), torch.ones(1, 4), 3)


def test_shorter_responses_read_the_first_rows():
    policy = TablePolicy(np.random.default_rng(0).normal(size=(5, 4)))
    ids = torch.tensor([[0, 3, 1, 2, 0, 1]])
    whole, short = policy.evaluate(ids, torch.ones(1, 6), 5), policy.evaluate(ids[:, :3], torch.ones(1, 3), 2)
    assert torch.equal(short.logprobs, whole.logprobs[:, :2]) and torch.equal(short.entropies, whole.entropies[:, :2])
