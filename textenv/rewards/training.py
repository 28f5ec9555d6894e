"""`RewardTrainer`: fits a `RewardNetwork` to comparisons, and goes on from a checkpoint as if it had never stopped.

AdamW with a linear warm-up and a linear way down to 0, gradients summed over micro-batches. Knows neither where the
comparisons come from nor what the network is made of.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from textenv.optional import progress_bar
from textenv.rewards.bradley_terry import bradley_terry_loss, centering_loss, check_smoothing
from textenv.rewards.comparison_data import ComparisonBatch, ComparisonData
from textenv.rewards.network import RewardNetwork
from textenv.rewards.training_checkpoint import read_checkpoint, write_checkpoint


@dataclass(frozen=True, kw_only=True)
class RewardTrainingConfig:
    """Settings of reward training."""

    learning_rate: float = 5e-4
    """Of AdamW at its highest; suits adapters and heads. All weights want one some 30 times smaller."""
    epochs: int = 1
    """Passes over the comparisons. Reward models overfit early: Ouyang et al. (2022, arXiv:2203.02155) take one."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from 0; then it falls to 0."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Longer gradients are cut to this norm; infinity for no bound."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong; see `bradley_terry_loss`."""
    centering_coef: float = 0.0
    """Of `centering_loss`; Eisenstein et al. (2023, arXiv:2312.09244) take 0.01."""
    save_every: int = 50
    """Steps from one checkpoint to the next, where the trainer has a file for them."""

    def __post_init__(self) -> None:
        """Check every value."""
        for name in ("epochs", "save_every"):
            if (
                isinstance(getattr(self, name), bool)
                or not isinstance(getattr(self, name), int)
                or getattr(self, name) < 1
            ):
                raise ValueError(f"`{name}` should be an integer of at least 1, got {getattr(self, name)!r}.")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` should be above 0, got {getattr(self, name)}: nothing would be learned.")
        for name in ("weight_decay", "centering_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` should be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"`warmup` should be a share of the steps, at least 0 and below 1, got {self.warmup}.")
        check_smoothing(self.label_smoothing)


def learning_rate_at(step: int, total: int, config: RewardTrainingConfig) -> float:
    """The learning rate of a step: up to the highest over the warm-up, down towards 0 over the rest.

    Args:
        step: from 0 on.
        total: steps of the run.
        config: highest rate and warm-up.

    Example:
        >>> config = RewardTrainingConfig(learning_rate=1.0, warmup=0.2)
        >>> [learning_rate_at(step, 10, config) for step in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.125]
    """
    rising = round(config.warmup * total)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    return config.learning_rate * (total - step) / (total - rising)


@dataclass(frozen=True)
class StepStats:
    """What one step saw, before its update.

    Attributes:
        step: its number, from 0 on.
        loss: in nats, everything that was minimised.
        accuracy: share of the step's comparisons that the scores order as people did, a tie for one half.
        grad_norm: before it was cut.
        learning_rate: of this step.
    """

    step: int
    loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float


