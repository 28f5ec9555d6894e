"""What every agent shares that learns from its own fresh samples: one iteration, in the order of the algorithm.

    1. rollout         the engine writes one response per prompt, or a group of them
    2. score           the scorer judges them; the reference's log-probabilities come from the same pass where it can
    3. logprobs        the policy's own log-probabilities and values, in one pass
    4. rewards         the responses are replayed through the wrapped environments, which charge the tolls
    5. advantages      the algorithm's own
    6. optimise        epochs of minibatches on the algorithm's loss; on request entropy, KL, pretraining loss
    7. bookkeeping     one `IterationStats`

An algorithm is what it makes of rewards (`advantages`) and of log-probabilities (`loss_terms`); compare `ppo`, `grpo`,
`rloo` and `reinforce`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from textenv.agents import training
from textenv.agents.agent import Agent
from textenv.agents.kl_loss import kl_loss
from textenv.agents.losses import Counts, aggregate, clipped_policy_loss, log_ratio
from textenv.agents.micro_batches import micro_batches, token_budget
from textenv.agents.mismatch import Proximal
from textenv.agents.on_policy_config import OnPolicyConfig
from textenv.agents.option_checks import check_options
from textenv.agents.policy import Policy, arithmetic, device_of, masks_argument
from textenv.agents.ptx import PretrainingTexts, ptx_losses
from textenv.agents.rollouts.collect import collect
from textenv.agents.start_check import check_engine, check_ratios, check_reference
from textenv.agents.stats import UpdateStats, iteration_stats
from textenv.agents.types import IterationStats, PolicyOutput, Rollout
from textenv.checks import check_groups
from textenv.layers import reference_of
from textenv.replay import Replay, text_envs

Terms = dict[str, tuple[float, Tensor]]
"""Terms of a loss: a weight and a scalar by the name that it is logged under."""


class OnPolicy(Agent):
    """An agent that learns from its own fresh samples. A subclass gives `advantages`; most use the loss as it is.

    Args:
        policy: see `Agent`. For `entropy_coef` its `evaluate` takes `entropy_grad`.
        envs: see `Agent`. What shapes the reward (the KL toll, clipped scores, penalties) belongs to them.
        config: None for the defaults.
        pretraining_texts: for `ptx_coef`, see `PretrainingTexts`. They are not in checkpoints: `load` takes them again.
        **options: `seed`, `engine` and what else `Agent` takes.

    Raises:
        TypeError: see `Agent`; an entropy bonus without `entropy_grad`.
        ValueError: see `Agent`; `ptx_coef` without texts or texts without `ptx_coef`, or texts that cannot be used; a
            KL in the loss without a reference; episodes that do not divide into groups.
    """

    config: OnPolicyConfig

    def __init__(
        self,
        policy: Policy,
        envs: VectorEnv[Any, Any, Any],
        config: OnPolicyConfig | None = None,
        *,
        pretraining_texts: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy, envs, config, **options)
        for name, count in (("episodes_per_iteration", self.batch_size), ("num_envs", envs.num_envs)):
            check_groups(count, self.config.samples_per_prompt, name)
        check_options(self.config, policy, reference_of(policy, envs), pretraining_texts)
        self.pretraining: PretrainingTexts | None = None
        if pretraining_texts is not None:
            task = text_envs(envs).task
            self.pretraining = PretrainingTexts(
                pretraining_texts, task.tokenizer, task.mdp.vocab_size, self.config.ptx_max_tokens
            )

    def data_fingerprints(self) -> dict[str, str]:
        """Of the pretraining texts; the place in them is that of the generator."""
        return {} if self.pretraining is None else {"pretraining_texts": self.pretraining.fingerprint}

    def step(self) -> IterationStats:
        """One iteration: collect, then optimise."""
        if hasattr(self.policy, "eval"):
            self.policy.eval()  # dropout off, in rollouts and updates alike
        check = self.iteration == 0 and self.config.check_start
        rollout = self.rollout(keep_graph=not check)  # the check compares two passes
        if check:
            reference = reference_of(self.policy, self.envs)
            check_reference(self.policy, reference, rollout, type(self.config).__name__)
        start = time.perf_counter()
        learning_rate = self._set_learning_rate()
        update = self.optimise(rollout)
        rollout.seconds["update"] = time.perf_counter() - start
        self.iteration += 1
        self.episodes += len(rollout.prompts)
        self._warn_about(rollout)
        return iteration_stats(
            rollout,
            update,
            iteration=self.iteration,
            episodes=self.episodes,
            kl_coef=training.kl_coef(self.envs),
            learning_rate=learning_rate,
        )

    def rollout(self, keep_graph: bool = False) -> Rollout:
        """Steps 1 to 5: finished episodes with advantages.

        Args:
            keep_graph: where the batch is one micro-batch, keep the graph of the policy's pass over it in
                `Rollout.first_pass`, so that `optimise` need not do it again.
        """
        config, device = self.config, device_of(self.policy)
        episodes = collect(
            self.policy,
            self.envs,
            self.engine,
            episodes=self.batch_size,
            samples_per_prompt=config.samples_per_prompt,
            seed=training.derive_seed(self.seed, self.iteration),
            env_seed=self.seed if self.iteration == 0 else None,
            micro_batch_tokens=token_budget(self.policy, config.micro_batch_tokens),
            logprobs_from=config.logprobs_from,
            with_gradient=self._evaluate_options() if keep_graph and config.num_minibatches == 1 else None,
        )
        replayed = episodes.replayed
        kept = ~np.isnan(replayed.scores)  # dropped samples take part in nothing
        response_mask = torch.as_tensor(replayed.response_mask & kept[:, None], device=device)
        rewards = torch.as_tensor(replayed.rewards, dtype=torch.float32, device=device)
        output = episodes.output
        values = output.values.detach()
        advantages, returns = self.advantages(rewards, values, response_mask)
        return Rollout(
            input_ids=torch.as_tensor(replayed.input_ids, device=device),
            attention_mask=torch.as_tensor(replayed.attention_mask, device=device),
            response_mask=response_mask,
            logprobs=episodes.logprobs,
            ref_logprobs=episodes.ref_logprobs,
            values=values,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            scores=torch.as_tensor(replayed.scores, dtype=torch.float32, device=device),
            finish_reason=tuple(replayed.infos["finish_reason"]),
            prompts=episodes.prompts,
            responses=episodes.responses,
            seconds=episodes.seconds,
            action_masks=episodes.action_masks,
            engine_logprobs=episodes.engine_logprobs,
            tolls=tolls_of(replayed, device),
            first_pass=output if output.logprobs.requires_grad else None,
        )

    @abstractmethod
    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Step 5: advantages and returns (B, T), 0 where the mask is False.

        Args:
            rewards: (B, T), shaped.
            values: (B, T), the value head's; 0 for policies without one.
            response_mask: (B, T), False everywhere on dropped samples. The responses to one prompt are next to each
                other.
        """

    def optimise(self, rollout: Rollout) -> UpdateStats:
        """Step 6: epochs of minibatches over the batch, until `target_kl` says that it is enough."""
        config = self.config
        stats = UpdateStats(config.clip_range, config.clip_range_high)
        proximal = Proximal(rollout, config.importance_clip if config.logprobs_from == "engine" else None)
        count = len(rollout.input_ids)
        for epoch in range(config.epochs):
            order = torch.randperm(count, generator=self.generator)
            for number, index in enumerate(order.tensor_split(min(config.num_minibatches, count))):
                begins = epoch == 0 and number == 0
                self._update(rollout, index.to(rollout.input_ids.device), proximal, stats, begins)
                if stats.early_stop:
                    break
            if stats.early_stop:
                break
        stats.mismatch = proximal.figures()
        return stats

    def _update(self, rollout: Rollout, index: Tensor, proximal: Proximal, stats: UpdateStats, begins: bool) -> None:
        """One optimiser step on the episodes at `index`, in micro-batches with the minibatch's own denominators."""
        config = self.config
        counts = Counts.of(rollout.response_mask[index])
        if counts.tokens == 0:
            return
        self.optimizer.zero_grad(set_to_none=True)
        done = rollout.first_pass if begins else None
        budget = token_budget(self.policy, config.micro_batch_tokens)
        blocks = micro_batches(rollout.attention_mask, index, budget) if done is None else [index.sort().values]
        for rows in blocks:
            batch = rollout.rows(rows)
            with arithmetic(self.policy):
                output = done or self._evaluate(batch)
                old_logprobs, weights = proximal.of(rows, output.logprobs)
                if begins and self.iteration == 0 and config.check_start:
                    self._check_start(batch, output, old_logprobs)
                self._loss(batch, output, old_logprobs, weights, counts, stats).backward()
        if config.target_kl is not None and stats.minibatch_kl > 1.5 * config.target_kl:
            self.optimizer.zero_grad(set_to_none=True)
            stats.stop()
            return
        self._pretraining_gradient(stats)
        norm = training.clip_gradients(self.parameters, config.max_grad_norm, "the last scores and log-ratios")
        stats.add_grad_norm(norm)
        self.optimizer.step()

    def _evaluate_options(self) -> dict[str, Any]:
        return {"entropy_grad": True} if self.config.entropy_coef else {}

    def _evaluate(self, batch: Rollout) -> PolicyOutput:
        """The policy's view of the episodes, with gradient."""
        asked = self._evaluate_options() | masks_argument(batch.action_masks)
        return self.policy.evaluate(batch.input_ids, batch.attention_mask, batch.response_tokens, **asked)

    def _check_start(self, batch: Rollout, output: PolicyOutput, old_logprobs: Tensor) -> None:
        """Before the first step: ratios are 1, and the engine wrote from the policy's distribution."""
        check_ratios(self.policy, log_ratio(output.logprobs, old_logprobs, batch.response_mask), batch.response_mask)
        check_engine(self.policy, old_logprobs, batch.engine_logprobs, batch.response_mask)

    def _loss(
        self,
        batch: Rollout,
        output: PolicyOutput,
        old_logprobs: Tensor,
        weights: Tensor | None,
        counts: Counts,
        stats: UpdateStats,
    ) -> Tensor:
        """The loss of this micro-batch: its share of the minibatch's mean, the terms by their weights."""
        config, mask = self.config, batch.response_mask

        def mean(x: Tensor) -> Tensor:
            return aggregate(x, mask, config.loss_mode, counts)

        terms = self.loss_terms(batch, output, old_logprobs, weights, mean)
        if config.kl_loss_coef:
            assert batch.ref_logprobs is not None  # checked when the agent was made
            kl = mean(kl_loss(output.logprobs, batch.ref_logprobs, mask, config.kl_loss_estimator))
            terms["kl_loss"] = config.kl_loss_coef, kl
        logratio = log_ratio(output.logprobs, old_logprobs, mask)
        stats.add(logratio, output.entropies, mask, **{name: term for name, (_, term) in terms.items()})
        loss = torch.stack([weight * term for weight, term in terms.values()]).sum()
        return loss - config.entropy_coef * mean(output.entropies) if config.entropy_coef else loss

    def loss_terms(
        self,
        batch: Rollout,
        output: PolicyOutput,
        old_logprobs: Tensor,
        weights: Tensor | None,
        mean: Callable[[Tensor], Tensor],
    ) -> Terms:
        """The clipped policy loss; an algorithm may add to it.

        Args:
            batch: episodes, b of them.
            output: the policy's present view of them.
            old_logprobs: (b, T), what ratios are taken against.
            weights: (b, T), importance weights of the policy loss, or None.
            mean: (b, T) to this micro-batch's share of the minibatch's mean.
        """
        config, mask = self.config, batch.response_mask
        clipping = config.clip_range, config.clip_range_high, config.dual_clip
        losses = clipped_policy_loss(output.logprobs, old_logprobs, batch.advantages, mask, *clipping)
        return {"policy_loss": (1.0, mean(losses if weights is None else weights * losses))}

    def _pretraining_gradient(self, stats: UpdateStats) -> None:
        """Add ptx_coef times the gradient of the language-model loss on a fresh batch of pretraining texts."""
        if self.pretraining is None:
            return
        texts = self.pretraining.draw(self.config.ptx_batch_size, self.generator)
        with arithmetic(self.policy):
            for loss in ptx_losses(self.policy, *texts, token_budget(self.policy, self.config.micro_batch_tokens)):
                (self.config.ptx_coef * loss).backward()
                stats.add_loss("ptx_loss", loss)


def tolls_of(replayed: Replay, device: torch.device) -> Tensor | None:
    """What the outermost `KLPenalty` charged for each response (B,), 0 for dropped ones; None without one."""
    tolls = replayed.infos.get("kl_toll")
    if tolls is None:
        return None
    return torch.as_tensor(np.where(np.isnan(replayed.scores), 0.0, tolls), dtype=torch.float32, device=device)
