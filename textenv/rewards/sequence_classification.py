"""Any Hugging Face sequence-classification checkpoint as a scorer, with its own tokenizer and text in between.

Legend: B responses, L tokens, C classes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.lm.loading import DTYPES, quiet_progress
from textenv.lm.offload import HOME, at_work
from textenv.lm.precision import precision
from textenv.rewards.batches import check_pairs, score_by_length

SCORE_OFFSET = "score_offset"
"""What a reward model's configuration calls the constant that is added to its scores: transformers' heads on decoders
have no bias to keep it in."""
BATCH_SIZE = 32
NO_LIMIT = 10**6
"""Tokenizers without a length limit report a huge number."""


class SequenceClassificationReward:
    """Scores texts with a classifier: the logit of a one-logit head, or the log-probability of one label. A scorer.

    The classifier sees text, never the policy's ids, so its vocabulary and chat template may differ from the policy's.
    Rows are padded on the right behind an attention mask, so a padded batch equals each row alone. Decoder-type heads
    are read at the last real token, which the mask decides: transformers finds it by comparing ids with the padding id,
    and misses where that is also the end-of-sequence id.

    The weights are loaded at the first call; pickling and deep copies carry the name, not the weights.

    Args:
        name_or_path: a folder or hub id with safetensors weights. No code from it is run.
        device: a torch device.
        dtype: ``"float32"`` or ``"bfloat16"``, weights and arithmetic.
        batch_size: texts per pass.
        max_length: longer texts lose tokens at their *start*, since what is judged stands at the end; `truncated`
            counts them. None refuses texts beyond the model's own limit.
        label: which class of a head with several, by id or name. The score is the log-softmax of its logit (for
            ``multi_label_classification`` heads, whose labels are independent, the log-sigmoid).
        offload: let the weights rest in main memory, and come to `device` to score.
        template: makes the text from (prompt, response), such as a chat template; None joins the two.

    Attributes:
        truncated: how many texts were cut to `max_length` so far.

    Raises:
        ValueError: unknown checkpoint, dtype or label; several labels and none chosen.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        device: str = "cpu",
        dtype: str = "float32",
        *,
        batch_size: int = BATCH_SIZE,
        max_length: int | None = None,
        label: int | str | None = None,
        offload: bool = False,
        template: Callable[[str, str], str] | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"`dtype` should be one of {DTYPES}, got {dtype!r}.")
        if batch_size < 1 or (max_length is not None and max_length < 1):
            raise ValueError(f"`batch_size` and `max_length` should be at least 1, got {batch_size} and {max_length}.")
        self.name, self.device, self.dtype = os.fspath(name_or_path), device, dtype
        self.batch_size, self.max_length, self.template, self.offload = batch_size, max_length, template, offload
        self.truncated = 0
        self._config, self._tokenizer = load_config_and_tokenizer(self.name)
        self.label_id = _label_id(self._config, label, self.name)
        self._model: Any = None

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **_context: ignored.

        Returns:
            scores (B,), float64.

        Raises:
            ValueError: the numbers of prompts and responses differ, a text has no tokens, or one is too long.
        """
        check_pairs(prompts, responses)
        join = self.template or (lambda prompt, response: prompt + response)
        rows = [self._encode(join(p, r), index) for index, (p, r) in enumerate(zip(prompts, responses, strict=True))]
        model = self._load()
        with at_work(model, torch.device(self.device)) if self.offload else contextlib.nullcontext():
            return score_by_length(rows, self.batch_size, lambda block: self._read(self._logits(block)))

    def _encode(self, text: str, index: int) -> list[int]:
        """Ids of one text with the classifier's own special tokens, at most `max_length` or the model's limit."""
        ids, was_cut = encode_text(text, self._tokenizer, self._config, self.max_length, f"Row {index}", self.name)
        self.truncated += was_cut
        return ids

    @torch.no_grad()
    def _logits(self, rows: list[list[int]]) -> Tensor:
        """Logits (B, C), float32."""
        model = self._load()
        lengths = torch.tensor([len(row) for row in rows])
        attention_mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()  # (B, L)
        input_ids = torch.full_like(attention_mask, self._pad_id)
        input_ids[attention_mask.bool()] = torch.tensor([i for row in rows for i in row])
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": attention_mask.to(self.device)}
        with precision(self.device, self.dtype):
            if not is_decoder_type(model):
                logits: Tensor = model(**inputs).logits
            else:
                hidden = model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, L, H)
                logits = model.score(hidden[torch.arange(len(rows)), (lengths - 1).to(hidden.device)])
        return logits.float()

    @property
    def _pad_id(self) -> int:
        """The checkpoint's padding id where it has one: some encoders number their positions by it."""
        for candidate in (self._config.get_text_config().pad_token_id, self._tokenizer.pad_token_id):
            if candidate is not None:
                return int(candidate)
        return 0

    def _read(self, logits: Tensor) -> NDArray[np.float64]:
        """Scores (B,) from logits (B, C)."""
        logits = logits.double().cpu()
        if self.label_id is None:
            read = logits[:, 0]
        elif self._config.problem_type == "multi_label_classification":
            read = torch.nn.functional.logsigmoid(logits[:, self.label_id])
        else:
            read = torch.log_softmax(logits, -1)[:, self.label_id]
        scores: NDArray[np.float64] = read.numpy()
        return scores

    def _load(self) -> Any:
        if self._model is None:
            self._model = load_classifier(self.name, HOME if self.offload else self.device, self.dtype)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {**self.__dict__, "_model": None}


