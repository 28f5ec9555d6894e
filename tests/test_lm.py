"""Language models: loading, log-probabilities in chunks, left padding, lazy sharing, adapters, tokenizers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from lm_helpers import (
    EOS,
    NAMED,
    ROWS,
    gpt2,
    llama,
    padded,
    random_rows,
    tensors,
)

from textenv.lm import (
    LanguageModel,
    LazyLanguageModel,
    OutputHead,
    loading,
    token_logprobs,
)
from textenv.lm import lazy as lm_lazy
from textenv.lm import model as lm_model
from textenv.lm.adapters import AdapterFree, add_lora, round_frozen_layers
from textenv.lm.precision import fast_dtype, precision

# Log-probabilities in chunks

M, H, V = 11, 6, 40
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.6},
    "unnamed ids": {"named_size": 33},
    "softcap": {"softcap": 2.0},
    "all of it": {"bias": True, "temperature": 0.6, "named_size": 33, "softcap": 2.0},
}


def head_inputs(bias=False, **options):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, H, generator=generator)
    targets = torch.randint(33, (M,), generator=generator)
    weight, offsets = torch.randn(V, H, generator=generator), torch.randn(V, generator=generator)
    return hidden, targets, weight, (offsets if bias else None), options


def whole_distribution(hidden, weight, bias, temperature=1.0, named_size=None, softcap=None):
    """The definition, in float64 with all the logits at once."""
    logits = hidden.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax((logits / temperature)[:, :named_size], -1)


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("trains", ["nothing", "hidden", "head"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_chunks_equal_the_whole_distribution(options, trains, chunk):
    hidden, targets, weight, bias, options = head_inputs(**options)
    hidden.requires_grad_(trains != "nothing")
    weight.requires_grad_(trains == "head")
    logprobs, entropies = token_logprobs(hidden, targets, OutputHead(weight, bias, **options), chunk)

    exact = whole_distribution(hidden, weight, bias, **options)
    chosen = exact.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(1), atol=1e-5, rtol=0)
    assert not entropies.requires_grad and logprobs.requires_grad == (trains != "nothing")
    if trains == "nothing":
        return
    wanted = [hidden, weight] if trains == "head" else [hidden]
    coefficients = torch.linspace(-1, 2, M)
    ours = torch.autograd.grad((logprobs * coefficients).sum(), wanted)
    theirs = torch.autograd.grad((chosen * coefficients).sum(), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_no_tokens_no_logprobs():
    hidden, targets, weight, *_ = head_inputs()
    hidden.requires_grad_()
    logprobs, entropies = token_logprobs(hidden[:0], targets[:0], OutputHead(weight))
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(M, H))


def saved_for_backward(compute):
    """Sizes of the tensors that autograd keeps."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        compute()
    return sizes


@pytest.mark.parametrize("trains_head", [False, True])
def test_nothing_of_vocabulary_size_waits_for_the_backward_pass(trains_head):
    tokens, width, words = 64, 8, 1000
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(words, width, requires_grad=trains_head)
    targets = torch.zeros(tokens, dtype=torch.long)
    ours = saved_for_backward(lambda: token_logprobs(hidden, targets, OutputHead(weight), chunk=16))
    assert max(ours) <= max(tokens * width, words * width * trains_head)
    plain = saved_for_backward(lambda: torch.log_softmax(hidden @ weight.T, -1)[:, 0])
    assert max(plain) == tokens * words


def test_largest_tensor_is_a_chunk_of_logits():
    class Sizes(torch.overrides.TorchFunctionMode):
        largest = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
            return result

    hidden, weight = torch.randn(64, 8), torch.randn(1000, 8)
    with Sizes() as sizes:
        token_logprobs(hidden, torch.zeros(64, dtype=torch.long), OutputHead(weight), chunk=16)
    assert sizes.largest == 16 * 1000


# The same row alone and in company (left padding)


