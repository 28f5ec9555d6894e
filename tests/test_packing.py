"""Passes without padding: the same numbers and the same gradients as padded rows and as each row alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from architectures import ARCHITECTURES, VOCAB, mamba, tiny
from lm_helpers import llama, padded, random_rows, tensors
from torch.nn.functional import scaled_dot_product_attention
from value_helpers import make_policy

from textenv.lm import LanguageModel, load_causal_lm, packing
from textenv.lm.adapters import AdapterFree, add_lora, round_frozen_layers
from textenv.lm.packing import Layout, padded_states, rows_mask, why_not_packed
from textenv.lm.precision import precision

P, T = 30, 8
UNEQUAL = random_rows([3, 30, 1, 12], [6, 2, 1, 8], VOCAB)
TOKENS = sum(len(p) + len(r) for p, r in UNEQUAL)

by_name = pytest.mark.parametrize("name", ARCHITECTURES)
by_kernel = pytest.mark.parametrize("written_out", [256, 0], ids=["written-out", "torch's"])


def batch(rows=UNEQUAL, fill=0):
    return tensors(*padded(rows, P, T, fill))


def language_model(model, **options):
    return LanguageModel(model, source="tiny", **options)


def padded_pass(lm, ids, mask):
    with torch.autocast("cpu", torch.bfloat16, enabled=lm.dtype == "bfloat16"):
        return padded_states(lm.model.base_model, ids, mask)


def gradients(lm, road, rows=UNEQUAL):
    """Of a loss in which every real token has a weight of its own, for all that trains."""
    ids, mask = batch(rows)
    weights = torch.randn(*ids.shape, lm.hidden_size, generator=torch.Generator().manual_seed(5))
    loss = (road(ids, mask) * weights)[mask.bool()].float().sum()
    names, parameters = zip(*[(n, p) for n, p in lm.model.named_parameters() if p.requires_grad], strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)  # the output head has no part in it
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def assert_same_gradients(one, other, tolerance):
    """Relative to the largest entry of each parameter's gradient; some of them 0 by symmetry, such as key biases."""
    assert set(one) == set(other) and one
    largest = max(float(gradient.abs().max()) for gradient in other.values())
    for name in one:
        scale = max(float(other[name].abs().max()), 1e-3 * largest)
        assert float((one[name] - other[name]).abs().max()) <= tolerance * scale, name


class Tokens:
    """The shapes of what goes through a model's first feed-forward layer."""

    def __init__(self, model):
        block = (model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers)[0]
        self.shapes = []
        block.mlp.register_forward_pre_hook(lambda _module, args: self.shapes.append(tuple(args[0].shape[:-1])))


# Numbers


@by_name
@by_kernel
def test_hidden_states_equal_padded_rows_and_rows_alone(name, written_out, monkeypatch):
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    lm, (ids, mask) = language_model(tiny(name)), batch()
    assert why_not_packed(lm) is None
    tokens = Tokens(lm.model)
    with torch.no_grad():
        packed, whole = lm.hidden_states(ids, mask), padded_pass(lm, ids, mask)
        assert tokens.shapes == [(1, TOKENS), (4, P + T)]
        real, scale = mask.bool(), float(whole.abs().max())
        torch.testing.assert_close(packed[real], whole[real], atol=1e-5 * scale, rtol=0)
        assert not packed[~real].any()
        for row in range(len(ids)):
            alone = lm.model.base_model(ids[row, real[row]][None].long()).last_hidden_state[0]
            torch.testing.assert_close(packed[row, real[row]], alone, atol=1e-5 * scale, rtol=0)


