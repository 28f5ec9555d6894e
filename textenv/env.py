"""`TextGenerationEnv`: one episode of a text task at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from textenv.checks import check_actions, check_options, check_prompts_saved
from textenv.mdp import TokenState, initial_state, is_terminated, is_truncated, transition
from textenv.prompts import EncodedPrompt
from textenv.task import TextTask, observation


class TextGenerationEnv(gym.Env[dict[str, Any], np.int64]):
    """Writing a response to a prompt, one token per step.

    ## Action space
    ``Discrete(V)``: the next token's id.

    ## Observation space
    ``Dict``; P prompt columns and T response columns make L = P + T:

    | Key | Space | Content |
    |---|---|---|
    | input_ids | Box int32 (L,), 0 to V - 1 | the prompt, padded on the left to P columns; then the response so far |
    | attention_mask | Box int8 (L,), 0 or 1 | 1 on real tokens; response token t is always column P + t |

    ## Rewards
    0, and the scorer's score of the response at its last token. Wrappers shape it (`textenv.wrappers`).

    ## Episode end
    - Termination: the action was a stop id, which belongs to the response. ``info["finish_reason"] == "stop"``.
    - Truncation: T tokens without a stop id, ``"length"``; never both. The budget belongs to the task: a response's
      value beyond its last token is 0 either way. ``length_limit="terminate"`` reports it as termination.

    ## Info
    At reset ``prompt``; at an episode's end ``prompt, response, score, finish_reason, response_length``.

    ## Reset options
    ``prompt``: a text, a list of token ids or chat messages to start from; a `PromptRecord` where scorers get context.

    Args:
        task: prompts, scorer and MDP.
        render_mode: ``"ansi"``: `render` gives the text so far; ``"human"``: it is printed while it is written.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 10}  # noqa: RUF012 - Gymnasium's class attribute

    def __init__(self, task: TextTask, *, render_mode: str | None = "ansi") -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"`render_mode` should be None or one of {self.metadata['render_modes']}, got {render_mode!r}. Choose "
                "one of them."
            )
        self.task = task
        self.render_mode = render_mode
        self.observation_space = task.observation_space()
        self.action_space = task.action_space()
        self._state: TokenState | None = None
        self._prompt = EncodedPrompt("", ())
        self._shown = ""
        self._ended = False
        self._drawn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start from a prompt, drawn or asked for.

        Raises:
            ValueError: unknown option, or a prompt that cannot be used.
        """
        options = check_options(options, ("prompt",))
        super().reset(seed=seed)
        if seed is not None:
            self._drawn = 0
        asked = options.get("prompt")
        self._prompt = self.task.start(asked, self.np_random, self._drawn)
        self._drawn += asked is None
        self._state = initial_state(self.task.mdp, [self._prompt.ids])
        self._ended = False
        if self.render_mode == "human":
            self._shown = ""
            self.render()
        return self._observation(), {"prompt": self._prompt.text}

    def step(self, action: int | np.integer[Any]) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Append one token.

        Raises:
            ValueError: an action of a wrong shape or outside the vocabulary.
            ScorerError: see `call_scorer`.
            gymnasium.error.ResetNeeded: before `reset`, or after the episode's end.
        """
        mdp = self.task.mdp
        state = self._state_now()
        if self._ended:
            raise gym.error.ResetNeeded(
                "An episode should be running, but this one has ended: call reset() before step()."
            )
        actions = check_actions(action, (), mdp.vocab_size)[None]
        self._state = state = transition(mdp, state, actions)
        stopped = is_terminated(mdp, actions)
        cut = is_truncated(mdp, state, stopped)
        self._ended = bool(stopped[0] or cut[0])
        reward, info = 0.0, {}
        if self._ended:
            ends = self.task.episode_ends(state, [self._prompt], np.array([0]), stopped)
            info = {key: values[0] for key, values in ends.items()}
            reward = float(np.nan_to_num(info["score"]))
        if self.render_mode == "human":
            self.render()
        if self.task.length_limit == "terminate":
            stopped, cut = stopped | cut, cut & False
        return self._observation(), reward, bool(stopped[0]), bool(cut[0]), info

    def render(self) -> str | None:
        """The text so far (``"ansi"``), or print what is new of it (``"human"``)."""
        if self.render_mode is None:
            gym.logger.warn('`render` shows nothing: make the environment with render_mode="ansi".')
            return None
        text = self._prompt.text + self.task.response_texts(self._state_now(), [0])[0]
        if self.render_mode == "ansi":
            return text
        new = text[len(self._shown) :] if text.startswith(self._shown) else "\n" + text
        print(new, end="\n" if self._ended else "", flush=True)
        self._shown = text
        return None

    def score_so_far(self) -> float:
        """Score of the unfinished response.

        Raises:
            ScorerError: see `call_scorer`.
        """
        return float(self.task.score([self._prompt], self.task.response_texts(self._state_now(), [0]))[0])

    def state_dict(self) -> dict[str, Any]:
        """The generator and the place in the prompts, as JSON can hold them: which prompts come next."""
        return {
            "generator": self.np_random.bit_generator.state,
            "drawn": self._drawn,
            "prompts": self.task.prompts.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: it was taken with other prompts.
        """
        check_prompts_saved(state, self.task.prompts.fingerprint)
        self.np_random.bit_generator.state = state["generator"]
        self._drawn = int(state["drawn"])

    def _observation(self) -> dict[str, NDArray[Any]]:
        return {key: array[0] for key, array in observation(self._state_now()).items()}

    def _state_now(self) -> TokenState:
        if self._state is None:
            raise gym.error.ResetNeeded("An episode should be running, but none was started: call reset() first.")
        return self._state
