"""What the examples of other libraries share: a small network over prefixes, and the distance to the exact optimum.

It has no command line; `cleanrl_ppo.py`, `tianshou_ppo.py`, `torchrl_ppo.py` and `rllib_ppo.py` import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from textenv.agents.policy import PolicyLogprobs
from textenv.oracle import Evaluation, evaluate_policy, solve
from textenv.toy import standard_toy


class PrefixNetwork(nn.Module):
    """Numbers (N, outputs) for each prefix (N, L): which token stands in which column, through one hidden layer.

    The last layer starts small: a policy begins close to the uniform distribution, which is the toy's reference.
    """

    def __init__(self, vocab_size: int, length: int, outputs: int, hidden_size: int = 64) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.layers = nn.Sequential(
            nn.Linear(length * vocab_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, outputs)
        )
        with torch.no_grad():
            self.layers[-1].weight.mul_(0.01)
            self.layers[-1].bias.zero_()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = nn.functional.one_hot(input_ids.long(), self.vocab_size) * attention_mask[..., None]
        outputs: Tensor = self.layers(tokens.flatten(-2).float())
        return outputs

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The one method that textenv needs of a policy, to charge the KL and to evaluate it."""
        return self(input_ids, attention_mask)


def measure(policy: Any, kl_coef: float) -> Evaluation:
    """What a policy with ``next_logits(input_ids, attention_mask)`` reaches on the standard toy, exactly."""
    return evaluate_policy(standard_toy(), PolicyLogprobs(policy).next_logprobs, kl_coef)


def show(rows: Mapping[str, Evaluation], kl_coef: float) -> None:
    """Print what policies reach beside what the best one does: KL and distance in nats, the rest in units of score."""
    best = solve(standard_toy(), kl_coef)
    optimum = Evaluation(best.score, best.kl, best.value, 0.0, 0.0)
    table = Table("", "score", "KL", "objective", "regret", "distance")
    for name, found in {**rows, "exact optimum": optimum}.items():
        cells = (found.score, found.kl, found.objective, found.regret, found.distance)
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    Console().print(table)