class RewardTrainer:
    """Fits a network to comparisons.

    Args:
        network: what trains, in place.
        data: what it learns from.
        config: how.
        checkpoint: a file to write to every `save_every` steps and at the end. Where it exists, training goes on from
            it. None: nothing is written.

    Attributes:
        steps_done: how many steps were taken.
        history: one record per step.

    Raises:
        ValueError: the checkpoint is of another network, other data or other settings.
    """

    def __init__(
        self,
        network: RewardNetwork,
        data: ComparisonData,
        config: RewardTrainingConfig | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.network, self.data, self.config = network, data, config or RewardTrainingConfig()
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.steps_done = 0
        self.history: list[StepStats] = []
        self.optimizer = torch.optim.AdamW(
            network.trained_state().values(),
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            fused=network.device.type in ("cpu", "cuda"),
        )
        self._states: Tensor | None = None
        if self.checkpoint is not None and self.checkpoint.exists():
            read_checkpoint(self, self.checkpoint)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.data.steps_per_epoch

    def train(
        self, *, until: int | None = None, progress: bool = True, on_epoch: Callable[[int], None] | None = None
    ) -> list[StepStats]:
        """Take the steps that are left, or those up to number `until`.

        Args:
            until: stop after that many steps of the whole run.
            progress: show a bar.
            on_epoch: called with the number of epochs that are complete, after each of them.

        Returns:
            The history of the whole run.
        """
        end = self.total_steps if until is None else min(until, self.total_steps)
        if self._states is None and self.network.settings["train"] == "head" and self.steps_done < end:
            self._states = self._frozen_states(progress)
        with progress_bar("Learning from comparisons", end - self.steps_done, progress) as advance:
            while self.steps_done < end:
                self.history.append(self._step())
                self.steps_done += 1
                if self.checkpoint is not None and (
                    self.steps_done % self.config.save_every == 0 or self.steps_done == end
                ):
                    write_checkpoint(self, self.checkpoint)
                if on_epoch is not None and self.steps_done % self.data.steps_per_epoch == 0:
                    on_epoch(self.steps_done // self.data.steps_per_epoch)
                advance()
        return self.history

    def use_states(self, states: Tensor) -> None:
        """Take hidden states (S, K, H) of all texts that are at hand, instead of reading them; for a frozen trunk.

        Raises:
            ValueError: the trunk trains, or the shape is another.
        """
        expected = (*self.data.points.shape, self.network.hidden_size)
        if self.network.settings["train"] != "head" or tuple(states.shape) != expected:
            raise ValueError(
                f"`states` should have shape {expected} and be of a frozen trunk, got {tuple(states.shape)} for "
                f"train={self.network.settings['train']!r}: states of a trunk that trains would be out of date."
            )
        self._states = states

    def _frozen_states(self, progress: bool) -> Tensor:
        """Hidden states (S, K, H) of all texts: where only the head trains, the trunk reads each of them once."""
        rows, points = self.data.rows, self.data.points
        states = torch.zeros(*points.shape, self.network.hidden_size, device=self.network.device)
        for block, found in self.network.blocks_of_states(rows, points, "Reading the texts" if progress else None):
            states[block] = found.float()
        return states

    def _step(self) -> StepStats:
        epoch, index = divmod(self.steps_done, self.data.steps_per_epoch)
        rate = learning_rate_at(self.steps_done, self.total_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, accuracy = 0.0, 0.0
        for batch in self.data.step(epoch, index):
            with self.network.arithmetic():
                part, right = self._loss(batch)
                part.backward()
            loss, accuracy = loss + float(part.detach()), accuracy + right
        norm = torch.nn.utils.clip_grad_norm_(self.network.trained_state().values(), self.config.max_grad_norm)
        if not math.isfinite(loss) or not torch.isfinite(norm):
            raise FloatingPointError(
                f"Step {self.steps_done} has a loss of {loss} and a gradient of norm {float(norm)}; an update would "
                "turn every weight into NaN. Take a smaller learning rate, or look for margins of absurd size."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(self.steps_done, loss, accuracy, float(norm), rate)

    def _loss(self, batch: ComparisonBatch) -> tuple[Tensor, float]:
        """A micro-batch's part of the step's loss, and of its accuracy."""
        if self._states is None:
            scores = self.network([self.data.rows[i] for i in batch.texts], self.data.points[batch.texts])
        else:
            scores = self.network.read(self._states[torch.as_tensor(batch.texts, device=self._states.device)])
        chosen_at, rejected_at, margin, weight = (
            torch.as_tensor(array, device=scores.device)
            for array in (batch.chosen, batch.rejected, batch.margin, batch.weight)
        )
        chosen, rejected = scores.flatten()[chosen_at], scores.flatten()[rejected_at]  # (n,)
        smoothing, coef = self.config.label_smoothing, self.config.centering_coef
        loss = bradley_terry_loss(chosen, rejected, margin, label_smoothing=smoothing, weight=weight)
        if coef:
            loss = loss + coef * centering_loss(chosen, rejected, weight)
        right = (torch.sign(chosen.detach() - rejected.detach()) + 1) / 2
        return loss, float((weight * right).sum())
