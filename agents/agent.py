"""What every agent is around its algorithm: construction, the learning loop, prediction, checkpoints.

A subclass gives `config_class` and `step()`, one iteration; it knows the algorithm, this file does not.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.agents import checkpoint, training
from textenv.agents.alarm import Alarm
from textenv.agents.held_out import held_out
from textenv.agents.policy import Policy
from textenv.agents.rollouts import Engine, engine_for
from textenv.agents.rollouts.base import check_context
from textenv.agents.types import IterationStats, Rollout
from textenv.constraints import constraint_of
from textenv.layers import text_envs
from textenv.rewards.early_stopping import EarlyStopping


class Agent(ABC):
    """A policy that learns on text environments.

    Args:
        policy: see `Policy`; a `LanguageModelPolicy` as a rule.
        envs: vector text environments, ``gym.make_vec("RLHF-v0", num_envs=...)``. The policy's log-probabilities and
            its own reference are attached to their `KLPenalty`.
        config: None for the defaults.
        seed: of prompts, sampling and minibatches. Equal seeds give equal runs.
        engine: writes the responses; None for the policy's own.

    Raises:
        TypeError: `envs` holds no text environments.
        ValueError: the policy has nothing to train, or a prompt does not fit the engine.
    """

    config_class: ClassVar[type[Any]]

    def __init__(
        self,
        policy: Policy,
        envs: VectorEnv[Any, Any, Any],
        config: Any = None,
        *,
        seed: int = 0,
        engine: Engine | None = None,
    ) -> None:
        self.policy, self.envs, self.config, self.seed = policy, envs, config or self.config_class(), seed
        training.attach(policy, envs)
        self.engine = engine or engine_for(policy)
        check_context(self.engine, text_envs(envs).task)
        self.parameters = training.trained_parameters(policy)
        self.optimizer = torch.optim.AdamW(
            self.parameters, self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )
        self.generator = torch.Generator().manual_seed(seed)
        self._predict_generator = torch.Generator().manual_seed(seed)  # looking must not change what training does
        self.iteration = 0
        self.episodes = 0
        self.total_episodes: int | None = None
        self.run_folder: Path | None = None
        self._warned: set[str] = set()

    @abstractmethod
    def step(self) -> IterationStats:
        """One iteration: collect, then optimise."""

    def iterate(self) -> Iterator[IterationStats]:
        """Train without end, one record per iteration."""
        while True:
            yield self.step()

    @property
    def batch_size(self) -> int:
        """Episodes per iteration."""
        return self.config.episodes_per_iteration or self.envs.num_envs

    def learn(
        self,
        total_episodes: int,
        run_dir: str | os.PathLike[str] | None = "auto",
        *,
        save_every: int = 1,
        progress: bool = True,
        eval_envs: VectorEnv[Any, Any, Any] | None = None,
        eval_every: int = 10,
        eval_episodes: int | None = None,
        alarm: Alarm | None = None,
        early_stopping: EarlyStopping | None = None,
    ) -> Self:
        """Train until `total_episodes` episodes have been seen since training began.

        Args:
            total_episodes: counted over resumed runs, and rounded up to whole iterations.
            run_dir: where metrics, samples and checkpoints go; ``"auto"``: ``runs/<agent>-<date>-<time>``; None:
                nowhere.
            save_every: iterations between checkpoints, ``run_dir/checkpoint``. At 1 a crash or Ctrl-C loses at most the
                iteration that it interrupts.
            progress: show a live table with samples.
            eval_envs: environments for evaluation, on held-out prompts as a rule, sharing nothing with those of
                training: before the first iteration, after every `eval_every`-th and after the last. Every evaluation
                has the same prompts and random numbers, and leaves no trace in training: weights, prompts and metrics
                are those of a run without it.
            eval_every: iterations.
            eval_episodes: episodes of each evaluation; None: one per environment.
            alarm: compares each iteration with the first ones and warns (`RewardHackingWarning`, and in
                ``run_dir/alarms.txt``) of what looks like reward hacking. It never changes training.
            early_stopping: stops when the evaluations' score has not risen for a while; ``run_dir/best`` keeps the
                checkpoint with the highest. Give `eval_envs` another scorer than training's: a gold score, or a reward
                model trained on other comparisons.

        Returns:
            The agent.

        Raises:
            ValueError: a number that would do nothing, `eval_envs` that share state with the agent's environments,
                `early_stopping` without `eval_envs`, or an alarm or early stopping that has watched another run.
            FileExistsError: `run_dir` holds another run.
        """
        evaluation = held_out(self, eval_envs, eval_every, eval_episodes)
        training.learn(self, total_episodes, run_dir, save_every, progress, evaluation, alarm, early_stopping)
        return self

    def predict(self, observation: Mapping[str, NDArray[Any]], deterministic: bool = True) -> Any:
        """The next token for one observation (an int) or for N of them (an array).

        Args:
            observation: as the environments give it.
            deterministic: the most likely token; else one is drawn.
        """
        constraint = constraint_of(self.envs)
        return training.predict(self.policy, observation, deterministic, self._predict_generator, constraint)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that training needs to go on, all or nothing: see `checkpoint`."""
        checkpoint.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        envs: VectorEnv[Any, Any, Any],
        policy: Policy | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> Self:
        """Go on from `save`.

        Args:
            folder: what `save` wrote, or the run folder of `learn`.
            envs: environments made as they were for training; their state (prompt generators, KL coefficient, score
                statistics) is restored.
            policy: a policy of the kind that was saved; None remakes a `LanguageModelPolicy`.
            engine: see the class.
            **options: what else the constructor was given, `pretraining_texts` for example.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is another agent's, or does not fit the policy or the environments.
        """
        saved = checkpoint.read(folder, cls.__name__)
        config = cls.config_class(**saved.state["config"])
        agent = cls(policy or saved.make_policy(), envs, config, seed=saved.state["seed"], engine=engine, **options)
        checkpoint.restore(agent, saved)
        return agent

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Whose states a checkpoint holds."""
        return {"generator": self.generator, "predict_generator": self._predict_generator}

    def data_fingerprints(self) -> dict[str, str]:
        """Digests of what training reads besides its environments, by argument; a resumed run must have the same."""
        return {}

    def _set_learning_rate(self) -> float:
        """This iteration's learning rate, by the schedule."""
        rate = self.config.learning_rate
        if self.config.lr_schedule == "linear" and self.total_episodes:
            rate *= max(0.0, 1.0 - self.episodes / self.total_episodes)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _warn_about(self, rollout: Rollout) -> None:
        """Say once what makes a batch teach nothing, or the wrong thing."""
        can_stop = bool(text_envs(self.envs).task.mdp.stop_ids)
        if can_stop and all(reason == "length" for reason in rollout.finish_reason):
            self._warn_once(
                "Every response of a batch was cut by the budget: the policy cannot learn to stop. Raise "
                "max_response_tokens, add stop ids, or set missing_eos_penalty."
            )
        if not (rollout.advantages[rollout.response_mask] != 0).any():
            self._warn_once(
                "Every advantage of a batch is 0 (all rewards equal?): this iteration taught the policy nothing."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=4)
