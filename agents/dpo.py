"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290): comparisons without a reward model.

The policy that is best for a score r at the price `beta` per nat of KL is ref(y) exp(r(y) / beta) / Z. Read the other
way round, every policy is the best one for some score, beta log(pi(y) / ref(y)) up to a constant of the prompt, and two
responses to one prompt compare without that constant. So the policy itself is fitted to comparisons as a reward model
is, by the likelihood of Bradley and Terry, and no response is written while it learns.

One step reads in the order of the algorithm:

    1. batch        pairs as finished episodes of the task, chosen and rejected one behind the other
    2. loss         `dpo_loss` of the policy's and the reference's log-probabilities of whole responses
    3. optimise     one AdamW step, gradients accumulated over micro-batches of pairs
    4. bookkeeping  one `DPOStats`

The reference's log-probabilities are computed once, before the first step. `OnlineDPO` compares responses that the
policy writes as it learns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.dpo_config import DPOConfig
from textenv.agents.micro_batches import token_budget
from textenv.agents.offline import OfflineAgent, OfflineStats
from textenv.agents.pairs import PairBatch, PairFigures, PairShare, pair_losses, response_sums
from textenv.agents.plots import PREFERENCE_PANELS
from textenv.agents.policy import Policy, arithmetic
from textenv.optional import progress_bar
from textenv.preference_set import PreferenceSet
from textenv.whole import whole_logprobs

BLOCK = 64
"""Pairs that are measured between two moves of a progress bar."""


@dataclass(frozen=True, kw_only=True)
class DPOStats(OfflineStats):
    """One step, its figures those of the batch before the step; see `OfflineStats` and `PairFigures`.

    Attributes:
        loss: the mean.
        accuracy: share of pairs whose chosen response has the higher implicit reward, ties half.
        margin: mean implicit reward of the chosen responses less that of the rejected ones, in units of the score.
        chosen_reward: mean implicit reward of the chosen responses. It may fall while the margin rises: the loss asks
            for a difference only, and both responses may become rarer than under the reference.
        rejected_reward: of the rejected ones.
        ref_kl: -(chosen_reward + rejected_reward) / (2 beta). Where both responses of every pair are samples of the
            reference, an estimate of KL(reference || policy), nats; elsewhere no KL. That of the policy is measured on
            responses of its own: `textenv.evaluate`.
    """

    loss: float
    accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float
    ref_kl: float


