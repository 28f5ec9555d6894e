"""`Setup`: a training configuration as its price depends on it, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from textenv.agents.cost_shape import ModelShape
from textenv.agents.language_model import TRAINED_TOKENS
from textenv.agents.value_models import VALUE_KINDS, ValueKind
from textenv.lm.loading import DTYPES

RewardKind = Literal["shared", "separate", "none"]
EngineKind = Literal["hf", "vllm", "server"]
LogprobsFrom = Literal["trainer", "engine"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One policy and how it is trained. The fields are the arguments of `textenv.agents.cost.estimate`.

    Raises:
        ValueError: a number below 1, or a word that names nothing.
    """

    shape: ModelShape
    lora_rank: int | None = 16
    value: ValueKind = "trunk"
    reward: RewardKind = "shared"
    engine: EngineKind = "hf"
    dtype: str = "float32"
    device: str = "cpu"
    batch: int = 64
    prompt_tokens: int = 16
    response_tokens: int = 24
    epochs: int = 4
    num_minibatches: int = 1
    micro_batch_tokens: int | None = None
    logprobs_from: LogprobsFrom = "trainer"
    checkpointing: bool = False
    kv_cache_gib: float = 1.0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("batch", "prompt_tokens", "response_tokens", "epochs", "num_minibatches"):
            self._check_count(name)
        for name in ("lora_rank", "micro_batch_tokens"):
            if getattr(self, name) is not None:
                self._check_count(name)
        words = {
            "value": VALUE_KINDS,
            "reward": get_args(RewardKind),
            "engine": get_args(EngineKind),
            "dtype": DTYPES,
            "logprobs_from": get_args(LogprobsFrom),
        }
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` should be one of {known}, got {getattr(self, name)!r}.")

    def _check_count(self, name: str) -> None:
        count = getattr(self, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"`{name}` should be an integer of at least 1, got {count!r}: there is nothing to price.")

    @property
    def kind(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.partition(":")[0]

    @property
    def number(self) -> int:
        """Bytes of a number in this arithmetic."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def length(self) -> int:
        """L, the tokens of a prompt with its response: budgets are taken to be used up."""
        return self.prompt_tokens + self.response_tokens

    @property
    def adapters(self) -> int:
        """Weights of the adapters on one trunk; 0 where all weights train."""
        return (self.lora_rank or 0) * self.shape.linear_ends

    @property
    def trunk(self) -> int:
        """Weights of a trunk: the model without its output head, which is the embedding too where they are tied."""
        return self.shape.total - (0 if self.shape.tied else self.shape.head)

    @property
    def two_trunks(self) -> bool:
        """Whether the value function has a trunk of its own."""
        return self.value in ("separate", "reward")

    @property
    def trained(self) -> int:
        """Weights that train: policy, value function, value head."""
        policy = self.adapters if self.lora_rank else self.shape.total
        value = (self.adapters if self.lora_rank else self.trunk) if self.two_trunks else 0
        return policy + value + self.shape.hidden_size + 1

    @property
    def pass_tokens(self) -> int:
        """Tokens of one micro-batch: whole rows within the budget."""
        budget = self.micro_batch_tokens or TRAINED_TOKENS.get(self.kind, 16384)
        rows = min(max(1, budget // self.length), -(-self.batch // self.num_minibatches))
        return rows * self.length

    @property
    def one_pass(self) -> bool:
        """Whether a minibatch is one micro-batch."""
        return self.pass_tokens >= -(-self.batch // self.num_minibatches) * self.length

    @property
    def fused_first_pass(self) -> bool:
        """Whether the pass that reads the log-probabilities is also the first one of the update."""
        return self.one_pass and self.num_minibatches == 1
