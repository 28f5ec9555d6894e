"""Supervised fine-tuning as behaviour cloning: the policy learns to act as demonstrations did, token by token.

One step reads in the order of the algorithm:

    1. batch        demonstrations as finished episodes of the task, prompts padded on the left, responses behind them
    2. loss         -mean log pi(y_t | x, y_<t) over response tokens, stop tokens included; prompts are given
    3. optimise     one AdamW step, gradients accumulated over micro-batches without padding
    4. bookkeeping  one `SFTStats`

It is the first stage of Stiennon et al. 2020 (arXiv:2009.01325) and Ouyang et al. 2022 (arXiv:2203.02155). What it
leaves behind becomes both policy and reference of the stage with rewards: `LanguageModelPolicy.merged`, or the adapter
kept in both, ``LanguageModelPolicy.from_pretrained(model, adapter=...)``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from textenv.agents import checkpoint, training
from textenv.agents.micro_batches import token_budget
from textenv.agents.nll import Likelihood, likelihood, nll_losses
from textenv.agents.policy import Policy, arithmetic, check_takes_action_masks, device_of
from textenv.agents.sft_config import SFTConfig, learning_rate_at
from textenv.agents.sft_log import SFTLog
from textenv.demonstrations import DemonstrationSet


@dataclass(frozen=True, kw_only=True)
class SFTStats:
    """One step.

    Attributes:
        iteration: steps so far, this one included.
        episodes: demonstrations seen so far, repetitions counted.
        epoch: passes over the demonstrations so far, with the fraction of the one that is running.
        nll: the loss in nats, before the step: per response token where ``loss_mode`` is ``"token-mean"``.
        grad_norm: before it was scaled down.
        learning_rate: of this step.
        tokens: response tokens of the batch.
        seconds: that the step took.
    """

    iteration: int
    episodes: int
    epoch: float
    nll: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The figures that logs hold."""
        perplexity = math.exp(min(self.nll, 700.0))
        speed = self.tokens / self.seconds if self.seconds else math.nan
        return {**asdict(self), "perplexity": perplexity, "tokens_per_second": speed}