@by_name
@by_kernel
def test_gradients_equal_those_of_padded_rows(name, written_out, monkeypatch):
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    lm = language_model(tiny(name).requires_grad_(True))
    packed, whole = gradients(lm, lm.hidden_states), gradients(lm, lambda *rows: padded_pass(lm, *rows))
    assert why_not_packed(lm) is None
    assert_same_gradients(packed, whole, 1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_gradients_of_adapters(name):
    model = tiny(name)
    add_lora(model, rank=4, alpha=8, seed=0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    lm, free = language_model(model), AdapterFree(model, source="tiny")
    packed = gradients(lm, lm.hidden_states)
    assert all("lora_" in parameter for parameter in packed)
    assert_same_gradients(packed, gradients(lm, lambda *rows: padded_pass(lm, *rows)), 1e-4)
    ids, mask = batch()
    plain = padded_pass(language_model(tiny(name)), ids, mask)
    torch.testing.assert_close(free.hidden_states(ids, mask)[mask.bool()], plain[mask.bool()], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_bfloat16(name):
    """Packed rows are as near to float32 as padded ones, which round in other places."""
    model = tiny(name).requires_grad_(True)
    exact_lm, lm = language_model(model), language_model(model, dtype="bfloat16")
    assert why_not_packed(lm) is None
    exact = gradients(exact_lm, exact_lm.hidden_states)
    packed, whole = gradients(lm, lm.hidden_states), gradients(lm, lambda *rows: padded_pass(lm, *rows))

    def error(found):
        return sum(float((found[n] - exact[n]).norm()) for n in exact) / sum(float(g.norm()) for g in exact.values())

    assert 0 < error(packed) < 1.5 * error(whole)


def test_rounded_weights_are_tried_in_their_arithmetic():
    """Float32 activations on bfloat16 weights are an error outside autocast, and no reason to pad."""
    model = llama()
    round_frozen_layers(model)
    assert why_not_packed(language_model(model, dtype="bfloat16")) is None


@by_kernel
def test_what_is_in_padding_moves_nothing_by_a_bit(written_out, monkeypatch):
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    lm = language_model(llama())
    clean, dirty = (lm.hidden_states(*batch(fill=fill)) for fill in (1, 77))
    assert torch.equal(clean, dirty)
    assert not torch.equal(batch(fill=1)[0], batch(fill=77)[0])


@by_kernel
def test_rows_do_not_see_each_other(written_out, monkeypatch):
    """The gradient of one row's states reaches the embeddings of its own tokens alone, those before it in the row."""
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    lm = language_model(llama().requires_grad_(True))
    ids = torch.arange(12).view(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]])
    lm.hidden_states(ids, mask)[1, 2].square().sum().backward()
    touched = lm.model.get_input_embeddings().weight.grad.any(-1).nonzero().squeeze(-1)
    assert touched.tolist() == [5, 6]


# What goes through the model


def test_rows_of_one_length_stay_rows():
    lm = language_model(llama())
    tokens = Tokens(lm.model)
    ids, mask = batch(random_rows([4, 4, 4], [3, 3, 3], VOCAB))
    states = lm.hidden_states(ids, mask)
    assert tokens.shapes[-1] == (3, 7)
    torch.testing.assert_close(states[mask.bool()], padded_pass(lm, ids, mask)[mask.bool()], atol=1e-5, rtol=0)
    whole = lm.hidden_states(ids[:, P - 4 : P + 3], mask[:, P - 4 : P + 3])
    assert torch.equal(whole, states[:, P - 4 : P + 3])


def test_holes_and_rows_without_tokens():
    lm = language_model(llama())
    ids, mask = batch()
    mask[1, 5:9] = 0
    mask[2] = 0
    torch.testing.assert_close(
        lm.hidden_states(ids, mask)[mask.bool()], padded_pass(lm, ids, mask)[mask.bool()], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("value", ["separate", "reward"])
def test_value_networks_and_references_are_packed_too(tiny_model, value):
    policy = make_policy(tiny_model, value)
    trunks = [Tokens(policy.trunk), Tokens(policy.value_network.trunk)]
    ids, mask = batch()
    policy.evaluate(ids, mask, T)
    policy.reference.hidden_states(ids, mask)
    assert [tokens.shapes[-1] for tokens in trunks] == [(1, TOKENS)] * 2
    assert trunks[0].shapes.count((1, TOKENS)) == 2


# Switches that go with it


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@by_kernel
def test_gradient_checkpointing(name, written_out, monkeypatch):
    """The backward pass computes the layers again, long after the pass that laid the rows out."""
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    model = tiny(name).requires_grad_(True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    lm = language_model(model)
    plain = gradients(lm, lm.hidden_states)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    tokens = Tokens(model)
    assert_same_gradients(gradients(lm, lm.hidden_states), plain, 1e-6)
    assert tokens.shapes == [(1, TOKENS)] * 2
    with torch.enable_grad():  # another pass between a pass and its backward
        first, _ = lm.hidden_states(*batch()), lm.hidden_states(*batch(UNEQUAL[:2]))
    first.sum().backward()
    assert tokens.shapes[-1] == (1, TOKENS)


def test_compiled_layers():
    """No graph breaks, and one graph for packed rows of all sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = llama(), language_model(llama())
    lm = language_model(model)
    assert why_not_packed(lm) is None
    for layer in model.base_model.layers:
        layer.compile(backend="eager", fullgraph=True)
    for rows in (UNEQUAL, UNEQUAL[:3], UNEQUAL[1:]):
        ids, mask = batch(rows)
        torch.testing.assert_close(lm.hidden_states(ids, mask), plain.hidden_states(ids, mask), atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first sizes, then any
    torch._dynamo.reset()


# Attention


def by_hand(query, key, value, lengths, window, scale):
    """Token by token, in float64."""
    out, start = torch.zeros_like(query, dtype=torch.float64), 0
    for length in lengths:
        for place in range(length):
            seen = slice(start + max(0, place + 1 - window), start + place + 1)
            for head in range(query.shape[1]):
                scores = key[0, head, seen].double() @ query[0, head, start + place].double() * scale
                out[0, head, start + place] = scores.softmax(0) @ value[0, head, seen].double()
        start += length
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("scale", [None, 0.7])
@by_kernel
def test_attention_by_hand(window, scale, written_out, monkeypatch):
    monkeypatch.setattr(packing, "WRITTEN_OUT", written_out)
    lengths, width, groups, size = [4, 6, 1], 6, 2, 8
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 11, size, generator=generator)
    key, value = (torch.randn(1, 2, 11, size, generator=generator).repeat_interleave(groups, 1) for _ in range(2))
    slots = torch.cat([row * width + torch.arange(length) for row, length in enumerate(lengths)])
    mask = rows_mask(Layout(3, width, slots, groups), window, torch.device("cpu"))
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    expected = by_hand(query, key, value, lengths, window or width, scale or size**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    grouped = scaled_dot_product_attention(
        query, key[:, ::groups], value[:, ::groups], attn_mask=mask, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(grouped, found)


def test_dropout_is_not_lost():
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    mask = rows_mask(Layout(1, 5, None, 1), None, torch.device("cpu"))
    without, *twice = (
        scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p) for p in (0.0, 0.5, 0.5)
    )
    assert not torch.allclose(without, twice[0]) and not torch.allclose(*twice)


# Models that are not packed


def bloom():
    """Positions as a bias on the scores, in attention of its own."""
    config = tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4)
    with torch.random.fork_rng():
        return tf.BloomForCausalLM(config).eval().requires_grad_(False)


def bidirectional():
    """Sees to the right, which packed attention never does: only a trial tells."""
    model = llama()
    model.config.is_causal = False
    return model


def eager():
    return tiny("llama", attention="eager")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bloom, "its attention is 'eager'"),
        (bidirectional, "a trial missed the padded pass by"),
        (eager, "its attention is 'eager', and only 'sdpa'"),
    ],
)
def test_others_are_padded_as_before(make, reason):
    lm = language_model(make())
    assert reason in why_not_packed(lm)
    ids, mask = batch()
    assert torch.equal(lm.hidden_states(ids, mask), padded_pass(lm, ids, mask))


def test_recurrent_models_and_unknown_layers_are_not_tried(monkeypatch):
    monkeypatch.setattr(packing, "_trial", None)
    assert "recurrent state" in why_not_packed(language_model(mamba()))
    lm = language_model(llama())
    lm.model.config.layer_types = ["chunked_attention", "full_attention"]
    assert "['chunked_attention']" in why_not_packed(lm)


def test_layers_that_read_the_mask_themselves_are_padded(monkeypatch):
    """What they get out of ours knows no layout, and torch's attention refuses it."""
    lm = language_model(llama())
    layer = lm.model.base_model.layers[1]
    layer.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, kwargs | {"attention_mask": kwargs["attention_mask"][:, :, :, :]}),
        with_kwargs=True,
    )
    assert "a trial failed (" in why_not_packed(lm)


def test_gemma2_is_loaded_with_the_attention_that_knows_its_softcap(tmp_path):
    tiny("gemma2").save_pretrained(tmp_path / "gemma2")
    lm = language_model(load_causal_lm(tmp_path / "gemma2"))
    assert "eager" in why_not_packed(lm)


def test_the_decision_is_made_once_and_again_with_another_attention(monkeypatch):
    trials, trial = [], packing._trial
    monkeypatch.setattr(packing, "_trial", lambda *args: trials.append(1) or trial(*args))
    lm = language_model(llama())
    passes = []
    lm.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    for _ in range(3):
        lm.hidden_states(*batch())
    assert len(trials) == 1 and len(passes) == 3  # a trial is no pass of the model's user
    lm.model.set_attn_implementation("eager")
    assert "eager" in why_not_packed(lm)
    lm.model.set_attn_implementation("sdpa")
    assert why_not_packed(lm) is None and len(trials) == 2


def test_nothing_of_the_model_changes():
    model = llama()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    language_model(model).hidden_states(*batch())
    assert model.config._attn_implementation == "sdpa" and model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_smollm2_trains_on_the_same_gradients():
    model = load_causal_lm("smollm2-135m")
    add_lora(model, rank=4, alpha=8, seed=0)
    lm = language_model(model)
    rows = random_rows([3, 30, 16], [8, 2, 5], 49152)
    with precision("cpu", "float32"):
        packed = gradients(lm, lm.hidden_states, rows)
        whole = gradients(lm, lambda *given: padded_pass(lm, *given), rows)
    assert why_not_packed(lm) is None
    assert_same_gradients(packed, whole, 1e-3)
