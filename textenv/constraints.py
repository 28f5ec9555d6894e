"""Constraints: which tokens may come next in a state, for policy, reference and engine alike.

A constraint is a property of the task, so everything that has a distribution renormalises it over the allowed tokens.
A mask in the sampler alone would make log-probabilities those of another distribution: ratios that start away from 1,
and a KL that is negative on average. `constraint_kinds` has the constraints themselves.

Legend: N rows, B responses, P prompt columns, T response tokens, L = P + T, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.layers import layers
from textenv.mdp import TokenMDP
from textenv.packed_masks import PackedMasks, intersection

__all__ = ["Constraint", "Joint", "PackedMasks", "check_allowed", "constraint_of", "joint"]


class Constraint(ABC):
    """Says which tokens may come next. Ids that the tokenizer does not name never may.

    Args:
        mdp: of the task.
        named_size: ids from here on have embedding rows but no token; None: all are tokens.
    """

    def __init__(self, mdp: TokenMDP, named_size: int | None = None) -> None:
        self.mdp = mdp
        self.named = np.arange(mdp.vocab_size) < (mdp.vocab_size if named_size is None else named_size)  # (V,)

    @property
    def parts(self) -> tuple[Constraint, ...]:
        """The constraints that this one consists of."""
        return (self,)

    @abstractmethod
    def next_masks(self, observations: Mapping[str, NDArray[Any]]) -> PackedMasks:
        """What may follow each prefix: masks of index (N,)."""

    @abstractmethod
    def response_masks(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> PackedMasks:
        """What was allowed where each response token was chosen: masks of index (B, T), any beyond a response's end."""

    @abstractmethod
    def reason(self, token: int) -> str:
        """Why the constraint forbids a token, in words; "" where it never does."""

    def written(self, attention_mask: NDArray[Any]) -> NDArray[np.int64]:
        """Response tokens so far, (N,)."""
        return np.asarray(attention_mask)[:, self.mdp.max_prompt_tokens :].sum(axis=1, dtype=np.int64)


class Joint(Constraint):
    """Allows what all of its parts allow.

    Args:
        parts: two or more, of one task.
    """

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self.mdp, self.named = parts[0].mdp, parts[0].named
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple[Constraint, ...]:
        """See `Constraint.parts`."""
        return self._parts

    def next_masks(self, observations: Mapping[str, NDArray[Any]]) -> PackedMasks:
        """See `Constraint.next_masks`.

        Raises:
            ValueError: the parts leave nothing to write in some state.
        """
        return self._not_empty(intersection([part.next_masks(observations) for part in self._parts]))

    def response_masks(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> PackedMasks:
        """See `Constraint.response_masks`.

        Raises:
            ValueError: see `next_masks`.
        """
        masks = [part.response_masks(input_ids, attention_mask, response_tokens) for part in self._parts]
        return self._not_empty(intersection(masks))

    def reason(self, token: int) -> str:
        """See `Constraint.reason`."""
        return "; ".join(filter(None, (part.reason(token) for part in self._parts)))

    def _not_empty(self, masks: PackedMasks) -> PackedMasks:
        if not masks.table.any(axis=1).all():
            raise ValueError(
                "In some state the constraints together allow no token at all (a minimal length with nothing but stop "
                "ids among the allowed ones, say): nothing could be written. Allow more ids, or raise top_k."
            )
        return masks


def joint(parts: Iterable[Constraint]) -> Constraint | None:
    """All of some constraints at once; None where there are none."""
    flat = list(dict.fromkeys(single for part in parts for single in part.parts))
    return Joint(flat) if len(flat) > 1 else flat[0] if flat else None


def constraint_of(envs: Any) -> Constraint | None:
    """What the wrappers of a stack, single or vector, forbid together; None where nothing is forbidden."""
    return joint(layer.constraint for layer in layers(envs) if "constraint" in vars(layer))


def check_allowed(
    constraint: Constraint, action_masks: PackedMasks, actions: NDArray[Any], checked: NDArray[np.bool_]
) -> None:
    """Refuse forbidden tokens.

    Args:
        constraint: who forbids.
        action_masks: of the states in which the actions were chosen, index (N,) or (B, T).
        actions: ids of the same shape.
        checked: the same shape, False where the action means nothing.

    Raises:
        ValueError: the first forbidden one, and why.
    """
    forbidden = np.argwhere(checked & ~action_masks.allows(np.where(checked, actions, 0)))
    if not len(forbidden):
        return
    place = tuple(int(i) for i in forbidden[0])
    token = int(np.asarray(actions)[place])
    where = f"row {place[0]}" + (f", response token {place[1]}" if len(place) > 1 else "")
    if not constraint.named[token]:
        why = f"{token} has an embedding row, but the tokenizer names no such token"
    else:
        why = constraint.reason(token)
    raise ValueError(
        f"Actions should be allowed by the constraints of the environment, got {token} ({where}). {why}. Its "
        "probability is 0 under policy and reference, so no log-probability or toll could be right. Choose among "
        "env.action_masks() (True = allowed; MaskablePPO does), or the bits of info['action_mask'] "
        "(np.unpackbits(bits, axis=-1, count=V)); env.action_space.sample(mask) of a single environment wants int8."
    )
