"""The sync proof: do new weights really reach an engine? A few fixed log-probabilities, asked on both sides.

Legend: N prefixes, K tokens asked after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

PROVEN_SYNCS = 3
"""So many syncs are proven, then they are trusted: the probe costs about as much as decoding one token."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.75}
"""Nats that trainer and engine may differ by: in float32 on any token of the probe, in bfloat16 on their mean, because
two right implementations round differently (SmolLM2 at temperature 0.7: 0.3 on the probe's unlikely tokens)."""

STILL = {"float32": 1e-5, "bfloat16": 0.05}
"""Nats by which the trainer's probe must have moved for an engine that did not move by one bit to be found out."""

LENGTHS = (1, 5, 16, 70)
"""Tokens of the prefixes, the context permitting. The longest fills a block of the engine's prefix cache, so that one
that was not emptied after a sync is found out."""


class SyncError(RuntimeError):
    """An engine does not have the trainer's weights."""


@dataclass(frozen=True)
class Probe:
    """What trainer and engine are asked.

    Attributes:
        prefixes: N lists of ids.
        tokens: K ids; after each prefix the log-probability of each of them is asked for, temperature included.
    """

    prefixes: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, vocab_size: int, context: int) -> Probe:
        """The same for equal arguments.

        Args:
            vocab_size: ids from here on have no token.
            context: tokens that the engine can attend to; one is left for the answer.
        """
        rng = np.random.default_rng(0)
        lengths = sorted({min(length, context - 1) for length in LENGTHS})
        prefixes = tuple(tuple(rng.integers(vocab_size, size=length).tolist()) for length in lengths)
        return cls(prefixes, tuple(rng.choice(vocab_size, size=min(8, vocab_size), replace=False).tolist()))


@torch.no_grad()
def trainer_logprobs(policy: Any, probe: Probe) -> NDArray[np.float64]:
    """The probe's log-probabilities (N, K) under a `LanguageModelPolicy`, in the arithmetic that it trains in."""
    rows = []
    for prefix in probe.prefixes:
        ids = torch.tensor([prefix], device=policy.lm.device)
        with policy.arithmetic():
            log_pi = torch.log_softmax(policy.next_logits(ids, torch.ones_like(ids)).float(), -1)[0]
        rows.append(log_pi[list(probe.tokens)].double().cpu().numpy())
    return np.stack(rows)


class SyncProof:
    """Compares trainer and engine around each of the first syncs, and logs what it sees.

    Args:
        probe: what is asked.
        ask: the engine's log-probabilities (N, K) of a probe, with the weights that it has at the moment.
        dtype: of the engine's arithmetic, ``"float32"`` or ``"bfloat16"``.
        name: of the engine, for messages.
        syncs: so many are proven.
    """

    def __init__(
        self,
        probe: Probe,
        ask: Callable[[Probe], NDArray[Any]],
        *,
        dtype: str,
        name: str,
        syncs: int = PROVEN_SYNCS,
    ) -> None:
        self.probe, self.ask, self.name, self.syncs = probe, ask, name, syncs
        self.tolerance, self.still = TOLERANCE[dtype], STILL[dtype]
        self.statistic = "largest" if dtype == "float32" else "mean"
        self.proven = 0
        self._trainer: NDArray[np.float64] | None = None  # at the sync before

    def around(self, policy: Any, load: Callable[[], None]) -> None:
        """Load new weights into the engine, and prove it if it is one of the first times.

        Args:
            policy: the trainer's.
            load: gives its weights to the engine.

        Raises:
            SyncError: see `check`; the engine should not write anything then.
        """
        if self.proven >= self.syncs:
            load()
            return
        before = None if self._trainer is None else np.asarray(self.ask(self.probe), dtype=np.float64)
        load()
        after = np.asarray(self.ask(self.probe), dtype=np.float64)
        self.check(trainer_logprobs(policy, self.probe), before, after)

    def check(
        self, trainer: NDArray[np.float64], before: NDArray[np.float64] | None, after: NDArray[np.float64]
    ) -> None:
        """Compare, log, remember.

        Args:
            trainer: (N, K), with the new weights.
            before: (N, K) of the engine before the sync; None at the first.
            after: (N, K) of the engine after it.

        Raises:
            SyncError: trainer and engine differ by more than the tolerance, or the trainer's weights have moved and
                the engine's have not.
        """
        old, self._trainer, self.proven = self._trainer, trainer, self.proven + 1
        gap = self._size(after - trainer)
        moved, stuck, was = 0.0, False, ""
        if before is not None and old is not None:
            moved = self._size(trainer - old)
            stuck = moved > self.still and bool(np.array_equal(before, after))
            was = f", before the sync trainer {old[-1, 0]:.6f}, engine {before[-1, 0]:.6f}"
        logger.info(
            "%s, sync %d of %d proven: probe log-probability trainer %.6f, engine %.6f%s; %s difference %.2g nats",
            self.name,
            self.proven,
            self.syncs,
            trainer[-1, 0],
            after[-1, 0],
            was,
            self.statistic,
            gap,
        )
        if stuck or not gap <= self.tolerance:
            seen = f"the {self.statistic} difference is {gap:.3g} nats{was}"
            if stuck:
                seen = f"the trainer's have moved by {moved:.3g} nats and the engine's not at all"
            raise SyncError(
                f"After sync {self.proven} trainer and engine should agree on the probe's log-probabilities to "
                f"{self.tolerance} nats, but {seen}. {self.name} does not have the trainer's weights (or keeps a "
                "prefix cache of the old ones), so its responses would come from another policy. Make a new engine; if "
                "it happens again, train with engine=None and report the model's architecture."
            )

    def _size(self, differences: NDArray[np.float64]) -> float:
        sizes = np.abs(differences)
        return float(sizes.max() if self.statistic == "largest" else sizes.mean())
