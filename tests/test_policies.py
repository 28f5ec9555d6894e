"""A table, a recurrent network and a language model through one protocol; then what each promises by itself."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from lm_helpers import NAMED, ROWS, GRUPolicy, gpt2, llama, padded, random_rows, save_model, tensors

from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.policy import PolicyLogprobs, arithmetic, device_of, temperature_of
from textenv.lm import LanguageModel

P, T, V = 12, 5, 7
LENGTHS = [5, 3, 1, 5]


def stirred(policy, seed=0):
    """Parameters away from their start, so that values and adapters show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def table(seed=0):
    return TablePolicy(np.random.default_rng(seed).normal(size=(T, V)) * 2, prompt_tokens=P)


MAKERS = {
    "table": lambda _folder: table(),
    "recurrent": lambda _folder: GRUPolicy(V),
    "adapters": lambda folder: LanguageModelPolicy.from_pretrained(folder, lora_rank=4),
    "all weights": lambda folder: LanguageModelPolicy.from_pretrained(folder, lora_rank=None),
    "tempered": lambda folder: LanguageModelPolicy.from_pretrained(folder, lora_rank=4, temperature=0.6),
}


@pytest.fixture(params=MAKERS)
def make(request, tiny_model):
    return lambda: MAKERS[request.param](tiny_model)


@pytest.fixture
def policy(make):
    return stirred(make())


def batch(policy, prompt_lengths=(12, 3, 7, 1)):
    vocab_size = NAMED if isinstance(policy, LanguageModelPolicy) else V
    return padded(random_rows(prompt_lengths, LENGTHS, vocab_size), P, T)


@pytest.fixture
def ids_and_mask(policy):
    return tensors(*batch(policy))


# One protocol


def test_outputs_have_one_number_per_token_and_zeros_elsewhere(policy, ids_and_mask):
    ids, mask = ids_and_mask
    output = policy.evaluate(ids, mask, T)
    real = mask[:, -T:].bool()
    for field in (output.logprobs, output.values, output.entropies):
        assert field.shape == (4, T)
        assert (field[~real] == 0).all() and (field[real] != 0).all()
    assert (output.logprobs <= 0).all() and (output.entropies >= 0).all()


def test_whole_responses_and_next_tokens_are_one_distribution(policy, ids_and_mask):
    ids, mask = ids_and_mask
    output = policy.evaluate(ids, mask, T)
    for t in range(T):
        rows = torch.tensor(LENGTHS) > t
        seen = mask[rows] * (torch.arange(P + T) < P + t)
        log_pi = torch.log_softmax(policy.next_logits(ids[rows], seen).double(), -1)
        chosen = log_pi.gather(1, ids[rows, P + t].long()[:, None]).squeeze(1)
        torch.testing.assert_close(output.logprobs[rows, t].double(), chosen, atol=1e-5, rtol=0)
        entropy = torch.special.entr(log_pi.exp()).sum(1)
        torch.testing.assert_close(output.entropies[rows, t].double(), entropy, atol=1e-5, rtol=0)


def test_wrappers_are_told_the_same(policy, ids_and_mask):
    ids, mask = (x.numpy() for x in ids_and_mask)
    logprobs = PolicyLogprobs(policy)
    whole = logprobs.response_logprobs(ids, mask, T)
    assert whole.dtype == np.float64
    with torch.no_grad(), arithmetic(policy):
        np.testing.assert_array_equal(whole, policy.evaluate(*ids_and_mask, T).logprobs)
    for t in range(min(LENGTHS)):
        step = logprobs({"input_ids": ids, "attention_mask": mask * (np.arange(P + T) < P + t)}, ids[:, P + t])
        np.testing.assert_allclose(step, whole[:, t], atol=1e-5)


def test_gradients_reach_logprobs_and_values_but_not_entropies(policy, ids_and_mask):
    output = policy.evaluate(*ids_and_mask, T)
    assert not output.entropies.requires_grad
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.logprobs.sum() + output.values.sum(), trained)
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in gradients)