class DPO(OfflineAgent[DPOConfig, DPOStats]):
    """DPO, IPO and conservative DPO on comparisons. `learn`, `iterate` and `save` are those of `OfflineAgent`.

    Args:
        policy: see `Policy`; a `LanguageModelPolicy` as a rule, with adapters or all of its weights.
        pairs: encoded for the task that the policy is to act in, see `PreferenceSet.encode`.
        config: None for the defaults.
        held_out: pairs that are only measured.
        reference: what log-ratios are measured against, see `textenv.task.LogprobModel`; None: the policy's own, what
            its training starts from.
        seed: of the order of pairs. Equal seeds give equal runs.

    Raises:
        ValueError: the policy has nothing to train, there is no reference, or `held_out` is of another task.
        TypeError: no preference set, or wrappers forbid tokens and the policy cannot be told which.
    """

    config_class = DPOConfig
    stats_class = DPOStats
    data_class = PreferenceSet
    data_name = "pairs"
    panels = PREFERENCE_PANELS

    def __init__(
        self,
        policy: Policy,
        pairs: PreferenceSet,
        config: DPOConfig | None = None,
        *,
        held_out: PreferenceSet | None = None,
        reference: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, pairs, config or DPOConfig(), held_out=held_out, seed=seed)
        self.reference = getattr(policy, "reference", None) if reference is None else reference
        if self.reference is None:
            raise ValueError(
                f"DPO should have a reference to measure log-ratios against, got none: a {type(policy).__name__} "
                "carries none of its own. Pass DPO(..., reference=...), log-probabilities of the policy that training "
                "starts from."
            )
        self._known: dict[PreferenceSet, NDArray[np.float64]] = {}

    @property
    def pairs(self) -> PreferenceSet:
        """What is learned from."""
        data: PreferenceSet = self.data
        return data

    def prepare(self, progress: bool) -> None:
        """See `OfflineAgent.prepare`: what the reference says of all pairs."""
        for pairs in (self.pairs, self.held_out):
            if pairs is not None:
                self.ref_logprobs(pairs, progress=progress)

    def gradient(self, rows: Tensor) -> dict[str, Any]:
        """Steps 1 and 2: the loss of some pairs, and its gradient."""
        batch, parts = self.batch(self.pairs, rows.numpy()), []
        for share in self._losses(batch):
            share.loss.backward()
            parts.append(share.figures)
        found = PairFigures.joined(parts).metrics()
        ref_kl = -(found["chosen_reward"] + found["rejected_reward"]) / (2 * self.config.beta)
        return {**found, "ref_kl": ref_kl, "tokens": batch.tokens}

    def batch(self, pairs: PreferenceSet, rows: NDArray[np.int64]) -> PairBatch:
        """Some pairs of a set with what the reference says of them."""
        state = pairs.state(rows)
        return PairBatch(
            torch.as_tensor(state.input_ids),
            torch.as_tensor(state.attention_mask),
            pairs.mdp.max_response_tokens,
            torch.as_tensor(self.ref_logprobs(pairs)[rows].reshape(-1)),
            self.config.label_smoothing,
            pairs.action_masks(state),
        )

    def _losses(self, batch: PairBatch) -> Iterator[PairShare]:
        config = self.config
        budget = token_budget(self.policy, config.micro_batch_tokens)
        with arithmetic(self.policy):
            yield from pair_losses(self.policy, batch, config.beta, config.loss, budget)

    def ref_logprobs(self, pairs: PreferenceSet, *, progress: bool = False) -> NDArray[np.float64]:
        """Log-probabilities (N, 2) of chosen and rejected responses under the reference, computed once for a set.

        Raises:
            FloatingPointError: the reference forbids a response; the pair is named.
        """
        if pairs not in self._known:
            self._known[pairs] = reference_logprobs(self.reference, pairs, progress=progress)
        return self._known[pairs]

    @torch.no_grad()
    def evaluate(self, *, progress: bool = False) -> PairFigures:
        """Measure the held-out pairs; training does not notice.

        Raises:
            ValueError: there are none.
        """
        pairs: PreferenceSet = self._measured_data()
        if hasattr(self.policy, "eval"):
            self.policy.eval()
        blocks = np.array_split(np.arange(len(pairs)), -(-len(pairs) // BLOCK))
        parts = []
        with progress_bar("Held-out pairs", len(blocks), progress) as move_on:
            for rows in blocks:
                parts += [share.figures for share in self._losses(self.batch(pairs, rows))]
                move_on()
        return PairFigures.joined(parts)

    def headline(self, figures: DPOStats | PairFigures) -> str:
        """See `OfflineAgent.headline`."""
        return f"loss {figures.loss:.3f} accuracy {figures.accuracy:.0%}"

    def sentence(self, measured: PairFigures) -> str:
        """See `OfflineAgent.sentence`."""
        return (
            f"held-out loss {measured.loss:.3f}, accuracy {measured.accuracy_estimate()}, margin "
            f"{measured.margin_estimate()}"
        )

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        pairs: PreferenceSet,
        policy: Policy | None = None,
        *,
        held_out: PreferenceSet | None = None,
        reference: Any = None,
    ) -> Self:
        """Go on from `save`, as if training had never stopped.

        Args:
            folder: what `save` wrote, or the run folder of `learn`.
            pairs: those of training, in the same order.
            policy: a policy of the kind that was saved; None remakes a `LanguageModelPolicy`.
            held_out: see the class.
            reference: see the class.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is another agent's, of other pairs, or does not fit the policy.
        """
        return cls.resumed(folder, pairs, policy, held_out, reference=reference)


def reference_logprobs(reference: Any, pairs: PreferenceSet, *, progress: bool = False) -> NDArray[np.float64]:
    """Log-probabilities (N, 2) of chosen and rejected responses under a model, nats.

    Pairs of like length go together, `BLOCK` at a time, so that the model pads little.

    Args:
        reference: see `textenv.task.LogprobModel`.
        pairs: N of them.
        progress: show a bar.

    Raises:
        FloatingPointError: a response that the model holds to be impossible, or a number that is none.
    """
    lengths = np.array([len(response) for response in pairs.episodes.responses]).reshape(-1, 2).max(1)
    order = np.argsort(lengths, kind="stable")
    found = np.zeros((len(pairs), 2))
    blocks = np.array_split(order, -(-len(order) // BLOCK))
    with progress_bar("Reference of pairs", len(blocks), progress) as move_on:
        for rows in blocks:
            state = pairs.state(rows)
            whole = torch.as_tensor(whole_logprobs(reference, state, pairs.mdp, pairs.action_masks(state)))
            found[rows] = response_sums(whole, torch.as_tensor(state.attention_mask)).reshape(-1, 2).numpy()
            move_on()
    if not np.isfinite(found).all():
        row, side = np.argwhere(~np.isfinite(found))[0].tolist()
        raise FloatingPointError(
            f"{pairs.episodes.names[2 * row + side]} should have a finite log-probability under the reference, got "
            f"{found[row, side]}: no policy near the reference writes it, and every loss would be infinite. Leave that "
            "comparison out."
        )
    return found
