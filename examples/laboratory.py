"""What the runs of `overoptimisation.py` share: settings, the task, the gold scorer, measuring a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

import textenv  # noqa: F401 - registers RLHF-v0
from textenv.agents import LanguageModelPolicy, attach
from textenv.agents.rollouts.collect import collect
from textenv.lm.precision import fast_dtype
from textenv.rewards import (
    OverOptimisation,
    RewardModel,
    best_of_n_curve,
    film_review_head,
    load_openings,
    load_ratings,
    split_ratings,
)
from textenv.rlhf import SENTENCE_ENDS


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    name: str = ""
    """Files go to runs/<name>/; empty: overoptimisation-<date>-<time>."""
    seed: int = 0
    """Of comparisons, prompts, sampling, adapters and minibatches."""
    comparisons: tuple[int, ...] = (100, 500, 2000)
    """What the proxies learn from; the smaller ones are the first of the largest."""
    prompts: int = 48
    """Openings on which everything is measured."""
    samples: int = 64
    """Responses to each of them that best-of-n chooses from."""
    episodes: int = 960
    """Responses that PPO trains on, against each proxy."""
    num_envs: int = 48
    """Responses per iteration."""
    eval_every: int = 2
    """Iterations from one measurement to the next."""
    eval_samples: int = 3
    """Responses to each prompt in a measurement."""
    kl_coef: float = 0.02
    """Price of a nat: low, so that the proxy is what is optimised."""
    learning_rate: float = 6e-4
    """Of AdamW."""
    refits: int = 2
    """How often the smallest proxy learns from the policy's own samples; 0: never."""
    max_response_tokens: int = 24
    """Budget of a response."""
    lora_rank: int = 16
    """Of the adapters."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic; auto: bfloat16 where the processor multiplies it natively."""


class Scale(NamedTuple):
    """Mean and standard deviation of the reference's scores: in these units a proxy and the gold scorer compare."""

    mean: float
    std: float

    @classmethod
    def of(cls, scores: NDArray[np.float64]) -> Scale:
        return cls(float(scores.mean()), float(scores.std()))

    def __call__(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return (scores - self.mean) / self.std


class Point(NamedTuple):
    """One measurement of a policy in training; scores (P,) are means over each prompt's responses."""

    label: str
    kl: float
    proxy: NDArray[np.float64]
    gold: NDArray[np.float64]


class Laboratory:
    """What all runs share: the task, its evaluation prompts, the gold scorer, the reference's samples."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.dtype = fast_dtype() if arguments.dtype == "auto" else arguments.dtype
        self.gold = film_review_head(dtype=self.dtype)
        openings = load_openings()
        self.held_out, self.openings = openings[: arguments.prompts], openings[arguments.prompts :]
        self.texts = self.reference_samples()
        self.gold_scores = self.gold(*self.texts)
        self.train, _ = split_ratings(load_ratings())

    def envs(self, prompts: list[str], scorer: RewardModel, num_envs: int, order: str = "random") -> Any:
        """Environments that pay out a scorer."""
        return gym.make_vec(
            "RLHF-v0",
            num_envs=num_envs,
            prompts=prompts,
            stop=SENTENCE_ENDS,
            order=order,
            scorer=scorer,
            max_response_tokens=self.arguments.max_response_tokens,
            kl_coef=self.arguments.kl_coef,
            missing_eos_penalty=1.0,
            dtype=self.dtype,
        )

    def policy(self) -> LanguageModelPolicy:
        """The reference, with adapters that do nothing yet."""
        rank, seed = self.arguments.lora_rank, self.arguments.seed
        return LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=rank, dtype=self.dtype, seed=seed)

    def reference_samples(self) -> tuple[list[str], list[str]]:
        """`samples` responses of the reference to each evaluation prompt, prompt by prompt."""
        policy, count = self.policy(), self.arguments.samples
        envs = self.envs(self.held_out, self.gold, len(self.held_out), "sequential")
        attach(policy, envs)
        engine = policy.engine()
        responses = [
            collect(policy, envs, engine, episodes=len(self.held_out), seed=number, env_seed=0).responses
            for number in track(range(count), description="The reference writes")
        ]
        return [p for p in self.held_out for _ in range(count)], [
            r for row in zip(*responses, strict=True) for r in row
        ]

    def measure_of(self, policy: LanguageModelPolicy, proxy: RewardModel) -> Callable[[str], Point]:
        """Measures a policy on the evaluation prompts: the same ones, and the same random numbers, every time."""
        count = self.arguments.eval_samples
        envs = self.envs(self.held_out, proxy, count * len(self.held_out), "sequential")
        attach(policy, envs)
        scales = Scale.of(proxy(*self.texts)), Scale.of(self.gold_scores)
        engine = policy.engine()

        def measure(label: str) -> Point:
            episodes = collect(policy, envs, engine, episodes=count * len(self.held_out), seed=54321, env_seed=0)
            texts = list(episodes.prompts), list(episodes.responses)
            scores = [
                scale(scorer(*texts)).reshape(count, -1).mean(0)
                for scorer, scale in zip((proxy, self.gold), scales, strict=True)
            ]
            return Point(label, float(episodes.replayed.infos["kl"].mean()), *scores)

        return measure

    def best_of_n(self, proxy: RewardModel) -> OverOptimisation:
        """Best-of-n by the proxy among the reference's samples."""
        shape = len(self.held_out), self.arguments.samples
        return best_of_n_curve(proxy(*self.texts).reshape(shape), self.gold_scores.reshape(shape))
