"""`TextGenerationVectorEnv`: N episodes of a text task side by side, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from textenv.checks import (
    check_actions,
    check_options,
    check_prompts_saved,
    group_asked_for,
    prompts_asked_for,
    rows_to_reset,
)
from textenv.mdp import TokenState, initial_state, is_terminated, is_truncated, replace_rows, transition
from textenv.prompts import EncodedPrompt
from textenv.row_generators import RowGenerators
from textenv.task import TextTask, observation

RESET_OPTIONS = ("prompt", "prompts", "reset_mask", "samples_per_prompt")


class TextGenerationVectorEnv(VectorEnv[Any, Any, Any]):
    """Language generation as N Markov decision processes; see `TextGenerationEnv` for one row's specification.

    Rows are independent: row i has a generator of its own, seeded with ``seed + i``, so that a vector environment
    equals a `SyncVectorEnv` of single ones. Rows that end in one step are scored in one call.

    Args:
        num_envs: N.
        task: prompts, scorer and MDP.
        autoreset_mode: what happens to a row after its end. ``NEXT_STEP``: the next step ignores its action and resets
            it; ``SAME_STEP``: it resets at once, its end kept in ``final_obs`` and ``final_info``; ``DISABLED``: call
            ``reset(options={"reset_mask": mask})`` before stepping it again.
        render_mode: ``"ansi"``: `render` gives the N texts so far.

    Reset options: ``prompts``, one text, list of ids, chat or record per row; ``prompt``, one for all rows;
    ``reset_mask``, a (N,) bool array of the rows to reset; ``samples_per_prompt``, a divisor G of N: rows next to each
    other share a drawn prompt in groups of G. Rows that reset on their own later draw on their own.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 10}  # noqa: RUF012 - Gymnasium's class attribute

    def __init__(
        self,
        num_envs: int,
        task: TextTask,
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = "ansi",
    ) -> None:
        super().__init__()
        if isinstance(num_envs, bool) or not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ValueError(
                f"`num_envs` should be an integer of at least 1, got {num_envs!r}. There would be nothing to step; use "
                "1 for a single episode."
            )
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"`render_mode` should be None or one of {self.metadata['render_modes']}, got {render_mode!r}. Choose "
                "one of them."
            )
        self.num_envs = int(num_envs)
        self.task = task
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode
        self.single_observation_space = task.observation_space()
        self.single_action_space = task.action_space()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._generators = RowGenerators(self.num_envs)
        self._state: TokenState | None = None
        self._prompts: list[EncodedPrompt] = []
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self._planned_scores: NDArray[np.float64] | None = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start all rows, or those of ``options["reset_mask"]``, from a prompt.

        Args:
            seed: an int (row i gets ``seed + i``), one per row, or None to go on with the generators there are.
            options: see the class.

        Raises:
            ValueError: unknown option, wrong number of prompts or seeds, or a prompt that cannot be used.
        """
        options = check_options(options, RESET_OPTIONS)
        rows = rows_to_reset(options, self.num_envs)
        prompts = prompts_asked_for(options, self.num_envs)
        group = group_asked_for(options, self.num_envs)
        self._generators.seed(seed, rows)
        new = self._start_rows(rows, prompts, group)
        self._state = new if len(rows) == self.num_envs else replace_rows(self._state_now(), rows, new)
        self._ended[rows] = False
        return observation(self._state), self._infos({"prompt": [self._prompts[row].text for row in rows]}, rows)

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Append one token to every running row.

        Args:
            actions: (N,) token ids.

        Returns:
            observations (N, L), rewards (N,) (the score at an episode's last token, else 0), terminations, truncations,
            infos.

        Raises:
            ValueError: actions of a wrong shape or outside the vocabulary.
            ScorerError: see `call_scorer`.
            gymnasium.error.ResetNeeded: before `reset`, or (``DISABLED``) on a row that has ended.
        """
        mdp = self.task.mdp
        state = self._state_now()
        actions = check_actions(actions, (self.num_envs,), mdp.vocab_size)
        if self.autoreset_mode is AutoresetMode.DISABLED and self._planned_scores is None and self._ended.any():
            raise gym.error.ResetNeeded(
                f"Row {int(self._ended.argmax())} has ended; with autoreset_mode DISABLED call "
                'reset(options={"reset_mask": ended}) before stepping it again.'
            )
        idle = self._ended  # rows whose action is ignored: they ended one step ago
        moving = np.flatnonzero(~idle)
        state = transition(mdp, state, actions, None if len(moving) == self.num_envs else moving)
        stopped = is_terminated(mdp, actions) & ~idle
        cut = is_truncated(mdp, state, stopped) & ~idle
        ended = stopped | cut

        rewards, infos = np.zeros(self.num_envs), {}
        if ended.any():
            rows = np.flatnonzero(ended)
            planned = None if self._planned_scores is None else self._planned_scores[rows]
            ends = self.task.episode_ends(state, self._prompts, rows, stopped, planned)
            scores = np.array(ends["score"])
            rewards[rows] = np.where(np.isnan(scores), 0.0, scores)
            infos = self._infos(ends, rows)
        # In replay a row that has ended stays where it is. Always an array of its own: resets clear rows of it.
        self._state, self._ended = state, ended.copy() if self._planned_scores is None else idle | ended
        infos = self._autoreset(infos, idle, ended)
        if self.task.length_limit == "terminate":
            stopped, cut = ended, np.zeros_like(cut)
        return observation(self._state), rewards, stopped, cut, infos

    def render(self) -> tuple[str, ...] | None:
        """The N texts so far (``"ansi"``), or None without a render mode."""
        if self.render_mode is None:
            gym.logger.warn('`render` shows nothing: make the environment with render_mode="ansi".')
            return None
        texts = self.task.response_texts(self._state_now(), range(self.num_envs))
        return tuple(prompt.text + text for prompt, text in zip(self._prompts, texts, strict=True))

    def prompts_now(self) -> list[EncodedPrompt]:
        """The N prompts that the running episodes started from."""
        self._state_now()
        return list(self._prompts)

    def score_so_far(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Scores (len(rows),) of the unfinished responses of some rows, from one call of the scorer.

        Raises:
            ScorerError: see `call_scorer`.
        """
        texts = self.task.response_texts(self._state_now(), rows)
        return self.task.score([self._prompts[row] for row in rows], texts)

    def plan(self, scores: NDArray[np.float64] | None, idle_rows: NDArray[np.bool_] | None = None) -> None:
        """Enter or leave replay: responses are known ahead, so scores are given and ended rows stay as they are.

        Args:
            scores: (N,) scores of the rows' coming ends, or None to leave replay; `reset` comes next then.
            idle_rows: (N,) True on rows that hold no response.
        """
        self._planned_scores = scores
        if scores is None:
            self._state = None
        elif idle_rows is not None:
            self._ended = idle_rows.copy()

    def _state_now(self) -> TokenState:
        if self._state is None:
            raise gym.error.ResetNeeded("Episodes should be running, but none were started: call reset() first.")
        return self._state

    def _autoreset(self, infos: dict[str, Any], idle: NDArray[np.bool_], ended: NDArray[np.bool_]) -> dict[str, Any]:
        """Bring ended rows to what the mode promises, and add its infos."""
        assert self._state is not None
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        if same_step and ended.any():
            rows = np.flatnonzero(ended)
            final_ids, final_mask = self._state.input_ids[rows], self._state.attention_mask[rows]
            final_obs = np.full(self.num_envs, None, dtype=object)
            for row, ids, attention_mask in zip(rows, final_ids, final_mask, strict=True):
                final_obs[row] = {"input_ids": ids, "attention_mask": attention_mask}
            infos = {
                "final_obs": final_obs,
                "_final_obs": ended.copy(),
                "final_info": infos,
                "_final_info": ended.copy(),
            }
        due = ended if same_step else idle if self.autoreset_mode is AutoresetMode.NEXT_STEP else ended & False
        if self._planned_scores is not None or not due.any():
            return infos
        rows = np.flatnonzero(due)
        self._state = replace_rows(self._state, rows, self._start_rows(rows, [None] * self.num_envs))
        self._ended[rows] = False
        return self._infos({"prompt": [self._prompts[row].text for row in rows]}, rows, infos)

    def _start_rows(self, rows: NDArray[np.int64], prompts: Sequence[Any], group: int = 1) -> TokenState:
        """Draw or take a prompt for each row, or for each group of rows; returns the state of those rows alone."""
        generators, drawn, groups = self._generators.rows, self._generators.drawn, self.num_envs // group
        leaders = rows[rows % group == 0]
        started = [self.task.start(prompts[r], generators[r], drawn[r], int(r) // group, groups) for r in leaders]
        for row in leaders:
            drawn[row] += prompts[row] is None
        started = [prompt for prompt in started for _ in range(group)]
        if not self._prompts:
            self._prompts = [EncodedPrompt("", ())] * self.num_envs
        for row, prompt in zip(rows, started, strict=True):
            self._prompts[row] = prompt
        return initial_state(self.task.mdp, [prompt.ids for prompt in started])

    def _infos(
        self, columns: dict[str, list[Any]], rows: NDArray[np.int64], infos: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Add columns to infos in Gymnasium's convention: an (N,) array per key and a bool array ``_key``."""
        infos = {} if infos is None else infos
        for key, values in columns.items():
            mask = infos.setdefault(f"_{key}", np.zeros(self.num_envs, dtype=np.bool_))
            if key not in infos:
                numeric = type(values[0]) in (bool, int, float)
                infos[key] = (
                    np.zeros(self.num_envs, type(values[0])) if numeric else np.full(self.num_envs, None, object)
                )
            infos[key][rows] = values
            mask[rows] = True
        return infos

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The rows' generators."""
        return tuple(self._generators.rows)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The rows' seeds."""
        return tuple(self._generators.seeds)

    def state_dict(self) -> dict[str, Any]:
        """The rows' generators and places in the prompts, as JSON can hold them: which prompts come next."""
        return {**self._generators.state_dict(), "prompts": self.task.prompts.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: it was taken from another number of environments, or with other prompts.
        """
        check_prompts_saved(state, self.task.prompts.fingerprint)
        self._generators.load_state_dict(state)