class SFT:
    """Behaviour cloning on demonstrations of a task.

    Args:
        policy: see `Policy`; a `LanguageModelPolicy` as a rule, with adapters or all of its weights.
        demonstrations: encoded for the task that the policy is to act in, see `DemonstrationSet.encode`.
        config: None for the defaults.
        held_out: demonstrations that are only measured.
        seed: of the order of demonstrations. Equal seeds give equal runs.

    Raises:
        ValueError: the policy has nothing to train, or `held_out` is of another task.
        TypeError: no demonstration set, or wrappers forbid tokens and the policy cannot be told which.
    """

    envs = None
    """A checkpoint holds no environments: there is nothing to remember of them."""

    def __init__(
        self,
        policy: Policy,
        demonstrations: DemonstrationSet,
        config: SFTConfig | None = None,
        *,
        held_out: DemonstrationSet | None = None,
        seed: int = 0,
    ) -> None:
        _check_sets(demonstrations, held_out)
        if demonstrations.constraint is not None:
            check_takes_action_masks(policy)
        self.policy, self.demonstrations, self.held_out = policy, demonstrations, held_out
        self.config, self.seed = config or SFTConfig(), seed
        self.parameters = training.trained_parameters(policy)
        self.optimizer = torch.optim.AdamW(
            self.parameters, self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )
        self.generators: dict[str, torch.Generator] = {}  # an epoch's order follows from the seed and its number
        self.iteration = 0
        self.run_folder: Path | None = None
        self.total_episodes: int | None = self.config.epochs * len(demonstrations)
        self.episodes = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the demonstrations."""
        return math.ceil(len(self.demonstrations) / self.config.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def rows(self, iteration: int) -> Tensor:
        """Which demonstrations a step learns from; it depends on seed and iteration alone.

        Args:
            iteration: steps taken before.
        """
        epoch, place = divmod(iteration, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(training.derive_seed(self.seed, epoch))
        return torch.randperm(len(self.demonstrations), generator=generator).split(self.config.batch_size)[place]

    def step(self) -> SFTStats:
        """One optimiser step."""
        start, config = time.perf_counter(), self.config
        if hasattr(self.policy, "eval"):
            self.policy.eval()  # dropout off: what is measured is what acts
        rows = self.rows(self.iteration)
        learning_rate = learning_rate_at(min(self.iteration, self.total_steps - 1), self.total_steps, config)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        nll, tokens = self._gradient(rows)
        norm = training.clip_gradients(self.parameters, config.max_grad_norm, "the demonstrations")
        self.optimizer.step()
        self.iteration += 1
        self.episodes += len(rows)
        return SFTStats(
            iteration=self.iteration,
            episodes=self.episodes,
            epoch=self.iteration / self.steps_per_epoch,
            nll=nll,
            grad_norm=norm,
            learning_rate=learning_rate,
            tokens=tokens,
            seconds=time.perf_counter() - start,
        )

    def _gradient(self, rows: Tensor) -> tuple[float, int]:
        """Add the gradient of a batch's loss to the parameters; the loss and its response tokens."""
        demonstrations, device = self.demonstrations, device_of(self.policy)
        state = demonstrations.state(rows.tolist())
        ids, mask = (torch.as_tensor(array, device=device) for array in (state.input_ids, state.attention_mask))
        width = demonstrations.mdp.max_response_tokens
        budget = token_budget(self.policy, self.config.micro_batch_tokens)
        options: dict[str, Any] = {"mode": self.config.loss_mode, "action_masks": demonstrations.action_masks(state)}
        total = 0.0
        with arithmetic(self.policy):
            for loss in nll_losses(self.policy, ids, mask, width, budget, **options):
                loss.backward()
                total += float(loss.detach())
        return total, int(state.response_lengths.sum())

    def iterate(self) -> Iterator[SFTStats]:
        """Train to the end of the last epoch, one record per step."""
        while self.iteration < self.total_steps:
            yield self.step()

    def evaluate(self, *, progress: bool = False) -> Likelihood:
        """Measure the held-out demonstrations; training does not notice.

        Raises:
            ValueError: there are none.
        """
        if self.held_out is None:
            raise ValueError(
                "`held_out` should be demonstrations that nothing is learned from, got none: there is nothing to "
                "measure. Pass SFT(..., held_out=...), from `DemonstrationSet.split` for example."
            )
        return likelihood(self.policy, self.held_out, self.config.micro_batch_tokens, progress=progress)

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
                ``runs/sft-<date>-<time>``; None: nowhere.
            save_every: steps between checkpoints; None: one after each epoch. One follows the last step in any case.
            eval_every: steps between measurements of the held-out demonstrations; None: after each epoch. They are
                measured before the first step and after the last in any case, and leave no trace in training.
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
        with SFTLog(folder, self.total_steps, self.iteration, goes_on, progress) as log:
            self.run_folder = None if folder is None else folder.resolve()
            if folder is not None:
                self.save(folder / "checkpoint")
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
    def load(
        cls,
        folder: str | os.PathLike[str],
        demonstrations: DemonstrationSet,
        policy: Policy | None = None,
        *,
        held_out: DemonstrationSet | None = None,
    ) -> Self:
        """Go on from `save`, as if training had never stopped.

        Args:
            folder: what `save` wrote, or the run folder of `learn`.
            demonstrations: those of training, in the same order.
            policy: a policy of the kind that was saved; None remakes a `LanguageModelPolicy`.
            held_out: see the class.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is another agent's, of other demonstrations, or does not fit the policy.
        """
        saved = checkpoint.read(folder, cls.__name__, "demonstrations")
        config = SFTConfig(**saved.state["config"])
        agent = cls(policy or saved.make_policy(), demonstrations, config, held_out=held_out, seed=saved.state["seed"])
        checkpoint.restore(agent, saved)
        return agent

    def data_fingerprints(self) -> dict[str, str]:
        """Digests of what training reads; a resumed run must have the same."""
        return {"demonstrations": self.demonstrations.fingerprint}


def _check_sets(demonstrations: Any, held_out: Any) -> None:
    for name, given in (("demonstrations", demonstrations), ("held_out", held_out)):
        if not isinstance(given, DemonstrationSet) and not (name == "held_out" and given is None):
            raise TypeError(
                f"`{name}` should be a DemonstrationSet, got {type(given).__name__}: prompts and responses must be "
                "encoded for the task that the policy acts in. Pass DemonstrationSet.encode(demonstrations, envs)."
            )
    if held_out is not None and held_out.mdp.vocab_size != demonstrations.mdp.vocab_size:
        raise ValueError(
            f"`held_out` should be of the same task, got a vocabulary of {held_out.mdp.vocab_size} beside "
            f"{demonstrations.mdp.vocab_size}: its ids mean other tokens. Encode both for the same environments."
        )
