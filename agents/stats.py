"""Figures of an iteration. Every mean over tokens is over real tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from textenv.agents.losses import approx_kl, explained_variance
from textenv.agents.mismatch import MISMATCH
from textenv.agents.types import IterationStats, Rollout, Sample
from textenv.correlation import pearson
from textenv.metrics import distinct_n, repetition_rate

SAMPLES = 4
"""Responses kept to look at, per iteration."""


class UpdateStats:
    """What the optimiser saw, summed over micro-batches, minibatches and epochs.

    Args:
        clip_range: of the ratio, downwards.
        clip_range_high: upwards; None: the same.
    """

    def __init__(self, clip_range: float, clip_range_high: float | None = None) -> None:
        self.clip_range = clip_range, clip_range if clip_range_high is None else clip_range_high
        self.grad_norms: list[float] = []
        self.early_stop = False
        self.mismatch: dict[str, float] = dict.fromkeys(MISMATCH, math.nan)
        """Trainer against engine, see `textenv.agents.mismatch`."""
        self._losses = dict.fromkeys(("policy_loss", "value_loss", "kl_loss", "ptx_loss"), 0.0)
        self._seen: set[str] = set()
        self._logratios: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._minibatch = 0
        """Where in `_logratios` the present minibatch begins."""

    def add(self, logratio: Tensor, entropies: Tensor, response_mask: Tensor, **losses: Tensor) -> None:
        """One micro-batch: its tokens, and its shares of the minibatch's losses by the names they are logged under."""
        for name, loss in losses.items():
            self.add_loss(name, loss)
        self._logratios.append(logratio.detach()[response_mask].float().cpu())
        self._entropies.append(entropies.detach()[response_mask].float().cpu())

    def add_loss(self, name: str, loss: Tensor) -> None:
        """A micro-batch's share of one of the minibatch's losses."""
        self._losses[name] += float(loss.detach())
        self._seen.add(name)

    @property
    def minibatch_kl(self) -> float:
        """`approx_kl` per token of the whole minibatch that is at hand, all its micro-batches together."""
        return float(approx_kl(torch.cat(self._logratios[self._minibatch :])).mean())

    def add_grad_norm(self, norm: float) -> None:
        """One optimiser step, which ends the minibatch: its gradient norm before clipping."""
        self.grad_norms.append(norm)
        self._minibatch = len(self._logratios)

    def stop(self) -> None:
        """The minibatch at hand is looked at, but its step is not taken, and no other follows."""
        self.early_stop = True

    def figures(self) -> dict[str, Any]:
        """Means over minibatches (losses), over optimiser steps (norms) and over tokens (the rest)."""
        steps = len(self.grad_norms)
        looked_at = dict.fromkeys(self._losses, steps + self.early_stop) | {"ptx_loss": steps}
        means = {
            name: total / looked_at[name] if name in self._seen and looked_at[name] else math.nan
            for name, total in self._losses.items()
        }
        return {
            **means,
            **self._token_figures(),
            **self.mismatch,
            "grad_norm": sum(self.grad_norms) / steps if steps else math.nan,
            "updates": steps,
            "early_stop": int(self.early_stop),
        }

    def _token_figures(self) -> dict[str, float]:
        if not self._logratios:
            names = ("clip_fraction", "approx_kl", "entropy", "ratio_q01", "ratio_q50", "ratio_q99")
            return dict.fromkeys(names, math.nan)
        logratio = torch.cat(self._logratios)
        ratio = logratio.exp()
        low, middle, high = torch.quantile(_at_most(ratio, 1_000_000), torch.tensor([0.01, 0.5, 0.99])).tolist()
        down, up = self.clip_range
        return {
            "clip_fraction": float(((ratio - 1 > up) | (1 - ratio > down)).float().mean()),
            "approx_kl": float(approx_kl(logratio).mean()),
            "entropy": float(torch.cat(self._entropies).mean()),
            "ratio_q01": low,
            "ratio_q50": middle,
            "ratio_q99": high,
        }


def _at_most(x: Tensor, count: int) -> Tensor:
    """Evenly spaced entries of x: torch's quantile refuses more than 16 million."""
    return x[:: max(1, len(x) // count)]


def iteration_stats(
    rollout: Rollout,
    update: UpdateStats,
    *,
    iteration: int,
    episodes: int,
    kl_coef: float,
    learning_rate: float,
) -> IterationStats:
    """Step 7: everything about one iteration in one record."""
    kept = torch.isfinite(rollout.scores).cpu()
    scores = rollout.scores.cpu()[kept]
    kl = rollout.kl()
    lengths = rollout.response_mask.sum(-1).cpu()[kept]
    texts = [text for text, keep in zip(rollout.responses, kept.tolist(), strict=True) if keep]
    stopped = [reason == "stop" for reason, keep in zip(rollout.finish_reason, kept.tolist(), strict=True) if keep]
    rewards = torch.where(rollout.response_mask, rollout.rewards, torch.zeros_like(rollout.rewards))
    shaped = rewards.sum(-1).cpu()[kept]
    return IterationStats(
        iteration=iteration,
        episodes=episodes,
        score=_mean(scores),
        score_std=float(scores.std(correction=0)) if len(scores) else math.nan,
        kl=math.nan if kl is None else _mean(kl.cpu()[kept]),
        shaped_return=_mean(shaped),
        response_length=_mean(lengths.float()),
        eos_rate=_mean(torch.tensor(stopped, dtype=torch.float32)),
        distinct_2=distinct_n(texts, 2),
        repetition=repetition_rate(texts),
        kl_coef=kl_coef,
        learning_rate=learning_rate,
        explained_variance=explained_variance(rollout.values, rollout.returns, rollout.response_mask),
        dropped=int((~kept).sum()),
        tokens=int(rollout.response_mask.sum()),
        seconds=dict(rollout.seconds),
        samples=tuple(
            Sample(*sample)
            for sample in list(zip(rollout.prompts, rollout.responses, rollout.scores.tolist(), strict=True))[:SAMPLES]
        ),
        **_surprise_figures(rollout, kept),
        **update.figures(),
    )


def _surprise_figures(rollout: Rollout, kept: Tensor) -> dict[str, Any]:
    """How odd responses look to the reference, and whether the odd ones score higher: two floats."""
    if rollout.ref_logprobs is None or not kept.any():
        return {"ref_perplexity": math.nan, "score_surprise": math.nan}
    logprobs = torch.where(rollout.response_mask, rollout.ref_logprobs, torch.zeros_like(rollout.ref_logprobs))
    nats, tokens = -logprobs.double().sum(-1).cpu()[kept], rollout.response_mask.sum(-1).cpu()[kept]
    return {
        "ref_perplexity": float((nats.sum() / tokens.sum()).exp()),
        "score_surprise": pearson(rollout.scores.cpu()[kept].numpy(), (nats / tokens).numpy()).value,
    }


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else math.nan
