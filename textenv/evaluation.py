"""`evaluate`: everything worth knowing about a policy on a text environment, each figure with its interval."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.alignment_tax import alignment_tax
from textenv.checks import check_groups
from textenv.constraints import constraint_of
from textenv.estimates import UNDEFINED, Estimate, mean_estimate, quantile_of, ratio_estimate, share_estimate
from textenv.evaluation_record import Evaluation
from textenv.layers import layers, reference_of, text_envs
from textenv.metrics import distinct_n_estimate
from textenv.optional import progress_bar
from textenv.packed_masks import concatenated
from textenv.prompts import EncodedPrompt, context_columns
from textenv.replay import Replay, replay
from textenv.scorer_columns import check_takes_columns
from textenv.scoring import call_scorer
from textenv.whole import check_logprobs, whole_logprobs
from textenv.writing import Written, actor_of, logprobs_of, write_responses

DISTINCT = (1, 2, 3)
"""The n of distinct-n."""

SAMPLES = 8
"""Responses kept to read."""


def evaluate(
    policy: Any,
    envs: VectorEnv[Any, Any, Any],
    episodes: int,
    *,
    seed: int = 0,
    deterministic: bool = False,
    opponent: Any = None,
    judge: Callable[..., Any] | None = None,
    texts: Sequence[str] | None = None,
    confidence: float = 0.95,
    progress: bool = False,
) -> Evaluation:
    """Let a policy finish `episodes` episodes and measure them. Nothing is trained, and `envs` keep their state.

    Prompts come from the environments' resets; the policy writes; the responses are replayed through the wrapped
    environments. Equal seeds give equal prompts and, of one policy, equal responses: two policies evaluated with one
    seed answer the same prompts. The environments' generators, coefficients and running figures are put back
    afterwards; an episode that was under way in them is lost, so evaluate in environments of their own.

    Args:
        policy: see `textenv.writing.actor_of`. KL, perplexity and tax need one with ``response_logprobs`` (those of
            `textenv.agents`, or agents that hold one), and are undefined (nan) for others.
        envs: vector text environments, wrapped as one likes; N responses are written side by side.
        episodes: at least 1.
        seed: of prompts and sampling.
        deterministic: take the most likely token everywhere.
        opponent: another policy, for the win rate.
        judge: the scorer that decides who wins; None: the task's own.
        texts: held-out texts, for the alignment tax.
        confidence: of the intervals.
        progress: show a bar while responses are written.

    Returns:
        The record.

    Raises:
        ValueError: `episodes` below 1, a judge without an opponent, no usable text, a confidence outside (0, 1).
        TypeError: no text environments, or nothing that acts.
        ScorerError: see `textenv.scoring.call_scorer`.
    """
    _check(episodes, opponent, judge, confidence)
    task = text_envs(envs).task
    if judge is not None:
        check_takes_columns(judge, task.prompts.columns)
    with put_back(envs):
        finished = finish_episodes(policy, envs, episodes, seed, deterministic, progress)
        prompts, replayed = finished.prompts, finished.replayed
        rivals = None
        if opponent is not None:
            rivals = _write(opponent, envs, prompts, seed + 1, deterministic, progress).responses
        model, reference = logprobs_of(policy), _reference(policy, envs)
    kept = np.isfinite(replayed.scores)
    tax = None
    if texts is not None:
        tax = alignment_tax(model, reference, texts, task.tokenizer, task.mdp.vocab_size, confidence=confidence)
    written = list(replayed.infos["response"])
    return Evaluation(
        episodes=episodes,
        dropped=int((~kept).sum()),
        win_rate=None if rivals is None else _win_rate(task, prompts, written, rivals, judge, confidence),
        tax=tax,
        samples=tuple(
            (prompt.text, text, float(score))
            for prompt, text, score in list(zip(prompts, written, replayed.scores, strict=True))[:SAMPLES]
        ),
        **_figures(replayed, kept, finished.logprobs, finished.ref_logprobs, confidence),
    )


class Finished(NamedTuple):
    """B episodes of a policy."""

    prompts: list[EncodedPrompt]
    replayed: Replay
    logprobs: NDArray[np.float64] | None
    """(B, T) under the policy; None where it cannot tell."""
    ref_logprobs: NDArray[np.float64] | None
    """(B, T) under what the toll measures against; None where there is none."""


def finish_episodes(
    policy: Any,
    envs: VectorEnv[Any, Any, Any],
    episodes: int,
    seed: int,
    deterministic: bool,
    progress: bool,
    samples_per_prompt: int = 1,
) -> Finished:
    """Let a policy answer prompts of the environments, and replay its responses through them; see `evaluate`.

    The environments' generators and figures move on: `put_back` undoes that.
    """
    task = text_envs(envs).task
    prompts = draw_prompts(envs, episodes, seed, samples_per_prompt)
    responses, masks = _write(policy, envs, prompts, seed, deterministic, progress)
    state = task.whole_state(prompts, responses)
    logprobs, ref_logprobs = (
        None
        if model is None
        else check_logprobs(whole_logprobs(model, state, task.mdp, masks), "logprobs", state, task.mdp)
        for model in (logprobs_of(policy), _reference(policy, envs))
    )
    replayed = replay(envs, prompts, responses, logprobs=logprobs, ref_logprobs=ref_logprobs, action_masks=masks)
    return Finished(prompts, replayed, logprobs, ref_logprobs)


def _check(episodes: int, opponent: Any, judge: Any, confidence: float) -> None:
    """Refuse what would only fail after all responses were written."""
    quantile_of(confidence)
    check_episodes(episodes)
    if judge is not None and opponent is None:
        raise ValueError("`judge` decides between two policies, but there is no `opponent`. Pass one, or leave it out.")


def check_episodes(episodes: int) -> None:
    """Refuse a number of episodes that leaves nothing to look at.

    Raises:
        ValueError: it is no integer, or below 1.
    """
    if isinstance(episodes, bool) or not isinstance(episodes, int | np.integer) or episodes < 1:
        raise ValueError(f"`episodes` should be an integer of at least 1, got {episodes!r}: nothing would be measured.")


def draw_prompts(
    envs: VectorEnv[Any, Any, Any], count: int, seed: int | None, samples_per_prompt: int = 1
) -> list[EncodedPrompt]:
    """The prompts of `count` episodes, from as many resets of the environments as it takes.

    Args:
        envs: vector text environments.
        count: of episodes.
        seed: of the first reset.
        samples_per_prompt: episodes that share a prompt, next to each other.

    Raises:
        ValueError: `count` or the number of environments is no multiple of `samples_per_prompt`.
    """
    base = text_envs(envs)
    options = None
    if samples_per_prompt != 1:
        options = {"samples_per_prompt": samples_per_prompt}
        check_groups(count, samples_per_prompt, "episodes")
    prompts: list[EncodedPrompt] = []
    while len(prompts) < count:
        envs.reset(seed=seed, options=options)
        prompts += base.prompts_now()
        seed = None
    return prompts[:count]


def _write(
    policy: Any,
    envs: VectorEnv[Any, Any, Any],
    prompts: Sequence[EncodedPrompt],
    seed: int,
    deterministic: bool,
    progress: bool,
) -> Written:
    """One response per prompt, N at a time."""
    base, constraint = text_envs(envs), constraint_of(envs)
    act = actor_of(policy, np.random.default_rng(seed), deterministic)
    blocks = [prompts[start : start + base.num_envs] for start in range(0, len(prompts), base.num_envs)]
    with progress_bar("Writing ...", len(blocks) * base.task.mdp.max_response_tokens, progress) as advance:

        def act_and_tell(*state: Any) -> NDArray[Any]:
            advance()
            return act(*state)

        parts = [write_responses(act_and_tell, base.task.mdp, [prompt.ids for prompt in b], constraint) for b in blocks]
    masks = [part.action_masks for part in parts if part.action_masks is not None]
    return Written([r for part in parts for r in part.responses], concatenated(masks) if masks else None)


def _reference(policy: Any, envs: VectorEnv[Any, Any, Any]) -> Any:
    """What the toll measures against, or the policy's own reference, or the task's; None where there is none."""
    reference = reference_of(policy, envs)
    return text_envs(envs).task.reference if reference is None else reference


def _figures(
    replayed: Replay,
    kept: NDArray[np.bool_],
    logprobs: NDArray[np.float64] | None,
    ref_logprobs: NDArray[np.float64] | None,
    confidence: float,
) -> dict[str, Any]:
    """Everything that is a function of the episodes alone."""
    mask = replayed.response_mask
    lengths = mask.sum(1)
    scores = replayed.scores[kept]
    kl = perplexity = UNDEFINED
    if ref_logprobs is not None:
        surprise = -np.where(mask, ref_logprobs, 0.0).sum(1)
        nats = ratio_estimate(surprise[kept], lengths[kept], confidence)
        perplexity = Estimate(*(float(np.exp(x)) for x in nats))
        if logprobs is not None:
            gaps = np.where(mask, logprobs, 0.0) - np.where(mask, ref_logprobs, 0.0)
            kl = mean_estimate(gaps.sum(1)[kept], confidence)
    texts = [text for text, keep in zip(replayed.infos["response"], kept, strict=True) if keep]
    return {
        "score": mean_estimate(scores, confidence),
        "score_std": float(scores.std()) if len(scores) else float("nan"),
        "shaped_return": mean_estimate(replayed.rewards.sum(1)[kept], confidence),
        "kl": kl,
        "length": mean_estimate(lengths[kept], confidence),
        "eos_rate": share_estimate((replayed.infos["finish_reason"] == "stop")[kept], confidence),
        "distinct": {n: distinct_n_estimate(texts, n, confidence) for n in DISTINCT},
        "ref_perplexity": perplexity,
    }


def _win_rate(
    task: Any,
    prompts: Sequence[EncodedPrompt],
    written: Sequence[str],
    rivals: Sequence[NDArray[np.int32]],
    judge: Callable[..., Any] | None,
    confidence: float,
) -> Estimate:
    """Share of prompts on which our response scores higher, ties half; pairs without both scores are left out."""
    other = task.response_texts(task.whole_state(prompts, rivals), range(len(prompts)))
    texts = [prompt.text for prompt in prompts]
    context = context_columns(prompts)
    ours, theirs = (
        call_scorer(judge or task.scorer, texts, side, task.scorer_errors, context) for side in (list(written), other)
    )
    both = np.isfinite(ours) & np.isfinite(theirs)
    outcomes = np.where(ours > theirs, 1.0, np.where(ours < theirs, 0.0, 0.5))
    return share_estimate(outcomes[both], confidence)


@contextlib.contextmanager
def put_back(envs: VectorEnv[Any, Any, Any]) -> Iterator[None]:
    """Give every layer the state back that it had: generators, coefficients, running figures."""
    states = [(layer, copy.deepcopy(layer.state_dict())) for layer in layers(envs) if hasattr(layer, "state_dict")]
    try:
        yield
    finally:
        for layer, state in states:
            layer.load_state_dict(state)