def test_ids_in_padding_move_nothing_by_a_bit(policy, ids_and_mask):
    ids, mask = ids_and_mask
    dirty = torch.where(mask.bool(), ids, torch.tensor(V - 1, dtype=ids.dtype))
    clean, other = policy.evaluate(ids, mask, T), policy.evaluate(dirty, mask, T)
    for name in ("logprobs", "values", "entropies"):
        assert torch.equal(getattr(clean, name), getattr(other, name))


def test_rows_alone_and_in_company(policy, ids_and_mask):
    ids, mask = ids_and_mask
    together = policy.evaluate(ids, mask, T)
    for row, length in enumerate(LENGTHS):
        if isinstance(policy, TablePolicy):  # knows a fixed number of columns only
            alone = policy.evaluate(ids[row : row + 1], mask[row : row + 1], T)
        else:
            used = mask[row].bool()
            alone = policy.evaluate(ids[row : row + 1, used], mask[row : row + 1, used], length)
        for name in ("logprobs", "values", "entropies"):
            one, other = getattr(alone, name)[0, :length], getattr(together, name)[row, :length]
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_values_belong_to_the_state_before_the_token(policy, ids_and_mask):
    """Another token at t = 2 changes what comes after it, not what was known before."""
    ids, mask = ids_and_mask
    changed = ids.clone()
    changed[:, P + 2] = (changed[:, P + 2] + 1) % V
    before, after = policy.evaluate(ids, mask, T).values, policy.evaluate(changed, mask, T).values
    torch.testing.assert_close(before[:, :3], after[:, :3], atol=1e-6, rtol=0)
    assert isinstance(policy, TablePolicy) or (before[0, 3:] != after[0, 3:]).all()


def test_state_goes_over_to_a_fresh_policy(policy, make, ids_and_mask):
    fresh = make()
    before = fresh.evaluate(*ids_and_mask, T)
    fresh.load_state_dict(copy.deepcopy(policy.state_dict()))
    after, expected = fresh.evaluate(*ids_and_mask, T), policy.evaluate(*ids_and_mask, T)
    assert torch.equal(after.logprobs, expected.logprobs) and torch.equal(after.values, expected.values)
    assert not torch.equal(before.logprobs, expected.logprobs)


def test_device_and_temperature_are_found(policy):
    assert device_of(policy).type == "cpu"
    assert temperature_of(policy) == getattr(policy, "temperature", 1.0)


# The table


def test_table_takes_the_row_of_the_next_position():
    policy = table()
    ids, mask = tensors(*padded([([1] * P, [2, 3]), ([1], [])], P, T))
    assert torch.equal(policy.next_logits(ids, mask), policy.logits[[2, 0]])


def test_forbidden_tokens_stay_forbidden():
    logits = np.zeros((T, V))
    logits[:, 4] = -np.inf
    policy = TablePolicy(logits, prompt_tokens=P)
    ids, mask = tensors(*padded([([1], [2, 3, 0])], P, T))
    optimizer = torch.optim.AdamW(policy.parameters(), 0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-policy.evaluate(ids, mask, T).logprobs.sum()).backward()
        optimizer.step()
    assert (policy.logits[:, 4] == -torch.inf).all() and policy.logits[:, :4].isfinite().all()
    assert torch.isfinite(policy.evaluate(ids, mask, T).entropies).all()


def test_table_refuses_prompts_narrower_than_its_own():
    ids, mask = tensors(*padded([([1], [])], 3, 0))
    with pytest.raises(ValueError, match=r"positions from column 12, got .* end at column 3\. Pad prompts"):
        table().next_logits(ids, mask)


# Language models: adapters, frozen copies, temperature, dropout, precision


def reference_logprobs(policy, ids, mask):
    return policy.reference.response_logprobs(ids.numpy(), mask.numpy(), T)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_policy_starts_as_its_reference_with_values_of_zero(tiny_model, lora_rank):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank)
    ids, mask = tensors(*batch(policy))
    with torch.no_grad(), policy.arithmetic():
        output = policy.evaluate(ids, mask, T)
    np.testing.assert_allclose(output.logprobs, reference_logprobs(policy, ids, mask), atol=1e-6)
    assert not output.values.any()


