"""A linear head fitted to comparisons on a frozen trunk: exact, in seconds, and able to share a policy's trunk.

Legend: S texts, H hidden size, n comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.optional import progress_bar
from textenv.rewards.bradley_terry import bradley_terry_loss
from textenv.rewards.preferences import Preference
from textenv.rewards.reward_model import RewardModel, pad_left

WEIGHT_DECAYS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
FOLDS = 5


def fit_head_to(
    preferences: Sequence[Preference],
    like: RewardModel,
    *,
    weight_decay: float | None = None,
    progress: bool = False,
) -> RewardModel:
    """A reward model that has learned these comparisons, on the trunk of another one, whose passes it can share.

    The head minimises the Bradley-Terry loss plus `weight_decay` times half its squared norm, on features that are
    standardised over the texts; a convex problem, solved to its optimum. The mean score of the texts is 0.

    Args:
        preferences: what to learn from, at least two. Margins count.
        like: gives trunk and tokenizer. Its own head is not used.
        weight_decay: None: that of `WEIGHT_DECAYS` with the lowest loss in five-fold cross-validation over comparisons.
        progress: show a bar while the trunk reads.

    Raises:
        ValueError: fewer than two comparisons, or a negative weight decay.

    Example::

        gold = film_review_head()
        proxy = fit_head_to(preferences_from_ratings(sentences, 500, rng), like=gold)
    """
    if len(preferences) < 2:
        raise ValueError(
            f"`preferences` should hold at least two comparisons, got {len(preferences)}: no direction but their own "
            "could be learned."
        )
    if weight_decay is not None and weight_decay < 0:
        raise ValueError(f"`weight_decay` should be at least 0, got {weight_decay}: the head would grow without bound.")
    sides = [(p.prompt, response) for p in preferences for response in (p.chosen, p.rejected)]
    texts = list(dict.fromkeys(sides))
    place = {text: number for number, text in enumerate(texts)}
    pairs = torch.tensor([place[side] for side in sides]).view(-1, 2)  # (n, 2)
    margins = torch.tensor([p.margin or 0.0 for p in preferences], dtype=torch.float64)
    states = read_states(like, texts, progress).double()
    mean, scale = states.mean(0), states.std(0, correction=0) + 1e-8
    features = (states - mean) / scale
    decay = choose_weight_decay(features, pairs, margins) if weight_decay is None else weight_decay
    weight = (solve(features, pairs, margins, decay) / scale).numpy()
    known = {"comparisons": str(len(preferences)), "weight_decay": str(decay)}
    bias = -float(weight @ mean.numpy())
    return RewardModel(like.trunk, like.tokenizer, weight, bias, metadata=known, batch_size=like.batch_size)


def read_states(like: RewardModel, texts: Sequence[tuple[str, str]], progress: bool = False) -> Tensor:
    """Hidden states (S, H), float32, at the last token of each (prompt, response), texts of like length together.

    Args:
        like: whose trunk and tokenizer read.
        texts: S of them.
        progress: show a bar.
    """
    rows = [like.encode(prompt, response) for prompt, response in texts]
    order = np.argsort([len(row) for row in rows], kind="stable")
    blocks: list[NDArray[np.int64]] = np.array_split(order, -(-len(rows) // like.batch_size))
    found = []
    with progress_bar("Reading the texts", len(blocks), progress) as advance:
        for block in blocks:
            input_ids, attention_mask = pad_left([rows[number] for number in block], like.tokenizer.pad_id)
            last = np.full(len(block), input_ids.shape[1] - 1)
            found.append(like.trunk.states_at(input_ids, attention_mask, last).float().cpu())
            advance()
    states = torch.empty(len(rows), found[0].shape[1])
    states[torch.as_tensor(order)] = torch.cat(found)
    return states


def solve(features: Tensor, pairs: Tensor, margins: Tensor, weight_decay: float) -> Tensor:
    """The weight (H,) that minimises mean -log sigmoid(w . (x_chosen - x_rejected) - margin) + decay |w|^2 / 2.

    Args:
        features: (S, H), float64.
        pairs: (n, 2) rows of the chosen and the rejected text.
        margins: (n,).
        weight_decay: at least 0.
    """
    return minimise(lambda scores: _loss(scores, pairs, margins), features, weight_decay)


def minimise(loss_of: Callable[[Tensor], Tensor], features: Tensor, weight_decay: float) -> Tensor:
    """The weight (H,) that minimises a convex loss of the scores plus decay |w|^2 / 2, by L-BFGS.

    Args:
        loss_of: scores (...) to a scalar.
        features: (..., H), float64.
        weight_decay: at least 0.
    """
    weight = torch.zeros(features.shape[-1], dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(features @ weight) + weight_decay * weight.square().sum() / 2
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    return weight.detach()


def choose_weight_decay(features: Tensor, pairs: Tensor, margins: Tensor) -> float:
    """The weight decay with the lowest loss on comparisons that were left out, one fold of them after the other.

    Folds are every fifth comparison; a text that stands in several comparisons may be on both sides.
    """
    folds = [torch.arange(len(pairs)) % min(FOLDS, len(pairs)) == fold for fold in range(min(FOLDS, len(pairs)))]

    def loss_of(decay: float) -> float:
        losses = []
        for left_out in folds:
            weight = solve(features, pairs[~left_out], margins[~left_out], decay)
            losses.append(_loss(features @ weight, pairs[left_out], margins[left_out]).item())
        return float(np.mean(losses))

    return min(WEIGHT_DECAYS, key=loss_of)


def _loss(scores: Tensor, pairs: Tensor, margins: Tensor) -> Tensor:
    return bradley_terry_loss(scores[pairs[:, 0]], scores[pairs[:, 1]], margins)
