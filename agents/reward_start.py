"""The reward model that a value network starts from: found, and refused where no value head could equal it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from textenv.agents.value_models import VALUE_KINDS
from textenv.lm import TextTokenizer, load_tokenizer
from textenv.rewards import RewardModel, SequenceClassificationReward, film_review_head

RewardSource = RewardModel | SequenceClassificationReward | str | os.PathLike[str] | None
"""A reward model, the file or folder it is in, or None for the packaged head."""

PROBE = "The film, though long, was good."
"""Two tokenizers that split this alike, and have one vocabulary, read the same ids."""


def reward_start(
    kind: str, reward_model: Any, tokenizer: TextTokenizer
) -> RewardModel | SequenceClassificationReward | None:
    """The reward model that a value network starts from, checked; None where it starts elsewhere.

    Args:
        kind: one of `VALUE_KINDS`.
        reward_model: see `RewardSource`.
        tokenizer: the policy's.

    Raises:
        ValueError: unknown kind, a reward model for a kind that has none, one of another tokenizer, or one whose score
            is not linear in a hidden state.
        TypeError: `reward_model` is no reward model, and no name of one.
    """
    if kind not in VALUE_KINDS:
        raise ValueError(f"`value` should be one of {VALUE_KINDS}, got {kind!r}.")
    if kind != "reward":
        if reward_model is not None:
            raise ValueError(
                f"`reward_model` is what value='reward' starts from, got value={kind!r}, which would ignore it. Pass "
                "value='reward', or leave it out."
            )
        return None
    reward = _as_reward(reward_model)
    _check_tokenizer(reward, tokenizer)
    if isinstance(reward, SequenceClassificationReward) and (reward.label_id is not None or reward.template):
        raise ValueError(
            "`reward_model` should score with one linear head on prompt + response, got a classifier with "
            f"{'a template' if reward.template else 'several labels, whose score is a log-probability'}: no value head "
            "equals it. Use value='separate'."
        )
    return reward


def _as_reward(given: Any) -> RewardModel | SequenceClassificationReward:
    if given is None:
        return film_review_head()
    if isinstance(given, RewardModel | SequenceClassificationReward):
        return given
    if isinstance(given, str | os.PathLike):
        return RewardModel.load(given) if Path(given).is_file() else SequenceClassificationReward(given)
    if isinstance(given, dict) and "object" in given:  # the settings of a policy that was made from one
        raise TypeError(
            f"This policy's values started from a {given['object']} object, which settings cannot name. Make the "
            "policy as it was made for training and pass it, load(folder, envs, policy=...); or make it from the start "
            "with the path of a reward model."
        )
    raise TypeError(
        "`reward_model` should be a RewardModel, a SequenceClassificationReward, the path of one, or None for the "
        f"packaged head, got {type(given).__name__}: a function of texts has no weights to start from."
    )


def _check_tokenizer(reward: RewardModel | SequenceClassificationReward, ours: TextTokenizer) -> None:
    if isinstance(reward, SequenceClassificationReward):
        name, theirs = reward.name, load_tokenizer(reward.name)
        probe = list(theirs.tokenizer(PROBE).input_ids)  # as the classifier reads it, appended ids and all
    else:
        name, theirs = reward.source, reward.tokenizer
        probe = theirs.encode(PROBE)
    if theirs.tokenizer.get_vocab() != ours.tokenizer.get_vocab() or probe != ours.encode(PROBE):
        raise ValueError(
            f"`reward_model` should have the policy's own tokenizer, got that of {name!r}, which writes {PROBE!r} as "
            f"{probe[:6]}..., the policy's as {ours.encode(PROBE)[:6]}.... A value network reads the policy's ids, and "
            "would read other text than the reward model did. Use value='separate', or a reward model on this "
            "tokenizer."
        )


def nameable(reward_model: Any) -> Any:
    """`reward_model` as settings can hold it in JSON: None, a path, or what the object was."""
    if reward_model is None or isinstance(reward_model, str | os.PathLike):
        return reward_model if reward_model is None else os.fspath(reward_model)
    return {"object": type(reward_model).__name__}
