"""The records that agents pass around: frozen, with a shape per field.

Legend: B responses in a batch, P prompt tokens, T response tokens, L = P + T, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from textenv.constraints import Constraint
from textenv.packed_masks import PackedMasks


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine writes responses. Every field is passed on, so that no model's own defaults slip in.

    Attributes:
        max_tokens: T.
        stop_ids: ids that end a response; they belong to it.
        temperature: of the sampling distribution; 0 takes the most likely token. There is no top-k or top-p: truncated
            sampling draws from another distribution than the one whose log-probabilities training uses, and its KL to
            the reference is infinite or negative (trl#235, #351).
        seed: of this call. Equal seeds and prompts give equal responses.
        constraint: which tokens the task allows in each state; the others must not be written. Prompts then fit the
            task's prompt budget.
        samples_per_prompt: responses to each prompt. Those of one prompt follow each other in the result.
    """

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 0
    constraint: Constraint | None = None
    samples_per_prompt: int = 1


@dataclass(frozen=True)
class Generation:
    """What an engine wrote: B arrays of ids, each ending at its first stop id or at the budget.

    B is prompts times `Sampling.samples_per_prompt`, the responses to one prompt next to each other.
    """

    responses: list[NDArray[np.int64]]
    action_masks: PackedMasks | None = None
    """What `Sampling.constraint` allowed where each token was chosen, index (B, T). An engine that leaves it out makes
    the constraint say it again, which for top-k masks may differ by rounding."""
    logprobs: list[NDArray[np.float32]] | None = None
    """The engine's own log-probabilities of the tokens that it drew, one array per response, of the distribution that
    they were drawn from (temperature and constraint included); None where it has none."""

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return sum(map(len, self.responses))


@dataclass(frozen=True)
class PolicyOutput:
    """A policy's view of given responses. Entries beyond a response's end are 0 and mean nothing."""

    logprobs: Float[Tensor, "B T"]
    """log pi(y_t | x, y_<t), temperature included; differentiable."""
    values: Float[Tensor, "B T"]
    """V(x, y_<t), the value of the state in which token t was chosen; differentiable."""
    entropies: Float[Tensor, "B T"]
    """Entropy of the distribution that token t was drawn from, nats; differentiable only where it was asked for."""


