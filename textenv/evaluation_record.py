"""`Evaluation`: a policy in figures, as `textenv.evaluate` gives them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from textenv.alignment_tax import TaxedLoss
from textenv.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A policy in figures; see `evaluate`. Means are over episodes, intervals at its `confidence`."""

    episodes: int
    dropped: int
    """Episodes whose scorer gave no score; they count in nothing but this."""
    score: Estimate
    """The scorer's number."""
    score_std: float
    """Standard deviation of scores, with n in its denominator."""
    shaped_return: Estimate
    """Sum of the rewards that the wrapped environments gave."""
    kl: Estimate
    """KL(policy || reference), nats per response (k1, unbiased)."""
    length: Estimate
    """Tokens per response, the stop token included."""
    eos_rate: Estimate
    """Share of responses that ended with a stop token."""
    distinct: dict[int, Estimate]
    """distinct-n of all responses together, by n. Compare equal numbers of episodes."""
    ref_perplexity: Estimate
    """exp of the reference's nats per token on the policy's responses: how odd they look to it."""
    win_rate: Estimate | None = None
    """Share of prompts where the judge prefers this policy's response to the opponent's; a tie counts half."""
    tax: TaxedLoss | None = None
    """The alignment tax: language-model loss on held-out texts, the policy's against the reference's."""
    samples: tuple[tuple[str, str, float], ...] = ()
    """Some (prompt, response, score)."""

    def metrics(self) -> dict[str, float]:
        """The figures as a flat dict for logs; intervals as ``<name>_low`` and ``<name>_high``."""
        named: dict[str, Estimate | None] = {
            field.name: value
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Estimate)
        }
        named |= {f"distinct_{n}": estimate for n, estimate in self.distinct.items()}
        if self.tax is not None:
            named |= {"alignment_tax": self.tax.tax, "lm_loss": self.tax.policy, "ref_lm_loss": self.tax.reference}
        flat = {"episodes": float(self.episodes), "dropped": float(self.dropped), "score_std": self.score_std}
        for name, estimate in named.items():
            if estimate is not None:
                flat |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        return flat

    def __str__(self) -> str:
        """One figure a line."""
        names = {name for name in self.metrics() if f"{name}_low" in self.metrics()}
        flat = self.metrics()
        lines = [
            f"{name:<16}{Estimate(flat[name], flat[f'{name}_low'], flat[f'{name}_high'])}"
            for name in flat
            if name in names
        ]
        return "\n".join([f"{'episodes':<16}{self.episodes} ({self.dropped} dropped)", *lines])
