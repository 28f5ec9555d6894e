"""Proxy and gold score against the square root of KL: where the gold score peaks, and how it falls. Pure numpy.

The points may be best-of-n at several n, or one policy at several times of its training, each asked the same prompts.

Legend: P prompts, K points of the curve.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from textenv.estimates import UNDEFINED, Estimate, mean_estimate, quantile_of
from textenv.optional import require
from textenv.rewards.plain_json import write_json

RESAMPLES = 2_000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Peak:
    """Where the gold score is highest."""

    index: int
    """Which point of the curve."""
    kl: Estimate
    """Its KL, nats; percentile bootstrap over prompts, the peak found anew in each resample."""
    gold: Estimate
    """The gold score there. Chosen for being the highest, so a little too high."""
    fall: Estimate
    """By how much the gold score at the peak exceeds that of the last point. The peak is found on half of the prompts
    and the fall measured on the other half, both ways round, so that chance makes no fall. Above 0 with its whole
    interval: the proxy was over-optimised."""


@dataclass(frozen=True, eq=False)
class OverOptimisation:
    """A proxy score and the gold score behind it, further and further from the reference.

    Attributes:
        kl: (K,) KL(policy || reference) at each point, nats, rising.
        proxy: (P, K) what was optimised, by prompt; or (K,), means only.
        gold: (P, K) or (K,), the score that it stands for.
        labels: K names for the table; empty: the points are numbered.
        confidence: of all intervals, over prompts.

    Raises:
        ValueError: shapes that do not fit each other, a KL that is negative or does not rise, figures that are not
            finite.
    """

    kl: NDArray[np.float64]
    proxy: NDArray[np.float64]
    gold: NDArray[np.float64]
    labels: tuple[str, ...] = ()
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Check, and make both scores (P, K)."""
        kl = np.array(self.kl, np.float64)
        proxy, gold = (np.atleast_2d(np.array(x, np.float64)) for x in (self.proxy, self.gold))
        if kl.ndim != 1 or proxy.shape != gold.shape or proxy.ndim != 2 or proxy.shape[1] != len(kl) or not kl.size:
            raise ValueError(
                "`kl` should have shape (K,) and `proxy` and `gold` both (P, K), K points for each of P prompts, got "
                f"{kl.shape}, {proxy.shape} and {gold.shape}."
            )
        if not all(np.isfinite(x).all() for x in (kl, proxy, gold)):
            raise ValueError("`kl`, `proxy`, `gold` should be finite, got nan or inf. Leave that point or prompt out.")
        if kl[0] < 0 or not (np.diff(kl) > 0).all():
            raise ValueError(
                f"`kl` should be at least 0 and rise from point to point, got {kl.tolist()}: a curve over it would run "
                "backwards. Sort the points by their KL."
            )
        if len(self.labels) not in (0, len(kl)):
            raise ValueError(f"`labels` should be {len(kl)}, one per point, or none, got {len(self.labels)}.")
        quantile_of(self.confidence)
        labels = self.labels or tuple(f"{number}" for number in range(1, len(kl) + 1))
        for name, value in (("kl", kl), ("proxy", proxy), ("gold", gold), ("labels", tuple(labels))):
            object.__setattr__(self, name, value)

    def means(self, which: Literal["proxy", "gold"]) -> list[Estimate]:
        """The mean score at each of the K points, with its interval over prompts."""
        scores = self.proxy if which == "proxy" else self.gold
        return [mean_estimate(column, self.confidence) for column in scores.T]

    def peak(self, rng: np.random.Generator | None = None, resamples: int = RESAMPLES) -> Peak:
        """Where the gold score is highest; the first such point where several tie.

        Args:
            rng: of the bootstrap; None: ``np.random.default_rng(0)``.
            resamples: of the bootstrap.

        Raises:
            ValueError: `resamples` below 1.
        """
        if resamples < 1:
            raise ValueError(f"`resamples` should be at least 1, got {resamples}: there would be no interval.")
        rng = np.random.default_rng(0) if rng is None else rng
        prompts, index = len(self.gold), int(self.gold.mean(0).argmax())
        where = Estimate(float(self.kl[index]), 0.0, np.inf)  # one prompt tells nothing of others
        if prompts > 1:
            drawn = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)  # (R, P)
            peaks = self.kl[(drawn @ self.gold).argmax(1)]
            tail = (1 - self.confidence) / 2
            # "nearest": an interval of KLs that are points of the curve
            low, high = np.quantile(peaks, [tail, 1 - tail], method="nearest").tolist()
            where = Estimate(where.value, min(low, where.value), max(high, where.value))
        return Peak(index, where, mean_estimate(self.gold[:, index], self.confidence), self._fall())

    def _fall(self) -> Estimate:
        """Gold at the peak minus gold at the last point, the peak found on the other half of the prompts."""
        if len(self.gold) < 2:
            return UNDEFINED
        halves = self.gold[::2], self.gold[1::2]
        falls = [half[:, int(other.mean(0).argmax())] - half[:, -1] for half, other in (halves, halves[::-1])]
        return mean_estimate(np.concatenate(falls), self.confidence)

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain numbers: points with intervals, and the peak."""
        points = [
            {"label": label, "kl": float(kl), "proxy": proxy._asdict(), "gold": gold._asdict()}
            for label, kl, proxy, gold in zip(
                self.labels, self.kl, self.means("proxy"), self.means("gold"), strict=True
            )
        ]
        peak = self.peak()
        figures = {name: getattr(peak, name)._asdict() for name in ("kl", "gold", "fall")}
        return {"prompts": len(self.gold), "confidence": self.confidence, "points": points, "peak": figures}

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict` as JSON; figures that are not finite become null."""
        write_json(path, self.as_dict())

    def table(self) -> Any:
        """A rich table, one row per point, the peak of the gold score marked.

        Raises:
            ImportError: rich is not installed.
        """
        require("rich", "train", "A table")
        from rich.table import Table

        peak = self.peak()
        table = Table("", "KL (nats)", "sqrt KL", "proxy", "gold", title=f"Over-optimisation, {len(self.gold)} prompts")
        rows = zip(self.labels, self.kl, self.means("proxy"), self.means("gold"), strict=True)
        for index, (label, kl, proxy, gold) in enumerate(rows):
            cells = [label, f"{kl:.3f}", f"{kl**0.5:.3f}", str(proxy), str(gold)]
            table.add_row(*cells, style="bold" if index == peak.index else None)
        table.caption = f"Gold peaks at KL {peak.kl} nats; from there to the end it falls by {peak.fall}."
        return table

    def plot(self, path: str | os.PathLike[str], gold_label: str = "gold", proxy_label: str = "proxy") -> None:
        """Draw both curves against the square root of KL, with intervals and the gold score's peak, as a PNG."""
        from textenv.rewards.figures import plot_overoptimisation

        plot_overoptimisation(self, path, proxy_label, gold_label)


