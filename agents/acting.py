"""Choosing the next token of each row of an environment. Knows policies and observations, not environments.

Legend: N rows, L columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import arithmetic, device_of
from textenv.agents.rollouts.base import sample_tokens
from textenv.lm.output_head import forbid
from textenv.packed_masks import PackedMasks


@torch.no_grad()
def act(
    policy: Any,
    observations: Mapping[str, NDArray[Any]],
    *,
    generator: np.random.Generator | None = None,
    deterministic: bool = False,
    action_masks: PackedMasks | None = None,
) -> NDArray[np.int64] | int:
    """Draw a token for each row from the policy, or take the most likely one.

    One uniform number per row decides (the cumulative distribution is inverted), so a row's token depends on its own
    number alone and torch's global generator is left as it was. A policy with a `stepper` reads each token once: the
    cost of a step does not depend on the prefix.

    Example:
        >>> from textenv.agents import TablePolicy
        >>> prompt = {"input_ids": np.array([5, 0, 0]), "attention_mask": np.array([1, 0, 0])}
        >>> act(TablePolicy([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]), prompt, deterministic=True)
        1

    Args:
        policy: see `textenv.agents.policy.Policy`.
        observations: ``input_ids`` and ``attention_mask``, (N, L); or (L,), a single observation.
        generator: of the uniform numbers; None draws from the operating system's entropy.
        deterministic: the most likely token instead.
        action_masks: index (N,), the tokens that are allowed; None for all.

    Returns:
        Tokens (N,), or one int for a single observation.

    Raises:
        TypeError: `generator` is something else than a numpy Generator.
    """
    if generator is not None and not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"`generator` should be a numpy.random.Generator, got {type(generator).__name__}. Make one with "
            "np.random.default_rng(seed) and use it for all steps; a new one for each step would repeat its numbers."
        )
    rows = {key: np.asarray(observations[key]) for key in ("input_ids", "attention_mask")}
    single = rows["input_ids"].ndim == 1
    if single:
        rows = {key: value[None] for key, value in rows.items()}
    uniforms = torch.as_tensor((generator or np.random.default_rng()).random(len(rows["input_ids"])))
    tokens = []
    for part, logits in next_logits(policy, rows):
        if action_masks is not None:
            logits = forbid(
                logits, PackedMasks(action_masks.table, np.atleast_1d(action_masks.index)[part], logits.shape[-1])
            )
        tokens.append(sample_tokens(logits, uniforms[part].to(logits.device), 0.0 if deterministic else 1.0))
    actions: NDArray[np.int64] = torch.cat(tokens).cpu().numpy()
    return int(actions[0]) if single else actions


def next_logits(policy: Any, rows: Mapping[str, NDArray[Any]]) -> Iterator[tuple[slice, Tensor]]:
    """Logits (n, V) of the next tokens, some rows at a time where the policy has a stepper."""
    if hasattr(policy, "stepper"):
        yield from policy.stepper().next_logits(rows)
    else:
        device = device_of(policy)
        ids, mask = (torch.as_tensor(rows[key], device=device) for key in ("input_ids", "attention_mask"))
        with arithmetic(policy):
            logits = policy.next_logits(ids, mask)
        yield slice(None), logits