def loss_step(policy, ids, mask):
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.1)
    output = policy.evaluate(ids, mask, T)
    (output.logprobs.sum() + (output.values - 1).square().sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("lora_rank", [4, None])
def test_reference_stays_while_the_policy_moves(tiny_model, lora_rank):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank)
    ids, mask = tensors(*batch(policy))
    start = reference_logprobs(policy, ids, mask)
    for _ in range(2):
        loss_step(policy, ids, mask)
    np.testing.assert_array_equal(reference_logprobs(policy, ids, mask), start)
    moved = policy.evaluate(ids, mask, T).logprobs.detach().numpy() - start
    assert np.abs(moved).max() > 0.1


def test_adapters_need_one_trunk_and_train_nothing_of_it(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    assert policy.reference.model is policy.lm.model
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("value_head") for name in trained)
    assert set(policy.state_dict()) == trained
    base = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    loss_step(policy, *tensors(*batch(policy)))
    assert all(torch.equal(dict(policy.named_parameters())[name], p) for name, p in base.items())


def test_all_weights_need_a_copy_that_no_optimiser_sees(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=None)
    assert policy.reference.model is not policy.lm.model
    assert all(parameter.requires_grad for parameter in policy.parameters())
    ours = {parameter.data_ptr() for parameter in policy.parameters()}
    frozen = list(policy.reference.model.parameters())
    assert not any(parameter.requires_grad or parameter.data_ptr() in ours for parameter in frozen)


@pytest.mark.parametrize("rank, alpha, scale", [(4, None, 2.0), (4, 4, 1.0), (8, 4, 0.5)])
def test_adapters_are_scaled_by_alpha_over_rank(tiny_model, rank, alpha, scale):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=rank, lora_alpha=alpha)
    layer = policy.trunk.base_model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == scale and layer.lora_A["default"].weight.shape[0] == rank


def test_temperature_is_everywhere_or_nowhere(tiny_model):
    """softmax(logits)^(1/0.6), normalised, in next_logits, evaluate, the wrappers' callable and the reference."""
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, temperature=0.6)
    prompt = [5, 9, 40]
    with torch.no_grad():
        raw = torch.softmax(llama()(torch.tensor([prompt])).logits[0, -1, :NAMED].double(), -1)
    expected = (raw ** (1 / 0.6) / (raw ** (1 / 0.6)).sum()).log().numpy()
    ids, mask = padded([(prompt, [token]) for token in range(NAMED)], 3, 1)
    before = {"input_ids": ids, "attention_mask": mask * (np.arange(4) < 3)}
    actions = np.arange(NAMED)
    with torch.no_grad():
        next_logits = policy.next_logits(*tensors(before["input_ids"][:1], before["attention_mask"][:1]))
        evaluated = policy.evaluate(*tensors(ids, mask), 1).logprobs[:, 0]
    for ours in (
        torch.log_softmax(next_logits, -1)[0, :NAMED],
        evaluated,
        PolicyLogprobs(policy)(before, actions),
        PolicyLogprobs(policy).response_logprobs(ids, mask, 1)[:, 0],
        policy.reference(before, actions),
        policy.reference.response_logprobs(ids, mask, 1)[:, 0],
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert np.abs(expected - raw.log().numpy()).max() > 0.5  # temperature 1 would fail


@pytest.mark.parametrize("lora_rank", [4, None])
def test_dropout_is_never_on(tmp_path, lora_rank):
    folder = save_model(tmp_path, gpt2(dropout=0.1))
    policy = LanguageModelPolicy.from_pretrained(folder, lora_rank=lora_rank)
    assert any(isinstance(module, torch.nn.Dropout) and module.p == 0.1 for module in policy.modules())
    ids, mask = tensors(*batch(policy))
    before = policy.evaluate(ids, mask, T).logprobs
    assert policy.train() is policy and not any(module.training for module in policy.modules())
    assert torch.equal(policy.evaluate(ids, mask, T).logprobs, before)
    for module in policy.modules():
        module.training = True
    assert not torch.allclose(policy.evaluate(ids, mask, T).logprobs, before, atol=1e-2)  # it would have shown


@pytest.mark.parametrize("lora_rank", [4, None])
def test_bfloat16_is_arithmetic_and_what_trains_is_float32(tiny_model, lora_rank):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank, dtype="bfloat16")
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    frozen = {p.dtype for p in policy.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16, torch.float32} if lora_rank else set())
    ids, mask = tensors(*batch(policy))
    with policy.arithmetic():
        output = policy.evaluate(ids, mask, T)
    assert output.logprobs.dtype == output.values.dtype == output.entropies.dtype == torch.float32
    exact = LanguageModel(llama(), source="tiny", named_size=NAMED).response_logprobs(ids.numpy(), mask.numpy(), T)
    gaps = np.abs(output.logprobs.detach().numpy() - exact)
    assert 1e-4 < gaps.max() < 0.5  # rounded, but the same model
    output.logprobs.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


