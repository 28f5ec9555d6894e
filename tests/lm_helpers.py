"""Tiny random language models, saved to folders as users have them, and small policies for the toy language."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from textenv.agents.policy import output_from_logits
from textenv.agents.types import PolicyOutput

EOS = 0
LETTERS = [chr(code) for code in range(32, 127)]
MERGES = [("t", "h"), ("th", "e"), ("g", "o"), ("go", "o"), ("goo", "d")]
NAMED = 1 + len(LETTERS) + len(MERGES)
"""Ids that the tokenizer names; every tiny model has some more rows."""
ROWS = NAMED + 7

PROMPTS = ["the a", "the long and winding road of go", "good", "a bc"]


def byte_tokenizer(bos: bool = False, appends_eos: bool = False) -> PreTrainedTokenizerFast:
    """ASCII byte-level BPE with a few merges. `<eos>` is id 0 and, as in SmolLM2, the padding token too."""
    encode = {char: bytes_char for char, bytes_char in zip(LETTERS, _byte_level(LETTERS), strict=True)}
    pieces = ["<eos>", *encode.values(), *("".join(pair) for pair in MERGES), *(["<bos>"] if bos else [])]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos or appends_eos:
        template = f"{'<bos> ' if bos else ''}$A{' <eos>' if appends_eos else ''}"
        special = [(name, vocab[name]) for name in ("<bos>", "<eos>") if name in vocab]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", bos_token="<bos>" if bos else None
    )


def _byte_level(chars: Sequence[str]) -> list[str]:
    """How byte-level vocabularies spell these characters (a space is a G with a dot)."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [split.pre_tokenize_str(char)[0][0] for char in chars]


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of 30 thousand random weights, large enough for its distributions to be far from uniform."""
    options: dict[str, Any] = {
        "vocab_size": ROWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(options | changes))).eval().requires_grad_(False)


def gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    """A GPT-2 (learned positions) whose configuration asks for dropout everywhere."""
    config = GPT2Config(
        vocab_size=ROWS,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.3,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def save_model(folder: Path, model: Any, generation: dict[str, Any] | None = None) -> str:
    """A folder as transformers saves it: weights, configuration, tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def padded(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_tokens: int, response_tokens: int, fill: int = 0
):
    """(prompt, response) rows as environments hold them: numpy input_ids and attention_mask (B, P + T)."""
    ids = np.full((len(rows), prompt_tokens + response_tokens), fill, dtype=np.int32)
    mask = np.zeros(ids.shape, dtype=np.int8)
    for row, (prompt, response) in enumerate(rows):
        columns = slice(prompt_tokens - len(prompt), prompt_tokens + len(response))
        ids[row, columns] = [*prompt, *response]
        mask[row, columns] = 1
    return ids, mask


def random_rows(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], vocab_size: int, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Rows of random ids of the lengths asked for."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(vocab_size, size=p).tolist(), rng.integers(vocab_size, size=t).tolist())
        for p, t in zip(prompt_lengths, response_lengths, strict=True)
    ]


def tensors(*arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.as_tensor(array) for array in arrays]


class GRUPolicy(nn.Module):
    """A recurrent policy: thirty lines that know nothing of textenv but two method names. Starts uniform."""

    def __init__(self, vocab_size: int, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab_size, width)
            self.cell = nn.GRUCell(width, width)
            self.head = nn.Linear(width, vocab_size + 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        state = torch.zeros(len(input_ids), self.cell.hidden_size)
        states = []
        for ids, real in zip(input_ids.T.long(), attention_mask.T.bool(), strict=True):
            state = torch.where(real[:, None], self.cell(self.embedding(ids), state), state)
            states.append(state)
        return torch.stack(states, 1)  # (B, L, width)

    def evaluate(self, input_ids: Tensor, attention_mask: Tensor, response_tokens: int) -> PolicyOutput:
        before = self.states(input_ids, attention_mask)[:, -response_tokens - 1 : -1]
        out = self.head(before)
        return output_from_logits(out[..., 1:], out[..., 0], input_ids, attention_mask[:, -response_tokens:])

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.states(input_ids, attention_mask)[:, -1])[:, 1:]
