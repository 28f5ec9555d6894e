"""Best-of-n: write n responses to each prompt and keep the one with the highest score. Trains nothing.

It is the simplest policy that is better than the one it draws from, it costs n times as much to run, and its distance
is known without measuring: KL(best-of-n || policy) <= log n - (n - 1) / n nats (Beirami et al. 2024, arXiv:2401.01879;
see `best_of_n_kl`). So it is the yardstick for agents that train: at the same KL, how much of the score do they reach?

Legend: B prompts, n responses to each, N rows of observations, L columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.agents import training
from textenv.agents.policy import Policy, temperature_of
from textenv.agents.rollouts.base import Engine, check_context, engine_for
from textenv.agents.types import Sampling
from textenv.constraints import constraint_of
from textenv.evaluation import draw_prompts
from textenv.layers import text_envs
from textenv.optional import progress_bar
from textenv.prompts import EncodedPrompt
from textenv.rewards.overoptimisation import best_of_n_kl

ROWS = 256
"""Responses that are written at once, at most (but all of a prompt's)."""


@dataclass(frozen=True)
class BestResponses:
    """The best of n responses to each of B prompts.

    Attributes:
        prompts: B of them.
        responses: B arrays of ids, the ones that were kept.
        texts: B of them.
        scores: (B,) the scorer's numbers of those, NaN where all n were dropped.
        all_scores: (B, n) of every response, NaN where one was dropped: for `best_of_n_curve`, which says what every
            smaller n would have given, from the same samples.
    """

    prompts: tuple[EncodedPrompt, ...]
    responses: tuple[NDArray[np.int64], ...]
    texts: tuple[str, ...]
    scores: NDArray[np.float64]
    all_scores: NDArray[np.float64]


class BestOfN:
    """A policy that thinks n times before it speaks. It acts where a policy or an agent does, ``evaluate`` included.

    A whole response is chosen when an episode begins, and then said token by token. The scorer's number decides; what
    wrappers add to it or take from it (penalties, clipping) does not count.

    Args:
        policy: writes the responses. It is not called `policy` afterwards, because its log-probabilities are not those
            of what is written here: `textenv.evaluate` leaves their KL undefined, and `kl` bounds it. Evaluate in
            environments without a toll (``kl_coef=None``), which could only charge the policy's own.
        envs: vector text environments: prompts, budgets, constraints and the scorer. They are not stepped.
        n: responses to each prompt, at least 1.
        seed: of the sampling. Equal seeds give equal responses.
        engine: writes for the policy; None for the policy's own.

    Raises:
        ValueError: an n below 1, or a prompt that does not fit the engine.
        TypeError: `envs` holds no text environments.
    """

    def __init__(
        self,
        policy: Policy,
        envs: VectorEnv[Any, Any, Any],
        n: int = 4,
        *,
        seed: int = 0,
        engine: Engine | None = None,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(f"`n` should be an integer of at least 1, got {n!r}: there would be nothing to choose.")
        self.writer, self.envs, self.n, self.seed = policy, envs, int(n), seed
        training.attach(policy, envs)
        self.engine = engine or engine_for(policy)
        check_context(self.engine, text_envs(envs).task)
        self._generator = np.random.default_rng(seed)
        self._said: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        self._known: dict[tuple[int, ...], list[EncodedPrompt]] = {}

    @property
    def kl(self) -> float:
        """Upper bound of KL(best-of-n || policy), nats; nearly reached where no two responses have equal scores."""
        return float(best_of_n_kl(self.n))

    def write(self, episodes: int, *, seed: int | None = None, progress: bool = False) -> BestResponses:
        """Answer the prompts of the environments' next episodes.

        Args:
            episodes: B, at least 1.
            seed: of prompts and sampling; None: prompts come where the environments are, samples from the agent's seed.
            progress: show a bar.
        """
        if isinstance(episodes, bool) or not isinstance(episodes, int | np.integer) or episodes < 1:
            raise ValueError(f"`episodes` should be an integer of at least 1, got {episodes!r}.")
        prompts = draw_prompts(self.envs, int(episodes), seed)
        drawn = int(self._generator.integers(2**63)) if seed is None else seed
        return self.answer(prompts, seed=drawn, progress=progress)

    def answer(self, prompts: Sequence[EncodedPrompt], *, seed: int, progress: bool = False) -> BestResponses:
        """The best of n responses to each prompt.

        Args:
            prompts: B of them, encoded for the task.
            seed: of the sampling.
            progress: show a bar.
        """
        task, per_block = text_envs(self.envs).task, max(1, ROWS // self.n)
        blocks = [prompts[start : start + per_block] for start in range(0, len(prompts), per_block)]
        seeds = np.random.SeedSequence(seed).generate_state(len(blocks), np.uint64) >> np.uint64(1)
        self.engine.sync(self.writer)
        responses: list[NDArray[np.int64]] = []
        texts: list[str] = []
        with progress_bar(f"Writing best of {self.n} ...", len(blocks), progress) as advance:
            for block, block_seed in zip(blocks, seeds.tolist(), strict=True):
                written = self._candidates(block, block_seed)
                asked = [prompt for prompt in block for _ in range(self.n)]
                responses += written
                texts += task.response_texts(task.whole_state(asked, written), range(len(asked)))
                advance()
        asked = [prompt for prompt in prompts for _ in range(self.n)]
        scores = task.score(asked, texts).reshape(len(prompts), self.n)
        best = np.where(np.isnan(scores), -np.inf, scores).argmax(1)  # the first of equals, which are as likely as ever
        kept = (np.arange(len(prompts)) * self.n + best).tolist()
        return BestResponses(
            prompts=tuple(prompts),
            responses=tuple(responses[row] for row in kept),
            texts=tuple(texts[row] for row in kept),
            scores=scores[np.arange(len(best)), best],
            all_scores=scores,
        )

    def _candidates(self, prompts: Sequence[EncodedPrompt], seed: int) -> list[NDArray[np.int64]]:
        """All n responses to each prompt, one behind the other."""
        mdp = text_envs(self.envs).task.mdp
        sampling = Sampling(
            max_tokens=mdp.max_response_tokens,
            stop_ids=mdp.stop_ids,
            temperature=temperature_of(self.writer),
            seed=seed,
            constraint=constraint_of(self.envs),
            samples_per_prompt=self.n,
        )
        return self.engine.generate([list(prompt.ids) for prompt in prompts], sampling).responses

    def act(
        self,
        observations: Mapping[str, NDArray[Any]],
        *,
        generator: np.random.Generator | None = None,
        deterministic: bool = False,
        action_masks: Any = None,  # noqa: ARG002 - a response was written within the constraints of `envs`
    ) -> NDArray[np.int64] | int:
        """The next token of each row: a response is chosen where an episode begins, and said to its end.

        Args:
            observations: ``input_ids`` and ``attention_mask``, (N, L); or (L,), a single observation. Rows keep their
                places from step to step.
            generator: decides the samples; None: the agent's own.
            deterministic: the same n samples every time, those of the agent's seed.
            action_masks: see `textenv.agents.acting.act`; the constraints of `envs` count.

        Returns:
            Tokens (N,), or one int for a single observation.

        Raises:
            ValueError: a row stands in the midst of a response that was not written here.
        """
        ids, mask = (np.asarray(observations[key]) for key in ("input_ids", "attention_mask"))
        single, first = ids.ndim == 1, text_envs(self.envs).task.mdp.max_prompt_tokens
        rows = [
            (tuple(row[:first][real[:first] == 1].tolist()), row[first:][real[first:] == 1].tolist())
            for row, real in zip(np.atleast_2d(ids), np.atleast_2d(mask), strict=True)
        ]
        begin = [number for number, (_, said) in enumerate(rows) if not said]
        if begin:
            own = generator or self._generator
            seed = self.seed if deterministic else int(own.integers(2**63))
            found = self.answer([self._prompt(rows[number][0]) for number in begin], seed=seed)
            for number, response in zip(begin, found.responses, strict=True):
                self._said[number] = (rows[number][0], response.tolist())
        actions = np.array([self._next(number, *row) for number, row in enumerate(rows)], dtype=np.int64)
        return int(actions[0]) if single else actions

    def predict(self, observation: Mapping[str, NDArray[Any]], deterministic: bool = True) -> Any:
        """The next token for one observation (an int) or for N of them (an array); see `act`."""
        return self.act(observation, deterministic=deterministic)

    def _next(self, number: int, prompt: tuple[int, ...], said: list[int]) -> int:
        """The token of a row's response that follows what was said; any where the response has ended."""
        planned = self._said.get(number)
        if planned is None or planned[0] != prompt or planned[1][: len(said)] != said:
            raise ValueError(
                f"Row {number} should begin with a prompt alone or go on with what best-of-n chose there, got a "
                f"response of {len(said)} tokens that it did not write: it chooses among whole responses. Let it act "
                "from `reset` on, rows in their places."
            )
        return planned[1][min(len(said), len(planned[1]) - 1)]

    def _prompt(self, ids: tuple[int, ...]) -> EncodedPrompt:
        """The prompt with these ids, with its text and the context that the scorer is given."""
        task = text_envs(self.envs).task
        if not self._known:
            for prompt in task.prompts.prompts:
                self._known.setdefault(tuple(prompt.ids), []).append(prompt)
        found = self._known.get(ids) or [task.encode(list(ids), "The observation")]
        if any(prompt != found[0] or dict(prompt.context) != dict(found[0].context) for prompt in found):
            raise ValueError(
                f"Prompts of equal tokens should have equal texts and context, got {found[0]!r} and others: an "
                "observation does not tell which is meant, and the scorer would judge by the wrong one. Use `write`."
            )
        return found[0]
