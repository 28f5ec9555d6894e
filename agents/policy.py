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


class Policy(Protocol):
    """A table of logits, a recurrent network or a language model; usually a `torch.nn.Module`.

    Optional, used where they exist: ``temperature`` (a float, 1 where absent), ``reference`` (log-probabilities of the
    policy that training starts from, see `textenv.task.LogprobModel`), ``engine()`` (a faster way to write responses),
    ``arithmetic()`` (a context for the precision of passes).
    """

    def evaluate(self, input_ids: Tensor, attention_mask: Tensor, response_tokens: int) -> PolicyOutput:
        """Log-probabilities, values and entropies (B, T) of given responses, differentiable in the parameters."""
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


def output_from_logits(logits: Tensor, values: Tensor, input_ids: Tensor, response_mask: Tensor) -> PolicyOutput:
    """The policy output of a small model that has all its logits at hand.

    Args:
        logits: (B, T, V) of the distributions that the response tokens were drawn from, temperature included.
        values: (B, T) of the states they were drawn in.
        input_ids: (B, L).
        response_mask: (B, T).
    """
    log_pi = torch.log_softmax(logits, -1)
    chosen = input_ids[:, -logits.shape[1] :].long()
    logprobs = log_pi.gather(-1, chosen[..., None]).squeeze(-1)
    entropies = torch.special.entr(log_pi.detach().exp()).sum(-1)
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


class PolicyLogprobs:
    """A policy as `KLPenalty` asks for it: numpy in, log-probabilities out, no gradient."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        """Log-probability (N,) of each action after its prefix."""
        device = device_of(self.policy)
        ids = torch.as_tensor(np.asarray(observations["input_ids"]), device=device)
        mask = torch.as_tensor(np.asarray(observations["attention_mask"]), device=device)
        with arithmetic(self.policy):
            logprobs = torch.log_softmax(self.policy.next_logits(ids, mask).float(), -1)
        chosen = torch.as_tensor(np.asarray(actions), device=device).long()
        return logprobs.gather(-1, chosen[:, None]).squeeze(-1).double().cpu().numpy()

    @torch.no_grad()
    def response_logprobs(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float64]:
        """Log-probabilities (B, T) of whole responses, 0 beyond their ends."""
        device = device_of(self.policy)
        ids, mask = (torch.as_tensor(np.asarray(x), device=device) for x in (input_ids, attention_mask))
        with arithmetic(self.policy):
            return self.policy.evaluate(ids, mask, response_tokens).logprobs.double().cpu().numpy()
