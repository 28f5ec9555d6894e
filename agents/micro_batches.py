"""Which rows go through the policy together: rows of like length, within a budget of tokens. Pure torch.

A budget of tokens instead of rows holds memory where it is, however long the responses grow, and it keeps padding out:
sorted by length, neighbours differ by little. Gradients do not depend on it, because denominators are those of the
whole minibatch (`losses.Counts`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from textenv.lm.token_blocks import block_sizes


def by_length(attention_mask: Tensor, index: Tensor) -> Tensor:
    """The rows of `index` from short to long."""
    return index[attention_mask[index].sum(-1).argsort(stable=True)]


def micro_batches(attention_mask: Tensor, index: Tensor, budget: int | None) -> list[Tensor]:
    """The rows of `index` from short to long, in blocks of as many as fit the budget; a longer row goes alone.

    Args:
        attention_mask: (B, L).
        index: rows of it.
        budget: tokens of a block, its rows times its longest; None: one block.

    Returns:
        Blocks of row numbers; none where `index` is empty.

    Example:
        >>> mask = torch.ones(4, 10).tril(5)  # rows of 6, 7, 8 and 9 tokens
        >>> [block.tolist() for block in micro_batches(mask, torch.arange(4), 16)]
        [[0, 1], [2], [3]]
    """
    if len(index) == 0:
        return []
    order = by_length(attention_mask, index)
    return list(order.split(block_sizes(attention_mask[order].sum(-1).tolist(), budget)))


def token_budget(policy: Any, asked: int | None) -> int | None:
    """The budget that was asked for, else the policy's own (`tokens_per_pass`), else None: no bound."""
    return getattr(policy, "tokens_per_pass", None) if asked is None else asked