def language_model(module, **options) -> LanguageModel:
    return LanguageModel(module, source="tiny", **options)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def lm(request):
    """GPT-2's learned positions notice a wrong position id; Llama's only see distances."""
    return language_model(llama() if request.param == "llama" else gpt2().requires_grad_(False), named_size=NAMED)


P, T = 30, 6
UNEQUAL = random_rows([3, 30, 12], [6, 2, 1], NAMED)


def test_response_logprobs_alone_and_in_company(lm):
    together = lm.response_logprobs(*padded(UNEQUAL, P, T), T)
    assert together.shape == (3, T) and together.dtype == np.float64
    for row, (prompt, response) in enumerate(UNEQUAL):
        alone = lm.response_logprobs(*padded([(prompt, response)], len(prompt), len(response)), len(response))
        np.testing.assert_allclose(together[row, : len(response)], alone[0], atol=1e-5)
        assert (together[row, len(response) :] == 0).all()
    assert together[0].std() > 0.5  # far from uniform, so that a shifted row would show


def test_response_logprobs_are_the_models_own(lm):
    """One unpadded row at a time through transformers as it comes."""
    together = lm.response_logprobs(*padded(UNEQUAL, P, T), T)
    for row, (prompt, response) in enumerate(UNEQUAL):
        with torch.no_grad():
            logits = lm.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1, :NAMED]
        expected = torch.log_softmax(logits, -1)[torch.arange(len(response)), torch.tensor(response)]
        np.testing.assert_allclose(together[row, : len(response)], expected, atol=1e-5)


def test_one_action_at_a_time_equals_whole_responses(lm):
    ids, mask = padded(UNEQUAL, P, T)
    whole = lm.response_logprobs(ids, mask, T)
    for t in range(T):
        rows = [row for row, (_, response) in enumerate(UNEQUAL) if len(response) > t]
        seen = mask[rows] * (np.arange(P + T) < P + t)
        step = lm({"input_ids": ids[rows], "attention_mask": seen}, ids[rows, P + t])
        assert step.dtype == np.float64
        np.testing.assert_allclose(step, whole[rows, t], atol=1e-5)


def test_states_alone_and_in_company(lm):
    ids, mask = padded(UNEQUAL, P, T)
    columns = np.array([P + len(response) - 1 for _, response in UNEQUAL])
    together = lm.states_at(ids, mask, columns)
    assert together.dtype == torch.float32 and not together.requires_grad
    for row, (prompt, response) in enumerate(UNEQUAL):
        tokens = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            alone = lm.model.base_model(tokens).last_hidden_state[0, -1]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=0)


