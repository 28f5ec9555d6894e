"""The distribution over tokens as Stable-Baselines3 asks for it: from logits, without a simplex in between.

torch's own Categorical checks that probabilities add up to 1 within 1e-6, which 50 thousand rounded ones do not, and
its KL has a NaN gradient where both sides forbid a token.

Legend: M states, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.distributions import Distribution
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.distributions.kl import register_kl

from textenv.agents.rollouts.base import sample_tokens
from textenv.lm.output_head import forbid
from textenv.packed_masks import PackedMasks

LOWEST = -1e30
"""Stands for -inf where it is multiplied by a probability of 0."""


class TokenCategorical(Categorical):
    """torch's categorical distribution from logits, of which some may be -inf; nothing is checked.

    Args:
        logits: (M, V).
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)

    def entropy(self) -> Tensor:
        """In nats, (M,)."""
        return -(self.probs * self.logits.clamp_min(LOWEST)).sum(-1)


@register_kl(TokenCategorical, TokenCategorical)
def _kl(p: TokenCategorical, q: TokenCategorical) -> Tensor:
    """KL(p || q) in nats, (M,); twice differentiable, tokens that both forbid included."""
    return (p.probs * (p.logits.clamp_min(LOWEST) - q.logits.clamp_min(LOWEST))).sum(-1)


class TokenDistribution(Distribution):
    """What a policy would write next in M states.

    It holds (M, V) numbers, 200 kB a state at 50 thousand tokens: TRPO needs it for the whole rollout, PPO never.
    Samples come from torch's global generator, which Stable-Baselines3 seeds.

    Args:
        logits: (M, V), temperature included.
        action_masks: index (M,); None: everything is allowed.
    """

    distribution: TokenCategorical

    def __init__(self, logits: Tensor, action_masks: PackedMasks | None = None) -> None:
        super().__init__()
        self._logits = logits
        self._set(action_masks)

    def _set(self, action_masks: PackedMasks | None) -> None:
        logits = self._logits if action_masks is None else forbid(self._logits, action_masks)
        self.distribution = TokenCategorical(logits)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Of actions (M,), nats."""
        return self.distribution.logits.gather(-1, actions.long().view(-1, 1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """In nats, (M,)."""
        return self.distribution.entropy()

    def sample(self) -> Tensor:
        """A token for each state, (M,)."""
        logits = self.distribution.logits.detach()
        return sample_tokens(logits, uniforms(len(logits), logits.device), 1.0)

    def mode(self) -> Tensor:
        """The most likely token of each state, (M,)."""
        return self.distribution.logits.argmax(-1)

    def apply_masking(self, masks: Any) -> None:
        """Allow only some tokens, (M, V) True or 1 = allowed; None: all of them again."""
        self._set(packed(masks, self._logits.shape[-1]))

    def proba_distribution_net(self, *_: Any, **__: Any) -> nn.Module:
        """There is none to make: logits come from a language model.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("A TokenDistribution is made from logits; there is no layer to be made for it.")

    def proba_distribution(self, action_logits: Tensor) -> TokenDistribution:
        """Take other logits (M, V)."""
        self._logits = action_logits
        self._set(None)
        return self

    def actions_from_params(self, action_logits: Tensor, deterministic: bool = False) -> Tensor:
        """Tokens (M,) from logits (M, V)."""
        return self.proba_distribution(action_logits).get_actions(deterministic)

    def log_prob_from_params(self, action_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (M,) from logits (M, V), and their log-probabilities."""
        actions = self.actions_from_params(action_logits)
        return actions, self.log_prob(actions)


def uniforms(count: int, device: torch.device) -> Tensor:
    """Numbers (count,) in [0, 1) from torch's global generator, the same on every device."""
    return torch.rand(count, dtype=torch.float64).to(device)


def packed(masks: Any, vocab_size: int) -> PackedMasks | None:
    """Masks as Stable-Baselines3 hands them on, as bits; None: None.

    Args:
        masks: (M, V) bools or floats, in numpy or torch; or the bits (M, W) of `PackedMaskBuffer`.
        vocab_size: V.
    """
    if masks is None:
        return None
    tensor = torch.as_tensor(masks)
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.dtype == torch.uint8 and rows.shape[-1] != vocab_size:
        return PackedMasks(rows.cpu().numpy(), np.arange(len(rows)), vocab_size)
    return PackedMasks.of((rows > 0).cpu().numpy())
