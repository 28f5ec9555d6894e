"""A causal language model as the environment and the agents use it: hidden states once, then whatever is read off them.

Legend: B responses, P prompt columns, T response tokens, L = P + T, H hidden size, V vocabulary. Prompts are padded on
the left to P, responses grow to the right from column P, so the token in column c is predicted by the state in column
c - 1. Position ids follow from the mask, which makes a padded row equal to the same row alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from textenv.lm.cache import Place, RowCache, attention_masks, plain_attention
from textenv.lm.loading import check_placement
from textenv.lm.logprobs import token_logprobs
from textenv.lm.output_head import OutputHead
from textenv.lm.packing import packed_states, padded_states, why_not_packed
from textenv.lm.precision import precision
from textenv.packed_masks import PackedMasks

if TYPE_CHECKING:
    from textenv.lm.stepping import Stepper

TOKENS_PER_PASS = {"cpu": 1024, "cuda": 16384}
"""Tokens of a frozen pass: bounds activations. Small blocks, rows of like length, hold little padding; they lose
nothing on a CPU."""


class LanguageModel:
    """A loaded causal model with its sampling distribution (temperature included).

    As a callable it is what `KLPenalty` asks for: ``model(observations, actions) -> logprobs (N,)``.

    Args:
        model: a transformers causal language model.
        source: where its weights came from; two frozen models with one source are the same function.
        named_size: how many ids the tokenizer names; the rest get probability 0.
        temperature: of the distribution that tokens are sampled from; above 0.
        dtype: ``"float32"`` or ``"bfloat16"`` arithmetic.

    Raises:
        ValueError: bad temperature or dtype, or a model that changes its logits in a way this class does not know.
    """

    def __init__(
        self,
        model: Any,
        *,
        source: str,
        named_size: int | None = None,
        temperature: float = 1.0,
        dtype: str = "float32",
    ) -> None:
        check_temperature(temperature)
        check_placement("cpu", dtype)
        self.model = model
        self.source = source
        self.dtype = dtype
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.named_size = named_size
        self.temperature = temperature
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._check_head()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def head(self) -> OutputHead:
        """The output head with the temperature and the unnamed ids in it."""
        layer = self.model.get_output_embeddings()
        return OutputHead(
            layer.weight, getattr(layer, "bias", None), self.temperature, self.named_size, softcap=self._softcap
        )

    def _check_head(self) -> None:
        """Compare our reading of the logits with the model's own on two tokens."""
        ids = torch.tensor([[0, 1]], device=self.device)
        with torch.no_grad(), precision(self.device.type, self.dtype):
            theirs = self.model(input_ids=ids).logits[0].float()
            hidden = self.model.base_model(input_ids=ids).last_hidden_state[0]
            ours = dataclasses.replace(self.head, temperature=1.0, named_size=None).logits(hidden)
        scale = theirs.abs().max().clamp_min(1.0)
        if not torch.allclose(ours / scale, theirs / scale, atol=0.03 if self.dtype == "bfloat16" else 1e-3):
            raise ValueError(
                f"{self.source}: {type(self.model).__name__} post-processes its logits in a way that textenv does not "
                f"reproduce (largest difference {(ours - theirs).abs().max():.3g}), so its log-probabilities would be "
                "wrong. Plain output heads and final_logit_softcapping are supported."
            )

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Last hidden states (B, L, H) of padded rows; values in masked columns mean nothing.

        Columns that no row uses do not go through the model, nor does padding where its attention allows that: see
        `textenv.lm.packing`.
        """
        trunk = self.model.base_model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            if why_not_packed(self) is None:
                return packed_states(trunk, trunk.config.get_text_config(), input_ids, attention_mask)
            return padded_states(trunk, input_ids, attention_mask)

    @torch.no_grad()
    def extend(self, input_ids: Tensor, cache: RowCache, place: Place) -> Tensor:
        """Hidden states (R, Q, H) of new tokens (R, Q), each row after its past in the cache, which takes them in."""
        cache.place_at(place)
        masks = attention_masks(self.model.config.get_text_config(), place)
        with precision(self.device.type, self.dtype), plain_attention(self.device.type):
            output = self.model.base_model(
                input_ids=input_ids,
                attention_mask=masks,
                position_ids=place.slots,
                past_key_values=cache,
                use_cache=True,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def stepper(self) -> Stepper:
        """This model for stepping: it reads each token once; see `textenv.lm.stepping.Stepper`."""
        from textenv.lm.stepping import Stepper

        return Stepper(self)

    def load(self) -> LanguageModel:
        """Itself; see `LazyLanguageModel.load`."""
        return self

    def read_response(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_tokens: int,
        *,
        entropy_grad: bool = False,
        action_masks: PackedMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the response tokens, zero where the mask is 0.

        Only real tokens go through the output head. Entropies carry a gradient where `entropy_grad` asks for it. Where
        there are `action_masks`, index (B, T), the distributions are those over the allowed tokens.
        """
        real = attention_mask[:, -response_tokens:].bool()  # (B, T)
        before = hidden[:, -response_tokens - 1 : -1][real]  # (M, H)
        chosen = input_ids[:, -response_tokens:].long()[real]
        masks = None if action_masks is None else action_masks[real.cpu().numpy()]
        logprobs, entropies = token_logprobs(before, chosen, self.head, entropy_grad=entropy_grad, action_masks=masks)
        zeros = torch.zeros(real.shape, dtype=torch.float32, device=hidden.device)
        return zeros.masked_scatter(real, logprobs), zeros.masked_scatter(real, entropies)

    @torch.no_grad()
    def frozen_pass(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_tokens: int,
        read_columns: Tensor | None = None,
        action_masks: PackedMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass without gradients, rows of like length together, `TOKENS_PER_PASS` tokens at a time.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L).
            response_tokens: T.
            read_columns: (B,) columns whose hidden state a reward head wants to see.
            action_masks: index (B, T), see `read_response`.

        Returns:
            logprobs (B, T), and the hidden states (B, H) at `read_columns` or None.
        """
        order = attention_mask.sum(-1).argsort(stable=True)
        rows = max(1, TOKENS_PER_PASS.get(self.device.type, 16384) // input_ids.shape[1])
        logprobs = torch.zeros(len(input_ids), response_tokens, device=self.device)
        read = None if read_columns is None else torch.zeros(len(input_ids), self.hidden_size, device=self.device)
        with precision(self.device.type, self.dtype):
            for block in order.split(rows):
                ids, mask = input_ids[block], attention_mask[block]
                hidden = self.hidden_states(ids, mask)
                if response_tokens:
                    masks = None if action_masks is None else action_masks[block.cpu().numpy()]
                    logprobs[block] = self.read_response(hidden, ids, mask, response_tokens, action_masks=masks)[0]
                if read is not None and read_columns is not None:
                    read[block] = hidden[torch.arange(len(block)), read_columns[block]].float()
        return logprobs, read

    def response_logprobs(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> np.ndarray:
        """Log-probabilities (B, T) of whole responses from one pass, float64, zero where the mask is 0.

        Over the allowed tokens where there are `action_masks`, index (B, T).
        """
        ids = torch.as_tensor(np.asarray(input_ids), device=self.device)
        mask = torch.as_tensor(np.asarray(attention_mask), device=self.device)
        logprobs, _ = self.frozen_pass(ids, mask, response_tokens, action_masks=action_masks)
        return logprobs.double().cpu().numpy()

    @torch.no_grad()
    def response_distributions(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, response_tokens: int
    ) -> np.ndarray:
        """Log-distributions (B, T, V), float32, that response tokens were drawn from, zero where the mask is 0.

        That is B * T * V * 4 bytes: give few rows at a time, as `textenv.distributions.whole_distributions` does.
        """
        ids = torch.as_tensor(np.asarray(input_ids), device=self.device)
        mask = torch.as_tensor(np.asarray(attention_mask), device=self.device)
        real = mask[:, -response_tokens:].bool()  # (B, T)
        whole = np.zeros((*real.shape, self.vocab_size), dtype=np.float32)
        rows = max(1, TOKENS_PER_PASS.get(self.device.type, 16384) // ids.shape[1])
        with precision(self.device.type, self.dtype):
            for start in range(0, len(ids), rows):
                block = slice(start, start + rows)
                hidden = self.hidden_states(ids[block], mask[block])[:, -response_tokens - 1 : -1][real[block]]
                log_pi = torch.log_softmax(self.head.logits(hidden), -1)
                whole[block][real[block].cpu().numpy()] = log_pi.cpu().numpy()
        return whole

    @torch.no_grad()
    def next_logprobs(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """Log-distribution (N, V), float32, after each prefix."""
        mask = np.asarray(observations["attention_mask"])
        hidden = self.states_at(np.asarray(observations["input_ids"]), mask, _last_columns(mask))
        with precision(self.device.type, self.dtype):
            log_pi: np.ndarray = torch.log_softmax(self.head.logits(hidden), -1).cpu().numpy()
        return log_pi

    def __call__(self, observations: Mapping[str, np.ndarray], actions: np.ndarray) -> np.ndarray:
        """Log-probability (N,) of each action after its prefix, float64."""
        ids = np.asarray(observations["input_ids"])
        mask = np.asarray(observations["attention_mask"])
        hidden = self.states_at(ids, mask, _last_columns(mask))
        with torch.no_grad(), precision(self.device.type, self.dtype):
            targets = torch.as_tensor(np.asarray(actions), device=self.device).long()
            logprobs, _ = token_logprobs(hidden, targets, self.head)
        return logprobs.double().cpu().numpy()

    def states_at(self, input_ids: np.ndarray, attention_mask: np.ndarray, columns: np.ndarray) -> Tensor:
        """Hidden states (B, H), float32, at one column per row, without gradients."""
        ids = torch.as_tensor(input_ids, device=self.device)
        mask = torch.as_tensor(attention_mask, device=self.device)
        _, read = self.frozen_pass(ids, mask, 0, torch.as_tensor(columns, device=self.device))
        assert read is not None
        return read


def check_temperature(temperature: float) -> None:
    """Refuse a temperature at which there is no distribution.

    Raises:
        ValueError: it is not positive and finite.
    """
    if not temperature > 0 or not np.isfinite(temperature):
        raise ValueError(
            f"`temperature` should be a positive number, got {temperature}. At 0 the policy is deterministic and "
            "log-probability ratios are undefined; use 1.0 to train and `predict` to decode greedily."
        )


def _last_columns(attention_mask: np.ndarray) -> np.ndarray:
    """Column of the last real token of each row: prompts end at P - 1, responses grow from there without holes."""
    columns: np.ndarray = attention_mask.shape[1] - 1 - attention_mask[:, ::-1].argmax(1)
    return columns
