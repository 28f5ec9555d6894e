"""How a policy of ours reads the states of Stable-Baselines3: token by token in rollouts, grouped in updates.

Legend: M states, R rows of a pass, L = P + T columns, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from textenv.agents.acting import next_logits
from textenv.agents.language_model import LanguageModelPolicy
from textenv.agents.policy import arithmetic, device_of, last_columns, masks_argument
from textenv.agents.sb3.shared_prefixes import SharedPrefixes
from textenv.lm.logprobs import token_logprobs
from textenv.packed_masks import PackedMasks


class Reading(NamedTuple):
    """What a policy says of M states and the actions taken in them, all (M,)."""

    logprobs: Tensor
    values: Tensor
    entropies: Tensor | None
    """None where the policy cannot differentiate them: Stable-Baselines3 then uses -logprobs."""


class LanguageModelReader:
    """Reads a `LanguageModelPolicy`: hidden states of the rows that hold all states, then what is read off them.

    Args:
        policy: whose.
        share_prefixes: let states that are prefixes of others in the minibatch be read in those.
    """

    def __init__(self, policy: LanguageModelPolicy, share_prefixes: bool = True) -> None:
        self.policy, self.share_prefixes = policy, share_prefixes
        network = policy.value_network
        self._value_stepper = None if network is None else network.stepper()

    def step(self, rows: dict[str, NDArray[Any]]) -> tuple[Iterator[tuple[slice, Tensor]], Tensor]:
        """Logits of the next tokens, some rows at a time, and the values (M,); each token is read once, no gradient."""
        return next_logits(self.policy, rows), self.step_values(rows)

    @torch.no_grad()
    def step_values(self, rows: dict[str, NDArray[Any]]) -> Tensor:
        """The values (M,) of rows that grow by tokens."""
        stepper = self._value_stepper or self.policy.stepper()
        values: Tensor = self.policy.value_head(stepper.states(rows["input_ids"], rows["attention_mask"]))
        return values

    def evaluate(
        self, input_ids: Tensor, attention_mask: Tensor, actions: Tensor, action_masks: PackedMasks | None
    ) -> Reading:
        """Log-probabilities, values and entropies with their gradients, from as few tokens as hold all states."""
        shared = self._shared(input_ids, attention_mask)
        with arithmetic(self.policy):
            hidden = self._states(self.policy.lm.hidden_states, input_ids, attention_mask, shared)
            logprobs, entropies = token_logprobs(
                hidden, actions.long(), self.policy.lm.head, entropy_grad=True, action_masks=action_masks
            )
            return Reading(logprobs, self._values(hidden, input_ids, attention_mask, shared), entropies)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Values (M,) alone, with their gradients."""
        shared = self._shared(input_ids, attention_mask)
        with arithmetic(self.policy):
            return self._values(None, input_ids, attention_mask, shared)

    def logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (M, V) with their gradients."""
        shared = self._shared(input_ids, attention_mask)
        # torch's fused attention has no second derivative, and TRPO takes the curvature of a KL.
        with arithmetic(self.policy), sdpa_kernel([SDPBackend.MATH]):
            hidden = self._states(self.policy.lm.hidden_states, input_ids, attention_mask, shared)
            return self.policy.lm.head.logits(hidden)

    def _shared(self, input_ids: Tensor, attention_mask: Tensor) -> SharedPrefixes:
        return SharedPrefixes.of(input_ids.cpu().numpy(), attention_mask.cpu().numpy(), self.share_prefixes)

    def _values(
        self, hidden: Tensor | None, input_ids: Tensor, attention_mask: Tensor, shared: SharedPrefixes
    ) -> Tensor:
        network = self.policy.value_network
        if network is not None:
            hidden = self._states(network, input_ids, attention_mask, shared)
        elif hidden is None:
            hidden = self._states(self.policy.lm.hidden_states, input_ids, attention_mask, shared)
        values: Tensor = self.policy.value_head(hidden)
        return values

    def _states(
        self,
        read: Callable[[Tensor, Tensor], Tensor],
        input_ids: Tensor,
        attention_mask: Tensor,
        shared: SharedPrefixes,
    ) -> Tensor:
        """Hidden states (M, H) after each state's last token, some rows at a time."""
        size = max(1, self.policy.tokens_per_pass // input_ids.shape[1])
        parts, places = [], []
        for start in range(0, len(shared.rows), size):
            rows = torch.as_tensor(shared.rows[start : start + size], device=input_ids.device)
            mine = np.flatnonzero((shared.row_of >= start) & (shared.row_of < start + size))
            hidden = read(input_ids[rows], attention_mask[rows])  # (r, L, H)
            parts.append(hidden[shared.row_of[mine] - start, shared.columns[mine]])
            places.append(mine)
        order = torch.as_tensor(np.argsort(np.concatenate(places)), device=input_ids.device)
        return torch.cat(parts)[order]


class PlainReader:
    """Reads any other `Policy`, such as a table or a recurrent network, through the methods that all have.

    Args:
        policy: whose.
        response_tokens: T of the task.
        share_prefixes: see `LanguageModelReader`.
    """

    def __init__(self, policy: Any, response_tokens: int, share_prefixes: bool = True) -> None:
        self.policy, self.response_tokens, self.share_prefixes = policy, response_tokens, share_prefixes
        parameters = inspect.signature(policy.evaluate).parameters
        self._entropy = {"entropy_grad": True} if "entropy_grad" in parameters else {}

    @torch.no_grad()
    def step(self, rows: dict[str, NDArray[Any]]) -> tuple[Iterator[tuple[slice, Tensor]], Tensor]:
        """See `LanguageModelReader.step`; prefixes are read whole where the policy has no stepper."""
        return next_logits(self.policy, rows), self.step_values(rows)

    @torch.no_grad()
    def step_values(self, rows: dict[str, NDArray[Any]]) -> Tensor:
        """See `LanguageModelReader.step_values`."""
        device = device_of(self.policy)
        return self.values(*(torch.as_tensor(rows[key], device=device) for key in ("input_ids", "attention_mask")))

    def evaluate(
        self, input_ids: Tensor, attention_mask: Tensor, actions: Tensor, action_masks: PackedMasks | None
    ) -> Reading:
        """See `LanguageModelReader.evaluate`; masks may differ from state to state, so that then none is shared."""
        ids, mask = with_token(input_ids, attention_mask, actions)
        shared = SharedPrefixes.of(ids.cpu().numpy(), mask.cpu().numpy(), self.share_prefixes and action_masks is None)
        rows, row_of = (torch.as_tensor(index, device=ids.device) for index in (shared.rows, shared.row_of))
        token = torch.as_tensor(shared.columns, device=ids.device) - (ids.shape[1] - self.response_tokens)
        masks = None
        if action_masks is not None:  # of the tokens before the last nothing is asked: any mask will do
            repeated = np.repeat(action_masks.index[:, None], self.response_tokens, axis=1)
            masks = PackedMasks(action_masks.table, repeated, action_masks.vocab_size)
        with arithmetic(self.policy):
            output = self.policy.evaluate(
                ids[rows], mask[rows], self.response_tokens, **self._entropy, **masks_argument(masks)
            )
        entropies = output.entropies[row_of, token] if self._entropy else None
        return Reading(output.logprobs[row_of, token], output.values[row_of, token], entropies)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Values (M,) alone, with their gradients: of a state whatever token follows; 0 where none can."""
        room = attention_mask[:, -1] == 0
        values = torch.zeros(len(input_ids), device=input_ids.device)
        if not room.any():
            return values
        ids, mask = input_ids[room], attention_mask[room]
        return values.masked_scatter(room, self.evaluate(ids, mask, torch.zeros_like(ids[:, 0]), None).values)

    def logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (M, V) with their gradients."""
        with arithmetic(self.policy):
            logits: Tensor = self.policy.next_logits(input_ids, attention_mask)
        return logits


def with_token(input_ids: Tensor, attention_mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """States (M, L) with one more token each, in tensors of their own.

    Raises:
        ValueError: a response fills its budget already.
    """
    columns = last_columns(attention_mask) + 1
    if (columns >= input_ids.shape[1]).any():
        raise ValueError(
            "A state should have room for the token that is chosen in it, got one whose response fills its budget. Its "
            "episode is over, so nothing is chosen there; leave terminal observations out."
        )
    ids, mask = input_ids.clone(), attention_mask.clone()
    every = torch.arange(len(ids), device=ids.device)
    ids[every, columns], mask[every, columns] = tokens.to(ids.dtype), 1
    return ids, mask