def load_config_and_tokenizer(name: str) -> tuple[Any, Any]:
    """A checkpoint's configuration and tokenizer, which cuts long texts at their start.

    Raises:
        ValueError: there is none of the name.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(name, trust_remote_code=False, truncation_side="left")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No classifier could be loaded from {name!r}. It should be a folder holding config.json, safetensors and "
            f"a tokenizer, or a Hugging Face hub id (which needs a network the first time). Cause: {error}"
        ) from error


def load_classifier(name: str, device: str, dtype: str) -> Any:
    """The checkpoint's model, frozen, in evaluation mode.

    Raises:
        ValueError: it has no weights for the classification head; transformers would make random ones up.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        with quiet_progress():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} holds no sequence classifier in safetensors. Cause: {error}") from error
    missing = ", ".join(sorted(report["missing_keys"]))
    if missing:
        raise ValueError(
            f"{name!r} should be a trained sequence classifier, but has no weights for {missing}. Random ones "
            "would give meaningless scores. Is it a language model without a classification head?"
        )
    offset = getattr(model.config, SCORE_OFFSET, 0.0)
    if is_decoder_type(model) and offset:
        bias = torch.full_like(model.score.weight[:, 0], float(offset))
        model.score.bias = torch.nn.Parameter(bias if model.score.bias is None else model.score.bias.data + bias)
    return model.to(device).eval().requires_grad_(False)


def is_decoder_type(model: Any) -> bool:
    """Whether the head is one linear layer, ``score``, on a causal model's last token, as transformers builds them."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def _label_id(config: Any, label: int | str | None, name: str) -> int | None:
    """The class to read, None for the only logit of a one-logit head."""
    labels = {int(i): str(text) for i, text in config.id2label.items()}
    known = ", ".join(f"{i} ({text})" for i, text in sorted(labels.items()))
    if label is None:
        if len(labels) == 1:
            return None
        raise ValueError(f"`label` should say which class of {name!r} is the score, one of {known}; got None.")
    matches = [i for i, text in labels.items() if label in (i, text)]
    if not matches:
        raise ValueError(f"`label` should be a class of {name!r}, one of {known}; got {label!r}.")
    return None if len(labels) == 1 else matches[0]


def _length_limit(config: Any, tokenizer: Any) -> int:
    """Tokens that the classifier can read: what its tokenizer says, at most its positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    return int(min(positions, tokenizer.model_max_length, NO_LIMIT))


def encode_text(
    text: str, tokenizer: Any, config: Any, max_length: int | None, row: str, name: str
) -> tuple[list[int], bool]:
    """Ids of one text as a classifier reads it: with its own special tokens, and one BOS where it has one.

    Args:
        text: prompt and response together.
        tokenizer: from `load_config_and_tokenizer`, so that it cuts at the start.
        config: the checkpoint's.
        max_length: longer texts lose tokens at their start; None refuses texts beyond the model's own limit.
        row: names the text in errors.
        name: the checkpoint's.

    Returns:
        The ids, and whether the text was cut.

    Raises:
        ValueError: the text has no tokens, or too many.
    """
    ids = _one_bos(list(tokenizer(text, truncation=False, verbose=False).input_ids), tokenizer)
    if not ids:
        raise ValueError(f"{row}: the text {text!r} has no tokens for {name}, so it cannot be scored.")
    limit = min(_length_limit(config, tokenizer), max_length or NO_LIMIT)
    if len(ids) <= limit:
        return ids, False
    if max_length is None:
        raise ValueError(
            f"{row}: a text should have at most {limit} tokens for {name}, got {len(ids)}: "
            f"{text[:80]!r}... Pass max_length={limit} to cut texts at their start, or shorten the responses."
        )
    # The tokenizer was loaded with truncation_side="left": special tokens stay, the text's first tokens go.
    return _one_bos(list(tokenizer(text, truncation=True, max_length=limit).input_ids), tokenizer), True


def _one_bos(ids: list[int], tokenizer: Any) -> list[int]:
    """One beginning-of-sequence token where a template had already written the one that the tokenizer adds."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids
