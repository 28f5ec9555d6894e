"""Online DPO on text environments (Guo et al. 2024, arXiv:2402.04792): compare responses that the policy writes now.

One iteration is that of `OnPolicy`. Its own:

    1. rollout         a group of responses to each prompt
    5. advantages      +1 for the best response of each group, -1 for the worst, 0 for the others: the pairs
    6. optimise        epochs of minibatches of pairs on `dpo_loss`; it has no ratios, and is right for pairs that the
                       policy has moved away from, so that several passes over them cost nothing but time

What the environment pays for a response decides which is the better one: the score as the wrappers shape it, the KL
toll set aside, because the loss has a price of KL of its own, `beta`; as a rule the environment's.

**Labels.** The paper asks a judge for the better one and takes its word (``"hard"``). A judge who is always sure has no
optimum: the loss goes on pulling two responses apart however far apart they are. Here the payments themselves are
known, and so is how often a judge as Bradley and Terry's (1952) would prefer either, sigma(r1 - r2). ``"soft"`` labels
are that probability. The optimum is then the tilted reference, that of score - beta * KL, as for the other agents, and
at the optimum the gradient of every single pair is 0, not only their mean.

Off its own distribution the policy is never asked; comparisons of another's responses are `DPO`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from textenv.agents import training
from textenv.agents.losses import log_ratio
from textenv.agents.micro_batches import token_budget
from textenv.agents.mismatch import Proximal
from textenv.agents.on_policy import OnPolicy
from textenv.agents.on_policy_config import OnPolicyConfig
from textenv.agents.option_checks import check_unused
from textenv.agents.pairs import PairBatch, PairFigures, pair_losses, response_sums, rows_of
from textenv.agents.policy import arithmetic
from textenv.agents.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, check_preference_loss
from textenv.agents.stats import UpdateStats
from textenv.agents.types import IterationStats, Rollout
from textenv.layers import reference_of

UNUSED = (
    "gamma",
    "clip_range",
    "clip_range_high",
    "dual_clip",
    "logprobs_from",
    "importance_clip",
    "target_kl",
    "entropy_coef",
    "kl_loss_coef",
    "loss_mode",
)


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(OnPolicyConfig):
    """Settings of `OnlineDPO`. There are no ratios and no loss per token: settings of these are refused.

    Raises:
        ValueError: see `OnPolicyConfig`, and a setting without effect.
    """

    samples_per_prompt: int = 2
    """Responses to each prompt, of which the best is compared with the worst."""

    beta: float | None = None
    """The price of a nat of KL in the loss, see `DPOConfig.beta`; None: what the environments' `KLPenalty` charges."""

    loss: PreferenceLoss = "sigmoid"
    """``"sigmoid"`` is DPO, ``"ipo"`` IPO; see `textenv.agents.preference_losses`."""

    labels: Literal["soft", "hard"] = "soft"
    """``"soft"``: the better response is preferred with probability sigma(difference of what the environment pays).
    ``"hard"``: always; pairs that are paid alike are then left out."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_unused(self, UNUSED, "It compares whole responses, and its loss has a KL of its own.")
        self._check_group()
        check_preference_loss(1.0 if self.beta is None else self.beta, self.loss)
        self._check_choice("loss", PREFERENCE_LOSSES)
        self._check_choice("labels", ("soft", "hard"))


@dataclass(frozen=True, kw_only=True)
class OnlineDPOStats(IterationStats):
    """One iteration; `policy_loss` is the loss on pairs. See `IterationStats`.

    Attributes:
        pairs: that were compared.
        accuracy: share of the pairs whose better response has the higher implicit reward, ties half; means over the
            iteration's steps, each before it was taken.
        margin: implicit reward beta log(pi / ref) of the better responses less that of the worse, in units of the
            score; at the optimum that of ``"soft"`` labels is what the environment pays more.
    """

    pairs: int
    accuracy: float
    margin: float


class OnlineDPO(OnPolicy):
    """Learns from comparisons of its own responses. Values are not used.

    Arguments and errors are those of `OnPolicy`.

    Raises:
        ValueError: there is no reference, or no price of KL: neither `beta` nor a `KLPenalty` with a coefficient above
            0.
    """

    config_class = OnlineDPOConfig
    config: OnlineDPOConfig

    def __init__(self, policy: Any, envs: Any, config: OnlineDPOConfig | None = None, **options: Any) -> None:
        super().__init__(policy, envs, config, **options)
        if reference_of(policy, envs) is None:
            raise ValueError(
                "OnlineDPO should have a reference to measure log-ratios against, got none: neither the policy nor a "
                "KLPenalty has one. Wrap the environments with KLPenalty(envs, ref_logprobs)."
            )
        if not self.beta > 0:  # NaN too
            raise ValueError(
                f"OnlineDPO should have a price of KL above 0, got beta=None and environments that charge "
                f"{training.kl_coef(envs)}: comparisons alone have no optimum. Pass OnlineDPOConfig(beta=0.1), or make "
                "the environments with a kl_coef."
            )
        self._figures: list[PairFigures] = []

    @property
    def beta(self) -> float:
        """The price of a nat now: a controller of the environments may move theirs."""
        return training.kl_coef(self.envs) if self.config.beta is None else self.config.beta

    def step(self) -> IterationStats:
        """One iteration: collect, then optimise."""
        self._figures = []
        stats = super().step()
        found = PairFigures.joined(self._figures) if self._figures else None
        return OnlineDPOStats(
            **vars(stats),
            pairs=len(found.losses) // self.config.epochs if found else 0,
            accuracy=found.accuracy if found else math.nan,
            margin=found.margin if found else math.nan,
        )

    def rollout(self, keep_graph: bool = False) -> Rollout:  # noqa: ARG002 - the loss is of pairs of its rows
        """Steps 1 to 5: finished episodes, each pair marked by advantages of +1 and -1."""
        rollout = super().rollout(keep_graph=False)
        best, worst = self.pairs(rollout)
        marks = torch.zeros_like(rollout.scores)
        marks[best], marks[worst] = 1.0, -1.0
        return replace(rollout, advantages=marks[:, None] * rollout.response_mask)

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Nothing yet: pairs are made of what the environment pays without its toll, which `rewards` holds."""
        return torch.zeros_like(rewards), torch.zeros_like(rewards)

    def pairs(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The best and the worst response of each group that has two, (n,) rows each.

        Dropped samples are compared with nothing; neither are, with hard labels, responses that are paid alike.
        """
        paid = rollout.paid().view(-1, self.config.samples_per_prompt)
        there = rollout.response_mask.any(-1).view(paid.shape)
        first = torch.arange(len(paid), device=paid.device) * paid.shape[1]
        best = torch.where(there, paid, -torch.inf).argmax(-1)
        # The last of equals, so that equal responses to a prompt are two responses.
        worst = paid.shape[1] - 1 - torch.where(there, paid, torch.inf).flip(-1).argmin(-1)
        usable = there.sum(-1) >= 2
        if self.config.labels == "hard":
            usable &= paid.gather(-1, best[:, None]).squeeze(-1) > paid.gather(-1, worst[:, None]).squeeze(-1)
        return (first + best)[usable], (first + worst)[usable]

    def batch(self, rollout: Rollout) -> tuple[PairBatch, Rollout]:
        """The pairs of a rollout as the loss takes them, and their episodes in the same order."""
        best, worst = self.pairs(rollout)
        paid, soft = rollout.paid(), self.config.labels == "soft"
        episodes = rollout.rows(torch.stack([best, worst], 1).reshape(-1))
        assert episodes.ref_logprobs is not None  # checked when the agent was made
        batch = PairBatch(
            episodes.input_ids,
            episodes.attention_mask,
            episodes.response_tokens,
            response_sums(episodes.ref_logprobs, episodes.attention_mask),
            torch.sigmoid(paid[worst] - paid[best]) if soft else 0.0,
            episodes.action_masks,
        )
        return batch, episodes

    def optimise(self, rollout: Rollout) -> UpdateStats:
        """Step 6: epochs of minibatches of pairs."""
        config = self.config
        stats = UpdateStats(config.clip_range)
        batch, episodes = self.batch(rollout)
        for _ in range(config.epochs if len(batch) else 0):
            order = torch.randperm(len(batch), generator=self.generator)
            for index in order.tensor_split(min(config.num_minibatches, len(batch))):
                self._compare(batch, episodes, index.to(batch.input_ids.device), stats)
        stats.mismatch = Proximal(rollout, None).figures()
        return stats

    def _compare(self, batch: PairBatch, episodes: Rollout, index: Tensor, stats: UpdateStats) -> None:
        """One optimiser step on the pairs at `index`, in micro-batches with their number as the denominator."""
        self.optimizer.zero_grad(set_to_none=True)
        budget = token_budget(self.policy, self.config.micro_batch_tokens)
        begins = self.iteration == 0 and not stats.grad_norms and self.config.check_start
        with arithmetic(self.policy):
            for share in pair_losses(self.policy, batch.pairs(index), self.beta, self.config.loss, budget):
                part = episodes.rows(rows_of(index[share.pairs]))
                if begins:
                    self._check_start(part, share.output, part.logprobs)
                share.loss.backward()
                self._figures.append(share.figures)
                logratio = log_ratio(share.output.logprobs, part.logprobs, part.response_mask)
                stats.add(logratio, share.output.entropies, part.response_mask, policy_loss=share.loss)
        self._pretraining_gradient(stats)
        norm = training.clip_gradients(self.parameters, self.config.max_grad_norm, "the last scores and log-ratios")
        stats.add_grad_norm(norm)
        self.optimizer.step()
