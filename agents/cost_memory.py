"""Bytes that a configuration takes: what stays, and what each moment of an iteration adds.

Legend: H hidden size, A width of all attention heads, K width of the key (or value) heads, F width of the MLP, V
vocabulary, L tokens of a row, r rank of the adapters.
"""

from __future__ import annotations

from textenv.agents.cost_setup import Setup
from textenv.agents.rollouts.hf import CACHE_TOKENS, FAST_FROM, MAX_ROWS
from textenv.lm.logprobs import chunk_tokens
from textenv.lm.model import TOKENS_PER_PASS
from textenv.lm.packing import WRITTEN_OUT

PROCESS = 470_000_000
"""A process with torch, transformers, peft, Gymnasium and a tokenizer loaded, and nothing else: 366 MB after the
imports, 470 MB with environments (measured: torch 2.13 for CPUs, resident set less the weights)."""

ALLOCATOR = {"cpu": 0.7, "cuda": 0.1}
"""Of what a moment allocates, the share that stands in holes beside it: memory that was freed, stays with the process
and fits no later tensor. On a CPU glibc keeps 0.4 to 1.1 of SmolLM2's activations so, another share in every
configuration, because the second forward pass finds the first one's memory cut up. On a GPU it is taken for a tenth,
which is not measured."""

LOGIT_COPIES = 2
"""Logits and probabilities, of one chunk."""

ADAM = 8
"""Bytes of AdamW's two float32 moments."""


def textbook_bytes(trained: int, frozen: int) -> int:
    """Bytes of weights in mixed precision with Adam: 16 for each that trains, 2 for each frozen one.

    Trained: bfloat16 weight 2, bfloat16 gradient 2, float32 master weight 4, two float32 moments 8. Four models of N
    weights, two of which train, take (2 x 16 + 2 x 2) N = 36 N. Activations come on top.

    Example:
        >>> textbook_bytes(trained=2, frozen=2)
        36
    """
    return 16 * trained + 2 * frozen


def resident(setup: Setup) -> dict[str, int]:
    """What is there all the time, by part.

    Weights that train are float32 (4 bytes) whatever the arithmetic; gradients (4) come and go, AdamW's moments (8)
    stay: 16 in all. Frozen weights take 4; in bfloat16 arithmetic a frozen trunk's linear layers take 2.
    """
    shape, lora = setup.shape, setup.lora_rank is not None
    full = 4 * shape.total
    frozen = full - (4 - setup.number) * shape.linear
    parts = {"process": PROCESS if setup.kind == "cpu" else 0, "policy": frozen if lora else full}
    if lora:
        parts["adapters"] = 4 * setup.adapters
    else:
        parts["reference"] = full
    if setup.two_trunks:
        parts["value network"] = 4 * (setup.adapters if lora else setup.trunk)
    parts["value head"] = 4 * (shape.hidden_size + 1)
    if setup.reward == "separate":
        parts["reward model"] = setup.number * shape.total
    parts["AdamW's moments"] = ADAM * setup.trained
    if setup.engine == "vllm":
        parts["vLLM's weights"] = setup.number * shape.total
        parts["vLLM's key-value cache"] = int(setup.kv_cache_gib * 2**30)
    return parts


def moments(setup: Setup) -> dict[str, dict[str, int]]:
    """What each moment of an iteration adds to `resident`, by part; the largest of them is the peak.

    Gradients are freed before each step's first backward pass. Where a minibatch is one micro-batch they grow while
    activations shrink, so that both are never there in full; with several, both are.
    """
    gradients = 4 * setup.trained
    backward = {"activations": activations(setup), "logits": logits(setup, chunk_tokens(setup.shape.vocab_size))}
    if not setup.one_pass:
        backward["gradients"] = gradients
    if setup.number == 2:
        backward["head in bfloat16"] = 2 * setup.shape.head
    if setup.lora_rank is None:  # the head's gradient is there before the trunk's activations are gone
        backward["gradient of the head"] = 4 * setup.shape.head
    found = {
        "generate": {"gradients": gradients} | _generation(setup),
        "score": {
            "gradients": gradients,
            "frozen pass": _frozen_pass(setup),
            "logits": logits(setup, chunk_tokens(setup.shape.vocab_size)),
        },
        "forward and backward": backward,
        "end of backward": {"gradients": gradients},
    }
    if setup.lora_rank is None and setup.shape.tied:
        # Read as a head and as an embedding: autograd holds both gradients and their sum for a moment.
        found["end of backward"]["gradient of the embedding"] = 2 * 4 * setup.shape.head
    for parts in found.values():
        share = ALLOCATOR.get(setup.kind, ALLOCATOR["cuda"])
        parts["allocator"] = int(share * sum(size for name, size in parts.items() if name != "gradients"))
    return found