class GoldFit(NamedTuple):
    """A gold score's gain over the reference as a function of d = sqrt(KL), see `fit_gold`."""

    kind: Literal["best-of-n", "rl"]
    alpha: float
    """How fast it rises at first."""
    beta: float
    """How much of that is lost as d grows: the over-optimisation."""

    def gain(self, kl: ArrayLike) -> NDArray[np.float64]:
        """The fitted gain at these KLs."""
        d = np.sqrt(np.asarray(kl, np.float64))
        gain: NDArray[np.float64] = _columns(d, self.kind) @ np.array([self.alpha, -self.beta])
        return gain

    @property
    def peak_kl(self) -> float:
        """The KL at which the fitted gain is largest; inf where it only rises, 0 where it only falls."""
        if self.beta < 0 or (self.beta == 0 and self.alpha > 0):
            return float("inf")
        if self.beta == 0:
            return 0.0
        if self.kind == "rl":
            return float(np.exp(2 * (self.alpha / self.beta - 1)))
        return max(self.alpha / (2 * self.beta), 0.0) ** 2


def fit_gold(kl: ArrayLike, gain: ArrayLike, kind: Literal["best-of-n", "rl"] = "best-of-n") -> GoldFit:
    """Fit the forms of Gao et al. (2022, arXiv:2210.10760, section 1) by least squares.

    d (alpha - beta d) for best-of-n and d (alpha - beta log d) for reinforcement learning, d = sqrt(KL).

    Args:
        kl: (K,) nats, at least two different ones above 0.
        gain: (K,) gold scores minus that of the reference.
        kind: which form.

    Raises:
        ValueError: an unknown kind, shapes that differ, or too few points.
    """
    if kind not in ("best-of-n", "rl"):
        raise ValueError(f"`kind` should be 'best-of-n' or 'rl', got {kind!r}.")
    kl, gain = np.asarray(kl, np.float64), np.asarray(gain, np.float64)
    if kl.shape != gain.shape or kl.ndim != 1 or len(np.unique(kl[kl > 0])) < 2:
        raise ValueError(
            "`kl` and `gain` should have one shape (K,), with at least two different KLs above 0 for the two unknowns, "
            f"got {kl.tolist()} and {gain.shape}."
        )
    (alpha, beta), *_ = np.linalg.lstsq(_columns(np.sqrt(kl), kind) * [1.0, -1.0], gain, rcond=None)
    return GoldFit(kind, float(alpha), float(beta))


def _columns(d: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """(K, 2): d, and what beta is subtracted from it with; d log d is 0 at 0."""
    second = d**2 if kind == "best-of-n" else d * np.log(np.where(d > 0, d, 1.0))
    return np.stack([d, second], axis=-1)
