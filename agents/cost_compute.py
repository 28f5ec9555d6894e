"""Floating-point operations of an iteration, from the sizes of models alone.

A matrix product with a weight costs 2 operations per weight and token: one multiplication, one addition. The backward
pass costs as much again for the gradient of the inputs and as much again for that of the weights, hence 6 for a weight
that trains and 4 for a frozen one that gradients pass through. Adam's step and everything elementwise is left out, and
so are attention's own products, see `attention_flops`.

Legend: N weights that multiply, P prompt tokens, T response tokens, L = P + T, E epochs.
"""

from __future__ import annotations

from textenv.agents.cost_setup import LogprobsFrom, Setup
from textenv.agents.cost_shape import ModelShape


def textbook_flops(weights: int, epochs: int, logprobs_from: LogprobsFrom = "trainer") -> int:
    """Operations per response token of PPO with four full models of N weights: (10 + 12 E) N.

    Writing it 2 N; one look of policy, reference, value and reward model 4 x 2 N; E times forward and backward through
    policy and value model, 2 x 6 N. Where the engine's log-probabilities are kept the policy's look is saved:
    (8 + 12 E) N. Prompts are not counted.

    Args:
        weights: N, of each model.
        epochs: E.
        logprobs_from: ``"trainer"`` or ``"engine"``.

    Example:
        >>> textbook_flops(1, epochs=4), textbook_flops(1, epochs=4, logprobs_from="engine")
        (58, 56)
    """
    frozen_passes = 4 if logprobs_from == "trainer" else 3
    return (2 + 2 * frozen_passes + 2 * 6 * epochs) * weights


def flops(setup: Setup) -> dict[str, float]:
    """Operations per response token of this library's step, by phase.

    A trunk of M weights reads prompts too: c = L / T tokens for each response token. The output head's V H weights see
    response tokens alone. With adapters of A weights:

    | phase    | trunk and adapters               | output head                                 |
    |----------|----------------------------------|---------------------------------------------|
    | generate | 2 M c (adapters are merged)      | 2 V H                                       |
    | score    | 2 M c, reference and score       | 2 V H                                       |
    | logprobs | 2 (M + A) c                      | 2 V H                                       |
    | update   | E (4 M + 6 A) c                  | 4 E V H (logits, and their gradient)        |
    |          | all weights train: 6 E M c       | 8 E V H (logits twice, two gradients)       |

    A separate reward model adds 2 M c to the score, a value trunk of its own a second trunk to logprobs and update;
    checkpointing repeats the trunk's forward pass in every epoch. Where a batch is one micro-batch, the logprobs
    pass is the update's first, and is not counted twice. Where the engine's log-probabilities are kept, it reads values
    alone.
    """
    shape, epochs, lora = setup.shape, setup.epochs, setup.lora_rank is not None
    tokens = setup.length / setup.response_tokens
    trunk, adapted, head = shape.linear * tokens, (shape.linear + setup.adapters) * tokens, float(shape.head)
    trunks = 2 if setup.two_trunks else 1
    score = 2 * trunk + 2 * head + (2 * trunk if setup.reward == "separate" else 0)
    if setup.fused_first_pass:
        logprobs = 0.0
    elif setup.logprobs_from == "engine":
        logprobs = 2 * adapted
    else:
        logprobs = 2 * adapted * trunks + 2 * head
    trained = (4 * shape.linear + 6 * setup.adapters) * tokens if lora else 6 * trunk
    again = 2 * adapted if setup.checkpointing else 0.0
    update = epochs * (trunks * (trained + again) + (4 if lora else 8) * head)
    return {"generate": 2 * trunk + 2 * head, "score": score, "logprobs": logprobs, "update": update}


def attention_flops(shape: ModelShape, length: int) -> int:
    """Operations per token of attention's own products in a forward pass: queries by keys, probabilities by values.

    2 x 2 x width x length per layer where all columns are computed; a causal kernel does half. On SmolLM2 at 48 tokens
    that is 1% of 2 N, at 2,048 tokens half of it.

    Args:
        shape: of the model.
        length: L.
    """
    return 4 * shape.layers * shape.heads * shape.head_size * length
