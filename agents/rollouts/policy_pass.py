"""The policy's look at the responses that were written: log-probabilities and values, before anything is learned.

Nothing is computed twice. Where the whole batch is one micro-batch of one minibatch, the pass keeps its graph and is
the first of the update as well; where the engine's log-probabilities count, only values are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from textenv.agents.micro_batches import micro_batches
from textenv.agents.policy import Policy, arithmetic, device_of, masks_argument
from textenv.agents.types import PolicyOutput
from textenv.mdp import TokenState
from textenv.packed_masks import PackedMasks


def policy_pass(
    policy: Policy,
    state: TokenState,
    response_tokens: int,
    micro_batch_tokens: int | None,
    action_masks: PackedMasks | None = None,
    engine_logprobs: Tensor | None = None,
    with_gradient: dict[str, Any] | None = None,
) -> PolicyOutput:
    """Log-probabilities, values and entropies (B, T) of finished episodes.

    Args:
        policy: whose.
        state: the B episodes.
        response_tokens: T.
        micro_batch_tokens: tokens of a pass; None: all at once.
        action_masks: what was allowed, index (B, T).
        engine_logprobs: (B, T), to be taken over in place of the policy's; entropies are then nan.
        with_gradient: further arguments of `Policy.evaluate` for a pass that keeps its graph, made where all episodes
            fit into one micro-batch; its log-probabilities are the policy's own in any case. None: no gradient.
    """
    device = device_of(policy)
    ids, mask = (torch.as_tensor(array, device=device) for array in (state.input_ids, state.attention_mask))
    blocks = micro_batches(mask, torch.arange(len(ids), device=device), micro_batch_tokens)
    masks = masks_argument(action_masks)
    if with_gradient is not None and len(blocks) == 1:
        with arithmetic(policy):
            return policy.evaluate(ids, mask, response_tokens, **with_gradient, **masks)

    def whole(rows: Tensor) -> tuple[Tensor, ...]:
        own = masks_argument(None if action_masks is None else action_masks[rows.cpu().numpy()])
        output = policy.evaluate(ids[rows], mask[rows], response_tokens, **own)
        return output.logprobs, output.values, output.entropies

    if engine_logprobs is None or not hasattr(policy, "response_values"):
        return PolicyOutput(*_in_blocks(policy, blocks, whole))
    value_of = policy.response_values
    (values,) = _in_blocks(policy, blocks, lambda rows: (value_of(ids[rows], mask[rows], response_tokens),))
    return PolicyOutput(engine_logprobs, values, torch.full_like(values, torch.nan))


@torch.no_grad()
def _in_blocks(policy: Policy, blocks: list[Tensor], one: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """What `one` gives for blocks of rows, put together in the order of the rows."""
    with arithmetic(policy):
        parts = [one(rows) for rows in blocks]
    back = torch.cat(blocks).argsort()
    return [torch.cat(tensors)[back].float() for tensors in zip(*parts, strict=True)]