def test_position_ids_are_what_makes_them_equal():
    lm = language_model(gpt2())
    ids, mask = tensors(*padded(UNEQUAL, P, T))
    with torch.no_grad():
        without = lm.model.base_model(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
        ours = lm.hidden_states(ids, mask)
    torch.testing.assert_close(without[1, :P], ours[1, :P])  # 30 tokens: no padding
    assert (without[0, P - 1] - ours[0, P - 1]).abs().max() > 0.1  # 3 tokens


@pytest.mark.parametrize("fill", [EOS, 17, ROWS - 1])
def test_ids_in_padding_move_nothing_by_a_bit(lm, fill):
    clean, dirty = (padded(UNEQUAL, P, T, fill) for fill in (1, fill))
    np.testing.assert_array_equal(lm.response_logprobs(*clean, T), lm.response_logprobs(*dirty, T))


def test_blocks_of_a_pass_do_not_show(lm, monkeypatch):
    ids, mask = padded(UNEQUAL, P, T)
    whole = lm.response_logprobs(ids, mask, T)
    monkeypatch.setattr(lm_model, "TOKENS_PER_PASS", {"cpu": 1})
    np.testing.assert_allclose(lm.response_logprobs(ids, mask, T), whole, atol=1e-5)


def test_rows_of_like_length_go_together(lm, monkeypatch):
    """Blocks of two out of short, long, short, long: attention holds little padding."""
    rows = random_rows([3, 30, 3, 30], [1, 6, 2, 5], NAMED)
    widths = []
    monkeypatch.setattr(lm_model, "TOKENS_PER_PASS", {"cpu": 2 * (P + T)})
    hook = lm.model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    lm.response_logprobs(*padded(rows, P, T), T)
    hook.remove()
    assert widths == [4 + 5, 36 + 35]  # tokens, without any padding


def test_unnamed_ids_have_probability_zero(lm):
    ids, mask = padded([([5, 9], [])], 2, 1)
    observation = {"input_ids": np.repeat(ids, ROWS, 0), "attention_mask": np.repeat(mask, ROWS, 0)}
    logprobs = lm(observation, np.arange(ROWS))
    assert np.exp(logprobs[:NAMED]).sum() == pytest.approx(1, abs=1e-5)
    assert (logprobs[NAMED:] == -np.inf).all()


@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_temperature_is_in_the_logprobs(temperature):
    module = llama()
    ids, mask = padded(UNEQUAL, P, T)
    logprobs = language_model(module, temperature=temperature).response_logprobs(ids, mask, T)
    prompt, response = UNEQUAL[0]
    with torch.no_grad():
        logits = module(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    tempered = torch.softmax(logits, -1) ** (1 / temperature)
    expected = (tempered / tempered.sum(-1, keepdim=True))[torch.arange(len(response)), torch.tensor(response)].log()
    np.testing.assert_allclose(logprobs[0, : len(response)], expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_without_a_distribution_are_refused(temperature):
    with pytest.raises(ValueError, match=r"`temperature` should be a positive number, got .*use 1\.0"):
        language_model(llama(), temperature=temperature)


# What a model does to its logits


def gemma2(**changes):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    options = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**(options | changes))).eval().requires_grad_(False)


def test_softcapped_logits_are_reproduced():
    module = gemma2(final_logit_softcapping=1.5)
    prompt, response = [3, 7, 9], [11, 2, 30]
    ours = language_model(module).response_logprobs(*padded([(prompt, response)], 3, 3), 3)
    with torch.no_grad():
        logits = module(torch.tensor([[*prompt, *response]])).logits[0, 2:-1]
    assert logits.abs().max() <= 1.5 and logits.abs().mean() > 0.5
    np.testing.assert_allclose(ours[0], torch.log_softmax(logits, -1)[range(3), response], atol=1e-5)


def test_a_model_that_scales_its_logits_is_refused():
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        logit_scale=0.0625,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    with pytest.raises(ValueError, match=r"tiny: CohereForCausalLM post-processes its logits .* would be wrong"):
        language_model(CohereForCausalLM(config).eval())


# Lazy models


def test_lazy_models_load_at_first_use_and_share(tiny_model, monkeypatch):
    loads = []
    load = loading.load_causal_lm
    monkeypatch.setattr(lm_lazy, "load_causal_lm", lambda *a: loads.append(a) or load(*a))
    warm, cold = LazyLanguageModel(tiny_model, named_size=NAMED), LazyLanguageModel(tiny_model, temperature=0.5)
    assert loads == []
    ids, mask = padded(UNEQUAL, P, T)
    np.testing.assert_array_equal(
        warm.response_logprobs(ids, mask, T), language_model(llama(), named_size=NAMED).response_logprobs(ids, mask, T)
    )
    assert warm.load().model is cold.load().model and len(loads) == 1
    assert (warm.load().temperature, cold.load().temperature) == (1.0, 0.5)
    assert LazyLanguageModel(tiny_model, dtype="bfloat16").load().model is not warm.load().model


def test_nobody_holds_on_to_a_model_that_nobody_uses(tiny_model):
    lazy = LazyLanguageModel(tiny_model)
    lazy.load()
    key = (lazy.source, "cpu", "float32")
    assert key in lm_lazy._loaded
    del lazy
    import gc

    gc.collect()
    assert key not in lm_lazy._loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_carry_the_name_and_not_the_weights(tiny_model, duplicate):
    lazy = LazyLanguageModel(tiny_model, named_size=NAMED, temperature=0.7)
    lazy.load()
    other = duplicate(lazy)
    assert other._model is None and len(pickle.dumps(lazy)) < 1000
    ids, mask = padded(UNEQUAL, P, T)
    np.testing.assert_array_equal(other.response_logprobs(ids, mask, T), lazy.response_logprobs(ids, mask, T))
    assert other.load().model is lazy.load().model


# Adapters


def test_adapters_start_as_the_identity_and_come_off():
    module = llama()
    ids, mask = tensors(*padded(UNEQUAL, P, T))
    with torch.no_grad():
        before = language_model(module).hidden_states(ids, mask)
        add_lora(module, rank=4, alpha=8, seed=0)
        adapted, free = language_model(module), AdapterFree(module, source="tiny")
        assert torch.equal(adapted.hidden_states(ids, mask), before)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert not torch.allclose(adapted.hidden_states(ids, mask), before, atol=0.1)
        assert torch.equal(free.hidden_states(ids, mask), before)
        assert not torch.allclose(adapted.hidden_states(ids, mask), before, atol=0.1)  # on again


def test_adapters_are_on_again_and_trainable_after_an_error():
    module = llama()
    add_lora(module, rank=4, alpha=8, seed=0)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    with pytest.raises(RuntimeError):
        AdapterFree(module, source="tiny").hidden_states(torch.zeros(1, 3), torch.ones(2, 7))
    assert [name for name, parameter in module.named_parameters() if parameter.requires_grad] == trained
    assert not module.base_model.layers[0].mlp.up_proj.disable_adapters


def test_adapters_are_on_every_linear_layer_but_the_head():
    module = llama(tie_word_embeddings=False)
    add_lora(module, rank=4, alpha=8, seed=0)
    adapted = {n.removesuffix(".lora_A") for n, m in module.named_modules() if n.endswith("lora_A")}
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(adapted) == 2 * len(layers) and {name.split(".")[-1] for name in adapted} == set(layers)
    assert all("lora_" in name for name, parameter in module.named_parameters() if parameter.requires_grad)


def adapter_starts(seed):
    module = llama()
    add_lora(module, rank=4, alpha=8, seed=seed)
    return [parameter.clone() for name, parameter in module.named_parameters() if "lora_A" in name]


def test_seed_decides_the_adapters_and_torch_is_left_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = adapter_starts(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(77)
    assert all(torch.equal(a, b) for a, b in zip(first, adapter_starts(0), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, adapter_starts(1), strict=True))


def test_rounding_spares_what_carries_precision():
    module = llama(tie_word_embeddings=False)
    round_frozen_layers(module)
    assert module.lm_head.weight.dtype == module.base_model.embed_tokens.weight.dtype == torch.float32
    assert module.base_model.norm.weight.dtype == torch.float32
    assert module.base_model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


# Precision


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_precision_is_left_as_it_was_found_even_after_an_error(dtype, before):
    original = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        with pytest.raises(RuntimeError, match="inside"), precision("cpu", dtype):
            assert torch.get_float32_matmul_precision() == "medium"
            assert torch.is_autocast_enabled("cpu") == (dtype == "bfloat16")
            raise RuntimeError("inside")
        assert torch.get_float32_matmul_precision() == before and not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(original)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"avx2": True, "avx512_bf16": False}, "float32"),
    ],
)
def test_fast_dtype_follows_the_processor(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fast_dtype("cpu") == expected


def test_logits_stay_float32_under_autocast():
    hidden, targets, weight, *_ = head_inputs()
    with precision("cpu", "bfloat16"):
        inside = token_logprobs(hidden, targets, OutputHead(weight))[0]
    assert torch.equal(inside, token_logprobs(hidden, targets, OutputHead(weight))[0])
