"""`LanguageModelPolicy`: a causal language model with a value head on its trunk, and its own frozen reference.

With adapters the reference is the same network with the adapters off, so that policy, reference and value function need
one trunk. Dropout is never on: a policy's log-probabilities are a function of its weights alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from textenv.agents.policy import last_columns
from textenv.agents.rollouts.hf import HFEngine
from textenv.agents.types import PolicyOutput
from textenv.lm import LanguageModel, TextTokenizer, load_causal_lm, load_tokenizer, resolve
from textenv.lm.adapters import AdapterFree, add_lora, round_frozen_layers
from textenv.lm.precision import precision


class LanguageModelPolicy(nn.Module):
    """A language model as an actor-critic policy; make it with `from_pretrained`.

    Args:
        lm: the model that trains.
        reference: the frozen model that it started from.
        tokenizer: its tokenizer.
        settings: how it was made, for checkpoints.
    """

    def __init__(
        self, lm: LanguageModel, reference: LanguageModel, tokenizer: TextTokenizer, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.lm, self.reference, self.tokenizer, self.settings = lm, reference, tokenizer, settings
        self.trunk = lm.model
        # Features of unit variance let the head learn at the policy's learning rate; starting at 0 keeps the first
        # advantages equal to the returns.
        self.value_norm = nn.LayerNorm(lm.hidden_size, elementwise_affine=False, device=lm.device)
        self.value_head = nn.utils.skip_init(nn.Linear, lm.hidden_size, 1, device=lm.device)  # draws no random numbers
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        lora_rank: int | None = 16,
        lora_alpha: int | None = None,
        temperature: float = 1.0,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
    ) -> LanguageModelPolicy:
        """Load a causal language model to be trained.

        Args:
            model: ``"smollm2-135m"`` (embedded), a folder, or a Hugging Face hub id.
            lora_rank: rank of the adapters on every linear layer; the reference is then the model with adapters off.
                None trains all weights, with a frozen copy as the reference.
            lora_alpha: adapters are scaled by alpha / rank; None: twice the rank.
            temperature: of the distribution that is sampled, trained and compared with the reference.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: arithmetic, ``"float32"`` or ``"bfloat16"``. Weights that train stay in float32 either way.
            seed: of the adapters' start; the process's random state is left alone.

        Raises:
            ValueError: unknown model or dtype, a rank or alpha below 1, a temperature that is not positive.
        """
        for name, value, none in (
            ("lora_rank", lora_rank, "train all weights"),
            ("lora_alpha", lora_alpha, "use twice the rank"),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` should be an integer of at least 1, or None to {none}, got {value!r}.")
        tokenizer = load_tokenizer(model)
        module = load_causal_lm(model, device)
        common: dict[str, Any] = {
            "source": resolve(model),
            "named_size": tokenizer.named_size,
            "temperature": temperature,
            "dtype": dtype,
        }
        reference: LanguageModel
        if lora_rank is None:
            reference = LanguageModel(copy.deepcopy(module), **common)
            module.requires_grad_(True)
        else:
            if dtype == "bfloat16":
                round_frozen_layers(module)
            add_lora(module, lora_rank, lora_alpha or 2 * lora_rank, seed)
            reference = AdapterFree(module, **common)
        settings = {
            "model": os.fspath(model),
            "lora_rank": lora_rank,
            "lora_alpha": lora_alpha,
            "temperature": temperature,
            "device": device,
            "dtype": dtype,
            "seed": seed,
        }
        return cls(LanguageModel(module, **common), reference, tokenizer, settings)

    @property
    def temperature(self) -> float:
        """Of the sampling distribution."""
        return self.lm.temperature

    def train(self, mode: bool = True) -> LanguageModelPolicy:  # noqa: ARG002 - torch's signature
        """Stay in evaluation mode: dropout would make ratios differ from 1 before anything was learned."""
        return super().train(False)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The precision of every pass."""
        return precision(self.lm.device.type, self.lm.dtype)

    def engine(self) -> HFEngine:
        """The engine that decodes with these weights."""
        return HFEngine(self)

    def evaluate(self, input_ids: Tensor, attention_mask: Tensor, response_tokens: int) -> PolicyOutput:
        """Log-probabilities, values and entropies (B, T) of given responses; see `Policy.evaluate`.

        The value of token t is read from the state before it.
        """
        hidden = self.lm.hidden_states(input_ids, attention_mask)
        logprobs, entropies = self.lm.read_response(hidden, input_ids, attention_mask, response_tokens)
        values = self._values(hidden[:, -response_tokens - 1 : -1])
        values = torch.where(attention_mask[:, -response_tokens:].bool(), values, torch.zeros_like(values))
        return PolicyOutput(logprobs, values, entropies)

    def _values(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.value_head(self.value_norm(hidden.float())).squeeze(-1)
        return values

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, V) after each prefix, temperature included; see `Policy.next_logits`."""
        hidden = self.lm.hidden_states(input_ids, attention_mask)
        return self.lm.head.logits(hidden[torch.arange(len(hidden)), last_columns(attention_mask)])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights that train: adapters and value head, or everything."""
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

        The value head stays behind; `PPO.save` writes what training needs to go on.
        """
        self.trunk.save_pretrained(folder)
        self.tokenizer.tokenizer.save_pretrained(folder)
