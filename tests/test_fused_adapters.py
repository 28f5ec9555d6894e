"""A fused LoRA layer against `peft`'s own: outputs and gradients."""

import copy
import pickle

import pytest
import torch
from lm_helpers import gpt2, llama
from peft.tuners.lora.layer import Linear
from transformers.models.llama.modeling_llama import LlamaMLP

from textenv.lm.adapters import adapters_off, add_lora
from textenv.lm.fused_adapters import FusedLinear


def pair(**changes):
    """One model with adapters that do something, fused, and the same as `peft` has it."""
    fused = llama(hidden_size=64, **changes)
    add_lora(fused, 4, 8, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in fused.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1, generator=generator)
    plain = copy.deepcopy(fused)
    for module in plain.modules():
        if type(module) is FusedLinear:
            module.__class__ = Linear
        elif isinstance(module, LlamaMLP):
            assert type(module) is not LlamaMLP
            module.__class__ = LlamaMLP
    return fused, plain


def outcome(model, dtype):
    ids = torch.arange(24).view(2, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(input_ids=ids).logits.float()
        logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
def test_outputs_and_gradients_are_pefts(changes):
    fused, plain = pair(**changes)
    if changes:
        for one, other in zip(fused.modules(), plain.modules(), strict=True):
            if isinstance(one, FusedLinear):
                one.get_base_layer().bias.data.uniform_(-1, 1)
                other.get_base_layer().bias.data.copy_(one.get_base_layer().bias)
    assert sum(type(module) is FusedLinear for module in fused.modules()) == 14
    (ours, mine), (theirs, their) = outcome(fused, "float32"), outcome(plain, "float32")
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert mine.keys() == their.keys() and len(mine) == 28
    for name in mine:
        assert their[name].abs().max() > 1e-6
        torch.testing.assert_close(mine[name], their[name], atol=1e-6, rtol=1e-4)


def test_in_bfloat16_they_are_as_near_to_float32_as_pefts():
    fused, plain = pair()
    (exact, slopes), results = outcome(copy.deepcopy(plain), "float32"), {}
    for name, model in (("fused", fused), ("peft", plain)):
        logits, grads = outcome(model, "bfloat16")
        gap = torch.cat([(grads[key] - slopes[key]).flatten() for key in slopes]).norm()
        results[name] = (logits - exact).square().mean().sqrt(), gap
        assert all(grad.dtype == torch.float32 for grad in grads.values())
    for ours, theirs in zip(results["fused"], results["peft"], strict=True):
        assert 0 < ours < 1.3 * theirs


def test_with_adapters_off_it_is_the_base_model():
    fused, _ = pair()
    base = llama(hidden_size=64)
    ids = torch.arange(12)[None]
    with torch.no_grad(), adapters_off(fused):
        assert torch.equal(fused(input_ids=ids).logits, base(input_ids=ids).logits)
    with torch.no_grad():
        assert not torch.allclose(fused(input_ids=ids).logits, base(input_ids=ids).logits)


def test_merging_is_still_pefts():
    fused, plain = pair()
    for module in fused.modules():
        if isinstance(module, FusedLinear):
            module.merge()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(fused(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_copies_and_pickles_are_the_same_model_with_tensors_of_its_own():
    fused, _ = pair()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = fused(input_ids=ids).logits
        for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            kinds = [type(module) for module in twin.modules()]
            assert kinds == [type(module) for module in fused.modules()]
            assert torch.equal(twin(input_ids=ids).logits, expected)
            for parameter in twin.parameters():
                parameter.zero_()
            assert torch.equal(fused(input_ids=ids).logits, expected)


def test_layers_of_another_kind_stay_pefts():
    model = gpt2()
    add_lora(model, 4, 8, seed=0)
    assert not any(isinstance(module, FusedLinear) for module in model.modules())  # Conv1D keeps its weight transposed
