"""What agents share around their algorithm: seeds, the learning loop, prediction, what they read off environments."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.agents.policy import Policy, PolicyLogprobs, arithmetic, check_takes_action_masks, device_of
from textenv.agents.rollouts.base import sample_tokens
from textenv.agents.run_log import RunLog
from textenv.agents.watching import Watch
from textenv.constraints import Constraint, constraint_of
from textenv.lm.output_head import forbid
from textenv.replay import attach_policy, layers, text_envs

if TYPE_CHECKING:
    from textenv.agents.agent import Agent
    from textenv.agents.alarm import Alarm
    from textenv.agents.held_out import HeldOut
    from textenv.rewards.early_stopping import EarlyStopping


def derive_seed(seed: int, iteration: int) -> int:
    """A seed of its own for each iteration, below 2**63."""
    low, high = np.random.SeedSequence([seed, iteration]).generate_state(2, np.uint32)
    return (int(high) << 31 | int(low)) % 2**63


def trained_parameters(policy: Policy) -> list[Any]:
    """The parameters that an optimiser is given.

    Raises:
        ValueError: there are none.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            "The policy should have parameters that require a gradient, got none: nothing would be trained. Load "
            "it with lora_rank, or unfreeze its weights."
        )
    return parameters


def clip_gradients(parameters: Sequence[Any], max_norm: float, look_at: str) -> float:
    """Scale gradients down to a norm, and give the norm they had.

    Args:
        parameters: whose.
        max_norm: of all of them together.
        look_at: what to look at where it is not finite, for the message.

    Raises:
        FloatingPointError: the norm is not finite.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"The gradient should be finite, its norm is {norm}; the step was not taken. Look at {look_at}, lower "
            "learning_rate, or use dtype='float32'."
        )
    return norm


def run_folder(run_dir: str | os.PathLike[str] | None, agent: object) -> Path | None:
    """Where a run's files go: `run_dir`; for ``"auto"`` a folder named by agent, date and time; None: nowhere."""
    if run_dir == "auto":
        return Path("runs") / f"{type(agent).__name__.lower()}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return None if run_dir is None else Path(run_dir)


def kl_coef(envs: VectorEnv[Any, Any, Any]) -> float:
    """The coefficient that the environments charge now; nan without a `KLPenalty`."""
    for layer in layers(envs):
        if "leash" in vars(layer):
            return float(layer.leash.kl_coef)
    return math.nan


def attach(policy: Policy, envs: VectorEnv[Any, Any, Any]) -> None:
    """Make a policy the one that acts in environments: their toll asks it, and measures against its own reference.

    A reward model on the same weights (and in the same precision) reads that reference's trunk from then on, instead of
    loading another.

    Args:
        policy: the policy that acts.
        envs: vector text environments.

    Raises:
        TypeError: `envs` holds no text environments, or they forbid tokens and the policy cannot be told which.
    """
    base: Any = text_envs(envs)
    if constraint_of(envs) is not None:
        check_takes_action_masks(policy)
    reference: Any = getattr(policy, "reference", None)
    attach_policy(envs, PolicyLogprobs(policy), reference)
    if hasattr(base.task.scorer, "with_trunk"):
        from textenv.rewards.shared import shares_trunk

        if shares_trunk(base.task.scorer, reference):
            base.task = dataclasses.replace(base.task, scorer=base.task.scorer.with_trunk(reference))


def learn(
    agent: Agent,
    total_episodes: int,
    run_dir: str | os.PathLike[str] | None,
    save_every: int,
    progress: bool,
    held_out: HeldOut | None = None,
    alarm: Alarm | None = None,
    early_stopping: EarlyStopping | None = None,
) -> None:
    """Drive an agent's iterations, evaluate and log them, and keep a checkpoint of the last one that was completed.

    An iteration is complete when its evaluation is: Ctrl-C during that one loses the iteration, and the run that goes
    on from the checkpoint does both again.
    """
    for name, value in (("total_episodes", total_episodes), ("save_every", save_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"`{name}` should be an integer of at least 1, got {value!r}: there would be nothing to do."
            )
    if early_stopping is not None and held_out is None:
        raise ValueError(
            "`early_stopping` watches the score of evaluations, but there are no `eval_envs`: training would never "
            "stop early. Pass environments whose scorer is the gold score or a held-out reward model."
        )
    agent.total_episodes = total_episodes
    folder = run_folder(run_dir, agent)
    checkpoint = None if folder is None else folder / "checkpoint"
    goes_on = folder is not None and folder.resolve() == agent.run_folder
    evaluates = held_out is not None
    done, price = (agent.iteration, agent.episodes), _price(agent)
    with RunLog(folder, total_episodes, *done, progress, goes_on, evaluates, price) as log:
        watch = Watch(alarm, early_stopping, folder)
        watch.begin(agent, log)
        agent.run_folder = None if folder is None else folder.resolve()
        if checkpoint is not None:
            agent.save(checkpoint)
        if held_out is not None and agent.iteration == 0 and not log.rows:
            evaluation = held_out.evaluate()
            log.record_start(evaluation)
            watch.evaluated(agent, evaluation)
        while agent.episodes < total_episodes and not watch.stop:
            stats = agent.step()
            last = agent.episodes >= total_episodes
            evaluated = held_out.evaluate() if held_out is not None and held_out.due(last) else None
            log.record(stats, evaluated)
            watch.evaluated(agent, evaluated)
            if checkpoint is not None and (last or watch.stop or agent.iteration % save_every == 0):
                agent.save(checkpoint)
            watch.sound(stats, log)
        if watch.stop:
            log.note(watch.reason)


def _price(agent: Agent) -> str | None:
    """What the run needs, to be said before it starts; a warning where the machine does not have it."""
    from textenv.agents.cost_run import memory_warning, run_line

    problem = memory_warning(agent)
    if problem is not None:
        warnings.warn(problem, UserWarning, stacklevel=5)
    return run_line(agent)


@torch.no_grad()
def predict(
    policy: Policy,
    observation: Mapping[str, NDArray[Any]],
    deterministic: bool,
    generator: torch.Generator,
    constraint: Constraint | None = None,
) -> Any:
    """The next token for one observation, or for each of N, among those that a constraint allows."""
    ids, mask = (np.asarray(observation[key]) for key in ("input_ids", "attention_mask"))
    single = ids.ndim == 1
    device = device_of(policy)
    batch = [torch.as_tensor(np.atleast_2d(array), device=device) for array in (ids, mask)]
    with arithmetic(policy):
        logits = policy.next_logits(*batch)
    if constraint is not None:
        masks = constraint.next_masks({"input_ids": np.atleast_2d(ids), "attention_mask": np.atleast_2d(mask)})
        logits = forbid(logits, masks)
    uniforms = torch.rand(len(logits), generator=generator, dtype=torch.float64).to(device)
    actions: NDArray[np.int64] = sample_tokens(logits, uniforms, 0.0 if deterministic else 1.0).cpu().numpy()
    return int(actions[0]) if single else actions
