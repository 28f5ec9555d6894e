"""Where a policy's values come from: a head on its own trunk, or on a network beside it. Knows no policy, no algorithm.

| `value`        | passes | the value loss trains           | starts at        | held beside the policy             |
|----------------|--------|---------------------------------|------------------|------------------------------------|
| ``"trunk"``    | 1      | the head and the policy's trunk | 0                | a head                             |
| ``"detached"`` | 1      | the head                        | 0                | a head                             |
| ``"separate"`` | 2      | the head and a trunk of its own | 0                | a head; adapters or a copied trunk |
| ``"reward"``   | 2      | the head and a trunk of its own | the reward model | the same                           |

Passes are those of one `evaluate`. Adapters of a value trunk lie on the frozen tensors of the policy's, held once:
``"separate"`` on SmolLM2 takes 20 MB at rank 16, and 538 MB where all weights train; a head takes 2 KB. A reward model
on other weights than the policy's brings its own frozen trunk. Gradients and AdamW take three times what trains on top.

Whatever the arithmetic, trained weights, the head and the values are float32.

Legend: B responses, L tokens in a row, H hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from textenv.lm import LanguageModel, load_causal_lm
from textenv.lm.adapters import add_lora, round_frozen_layers
from textenv.lm.stepping import Stepper
from textenv.lm.trunk import HeadlessModel
from textenv.rewards import RewardModel, SequenceClassificationReward

ValueKind = Literal["trunk", "detached", "separate", "reward"]
VALUE_KINDS: tuple[str, ...] = get_args(ValueKind)


class ValueHead(nn.Module):
    """V(h) = w . h + b in float32, starting at 0. State names and shapes are those of a linear layer.

    Args:
        hidden_size: H.
        device: of its weights.
        normalise: read (h - mean) / std over H. Features of unit variance let the head learn at the policy's learning
            rate. Off for a head that was learned on h itself.
        detach: let no gradient into h.
    """

    def __init__(self, hidden_size: int, device: torch.device, *, normalise: bool = True, detach: bool = False) -> None:
        super().__init__()
        self.normalise, self.detach = normalise, detach
        # Zeros draw no random numbers, and keep the first advantages equal to the returns.
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values (...) of hidden states (..., H)."""
        if self.detach:
            hidden = hidden.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.normalise:
                hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            return nn.functional.linear(hidden, self.weight, self.bias).squeeze(-1)

    @torch.no_grad()
    def start_from(self, weight: Tensor, bias: Any) -> None:
        """Take over a reward model's head.

        Args:
            weight: (1, H).
            bias: one number.

        Raises:
            ValueError: it is not as wide as the hidden states.
        """
        if weight.shape != self.weight.shape:
            raise ValueError(
                f"The reward model's head should be as wide as its trunk's hidden states, {self.weight.shape[1]}, got "
                f"{weight.shape[1]}: it was trained on another model than the one it names."
            )
        self.weight.copy_(weight)
        self.bias.fill_(float(bias))


class ValueNetwork(nn.Module):
    """A trunk of the value function's own.

    Args:
        trunk: a transformers model without an output head.
        dtype: arithmetic, ``"float32"`` or ``"bfloat16"``.
    """

    def __init__(self, trunk: Any, dtype: str) -> None:
        super().__init__()
        self.trunk = trunk
        self._reader = HeadlessModel(trunk, dtype)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.trunk.config.get_text_config().hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states (B, L, H); see `LanguageModel.hidden_states`."""
        return self._reader.hidden_states(input_ids, attention_mask)

    def stepper(self) -> Stepper:
        """The same for rows that grow token by token, with a cache of its own; see `Stepper.states`."""
        return Stepper(self._reader)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters to be; see `add_lora`."""

    rank: int
    alpha: int
    seed: int


def shared_copy(model: Any) -> Any:
    """A copy of a module on the same tensors: what is frozen is held once, what is added to one is not in the other."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def build_value(
    kind: str, start: RewardModel | SequenceClassificationReward | None, lm: LanguageModel, adapters: Adapters | None
) -> tuple[ValueHead, ValueNetwork | None]:
    """A value head, and its network where it has one of its own.

    Args:
        kind: one of `VALUE_KINDS`.
        start: what `reward_start` gave.
        lm: the policy's model before it has adapters: frozen weights are shared with it, trained ones are not.
        adapters: None to train all weights of the network.

    Raises:
        ValueError: the reward model's weights cannot be loaded, or are no causal trunk under a linear head.
    """
    if kind in ("trunk", "detached"):
        return ValueHead(lm.hidden_size, lm.device, detach=kind == "detached"), None
    base, weight, bias = lm.model.base_model, None, None
    if isinstance(start, SequenceClassificationReward):
        trunk, weight, bias = _classifier_parts(start, str(lm.device))
    elif start is not None:
        trunk = None if start.source == lm.source else load_causal_lm(start.source, str(lm.device)).base_model
        weight, bias = torch.as_tensor(start.weight)[None], start.bias
    else:
        trunk = None
    if trunk is None:
        trunk = copy.deepcopy(base) if adapters is None else shared_copy(base)
    if adapters is None:
        trunk.requires_grad_(True)
    else:
        if lm.dtype == "bfloat16":
            round_frozen_layers(trunk)
        add_lora(trunk, adapters.rank, adapters.alpha, adapters.seed)
    network = ValueNetwork(trunk, lm.dtype)
    head = ValueHead(network.hidden_size, lm.device, normalise=weight is None)
    if weight is not None:
        head.start_from(weight, bias)
    return head, network


def _classifier_parts(reward: SequenceClassificationReward, device: str) -> tuple[Any, Tensor, Any]:
    """Trunk, head weights (1, H) and bias of a classifier, float32 and frozen.

    Raises:
        ValueError: its score is not linear in the hidden state of a causal trunk.
    """
    from textenv.rewards.sequence_classification import load_classifier

    model = load_classifier(reward.name, device, "float32")
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"`reward_model` should be one linear head on a causal trunk, got {type(model).__name__}. An encoder reads "
            "what has not been written yet, so it cannot value prefixes. Use value='separate'."
        )
    return model.base_model, model.score.weight, 0.0 if model.score.bias is None else model.score.bias
