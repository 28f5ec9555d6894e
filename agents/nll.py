"""How likely a policy holds given responses to be: the loss of behaviour cloning, and the figures of held-out ones.

The policy is the distribution that acts: its temperature, and what the environments forbid, are in it. At temperature 1
with nothing forbidden, the default, this is a language model's ordinary loss with the prompts' tokens left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.losses import Counts, LossMode, aggregate
from textenv.agents.micro_batches import micro_batches, token_budget
from textenv.agents.policy import Policy, device_of, masks_argument
from textenv.agents.rollouts.policy_pass import policy_pass
from textenv.demonstrations import DemonstrationSet
from textenv.estimates import Estimate, ratio_estimate
from textenv.optional import progress_bar
from textenv.packed_masks import PackedMasks

ROWS = 256
"""Held-out demonstrations between two moves of a progress bar."""


def nll_losses(
    policy: Policy,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_tokens: int,
    micro_batch_tokens: int | None = None,
    *,
    mode: LossMode = "token-mean",
    action_masks: PackedMasks | None = None,
    of: str = "demonstrations",
) -> Iterator[Tensor]:
    """-mean log pi(y_t | x, y_<t) over response tokens, in shares per micro-batch that add up to it.

    Args:
        policy: is asked for its log-probabilities, with their gradient.
        input_ids: (B, L).
        attention_mask: (B, L).
        response_tokens: T; what comes before the last T columns is given.
        micro_batch_tokens: tokens that go through the policy at once; None: all of them.
        mode: how tokens are averaged, see `aggregate`.
        action_masks: what was allowed, index (B, T); None: everything.
        of: what the rows are called in messages.

    Yields:
        Scalars in nats, whose sum is the loss. The denominators are those of the whole batch.

    Raises:
        FloatingPointError: a share is not finite.
    """
    device = device_of(policy)
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    counts = Counts.of(attention_mask[:, -response_tokens:].bool())
    everything = torch.arange(len(input_ids), device=device)
    for rows in micro_batches(attention_mask, everything, micro_batch_tokens):
        ids, mask = input_ids[rows], attention_mask[rows]
        masks = None if action_masks is None else action_masks[rows.cpu().numpy()]
        output = policy.evaluate(ids, mask, response_tokens, **masks_argument(masks))
        loss = aggregate(-output.logprobs, mask[:, -response_tokens:].bool(), mode, counts)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss on {of} should be finite, got {loss.item()}; the step was not taken. Where it is inf the "
                "policy forbids one of their tokens, which no training undoes: leave that text out. Where it is nan, "
                "lower learning_rate."
            )
        yield loss


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihoods of n responses.

    Attributes:
        nats: (n,) of each response, summed over its tokens.
        tokens: (n,) response tokens, stop ids included.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def nll(self) -> float:
        """Nats per token: all nats over all tokens."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def estimate(self, confidence: float = 0.95) -> Estimate:
        """`nll` with its confidence interval; responses, not tokens, are the independent observations."""
        return ratio_estimate(self.nats, self.tokens, confidence)

    def gain_over(self, other: Likelihood, confidence: float = 0.95) -> Estimate:
        """How many nats per token lower this one is than another of the same responses; paired, hence narrow.

        Raises:
            ValueError: it is one of other responses.
        """
        if not np.array_equal(self.tokens, other.tokens):
            raise ValueError(
                f"`other` should be a likelihood of the same responses, got one of {len(other.tokens)} with "
                f"{other.tokens.sum()} tokens, against {len(self.tokens)} with {self.tokens.sum()}. Differences are "
                "taken response by response."
            )
        return ratio_estimate(other.nats - self.nats, self.tokens, confidence)

    def metrics(self) -> dict[str, float]:
        """The figures that logs hold."""
        return {
            "nll": self.nll,
            "perplexity": self.perplexity,
            "nats_per_response": float(self.nats.mean()),
            "tokens": float(self.tokens.sum()),
        }


def likelihood(
    policy: Policy, demonstrations: DemonstrationSet, micro_batch_tokens: int | None = None, *, progress: bool = False
) -> Likelihood:
    """Measure how likely a policy holds demonstrations to be; nothing is learned and no random number drawn.

    Args:
        policy: any policy; dropout is turned off.
        demonstrations: encoded for a task, see `DemonstrationSet`.
        micro_batch_tokens: tokens of a pass; None: what suits the policy.
        progress: show a bar.
    """
    if hasattr(policy, "eval"):
        policy.eval()
    budget, width = token_budget(policy, micro_batch_tokens), demonstrations.mdp.max_response_tokens
    lengths = np.array([len(response) for response in demonstrations.responses])
    order = np.argsort(lengths, kind="stable")  # passes hold rows of like length
    nats = np.zeros(len(order))
    blocks = [order[start : start + ROWS] for start in range(0, len(order), ROWS)]
    with progress_bar("Held-out likelihood", len(blocks), progress) as move_on:
        for rows in blocks:
            state = demonstrations.state(rows)
            output = policy_pass(policy, state, width, budget, demonstrations.action_masks(state))
            real = torch.as_tensor(state.attention_mask[:, -width:] == 1, device=output.logprobs.device)
            logprobs = torch.where(real, output.logprobs, torch.zeros_like(output.logprobs))
            nats[rows] = -logprobs.double().sum(-1).cpu().numpy()
            move_on()
    return Likelihood(nats, lengths)
