"""Episodes of a Minari dataset as demonstrations and as preferences. Records nothing, learns nothing.

Any dataset of a text environment will do, whoever recorded it: `record_minari`, or Minari's `DataCollector` around
``gym.make("RLHF-v0")``. Choose episodes with Minari's own ``dataset.filter_episodes`` before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np

from textenv.demonstrations import task_of
from textenv.prompts import Demonstration, decoder

if TYPE_CHECKING:
    from textenv.rewards.preference_sources import LabelledPairs

Figure = Literal["score", "return"]
FIGURES = ("score", "return")


@dataclass(frozen=True)
class _Episode:
    """One recorded episode."""

    name: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    record: Any


def demonstrations_from_minari(dataset: Any) -> list[Demonstration]:
    """Every episode as a demonstration: its prompt's ids, and the actions as they were taken.

    Nothing is added to them: a response that ended by itself has its stop id, one that was cut has none. So they are
    marked as not ended, which keeps `DemonstrationSet.encode` from adding another.

    Args:
        dataset: a `minari.MinariDataset` of a text environment.

    Raises:
        ValueError: it is of another kind of environment, or an episode's observations do not show its actions.
    """
    return [Demonstration(e.prompt, e.response, ended=False, place=e.name) for e in _episodes(dataset)]


def preferences_from_minari(
    dataset: Any,
    envs: Any,
    *,
    figure: Figure = "score",
    seed: int = 0,
    noise: float = 0.0,
    ties: str = "drop",
    margin: bool = False,
) -> LabelledPairs:
    """Pairs of episodes that answer one prompt, the one with the higher figure preferred; they keep their token ids.

    The first episode of a prompt is compared with the second, the third with the fourth, and so on: no episode is in
    two pairs, and a last one without a partner is left out, as are episodes whose figure is no number.

    Args:
        dataset: a `minari.MinariDataset` of a text environment.
        envs: text environments, single or vector, or their `TextTask`: whose tokenizer reads the ids.
        figure: ``"score"``, the scorer's number in ``infos`` (`record_minari` writes it), or ``"return"``, the sum of
            rewards, tolls and penalties included.
        seed: of labels that chance decides.
        noise: see `textenv.rewards.label_pairs`.
        ties: see `textenv.rewards.label_pairs`.
        margin: see `textenv.rewards.label_pairs`.

    Returns:
        The comparisons, and what became of the others.

    Raises:
        ValueError: see `demonstrations_from_minari` and `label_pairs`; scores that were not recorded, another
            vocabulary, or no two episodes of one prompt.
        TypeError: `envs` holds no text task.
    """
    if figure not in FIGURES:
        raise ValueError(f"`figure` should be one of {FIGURES}, got {figure!r}. Choose one of them.")
    from textenv.rewards.preference_sources import label_pairs

    task, _ = task_of(envs)
    episodes = _episodes(dataset)
    actions = int(dataset.action_space.n)
    if actions != task.mdp.vocab_size:
        raise ValueError(
            f"`envs` should have the vocabulary of the dataset, {actions} tokens, got {task.mdp.vocab_size}: ids would "
            "be read as other texts. Make the environments with the model of the recording."
        )
    pairs = _pairs([(e, value) for e in episodes if math.isfinite(value := _figure(e, figure))])
    if not pairs:
        raise ValueError(
            f"`dataset` should have two episodes of one prompt, got {len(episodes)} without such a pair: there is "
            "nothing to compare. Record with samples_per_prompt=2."
        )
    firsts, seconds = ([pair[side][0] for pair in pairs] for side in (0, 1))
    read = decoder(task.tokenizer)
    texts_a, texts_b = (read([list(e.response) for e in side]) for side in (firsts, seconds))
    labelled = label_pairs(
        read([list(e.prompt) for e in firsts]),
        texts_a,
        texts_b,
        _recorded,
        np.random.default_rng(seed),
        noise=noise,
        ties=ties,
        margin=margin,
        context={"values": [(first[1], second[1]) for first, second in pairs]},
    )
    ids_a, ids_b = ([e.response for e in side] for side in (firsts, seconds))
    return labelled.with_ids([e.prompt for e in firsts], texts_a, ids_a, ids_b)


def _recorded(_prompts: Sequence[str], responses: Sequence[str], *, values: Sequence[tuple[float, float]]) -> Any:
    """The scorer of `label_pairs`, which is asked for all first responses and then for all second ones."""
    count = len(responses) // 2
    return [value[0] for value in values[:count]] + [value[1] for value in values[count:]]


def _pairs(measured: Sequence[tuple[_Episode, float]]) -> list[tuple[tuple[_Episode, float], tuple[_Episode, float]]]:
    """Neighbours among the episodes of each prompt."""
    groups: defaultdict[tuple[int, ...], list[tuple[_Episode, float]]] = defaultdict(list)
    for episode, value in measured:
        groups[episode.prompt].append((episode, value))
    return [pair for group in groups.values() for pair in zip(group[::2], group[1::2], strict=False)]


def _figure(episode: _Episode, figure: Figure) -> float:
    if figure == "return":
        return float(np.sum(episode.record.rewards))
    if "score" not in (episode.record.infos or {}):
        raise ValueError(
            f"{episode.name} should have its score in `infos`, got {sorted(episode.record.infos or {})}. Record with "
            'textenv.record_minari, or compare returns: figure="return".'
        )
    return float(episode.record.infos["score"][-1])


def _episodes(dataset: Any) -> list[_Episode]:
    """Prompts and responses as ids, read from what the first and the last observation show."""
    space, actions = getattr(dataset, "observation_space", None), getattr(dataset, "action_space", None)
    keys = set(space.spaces) if isinstance(space, gym.spaces.Dict) else set()
    if not {"input_ids", "attention_mask"} <= keys or not isinstance(actions, gym.spaces.Discrete):
        raise ValueError(
            f"`dataset` should be a Minari dataset of a text environment, with input_ids and attention_mask to see and "
            f"tokens to choose, got the spaces {space} and {actions}. Record the environment without wrappers that "
            "change what is seen."
        )
    return [_episode(record) for record in dataset.iterate_episodes()]


def _episode(record: Any) -> _Episode:
    ids, mask = record.observations["input_ids"], record.observations["attention_mask"] == 1
    prompt, whole = ids[0][mask[0]].tolist(), ids[-1][mask[-1]].tolist()
    response = np.asarray(record.actions).tolist()
    name = f"episode {record.id}"
    if not prompt or prompt + response != whole:
        raise ValueError(
            f"{name} should show its prompt and behind it the tokens that were chosen, got the prompt {prompt}, the "
            f"actions {response} and {whole} in the end. It was recorded over a reset, or changed afterwards; leave it "
            "out with dataset.filter_episodes."
        )
    return _Episode(name, tuple(prompt), tuple(response), record)