def test_loading_a_policy_leaves_torch_alone_and_its_seed_decides(tiny_model):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    again = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, seed=3).state_dict()
    other = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_columns_that_no_row_uses_cost_nothing(tiny_model):
    policy = stirred(LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4))
    rows = random_rows([3, 2], [2, 1], NAMED)
    tight, wide = padded(rows, 3, 2), padded(rows, 20, 40)
    widths = []
    policy.trunk.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    one, other = policy.evaluate(*tensors(*tight), 2), policy.evaluate(*tensors(*wide), 40)
    assert widths == [8, 8]
    assert torch.equal(one.logprobs, other.logprobs[:, :2]) and torch.equal(one.values, other.values[:, :2])
    assert not other.logprobs[:, 2:].any() and other.logprobs.shape == (2, 40)


@pytest.mark.parametrize("name", ["lora_rank", "lora_alpha"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16"])
def test_bad_adapters_are_refused(tiny_model, name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be an integer of at least 1.*got {value!r}"):
        LanguageModelPolicy.from_pretrained(tiny_model, **{name: value})


def test_bad_temperature_and_dtype_are_refused(tiny_model):
    with pytest.raises(ValueError, match="`temperature` should be a positive number, got 0"):
        LanguageModelPolicy.from_pretrained(tiny_model, temperature=0)
    with pytest.raises(ValueError, match=r"`dtype` should be one of .* got 'float16'"):
        LanguageModelPolicy.from_pretrained(tiny_model, dtype="float16")


def test_settings_remake_the_policy(tiny_model):
    made = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, lora_alpha=6, temperature=0.7, seed=5)
    remade = LanguageModelPolicy.from_pretrained(**json.loads(json.dumps(made.settings)))
    assert remade.settings == made.settings and remade.temperature == 0.7
    assert all(torch.equal(tensor, remade.state_dict()[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("lora_rank", [4, None])
def test_export_opens_in_transformers_and_peft(tiny_model, tmp_path, lora_rank):
    """What others load from the folder has the trained policy's logits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank)
    with torch.no_grad():
        for parameter in policy.trunk.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter))
    policy.save_pretrained(tmp_path)
    if lora_rank is None:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path))
    ids = torch.tensor([[3, 5, 7, 9]])
    expected = policy.next_logits(ids, torch.ones_like(ids))[0, :NAMED]
    untouched = AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits[0, -1, :NAMED]
    assert torch.allclose(theirs(ids).logits[0, -1, :NAMED], expected, atol=1e-5)
    assert not torch.allclose(untouched, expected, atol=1e-2)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == NAMED


def test_missing_tensors_are_named(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    state = policy.state_dict()
    del state["value_head.bias"]
    with pytest.raises(ValueError, match=r"lacks 1 trained tensors, 'value_head\.bias' the first"):
        policy.load_state_dict(state)
    assert ROWS > NAMED  # so that unnamed ids are part of every test above
