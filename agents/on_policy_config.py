"""`OnPolicyConfig`: what every agent has to settle that learns from its own fresh samples, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from textenv.agents.kl_loss import KL_LOSS_ESTIMATORS, KLLossEstimator
from textenv.agents.losses import LOSS_MODES, LossMode


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """Settings of `OnPolicy`, and of every agent made from it.

    What shapes the reward is not among them, since it belongs to the environment: the KL toll and its coefficient
    (`KLPenalty`), clipped scores (`ClipScore`), penalties.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    episodes_per_iteration: int | None = None
    """Episodes that each iteration collects; None: as many as there are environments."""

    samples_per_prompt: int = 1
    """Responses to each prompt, next to each other in a batch; the episodes of an iteration and the number of
    environments must be multiples of it."""

    epochs: int = 4
    """Passes over each batch."""

    num_minibatches: int = 1
    """Optimiser steps per pass. With 1 the first pass of each iteration starts from ratios of exactly 1."""

    micro_batch_tokens: int | None = None
    """Tokens, prompts included, that go through the policy at once, rows of like length together; gradients accumulate
    over a minibatch. It changes memory and speed, not the gradient: denominators are those of the minibatch. None: what
    suits the policy: 1,024 for a language model on a CPU, 16,384 on a GPU, everything for others."""

    logprobs_from: Literal["trainer", "engine"] = "trainer"
    """Whose log-probabilities of the sampled tokens count as those of the policy that wrote them. ``"engine"`` takes
    over what the engine reports, saves the output head's part of a pass before the update (all of it where the value
    network is separate), and corrects for the gap between the two with a truncated importance weight, see
    `textenv.agents.mismatch`. The gap is logged either way."""

    importance_clip: float = 2.0
    """With ``logprobs_from="engine"``: the largest importance weight."""

    learning_rate: float = 3e-4
    """Of AdamW. 1e-4 to 1e-3 suits adapters and small policies, 1e-6 to 1e-5 all weights of a language model."""

    lr_schedule: Literal["constant", "linear"] = "constant"
    """``"linear"`` falls to 0 at the end of `learn`."""

    weight_decay: float = 0.0
    """Of AdamW."""

    gamma: float = 1.0
    """Discount. 1, because the score judges the whole response: less would make short responses worth more."""

    clip_range: float = 0.2
    """Ratios beyond 1 +- this get no further gradient."""

    clip_range_high: float | None = None
    """The upper end of that range, 1 + this, which holds back tokens with a positive advantage; None: `clip_range`.
    DAPO (arXiv:2503.14476) lets rare good tokens grow further, 0.28 over 0.2."""

    dual_clip: float | None = None
    """Ratios beyond this get no gradient from a negative advantage either (arXiv:1912.09729, which takes 3); above 1.
    None: without bound."""

    target_kl: float | None = None
    """Nats per token: the iteration's remaining updates are left out as soon as a minibatch shows an `approx_kl` above
    1.5 times this, before its own step (the rule of Stable-Baselines3's `PPO.train`). None: never. Not the `target_kl`
    of `KLPenalty`, which steers the distance to the reference; this one bounds how far one iteration may go from where
    it began."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the entropy per token, averaged by `loss_mode`, is subtracted from the loss. 0: off.
    The toll to the reference already keeps a policy from collapsing, and near text; entropy pulls towards noise over
    the whole vocabulary."""

    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference as a term of the loss, beside or in place of the environment's toll. 0: off. It
    leaves out what a token does to the KL of later ones, see `textenv.agents.kl_loss`: the toll is the exact one.
    Whitening scales advantages but not this term; for a coefficient in units of the score turn it off."""

    kl_loss_estimator: KLLossEstimator = "k2"
    """``"k2"`` has the gradient of KL(pi || pi_ref) per token; ``"k3"`` that of KL(pi_ref || pi); ``"k1"`` none at all
    on average."""

    ptx_coef: float = 0.0
    """Weight of the language-model loss on pretraining texts in every step (PPO-ptx, Ouyang et al. 2022,
    arXiv:2203.02155, eq. 2), which the agent then needs. 0: off."""

    ptx_batch_size: int = 8
    """Pretraining texts per optimiser step."""

    ptx_max_tokens: int = 256
    """Longer pretraining texts are cut to their first tokens."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    loss_mode: LossMode = "token-mean"
    """How tokens are averaged, see `aggregate`."""

    check_start: bool = True
    """Check before the first update that the policy is the reference and that ratios are 1. Turn it off for a policy
    that is meant to start elsewhere."""

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_counts("samples_per_prompt", "epochs", "num_minibatches", "ptx_batch_size")
        self._check_counts("episodes_per_iteration", "micro_batch_tokens", optional=True)
        self._check_positive("learning_rate", "max_grad_norm", "clip_range")
        self._check_weights("weight_decay", "entropy_coef", "kl_loss_coef", "ptx_coef")
        self._check_shares("gamma")
        self._check_bounds("clip_range_high", "target_kl")
        self._check_switches("check_start")
        self._check_objective()
        self._check_choice("loss_mode", LOSS_MODES)
        self._check_choice("logprobs_from", ("trainer", "engine"))
        self._check_choice("lr_schedule", ("constant", "linear"))

    def _check_counts(self, *names: str, optional: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (value is None and optional) and not (whole and value >= 1):
                raise ValueError(
                    f"`{name}` should be an integer of at least 1, got {value!r}: nothing would be trained."
                )

    def _check_group(self) -> None:
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"`samples_per_prompt` should be at least 2, got {self.samples_per_prompt}: a response is judged "
                "against the others to its prompt, and alone every advantage would be 0. 4 to 64 are usual."
            )

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not self._is_number(name) or getattr(self, name) <= 0:
                raise ValueError(
                    f"`{name}` should be a positive number, got {getattr(self, name)!r}: the policy would never move."
                )

    def _check_shares(self, *names: str) -> None:
        for name in names:
            if not self._is_number(name) or not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"`{name}` should be in [0, 1], got {getattr(self, name)!r}: returns would grow without bound."
                )

    def _check_weights(self, *names: str) -> None:
        for name in names:
            if not self._is_number(name) or getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` should be a number of at least 0, got {getattr(self, name)!r}: a negative weight would "
                    "train for the opposite. 0 turns it off."
                )

    def _check_bounds(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and (not self._is_number(name) or getattr(self, name) <= 0):
                raise ValueError(
                    f"`{name}` should be positive or None, got {getattr(self, name)!r}: nothing could move within it. "
                    "None turns it off."
                )

    def _check_switches(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` should be True or False, got {getattr(self, name)!r}.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            listed = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {choices}"
            raise ValueError(f"`{name}` should be {listed}, got {getattr(self, name)!r}.")

    def _check_objective(self) -> None:
        """Check what has a rule of its own."""
        if self.dual_clip is not None and (not self._is_number("dual_clip") or self.dual_clip <= 1):
            raise ValueError(
                f"`dual_clip` should be above 1 or None, got {self.dual_clip!r}: bad tokens would be left as likely as "
                "they were. 3 is the published value."
            )
        if not self._is_number("importance_clip") or self.importance_clip < 1:
            raise ValueError(
                f"`importance_clip` should be a number of at least 1, got {self.importance_clip!r}: even tokens on "
                "which engine and trainer agree would weigh less. 2 is the published value."
            )
        if self.kl_loss_estimator not in KL_LOSS_ESTIMATORS:
            raise ValueError(
                f"`kl_loss_estimator` should be one of {KL_LOSS_ESTIMATORS}, got {self.kl_loss_estimator!r}. 'k2' has "
                "the gradient of KL(policy || reference)."
            )
        tokens = self.ptx_max_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 2:
            raise ValueError(
                f"`ptx_max_tokens` should be an integer of at least 2, got {tokens!r}: the first token of a text is "
                "given, so that nothing would be left to predict."
            )

    def _is_number(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
