"""What agents that learn from a fixed set of data share around their loss: steps, epochs, the run, checkpoints.

A subclass gives `gradient` (the loss of a batch and its gradient) and `evaluate` (figures of held-out data); it knows
the algorithm, this file does not. `Agent` is the same for agents that learn in environments.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from textenv.agents import checkpoint, training
from textenv.agents.offline_config import OfflineConfig, learning_rate_at
from textenv.agents.offline_log import OfflineLog
from textenv.agents.policy import Policy, check_takes_action_masks


@dataclass(frozen=True, kw_only=True)
class OfflineStats:
    """One step.

    Attributes:
        iteration: steps so far, this one included.
        episodes: demonstrations or pairs seen so far, repetitions counted.
        epoch: passes over the data so far, with the fraction of the one that is running.
        grad_norm: before it was scaled down.
        learning_rate: of this step.
        tokens: response tokens of the batch.
        seconds: that the step took.
    """

    iteration: int
    episodes: int
    epoch: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The figures that logs hold."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.seconds if self.seconds else math.nan}


Stats = TypeVar("Stats", bound=OfflineStats)
Config = TypeVar("Config", bound=OfflineConfig)


class OfflineAgent(ABC, Generic[Config, Stats]):
    """A policy that learns from rows of data, in epochs.

    Args:
        policy: see `Policy`; a `LanguageModelPolicy` as a rule, with adapters or all of its weights.
        data: encoded for the task that the policy is to act in.
        config: the settings.
        held_out: data that is only measured.
        seed: of the order of the data. Equal seeds give equal runs.

    Raises:
        ValueError: the policy has nothing to train, or `held_out` is of another task.
        TypeError: other data than the agent learns from, or wrappers forbid tokens and the policy cannot be told which.
    """

    config_class: ClassVar[type[OfflineConfig]]
    stats_class: ClassVar[type[OfflineStats]]
    data_class: ClassVar[type[Any]]
    data_name: ClassVar[str]
    """What the data is called in `load` and in messages."""
    panels: ClassVar[Sequence[tuple[str, str, str]]]
    """What training.png shows, see `plot_training`."""

    envs = None
    """A checkpoint holds no environments: there is nothing to remember of them."""

    def __init__(self, policy: Policy, data: Any, config: Config, *, held_out: Any = None, seed: int = 0) -> None:
        self._check_data(data, held_out)
        if data.constraint is not None:
            check_takes_action_masks(policy)
        self.policy, self.data, self.held_out = policy, data, held_out
        self.config, self.seed = config, seed
        self.parameters = training.trained_parameters(policy)
        self.optimizer = torch.optim.AdamW(
            self.parameters, config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.generators: dict[str, torch.Generator] = {}  # an epoch's order follows from the seed and its number
        self.iteration = 0
        self.run_folder: Path | None = None
        self.total_episodes: int | None = config.epochs * len(data)
        self.episodes = 0

    @abstractmethod
    def gradient(self, rows: Tensor) -> dict[str, Any]:
        """Add the gradient of a batch's loss to the parameters.

        Returns:
            What the record of the step holds besides the fields of `OfflineStats`, and ``tokens``.
        """

    def prepare(self, progress: bool) -> None:
        """What `learn` does before the first step; steps that are taken without it do it themselves."""

    @abstractmethod
    def evaluate(self, *, progress: bool = False) -> Any:
        """Measure the held-out data; training does not notice. The figures have ``metrics()``.

        Raises:
            ValueError: there is none.
        """

    @abstractmethod
    def headline(self, figures: Any) -> str:
        """The most important figures of a step or of a measurement, for the line that shows progress."""

    @abstractmethod
    def sentence(self, measured: Any) -> str:
        """The figures of a measurement in full."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the data."""
        return math.ceil(len(self.data) / self.config.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def rows(self, iteration: int) -> Tensor:
        """Which rows of the data a step learns from; it depends on seed and iteration alone.

        Args:
            iteration: steps taken before.
        """
        epoch, place = divmod(iteration, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(training.derive_seed(self.seed, epoch))
        return torch.randperm(len(self.data), generator=generator).split(self.config.batch_size)[place]

    def step(self) -> Stats:
        """One optimiser step."""
        start = time.perf_counter()
        if hasattr(self.policy, "eval"):
            self.policy.eval()  # dropout off: what is measured is what acts
        rows = self.rows(self.iteration)
        learning_rate = learning_rate_at(min(self.iteration, self.total_steps - 1), self.total_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        figures = self.gradient(rows)
        norm = training.clip_gradients(self.parameters, self.config.max_grad_norm, f"the {self.data_name}")
        self.optimizer.step()
        self.iteration += 1
        self.episodes += len(rows)
        stats: Any = self.stats_class(
            iteration=self.iteration,
            episodes=self.episodes,
            epoch=self.iteration / self.steps_per_epoch,
            grad_norm=norm,
            learning_rate=learning_rate,
            seconds=time.perf_counter() - start,
            **figures,
        )
        found: Stats = stats
        return found

    def iterate(self) -> Iterator[Stats]:
        """Train to the end of the last epoch, one record per step."""
        while self.iteration < self.total_steps:
            yield self.step()

    def learn(
        self,
        run_dir: str | os.PathLike[str] | None = "auto",
        *,
        save_every: int | None = None,
        eval_every: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Train to the end of the last epoch; a run that was interrupted goes on from where `load` left it.

        Args:
            run_dir: where metrics.jsonl, tensorboard/, training.png and checkpoint/ go; ``"auto"``:
                ``runs/<agent>-<date>-<time>``; None: nowhere.
            save_every: steps between checkpoints; None: one after each epoch. One follows the last step in any case.
            eval_every: steps between measurements of the held-out data; None: after each epoch. It is measured before
                the first step and after the last in any case, and leaves no trace in training.
            progress: show a bar with the latest figures.

        Raises:
            ValueError: a number that would do nothing.
            FileExistsError: `run_dir` holds another run.
        """
        every = {"save_every": save_every, "eval_every": eval_every}
        for name, value in every.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` should be an integer of at least 1 or None, got {value!r}.")
        folder = training.run_folder(run_dir, self)
        goes_on = folder is not None and folder.resolve() == self.run_folder
        with OfflineLog(folder, self, goes_on, progress) as log:
            self.run_folder = None if folder is None else folder.resolve()
            if folder is not None:
                self.save(folder / "checkpoint")
            self.prepare(progress)
            if self.held_out is not None and self.iteration == 0 and not log.files.rows:
                log.record_start(self.evaluate())
            while self.iteration < self.total_steps:
                stats = self.step()
                measured = self.held_out is not None and self._is_due(eval_every)
                log.record(stats, self.evaluate() if measured else None)
                if folder is not None and self._is_due(save_every):
                    self.save(folder / "checkpoint")
        return self

    def _is_due(self, every: int | None) -> bool:
        """Whether something follows the step that was taken; the step's number alone decides, for resumed runs."""
        return self.iteration == self.total_steps or self.iteration % (every or self.steps_per_epoch) == 0

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that training needs to go on, all or nothing: see `checkpoint`."""
        checkpoint.save(self, folder)

    @classmethod
    def resumed(
        cls, folder: str | os.PathLike[str], data: Any, policy: Policy | None, held_out: Any, **options: Any
    ) -> Self:
        """The agent that a checkpoint holds; what `load` of a subclass is made of."""
        saved = checkpoint.read(folder, cls.__name__, cls.data_name)
        config: Any = cls.config_class(**saved.state["config"])
        given = policy or saved.make_policy()
        agent = cls(given, data, config, held_out=held_out, seed=saved.state["seed"], **options)
        checkpoint.restore(agent, saved)
        return agent

    def data_fingerprints(self) -> dict[str, str]:
        """Digests of what training reads; a resumed run must have the same."""
        return {self.data_name: self.data.fingerprint}

    def _measured_data(self) -> Any:
        """The held-out data, or an error."""
        if self.held_out is None:
            raise ValueError(
                f"`held_out` should be {self.data_name} that nothing is learned from, got none: there is nothing to "
                f"measure. Pass {type(self).__name__}(..., held_out=...), from `{self.data_class.__name__}.split` for "
                "example."
            )
        return self.held_out

    @classmethod
    def _check_data(cls, data: Any, held_out: Any) -> None:
        wanted = cls.data_class.__name__
        for name, given in ((cls.data_name, data), ("held_out", held_out)):
            if not isinstance(given, cls.data_class) and not (name == "held_out" and given is None):
                raise TypeError(
                    f"`{name}` should be a {wanted}, got {type(given).__name__}: prompts and responses must be "
                    f"encoded for the task that the policy acts in. Pass {wanted}.encode(..., envs)."
                )
        if held_out is not None and held_out.mdp.vocab_size != data.mdp.vocab_size:
            raise ValueError(
                f"`held_out` should be of the same task, got a vocabulary of {held_out.mdp.vocab_size} beside "
                f"{data.mdp.vocab_size}: its ids mean other tokens. Encode both for the same environments."
            )
