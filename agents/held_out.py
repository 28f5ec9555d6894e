"""Evaluation while training runs: episodes in environments of their own, the same prompts and seed every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.agents import acting, training
from textenv.agents.policy import PolicyLogprobs
from textenv.layers import layers

if TYPE_CHECKING:
    from textenv.agents.agent import Agent
    from textenv.evaluation import Evaluation


@dataclass(frozen=True)
class HeldOut:
    """When and where an agent is evaluated; make it with `held_out`.

    Attributes:
        agent: whose policy acts.
        envs: where; no other environment is touched.
        every: iterations between evaluations.
        episodes: of each.
    """

    agent: Agent
    envs: VectorEnv[Any, Any, Any]
    every: int
    episodes: int

    def due(self, last: bool) -> bool:
        """Whether the iteration that the agent has completed is followed by an evaluation.

        It depends on the iteration's number alone, so that a resumed run evaluates where an uninterrupted one does.

        Args:
            last: no iteration follows; the last one is always evaluated.
        """
        return last or self.agent.iteration % self.every == 0

    def evaluate(self) -> Evaluation:
        """See `textenv.evaluation.evaluate`. Prompts and random numbers are those of every other time."""
        from textenv.evaluation import evaluate

        policy = self.agent.policy
        if hasattr(policy, "eval"):
            policy.eval()  # as in training: dropout would also draw from torch's global generator
        complete = hasattr(policy, "act") and hasattr(policy, "response_logprobs")
        try:
            return evaluate(policy if complete else Evaluated(policy), self.envs, self.episodes, seed=self.agent.seed)
        finally:
            if hasattr(policy, "stepper"):
                policy.stepper().clear()  # training needs the memory of its cache


class Evaluated(PolicyLogprobs):
    """Any policy as `textenv.evaluation.evaluate` asks for it: it acts, and knows log-probabilities and reference."""

    @property
    def reference(self) -> Any:
        """The policy's own."""
        return getattr(self.policy, "reference", None)

    def act(self, observations: Mapping[str, NDArray[Any]], **how: Any) -> Any:
        """Token ids (N,); see `acting.act`."""
        return acting.act(self.policy, observations, **how)


def held_out(
    agent: Agent, eval_envs: VectorEnv[Any, Any, Any] | None, eval_every: int, eval_episodes: int | None
) -> HeldOut | None:
    """Check an evaluation's settings and attach the policy to its environments; None without environments.

    Args:
        agent: whose policy acts.
        eval_envs: vector text environments that share no state with the agent's.
        eval_every: iterations, at least 1.
        eval_episodes: at least 1; None: as many as there are environments.

    Raises:
        ValueError: environments that share state with those of training, or a number that evaluates nothing.
        TypeError: `eval_envs` are no text environments.
    """
    for name, value in (("eval_every", eval_every), ("eval_episodes", eval_episodes)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and not (name == "eval_episodes" and value is None):
            raise ValueError(f"`{name}` should be an integer of at least 1, got {value!r}: nothing would be evaluated.")
    if eval_envs is None:
        if eval_episodes is not None:
            raise ValueError(
                f"`eval_episodes`={eval_episodes} needs `eval_envs` to run in, got None. Make them on held-out "
                "prompts: gym.make_vec(..., prompts=...)."
            )
        return None
    training.attach(agent.policy, eval_envs)
    _check_apart(agent.envs, eval_envs)
    return HeldOut(agent, eval_envs, eval_every, eval_episodes or eval_envs.num_envs)


def _check_apart(envs: VectorEnv[Any, Any, Any], eval_envs: VectorEnv[Any, Any, Any]) -> None:
    ours = {id(holder) for holder in _state_holders(envs)}
    for holder in _state_holders(eval_envs):
        if id(holder) in ours:
            raise ValueError(
                f"`eval_envs` should be environments of their own, got some that share a {type(holder).__name__} with "
                "those of training. Evaluating there would draw training's prompts and move its KL coefficient and "
                "score statistics. Call gym.make_vec a second time, with held-out prompts."
            )


def _state_holders(envs: VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    """The layers of a stack, and what they hold that remembers: generators, coefficients, running figures."""
    for layer in layers(envs):
        yield layer
        yield from (value for value in vars(layer).values() if hasattr(type(value), "load_state_dict"))
