"""Pairs of responses through a policy: the loss on them in micro-batches, and what is known of them afterwards.

Shared by agents that learn from comparisons, whether these were there before (`DPO`) or come from the policy's own
responses of this iteration (`OnlineDPO`). Knows no environment.

Legend: N pairs, T response tokens, L columns. Rows come in pairs: 2 i holds the chosen response of pair i, 2 i + 1 the
rejected one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import Policy, device_of, masks_argument
from textenv.agents.preference_losses import PreferenceLoss, dpo_loss
from textenv.agents.types import PolicyOutput
from textenv.estimates import Estimate, mean_estimate, share_estimate
from textenv.lm.token_blocks import block_sizes
from textenv.packed_masks import PackedMasks


@dataclass(frozen=True)
class PairBatch:
    """N pairs to learn from. What stands in masked columns does not matter."""

    input_ids: Int[Tensor, "2N L"]
    attention_mask: Int[Tensor, "2N L"]
    response_tokens: int
    """T; what comes before the last T columns is given."""
    ref_logprobs: Float[Tensor, "2N"]
    """Of whole responses under the reference, nats."""
    label_smoothing: float | Float[Tensor, N] = 0.0  # noqa: F821 - a jaxtyping axis
    """How likely each label is wrong, see `dpo_loss`."""
    action_masks: PackedMasks | None = None
    """What was allowed where each token was chosen, index (2N, T); None: everything."""

    def __len__(self) -> int:
        """N."""
        return len(self.input_ids) // 2

    @property
    def tokens(self) -> int:
        """Response tokens of all of them."""
        return int(self.attention_mask[:, -self.response_tokens :].sum())

    def pairs(self, index: Tensor) -> PairBatch:
        """The pairs at `index`."""
        rows = rows_of(index)
        smoothing = self.label_smoothing
        return PairBatch(
            self.input_ids[rows],
            self.attention_mask[rows],
            self.response_tokens,
            self.ref_logprobs[rows],
            smoothing[index] if isinstance(smoothing, Tensor) else smoothing,
            None if self.action_masks is None else self.action_masks[rows.cpu().numpy()],
        )


@dataclass(frozen=True)
class PairFigures:
    """What a policy makes of N pairs.

    Attributes:
        losses: (N,).
        chosen_rewards: (N,) beta (log pi - log ref) of the chosen responses: the score that the policy is optimal for,
            up to a constant of the prompt (Rafailov et al. 2023, eq. 5), in units of the score.
        rejected_rewards: (N,) of the rejected ones.
    """

    losses: NDArray[np.float64]
    chosen_rewards: NDArray[np.float64]
    rejected_rewards: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[PairFigures]) -> PairFigures:
        """Of micro-batches, one behind the other."""
        names = ("losses", "chosen_rewards", "rejected_rewards")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def margins(self) -> NDArray[np.float64]:
        """(N,) reward of the chosen response less that of the rejected one."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def loss(self) -> float:
        """The mean."""
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float:
        """Share of pairs whose chosen response has the higher reward, ties half: 1/2 where nothing was learned yet."""
        return float(self._right().mean())

    @property
    def margin(self) -> float:
        """The mean."""
        return float(self.margins.mean())

    def accuracy_estimate(self, confidence: float = 0.95) -> Estimate:
        """`accuracy` with its confidence interval."""
        return share_estimate(self._right(), confidence)

    def margin_estimate(self, confidence: float = 0.95) -> Estimate:
        """`margin` with its confidence interval."""
        return mean_estimate(self.margins, confidence)

    def metrics(self) -> dict[str, float]:
        """The figures that logs hold."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "margin": self.margin,
            "chosen_reward": float(self.chosen_rewards.mean()),
            "rejected_reward": float(self.rejected_rewards.mean()),
        }

    def _right(self) -> NDArray[np.float64]:
        return np.where(self.margins == 0, 0.5, self.margins > 0)


class PairShare(NamedTuple):
    """A micro-batch of pairs."""

    loss: Tensor
    """Its share of the batch's mean loss, with gradient."""
    figures: PairFigures
    pairs: Tensor
    """Which pairs of the batch it holds, (n,)."""
    output: PolicyOutput
    """The policy's view of their 2 n rows, with gradient."""


def rows_of(index: Int[Tensor, N]) -> Int[Tensor, "2N"]:  # noqa: F821
    """The rows of some pairs, each chosen one before its rejected one.

    >>> rows_of(torch.tensor([3, 0])).tolist()
    [6, 7, 0, 1]
    """
    return torch.stack([2 * index, 2 * index + 1], 1).reshape(-1)


def response_sums(logprobs: Float[Tensor, "B T"], attention_mask: Int[Tensor, "B L"]) -> Tensor:
    """Log-probabilities of whole responses (B,); what stands beyond their ends counts nothing."""
    real = attention_mask[:, -logprobs.shape[1] :].bool()
    return torch.where(real, logprobs, torch.zeros_like(logprobs)).sum(-1)


def pair_blocks(attention_mask: Int[Tensor, "2N L"], budget: int | None) -> list[Tensor]:
    """Pairs of like length, in blocks whose 2 n rows fit a budget of tokens; a larger pair goes alone.

    Both responses of a pair are in one block, because the loss is of their difference.

    Example:
        >>> mask = torch.ones(6, 10).tril(4)  # rows of 5 to 10 tokens, pairs of 6, 8 and 10
        >>> [block.tolist() for block in pair_blocks(mask, 32)]
        [[0, 1], [2]]
    """
    lengths = attention_mask.sum(-1).reshape(-1, 2).amax(-1)
    order = lengths.argsort(stable=True)
    return list(order.split(block_sizes((2 * lengths[order]).tolist(), budget))) if len(order) else []


def pair_losses(
    policy: Policy, batch: PairBatch, beta: float, loss: PreferenceLoss, micro_batch_tokens: int | None = None
) -> Iterator[PairShare]:
    """The mean loss of a batch of pairs, in shares per micro-batch that add up to it.

    Args:
        policy: is asked for its log-probabilities, with their gradient.
        batch: N pairs.
        beta: see `dpo_loss`.
        loss: see `dpo_loss`.
        micro_batch_tokens: tokens that go through the policy at once; None: all of them.

    Yields:
        Micro-batches, whose shares add up to the loss (the denominator is N).

    Raises:
        FloatingPointError: a share is not finite.
    """
    device = device_of(policy)
    for index in pair_blocks(batch.attention_mask, micro_batch_tokens):
        part = batch.pairs(index)
        ids, mask = part.input_ids.to(device), part.attention_mask.to(device)
        output = policy.evaluate(ids, mask, part.response_tokens, **masks_argument(part.action_masks))
        logprobs = response_sums(output.logprobs, mask).reshape(-1, 2)
        ref_logprobs = part.ref_logprobs.to(logprobs).reshape(-1, 2)
        arguments: Any = (*logprobs.unbind(-1), *ref_logprobs.unbind(-1), beta, loss, part.label_smoothing)
        losses = dpo_loss(*arguments)
        share = losses.sum() / len(batch)
        if not torch.isfinite(share):
            raise FloatingPointError(
                f"The loss on pairs should be finite, got {share.item()}; the step was not taken. Where the policy "
                "forbids a token of a response no training undoes it: leave that pair out. Otherwise lower "
                "learning_rate."
            )
        yield PairShare(share, _figures(losses, beta * (logprobs - ref_logprobs)), index, output)


def _figures(losses: Tensor, rewards: Tensor) -> PairFigures:
    columns = (losses, *rewards.unbind(-1))
    return PairFigures(*(column.detach().double().cpu().numpy() for column in columns))
