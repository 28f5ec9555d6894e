"""`sample_preferences`: comparisons of what policies write, labelled by any scorer. Trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.agents.policy import temperature_of
from textenv.agents.rollouts.base import Engine, engine_for
from textenv.agents.types import Sampling
from textenv.constraints import constraint_of
from textenv.evaluation import draw_prompts, put_back
from textenv.layers import text_envs
from textenv.optional import progress_bar
from textenv.prompts import EncodedPrompt, context_columns
from textenv.rewards.preference_sources import LabelledPairs, check_labelling, label_pairs

BLOCK = 256
"""Prompts that are answered between two steps of the progress bar."""


def sample_preferences(
    policy_a: Any,
    policy_b: Any,
    envs: VectorEnv[Any, Any, Any],
    scorer: Callable[..., Any] | None,
    n: int,
    seed: int,
    *,
    noise: float = 0.0,
    ties: str = "drop",
    margin: bool = False,
    engine: Engine | None = None,
    progress: bool = False,
) -> LabelledPairs:
    """Let two policies, or one policy twice, answer n prompts, and a scorer say which answer is preferred.

    The comparisons carry the token ids that were sampled (`Preference.ids`), which `PreferenceSet.encode` takes over.
    Prompts come from the environments' resets, whose generators and places are put back afterwards (an episode that was
    under way in them is lost). Equal seeds give equal comparisons.

    Args:
        policy_a: has an engine, or is served by `StepwiseEngine`.
        policy_b: another one with the same tokenizer; None, or `policy_a` itself: two samples of one policy.
        envs: vector text environments, for prompts, budgets, stop ids and constraint.
        scorer: who judges; it gets the prompts' context. None: the environments' own.
        n: pairs, at least 1. Fewer comparisons come back where responses are equal, empty or tied: they are counted.
        seed: of prompts, sampling and labels, not negative.
        noise: see `label_pairs`.
        ties: see `label_pairs`.
        margin: see `label_pairs`.
        engine: writes for both policies, one after the other, and stays open; None: each policy's own.
        progress: show a bar while responses are written.

    Raises:
        ValueError: n below 1, or see `label_pairs`.
        TypeError: `envs` are no text environments.
        ScorerError: see `textenv.scoring.call_scorer`.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"`n` should be an integer of at least 1, got {n!r}: nothing would be compared.")
    check_labelling(noise, ties, margin)
    task = text_envs(envs).task
    prompts_seed, *sampling_seeds, labels_seed = map(int, np.random.SeedSequence(seed).generate_state(4))
    with put_back(envs):
        prompts = draw_prompts(envs, int(n), prompts_seed)
    with progress_bar("Writing pairs ...", 2 * -(-len(prompts) // BLOCK), progress) as advance:
        side_a = _written(policy_a, envs, prompts, sampling_seeds[0], engine, advance)
        policy = policy_a if policy_b is None else policy_b
        side_b = _written(policy, envs, prompts, sampling_seeds[1], engine, advance)
    labelled = label_pairs(
        [prompt.text for prompt in prompts],
        side_a.texts,
        side_b.texts,
        task.scorer if scorer is None else scorer,
        np.random.default_rng(labels_seed),
        noise=noise,
        ties=ties,
        margin=margin,
        context=context_columns(prompts),
    )
    return labelled.with_ids([prompt.ids for prompt in prompts], side_a.texts, side_a.ids, side_b.ids)


class _Written(NamedTuple):
    """One response of a policy to each prompt."""

    texts: list[str]
    ids: list[NDArray[np.int64]]


def _written(
    policy: Any,
    envs: VectorEnv[Any, Any, Any],
    prompts: Sequence[EncodedPrompt],
    seed: int,
    engine: Engine | None,
    advance: Callable[[], None],
) -> _Written:
    """One response of a policy to each prompt."""
    task = text_envs(envs).task
    writer = engine_for(policy) if engine is None else engine
    writer.sync(policy)
    written = _Written([], [])
    modes = [(module, module.training) for module in policy.modules()] if hasattr(policy, "modules") else []
    block_seeds = np.random.SeedSequence(seed).generate_state(-(-len(prompts) // BLOCK)).tolist()
    try:
        for module, _ in modes:
            module.training = False  # dropout off, as in rollouts
        for number, block_seed in enumerate(block_seeds):
            block = prompts[number * BLOCK : (number + 1) * BLOCK]
            sampling = Sampling(
                max_tokens=task.mdp.max_response_tokens,
                stop_ids=task.mdp.stop_ids,
                temperature=temperature_of(policy),
                seed=block_seed,
                constraint=constraint_of(envs),
            )
            responses = writer.generate([list(prompt.ids) for prompt in block], sampling).responses
            written.texts.extend(task.response_texts(task.whole_state(block, responses), range(len(block))))
            written.ids.extend(responses)
            advance()
    finally:
        for module, training in modes:
            module.training = training
        if engine is None:
            writer.close()
    return written
