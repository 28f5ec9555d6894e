"""Supervised fine-tuning as behaviour cloning: the policy learns to act as demonstrations did, token by token.

One step reads in the order of the algorithm:

    1. batch        demonstrations as finished episodes of the task, prompts padded on the left, responses behind them
    2. loss         -mean log pi(y_t | x, y_<t) over response tokens, stop tokens included; prompts are given
    3. optimise     one AdamW step, gradients accumulated over micro-batches without padding
    4. bookkeeping  one `SFTStats`

It is the first stage of Stiennon et al. 2020 (arXiv:2009.01325) and Ouyang et al. 2022 (arXiv:2203.02155). What it
leaves behind becomes both policy and reference of the stage with rewards: `LanguageModelPolicy.merged`, or the adapter
kept in both, ``LanguageModelPolicy.from_pretrained(model, adapter=...)``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from textenv.agents.micro_batches import token_budget
from textenv.agents.nll import Likelihood, likelihood, nll_losses
from textenv.agents.offline import OfflineAgent, OfflineStats
from textenv.agents.plots import LIKELIHOOD_PANELS
from textenv.agents.policy import Policy, arithmetic, device_of
from textenv.agents.sft_config import SFTConfig
from textenv.demonstrations import DemonstrationSet


@dataclass(frozen=True, kw_only=True)
class SFTStats(OfflineStats):
    """One step; see `OfflineStats`.

    Attributes:
        nll: the loss in nats, before the step: per response token where ``loss_mode`` is ``"token-mean"``.
    """

    nll: float

    def metrics(self) -> dict[str, float]:
        """The figures that logs hold."""
        return {**super().metrics(), "perplexity": math.exp(min(self.nll, 700.0))}


class SFT(OfflineAgent[SFTConfig, SFTStats]):
    """Behaviour cloning on demonstrations of a task. `learn`, `iterate` and `save` are those of `OfflineAgent`.

    Args:
        policy: see `Policy`; a `LanguageModelPolicy` as a rule, with adapters or all of its weights.
        demonstrations: encoded for the task that the policy is to act in, see `DemonstrationSet.encode`.
        config: None for the defaults.
        held_out: demonstrations that are only measured.
        seed: of the order of demonstrations. Equal seeds give equal runs.

    Raises:
        ValueError: the policy has nothing to train, or `held_out` is of another task.
        TypeError: no demonstration set, or wrappers forbid tokens and the policy cannot be told which.
    """

    config_class = SFTConfig
    stats_class = SFTStats
    data_class = DemonstrationSet
    data_name = "demonstrations"
    panels = LIKELIHOOD_PANELS

    def __init__(
        self,
        policy: Policy,
        demonstrations: DemonstrationSet,
        config: SFTConfig | None = None,
        *,
        held_out: DemonstrationSet | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, demonstrations, config or SFTConfig(), held_out=held_out, seed=seed)

    @property
    def demonstrations(self) -> DemonstrationSet:
        """What is learned from."""
        data: DemonstrationSet = self.data
        return data

    def gradient(self, rows: Tensor) -> dict[str, Any]:
        """Steps 1 and 2: the loss of some demonstrations, and its gradient."""
        demonstrations, device = self.demonstrations, device_of(self.policy)
        state = demonstrations.state(rows.tolist())
        ids, mask = (torch.as_tensor(array, device=device) for array in (state.input_ids, state.attention_mask))
        width = demonstrations.mdp.max_response_tokens
        budget = token_budget(self.policy, self.config.micro_batch_tokens)
        options: dict[str, Any] = {"mode": self.config.loss_mode, "action_masks": demonstrations.action_masks(state)}
        nll = 0.0
        with arithmetic(self.policy):
            for loss in nll_losses(self.policy, ids, mask, width, budget, **options):
                loss.backward()
                nll += float(loss.detach())
        return {"nll": nll, "tokens": int(state.response_lengths.sum())}

    def evaluate(self, *, progress: bool = False) -> Likelihood:
        """Measure the held-out demonstrations; training does not notice.

        Raises:
            ValueError: there are none.
        """
        return likelihood(self.policy, self._measured_data(), self.config.micro_batch_tokens, progress=progress)

    def headline(self, figures: SFTStats | Likelihood) -> str:
        """See `OfflineAgent.headline`."""
        return f"NLL {figures.nll:.3f}"

    def sentence(self, measured: Likelihood) -> str:
        """See `OfflineAgent.sentence`."""
        return f"held-out NLL {measured.estimate()} nats per token, perplexity {measured.perplexity:.2f}"

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        demonstrations: DemonstrationSet,
        policy: Policy | None = None,
        *,
        held_out: DemonstrationSet | None = None,
    ) -> Self:
        """Go on from `save`, as if training had never stopped.

        Args:
            folder: what `save` wrote, or the run folder of `learn`.
            demonstrations: those of training, in the same order.
            policy: a policy of the kind that was saved; None remakes a `LanguageModelPolicy`.
            held_out: see the class.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is another agent's, of other demonstrations, or does not fit the policy.
        """
        return cls.resumed(folder, demonstrations, policy, held_out)
