"""Expert iteration on text environments: imitate the best of one's own responses, and begin again from there.

Anthony, Tian & Barber 2017 (arXiv:1705.08439) with best-of-n as the expert: per prompt RAFT (Dong et al. 2023,
arXiv:2304.06767), over the whole batch the Grow and Improve steps of ReST (Gulcehre et al. 2023, arXiv:2308.08998).
One iteration is that of `OnPolicy`. Its own:

    1. rollout         a group of responses to each prompt
    5. advantages      1 for the tokens of the responses with the highest shaped returns, 0 for the others
    6. optimise        -log pi of the former alone, as in `SFT`

The shaped return has the KL toll in it (as in RAFT's section 3.3), so that a response which is as good and likelier
under the reference is the better one. Nothing else holds the policy back: it approaches what is best among its own
samples, not the optimum of score - kl_coef * KL, and goes on narrowing after that has been passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from textenv.agents.advantages import returns_to_go
from textenv.agents.on_policy import OnPolicy, Terms
from textenv.agents.on_policy_config import OnPolicyConfig
from textenv.agents.option_checks import check_unused
from textenv.agents.stats import UpdateStats
from textenv.agents.types import PolicyOutput, Rollout

UNUSED = ("clip_range", "clip_range_high", "dual_clip", "logprobs_from", "importance_clip")


@dataclass(frozen=True, kw_only=True)
class ExpertIterationConfig(OnPolicyConfig):
    """Settings of `ExpertIteration`. There are no ratios, hence nothing to clip: such settings are refused.

    Raises:
        ValueError: see `OnPolicyConfig`, and a setting without effect.
    """

    samples_per_prompt: int = 4
    """Responses to each prompt."""

    keep_share: float = 0.25
    """Share of the responses that are imitated, above 0 and below 1; rounded, and at least one."""

    keep_within: Literal["prompt", "batch"] = "prompt"
    """The best of what: ``"prompt"``, so that every prompt is learned from; ``"batch"``, where prompts on which scores
    are high may take all places."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_unused(self, UNUSED, "It imitates responses; ratios to an older policy do not occur.")
        self._check_choice("keep_within", ("prompt", "batch"))
        if not self._is_number("keep_share") or not 0 < self.keep_share < 1:
            raise ValueError(
                f"`keep_share` should be above 0 and below 1, got {self.keep_share!r}: with none there is nothing to "
                "imitate, and who imitates all of its own samples learns nothing."
            )
        if self.keep_within == "prompt":
            self._check_group()

    def kept_of(self, count: int) -> int:
        """How many of a number of responses are imitated."""
        return min(max(1, math.floor(self.keep_share * count + 0.5)), count)


class ExpertIteration(OnPolicy):
    """Imitates its best responses. Values are not used. Arguments and errors are those of `OnPolicy`."""

    config_class = ExpertIterationConfig
    config: ExpertIterationConfig

    def rollout(self, keep_graph: bool = False) -> Rollout:  # noqa: ARG002 - the loss is of some of its rows only
        """Steps 1 to 5: finished episodes, those to imitate marked by an advantage of 1."""
        return super().rollout(keep_graph=False)

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Step 5: 1 for the tokens of the best responses; and returns to go."""
        config = self.config
        returns = returns_to_go(rewards, response_mask, config.gamma)
        group = config.samples_per_prompt if config.keep_within == "prompt" else len(returns)
        best = best_of_groups(returns[:, 0], response_mask.any(-1), group, config.kept_of(group))
        return (best[:, None] & response_mask).to(rewards.dtype), returns

    def optimise(self, rollout: Rollout) -> UpdateStats:
        """Step 6: epochs of minibatches over the responses that are imitated."""
        best = (rollout.advantages != 0).any(-1).nonzero().squeeze(-1)
        if len(best) == 0:  # every sample was dropped
            return UpdateStats(self.config.clip_range)
        return super().optimise(rollout.rows(best))

    def loss_terms(
        self,
        batch: Rollout,  # noqa: ARG002
        output: PolicyOutput,
        old_logprobs: Tensor,  # noqa: ARG002
        weights: Tensor | None,  # noqa: ARG002
        mean: Callable[[Tensor], Tensor],
    ) -> Terms:
        """The negative log-likelihood."""
        return {"policy_loss": (1.0, mean(-output.logprobs))}


def best_of_groups(returns: Tensor, kept: Tensor, group: int, count: int) -> Tensor:
    """The `count` responses of each group with the highest returns, (B,) bool; the first of equals.

    Returns 1, 3, 2, 2 and 0, 5, 5, 5, of which the last was dropped, in groups of four:

    >>> returns, kept = torch.tensor([1.0, 3, 2, 2, 0, 5, 5, 5]), torch.tensor([True] * 7 + [False])
    >>> best_of_groups(returns, kept, 4, 2).nonzero().squeeze(-1).tolist()
    [1, 2, 5, 6]

    Args:
        returns: (B,); the responses of a group are next to each other.
        kept: (B,) False for dropped samples, which are never among the best.
        group: a divisor of B.
        count: at most `group`.
    """
    ranked = torch.where(kept, returns, -torch.inf).view(-1, group).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, ranked[:, :count], True)
    return chosen.view(-1) & kept