def activations(setup: Setup) -> int:
    """What autograd keeps of a micro-batch for its backward pass, in bytes.

    With checkpointing each layer keeps its input alone, and one layer at a time is computed again.
    """
    layer = layer_bytes(setup)
    layers = setup.shape.layers
    per_token = layers * 4 * setup.shape.hidden_size + layer if setup.checkpointing else layers * layer
    per_token += 4 * 4 * setup.shape.hidden_size  # final norm, and the states that the heads read
    trunks = 2 if setup.two_trunks else 1
    return trunks * (per_token * setup.pass_tokens + _rounded_weights(setup))


def layer_bytes(setup: Setup) -> int:
    """What autograd keeps of one Llama-like layer, in bytes per token.

    | kept                                     | float32            | bfloat16 (autocast)                       |
    |------------------------------------------|--------------------|-------------------------------------------|
    | the residual stream, into both norms     | 2 H x 4            | the same: it stays float32                |
    | normed, before the norm's weight         | 2 H x 4, if the weight trains | the same                       |
    | inputs of q, k, v; of gate, up           | 2 H x 4, shared    | 5 H x 2: each layer rounds its own        |
    | q, output, input of o                    | 3 A x 4            | q, output 2 A x 4; input A x 2            |
    | rows of k and v, rows written out        | 2 K x 4            | K x 4 + K x 2                             |
    | attention's probabilities, written out   | heads x L x 4      | heads x L x (4 + 2)                       |
    | gate, up; all weights: also gate's SiLU, the product | 2 F x 4; 4 F x 4 | 2 F x 2; 4 F x 2                |
    | between A and B of the adapters          | layers x r x 4     | layers x r x 2                            |

    Attention is written out up to `WRITTEN_OUT` tokens a row on a CPU. torch's fused kernels keep q, k, v and output in
    rows beside the tokens (8 A x 4; in bfloat16 2 A x 4 and 6 A x 2), and one number per head in place of
    probabilities. Rows are taken to be of unlike length; where all are as long, some of these are one tensor. Other
    architectures differ in the MLP (GPT-2: within a quarter).
    """
    shape, rounded = setup.shape, setup.number == 2
    hidden, heads, width = shape.hidden_size, shape.heads, shape.heads * shape.head_size
    keys = shape.kv_heads * shape.head_size
    stream = 2 * hidden * 4 * (1 if setup.lora_rank else 2)
    inputs = 5 * hidden * 2 if rounded else 2 * hidden * 4
    if setup.kind == "cpu" and setup.length <= WRITTEN_OUT:
        attention = 2 * width * 4 + width * setup.number
        attention += (4 + setup.number) * keys + (4 + (2 if rounded else 0)) * heads * setup.length
    else:
        attention = 2 * width * 4 + 6 * width * setup.number + heads * 4
    mlp = (2 if setup.lora_rank and shape.gated else 4) * shape.mlp_size * setup.number
    adapters = (setup.lora_rank or 0) * shape.linear_layers * setup.number // shape.layers
    return stream + inputs + attention + mlp + adapters


def _rounded_weights(setup: Setup) -> int:
    """Autocast's bfloat16 copies of float32 weights that train, kept from forward to backward."""
    if setup.number == 4:
        return 0
    return 2 * (setup.adapters if setup.lora_rank else setup.shape.linear)


def logits(setup: Setup, tokens: int) -> int:
    """Float32 logits of some tokens at once, with what is computed beside them."""
    return LOGIT_COPIES * 4 * tokens * setup.shape.vocab_size


def whole_logits(setup: Setup) -> int:
    """What (B, L, V) float32 logits of a minibatch and their gradient would take; they are never made."""
    rows = -(-setup.batch // setup.num_minibatches)
    return 2 * 4 * rows * setup.length * setup.shape.vocab_size


def kv_cache(setup: Setup) -> int:
    """Keys and values of the responses that `HFEngine` writes together, and of their prompts."""
    tokens = min(setup.batch * setup.length, CACHE_TOKENS.get(setup.kind, CACHE_TOKENS["cuda"]))
    keys = setup.shape.kv_heads * setup.shape.head_size
    return 2 * setup.shape.layers * keys * setup.number * max(tokens, setup.length)


def _generation(setup: Setup) -> dict[str, int]:
    if setup.engine != "hf":
        return {}
    parts = {"key-value cache": kv_cache(setup), "logits": logits(setup, min(setup.batch, MAX_ROWS))}
    if setup.response_tokens >= FAST_FROM and (setup.kind == "cpu" or setup.lora_rank):
        head = 4 * setup.shape.head if setup.kind == "cpu" else 0  # packed there, in float32
        parts["merged layers"] = setup.number * setup.shape.linear + head
    return parts


def _frozen_pass(setup: Setup) -> int:
    """The widest moment of a layer without gradients, inside the MLP: its four tensors, the stream and its norm."""
    tokens = min(setup.batch * setup.length, max(TOKENS_PER_PASS.get(setup.kind, 16384), setup.length))
    return 4 * (4 * setup.shape.mlp_size + 2 * setup.shape.hidden_size) * tokens
