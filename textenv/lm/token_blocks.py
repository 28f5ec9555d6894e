"""Cutting rows into blocks that fit a budget of tokens. Pure python.

A budget of tokens instead of rows holds memory where it is, however long the rows grow.
"""

from __future__ import annotations

from collections.abc import Sequence


def block_sizes(lengths: Sequence[int], budget: int | None) -> list[int]:
    """How many rows each block takes, in their order; a row longer than the budget goes alone.

    Args:
        lengths: tokens of each row, from short to long, so that the last of a block is its widest.
        budget: tokens of a block, its rows times its longest; None: one block.

    Returns:
        Sizes that add up to the number of rows; none where there is no row.

    Example:
        >>> block_sizes([6, 7, 8, 9], 16)
        [2, 1, 1]
    """
    if not lengths:
        return []
    if budget is None:
        return [len(lengths)]
    sizes, count = [], 0
    for length in lengths:
        if count and (count + 1) * length > budget:
            sizes.append(count)
            count = 0
        count += 1
    return [*sizes, count]
