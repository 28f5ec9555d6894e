"""`LanguageModelPolicy`: a causal language model with a value function, and its own frozen reference.

With adapters the reference is the same network with the adapters off, so that policy, reference and value function need
one trunk; `value_models` says what other value functions take. Dropout is never on: a policy's log-probabilities are a
function of its weights alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from textenv.agents import acting
from textenv.agents.policy import last_columns
from textenv.agents.reward_start import RewardSource, nameable, reward_start
from textenv.agents.rollouts.hf import HFEngine
from textenv.agents.start_weights import check_adapters, check_one_adapter, load_start, start_training
from textenv.agents.types import PolicyOutput
from textenv.agents.value_models import Adapters, ValueHead, ValueKind, ValueNetwork, build_value
from textenv.lm import LanguageModel, TextTokenizer, load_tokenizer
from textenv.lm.layers import check_switches, switch_layers
from textenv.lm.merged import save_merged
from textenv.lm.precision import precision
from textenv.lm.stepping import Stepper
from textenv.packed_masks import PackedMasks

TRAINED_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens of a pass with gradient. They bound activations, some 35 kB per token and layer where H is 576 in float32;
half of them take 15% longer on a CPU."""


class LanguageModelPolicy(nn.Module):
    """A language model as an actor-critic policy; make it with `from_pretrained`.

    Args:
        lm: the model that trains.
        reference: the frozen model that it started from.
        tokenizer: its tokenizer.
        settings: how it was made, for checkpoints.
        value_head: reads values off hidden states; None for one on the policy's own, see `build_value`.
        value_network: gives those hidden states; None for the policy's own.
    """

    def __init__(
        self,
        lm: LanguageModel,
        reference: LanguageModel,
        tokenizer: TextTokenizer,
        settings: dict[str, Any],
        value_head: ValueHead | None = None,
        value_network: ValueNetwork | None = None,
    ) -> None:
        super().__init__()
        self.lm, self.reference, self.tokenizer, self.settings = lm, reference, tokenizer, settings
        self.trunk = lm.model
        self.value_head = value_head or ValueHead(lm.hidden_size, lm.device)
        self.value_network = value_network
        self._stepper = lm.stepper()
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        lora_rank: int | None = 16,
        lora_alpha: int | None = None,
        adapter: str | os.PathLike[str] | None = None,
        temperature: float = 1.0,
        value: ValueKind = "trunk",
        reward_model: RewardSource = None,
        device: str = "cpu",
        dtype: str = "float32",
        checkpointing: bool = False,
        compiled: bool = False,
        offload: bool = False,
        seed: int = 0,
    ) -> LanguageModelPolicy:
        """Load a causal language model to be trained.

        Args:
            model: ``"smollm2-135m"`` (embedded), a folder, or a Hugging Face hub id.
            lora_rank: rank of the adapters on every linear layer; the reference is then the model with adapters off.
                None trains all weights, with a frozen copy as the reference.
            lora_alpha: adapters are scaled by alpha / rank; None: twice the rank.
            adapter: a folder with low-rank adapters of an earlier stage (`save_pretrained` wrote it). They stay on the
                model, frozen, beside those that train: policy and reference both start as the model with them.
            temperature: of the distribution that is sampled, trained and compared with the reference.
            value: where values come from: ``"trunk"``, a head on the policy's trunk with its gradient into it;
                ``"detached"``, the same without; ``"separate"``, a network of its own that starts as the model;
                ``"reward"``, one that starts as the reward model. `value_models` compares passes and memory.
            reward_model: for ``value="reward"``: None for the packaged head, the path of a head or classifier, or the
                object itself (`PPO.load` must then be given the policy). Its tokenizer must be the policy's.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: arithmetic, ``"float32"`` or ``"bfloat16"``. Weights that train stay in float32 either way. There is
                no float16: its gradients underflow without loss scaling, which skips steps now and then, and its
                log-probabilities overflow where those of bfloat16, with float32's range, do not.
            checkpointing: keep one hidden state per layer for the backward pass and compute the rest again there: a
                third more computation for a fraction of the memory.
            compiled: run the layers through `torch.compile`; the first pass takes a minute or so.
            offload: let the frozen copy that full training has as its reference rest in main memory, and come to the
                device for its pass. With adapters there is no copy, and on a CPU nothing moves.
            seed: of the adapters' start; the process's random state is left alone.

        Raises:
            ValueError: unknown model, dtype or value, a rank or alpha below 1, a temperature that is not positive, a
                reward model on another tokenizer.
            TypeError: `reward_model` has no weights to start from.
        """
        check_adapters(lora_rank, lora_alpha, adapter)
        check_switches(checkpointing, compiled)
        tokenizer = load_tokenizer(model)
        start = reward_start(value, reward_model, tokenizer)
        adapters = None if lora_rank is None else Adapters(lora_rank, lora_alpha or 2 * lora_rank, seed)
        module, source = load_start(model, adapter, device, rounded=adapters is not None and dtype == "bfloat16")
        common: dict[str, Any] = {
            "source": source,
            "named_size": tokenizer.named_size,
            "temperature": temperature,
            "dtype": dtype,
        }
        lm = LanguageModel(module, **common)
        value_parts = build_value(value, start, lm, adapters)
        reference = start_training(module, adapters, offload, common)
        for trained in (module, *(part.trunk for part in value_parts[1:] if part is not None)):
            switch_layers(trained, checkpointing, compiled)
        settings = {
            "model": os.fspath(model),
            "lora_rank": lora_rank,
            "lora_alpha": lora_alpha,
            "adapter": None if adapter is None else os.fspath(adapter),
            "temperature": temperature,
            "value": value,
            "reward_model": nameable(reward_model),
            "device": device,
            "dtype": dtype,
            "checkpointing": checkpointing,
            "compiled": compiled,
            "offload": offload,
            "seed": seed,
        }
        return cls(lm, reference, tokenizer, settings, *value_parts)

    @property
    def temperature(self) -> float:
        """Of the sampling distribution."""
        return self.lm.temperature

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens suit a pass that keeps its activations."""
        return TRAINED_TOKENS.get(self.lm.device.type, 16384)

    def train(self, mode: bool = True) -> LanguageModelPolicy:  # noqa: ARG002 - torch's signature
        """Stay in evaluation mode: dropout would make ratios differ from 1 before anything was learned."""
        return super().train(False)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The precision of every pass."""
        return precision(self.lm.device.type, self.lm.dtype)

    def engine(self) -> HFEngine:
        """The engine that decodes with these weights."""
        return HFEngine(self)

    def evaluate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_tokens: int,
        *,
        entropy_grad: bool = False,
        action_masks: PackedMasks | None = None,
    ) -> PolicyOutput:
        """Log-probabilities, values and entropies (B, T) of given responses; see `Policy.evaluate`.

        The value of token t is read from the state before it.
        """
        hidden = self.lm.hidden_states(input_ids, attention_mask)
        logprobs, entropies = self.lm.read_response(
            hidden, input_ids, attention_mask, response_tokens, entropy_grad=entropy_grad, action_masks=action_masks
        )
        values = self.response_values(input_ids, attention_mask, response_tokens, hidden)
        return PolicyOutput(logprobs, values, entropies)

    def response_values(
        self, input_ids: Tensor, attention_mask: Tensor, response_tokens: int, hidden: Tensor | None = None
    ) -> Tensor:
        """The values (B, T) of `evaluate` alone: no output head, and no pass of the policy where a network has its own.

        `hidden` (B, L, H) are the policy's hidden states where they are at hand.
        """
        if self.value_network is not None:
            hidden = self.value_network(input_ids, attention_mask)
        elif hidden is None:
            hidden = self.lm.hidden_states(input_ids, attention_mask)
        values: Tensor = self.value_head(hidden[:, -response_tokens - 1 : -1])
        return torch.where(attention_mask[:, -response_tokens:].bool(), values, torch.zeros_like(values))

    def response_distributions(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float32]:
        """Log-distributions (B, T, V) in one pass; see `LanguageModel.response_distributions`."""
        return self.lm.response_distributions(input_ids, attention_mask, response_tokens)

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, V) after each prefix, temperature included; see `Policy.next_logits`."""
        hidden = self.lm.hidden_states(input_ids, attention_mask)
        return self.lm.head.logits(hidden[torch.arange(len(hidden)), last_columns(attention_mask)])

    def stepper(self) -> Stepper:
        """The policy's only one, with which it acts; `clear` frees its cache. It notices when the weights change."""
        return self._stepper

    def act(
        self,
        observations: Mapping[str, NDArray[Any]],
        *,
        generator: np.random.Generator | None = None,
        deterministic: bool = False,
        action_masks: PackedMasks | None = None,
    ) -> NDArray[np.int64] | int:
        """Choose a token for each row, reading each token once; see `acting.act`."""
        return acting.act(
            self, observations, generator=generator, deterministic=deterministic, action_masks=action_masks
        )

    def response_logprobs(
        self,
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any],
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> NDArray[np.float64]:
        """Log-probabilities (B, T) of whole responses, without gradients; see `LanguageModel.response_logprobs`."""
        return self.lm.response_logprobs(input_ids, attention_mask, response_tokens, action_masks)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights that train: adapters and value head, or everything; those of a value network too."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if name in trained}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over trained weights; everything that trains must be there."""
        missing = set(self.state_dict()) - set(state)
        if missing and strict:
            raise ValueError(f"The checkpoint lacks {len(missing)} trained tensors, {sorted(missing)[0]!r} the first.")
        return super().load_state_dict(state, strict=False, assign=assign)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Export the language model for transformers: a PEFT adapter, or the whole model; and the tokenizer.

        The value function stays behind; `PPO.save` writes what training needs to go on.

        Raises:
            ValueError: an earlier adapter is kept beside the one that trains: one alone would be another model.
        """
        check_one_adapter(self.trunk)
        self.trunk.save_pretrained(folder)
        self._save_tokenizer(folder)

    def save_merged(self, folder: str | os.PathLike[str]) -> None:
        """Export the language model for transformers and vLLM as a whole, adapters merged in; and the tokenizer.

        Raises:
            FileExistsError: see `textenv.lm.merged.save_merged`.
        """
        save_merged(self.trunk, folder)
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: str | os.PathLike[str]) -> None:
        if isinstance(self.tokenizer, TextTokenizer):  # bytes need no file
            self.tokenizer.tokenizer.save_pretrained(folder)

    def merged(self, folder: str | os.PathLike[str], **changes: Any) -> LanguageModelPolicy:
        """Save as a whole, and load that as a policy of its own whose reference it is: the start of the next stage.

        Args:
            folder: where the model goes; checkpoints of the new policy name it.
            **changes: of what `from_pretrained` was given for this policy.

        Raises:
            FileExistsError: see `save_merged`.
        """
        self.save_merged(folder)
        return self.from_pretrained(**{**self.settings, "model": os.fspath(folder), "adapter": None, **changes})