@dataclass(frozen=True)
class Rollout:
    """B finished episodes and what PPO needs to know about them."""

    input_ids: Int[Tensor, "B L"]
    attention_mask: Int[Tensor, "B L"]
    response_mask: Bool[Tensor, "B T"]
    """True on tokens that the policy chose, the stop id included."""
    logprobs: Float[Tensor, "B T"]
    """Under the policy that wrote them, as the trainer computes them or, on request, as the engine reported them."""
    ref_logprobs: Float[Tensor, "B T"] | None
    """Under the reference; None where there is none."""
    values: Float[Tensor, "B T"]
    rewards: Float[Tensor, "B T"]
    """Shaped, as the wrapped environments gave them."""
    advantages: Float[Tensor, "B T"]
    """Whitened where the configuration says so."""
    returns: Float[Tensor, "B T"]
    scores: Float[Tensor, B]  # noqa: F821 - a jaxtyping axis
    """The scorer's numbers, NaN where a sample was dropped."""
    finish_reason: tuple[str, ...]
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    seconds: dict[str, float]
    """Wall time by phase."""
    action_masks: PackedMasks | None = None
    """What was allowed where each token was chosen, index (B, T); None: everything."""
    engine_logprobs: Float[Tensor, "B T"] | None = None
    """As the engine reported them; None where it reports none."""
    tolls: Float[Tensor, B] | None = None  # noqa: F821
    """What the outermost `KLPenalty` charged in all, in units of the score; None without one."""
    first_pass: PolicyOutput | None = None
    """The pass that gave `logprobs` and `values`, with its graph: the first one of the update, where it can be."""

    def rows(self, index: Tensor) -> Rollout:
        """The episodes at `index`, tensors only (texts are left behind)."""
        taken = {
            field.name: getattr(self, field.name)[index]
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        if self.action_masks is not None:
            taken["action_masks"] = self.action_masks[index.cpu().numpy()]
        return dataclasses.replace(self, finish_reason=(), prompts=(), responses=(), first_pass=None, **taken)

    @property
    def response_tokens(self) -> int:
        """T."""
        return self.response_mask.shape[1]

    def paid(self) -> Float[Tensor, B]:  # noqa: F821
        """What the environments pay for each response, the toll set aside: the score as the wrappers shape it."""
        returns = torch.where(self.response_mask, self.rewards, torch.zeros_like(self.rewards)).sum(-1)
        return returns if self.tolls is None else returns + self.tolls

    def kl(self) -> Float[Tensor, B] | None:  # noqa: F821
        """Sum over each response of log pi - log pi_ref (k1), nats; None without a reference."""
        if self.ref_logprobs is None:
            return None
        gaps = self.logprobs - self.ref_logprobs
        return torch.where(self.response_mask, gaps, torch.zeros_like(gaps)).sum(-1)


@dataclass(frozen=True)
class Sample:
    """One response to look at while training runs."""

    prompt: str
    response: str
    score: float


@dataclass(frozen=True, kw_only=True)
class IterationStats:
    """One iteration in numbers. Means over tokens are over real tokens; `nan` means "not defined here"."""

    iteration: int
    episodes: int
    """Episodes since training began."""
    score: float
    """Mean of the scorer's numbers."""
    score_std: float
    kl: float
    """Mean KL(policy || reference), nats per response (k1)."""
    shaped_return: float
    """Mean undiscounted sum of shaped rewards: the objective."""
    response_length: float
    eos_rate: float
    """Share of responses that ended with a stop id."""
    distinct_2: float
    """Distinct word pairs over word pairs, all responses together."""
    repetition: float
    """Share of a response's word 4-grams that it has said before, mean over responses of four words or more."""
    ref_perplexity: float
    """exp of the reference's nats per token on the responses: how odd they look to it."""
    score_surprise: float
    """Correlation over responses of the score with the reference's nats per token: whether oddness pays."""
    entropy: float
    """Mean entropy per token, nats."""
    kl_coef: float
    learning_rate: float
    policy_loss: float
    value_loss: float
    explained_variance: float
    """1 - Var(returns - values) / Var(returns), values before the update."""
    clip_fraction: float
    """Share of tokens whose ratio left [1 - clip_range, 1 + clip_range_high]."""
    approx_kl: float
    """Mean per token of (ratio - 1) - log ratio against the policy that wrote the batch."""
    ratio_q01: float
    ratio_q50: float
    ratio_q99: float
    mismatch_q01: float
    """Quantiles of log pi - log mu over tokens, nats: trainer against engine, before the update; nan where the engine
    reports no log-probabilities."""
    mismatch_q50: float
    mismatch_q99: float
    mismatch_max: float
    """Largest absolute value of the same."""
    mismatch_outside: float
    """Share of tokens whose ratio pi / mu is outside 0.9 to 1.1."""
    grad_norm: float
    """Mean norm before clipping."""
    kl_loss: float
    """The KL term of the loss before its coefficient, nats; nan where it is off."""
    ptx_loss: float
    """Mean negative log-likelihood per token of the pretraining texts, nats; nan without them."""
    updates: int
    """Optimiser steps taken."""
    early_stop: int
    """1 where `target_kl` ended the updates before their number was reached, else 0."""
    dropped: int
    """Samples left out because they had no score."""
    tokens: int
    """Response tokens in the batch."""
    seconds: dict[str, float]
    """Wall time by phase: generate, score, logprobs, rewards, update."""
    samples: tuple[Sample, ...] = ()

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Response tokens per second, by phase and in all (``"total"``)."""
        rates = {phase: self.tokens / max(taken, 1e-9) for phase, taken in self.seconds.items()}
        return {**rates, "total": self.tokens / max(sum(self.seconds.values()), 1e-9)}

    def metrics(self) -> dict[str, float]:
        """Every figure as a flat dict of numbers, for logs."""
        flat = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("seconds", "samples")
        }
        flat.update({f"seconds/{phase}": taken for phase, taken in self.seconds.items()})
        flat.update({f"tokens_per_second/{phase}": rate for phase, rate in self.tokens_per_second.items()})
        return flat
