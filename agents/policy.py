"""What an agent needs of a policy: a small protocol, not a class to inherit from. Knows no algorithm.

Legend: B responses, P prompt columns, T response tokens, L = P + T, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.types import PolicyOutput
from textenv.distributions import prefix_distributions, takes_action_masks
from textenv.lm.output_head import forbid
from textenv.packed_masks import PackedMasks


class Policy(Protocol):
    """A table of logits, a recurrent network or a language model; usually a `torch.nn.Module`.

    Optional, used where they exist: ``temperature`` (a float, 1 where absent), ``reference`` (log-probabilities of the
    policy that training starts from, see `textenv.task.LogprobModel`), ``engine()`` (a faster way to write responses),
    ``stepper()`` (the same distributions for rows that grow token by token, see `textenv.lm.stepping.Stepper`),
    ``arithmetic()`` (a context for the precision of passes), ``response_values(input_ids, attention_mask, T)`` (the
    values of `evaluate` alone, cheaper), ``tokens_per_pass`` (how many tokens suit one pass; all where absent).
    """

    def evaluate(self, input_ids: Tensor, attention_mask: Tensor, response_tokens: int) -> PolicyOutput:
        """Log-probabilities, values and entropies (B, T) of given responses, differentiable in the parameters.

        For an entropy bonus it is asked with one more argument, ``entropy_grad=True``, and the entropies must then be
        differentiable too; `output_from_logits` takes that argument.

        In environments with `MinLength` or `ActionMask` it is asked with ``action_masks``, a `PackedMasks` of index
        (B, T): everything is then that of the distribution over the allowed tokens. `output_from_logits` takes it too.
        """
        ...

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, V) of the next token's distribution, temperature included."""
        ...

    def parameters(self) -> Iterable[Any]:
        """All parameters; those that require a gradient are trained."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from `state_dict`."""
        ...


def output_from_logits(
    logits: Tensor,
    values: Tensor,
    input_ids: Tensor,
    response_mask: Tensor,
    *,
    entropy_grad: bool = False,
    action_masks: PackedMasks | None = None,
) -> PolicyOutput:
    """The policy output of a small model that has all its logits at hand.

    Args:
        logits: (B, T, V) of the distributions that the response tokens were drawn from, temperature included.
        values: (B, T) of the states they were drawn in.
        input_ids: (B, L).
        response_mask: (B, T).
        entropy_grad: whether the entropies carry a gradient.
        action_masks: what was allowed, index (B, T); None: everything.
    """
    if action_masks is not None:
        logits = forbid(logits, action_masks)
    log_pi = torch.log_softmax(logits, -1)
    chosen = input_ids[:, -logits.shape[1] :].long()
    logprobs = log_pi.gather(-1, chosen[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        finite = log_pi.clamp_min(-1e30)  # 0 log 0 = 0, and its gradient 0
        entropies = -(log_pi.exp() * finite).sum(-1)
    mask = response_mask.bool()
    return PolicyOutput(*(torch.where(mask, x, torch.zeros_like(x)) for x in (logprobs, values, entropies)))


def last_columns(attention_mask: Tensor) -> Tensor:
    """(B,) column of each row's last real token."""
    width = attention_mask.shape[1]
    return width - 1 - attention_mask.flip(1).long().argmax(1)


def temperature_of(policy: Any) -> float:
    """The policy's sampling temperature."""
    return float(getattr(policy, "temperature", 1.0))


def device_of(policy: Policy) -> torch.device:
    """Where the policy's parameters are."""
    return next(iter(policy.parameters())).device


@contextlib.contextmanager
def arithmetic(policy: Any) -> Iterator[None]:
    """The precision that the policy wants its passes in."""
    with policy.arithmetic() if hasattr(policy, "arithmetic") else contextlib.nullcontext():
        yield


def check_takes_action_masks(policy: Any) -> None:
    """Refuse a policy that cannot be told which tokens are allowed.

    Raises:
        TypeError: its `evaluate` has no parameter `action_masks`.
    """
    if not takes_action_masks(policy.evaluate):
        raise TypeError(
            "In environments with MinLength or ActionMask a policy's `evaluate` should take `action_masks`, got "
            f"{type(policy).__name__}.evaluate without it. Its log-probabilities would be those of another "
            "distribution than the one that is sampled, every ratio wrong and the KL negative. Add action_masks=None "
            "and pass it on to output_from_logits."
        )


class PolicyLogprobs:
    """A policy as `KLPenalty` asks for it: numpy in, log-probabilities out, no gradient."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        """Log-probability (N,) of each action after its prefix."""
        log_pi = self._next(observations)
        chosen = torch.as_tensor(np.asarray(actions), device=log_pi.device).long()
        return log_pi.gather(-1, chosen[:, None]).squeeze(-1).double().cpu().numpy()

    def stepper(self) -> Any:
        """The policy's own, with which it acts, so that nothing `act` computed is computed again; else itself."""
        return self.policy.stepper() if hasattr(self.policy, "stepper") else self

    @torch.no_grad()
    def next_logprobs(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Log-distribution (N, V) after each prefix."""
        log_pi: NDArray[np.float32] = self._next(observations).cpu().numpy()
        return log_pi

    def _next(self, observations: Mapping[str, NDArray[Any]]) -> Tensor:
        device = device_of(self.policy)
        ids = torch.as_tensor(np.asarray(observations["input_ids"]), device=device)
        mask = torch.as_tensor(np.asarray(observations["attention_mask"]), device=device)
        with arithmetic(self.policy):
            return torch.log_softmax(self.policy.next_logits(ids, mask).float(), -1)

    @torch.no_grad()
    def response_logprobs(
        self,
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any],
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> NDArray[np.float64]:
        """Log-probabilities (B, T) of whole responses, 0 beyond their ends; over the allowed tokens."""
        device = device_of(self.policy)
        ids, mask = (torch.as_tensor(np.asarray(x), device=device) for x in (input_ids, attention_mask))
        with arithmetic(self.policy):
            output = self.policy.evaluate(ids, mask, response_tokens, **masks_argument(action_masks))
        return output.logprobs.double().cpu().numpy()

    def response_distributions(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float32]:
        """Log-distributions (B, T, V): in one pass where the policy can, else prefix by prefix."""
        own = getattr(self.policy, "response_distributions", None)
        if own is not None:
            whole: NDArray[np.float32] = own(input_ids, attention_mask, response_tokens)
            return whole
        return prefix_distributions(self, input_ids, attention_mask, response_tokens)


def masks_argument(action_masks: PackedMasks | None) -> dict[str, PackedMasks]:
    """What `evaluate` is given besides: nothing where everything is allowed, so that simple policies stay simple."""
    return {} if action_masks is None else {"action_masks": action_masks}
