"""Value functions: where they start, what their loss trains, what they cost, which reward models they start from."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from agent_helpers import CUT, letters, lm_envs, same
from lm_helpers import EOS, NAMED, byte_tokenizer, gpt2, llama, padded, random_rows, save_model, tensors
from transformers import BertConfig, BertForSequenceClassification
from value_helpers import COMBINATIONS, head_file, make_policy, reward_on, save_classifier

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.value_models import VALUE_KINDS, ValueHead, shared_copy
from textenv.rewards import RewardModel, SequenceClassificationReward, film_review_head

P, T = 8, 5
LENGTHS = [5, 3, 1, 5]

every_kind = pytest.mark.parametrize("value", VALUE_KINDS)
every_combination = pytest.mark.parametrize("value, lora_rank", COMBINATIONS)


def batch():
    return tensors(*padded(random_rows([8, 3, 5, 1], LENGTHS, NAMED), P, T))


def stirred(policy):
    """Trained parameters away from their start, so that adapters and heads show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def bytes_of(module):
    """Bytes of its parameters, those that several names share counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# Where values start


@pytest.mark.parametrize("value, lora_rank", [c for c in COMBINATIONS if c[0] != "reward"])
def test_values_start_at_zero(tiny_model, value, lora_rank):
    output = make_policy(tiny_model, value, lora_rank).evaluate(*batch(), T)
    assert not output.values.any() and output.logprobs.any()


PREFIXES = [("the a", " b"), ("good", " q z"), ("a bc", ""), ("x", "yz!")]
"""Prompts and responses that are encoded alone as they are in one text."""


def prefix_values(policy, reward):
    """Values of states that show the prefixes, and the reward model's scores of them."""
    encode = reward.tokenizer.encode
    rows = [(encode(prompt), [*encode(response), EOS]) for prompt, response in PREFIXES]
    assert all([*p, *r[:-1]] == encode(a + b) for (p, r), (a, b) in zip(rows, PREFIXES, strict=True))
    ids, mask = tensors(*padded(rows, 12, 6))
    with torch.no_grad(), policy.arithmetic():
        values = policy.evaluate(ids, mask, 6).values
    last = torch.tensor([len(response) - 1 for _, response in rows])  # the stop token is chosen in the last state
    return values, last, reward(*zip(*PREFIXES, strict=True))


@pytest.mark.parametrize("lora_rank", [4, None])
@pytest.mark.parametrize("other_weights", [False, True])
def test_reward_values_start_as_the_reward_model(tiny_model, tmp_path, lora_rank, other_weights):
    """On the policy's weights, and on a narrower model's: V(prompt + response) is the score of that text."""
    trunk = save_model(tmp_path / "narrow", llama(seed=1, hidden_size=24)) if other_weights else tiny_model
    path = head_file(trunk, 24 if other_weights else 32)
    policy = make_policy(tiny_model, "reward", lora_rank, reward_model=path)
    values, last, scores = prefix_values(policy, RewardModel.load(path))
    rows = torch.arange(len(last))
    np.testing.assert_allclose(values[rows, last], scores, atol=1e-4)
    assert np.ptp(scores) > 1
    # Contrast: the state one token earlier, and features of unit variance, give other numbers.
    assert (np.abs(values[rows[:2], last[:2] - 1].numpy() - scores[:2]) > 0.1).all()
    policy.value_head.normalise = True
    assert (np.abs(prefix_values(policy, RewardModel.load(path))[0][rows, last].numpy() - scores) > 0.1).any()


def test_values_of_a_classifier_start_as_its_scores(tiny_model, tmp_path):
    folder = save_classifier(tmp_path / "classifier")
    for given in (folder, SequenceClassificationReward(folder)):
        policy = make_policy(tiny_model, "reward", reward_model=given)
        values, last, _ = prefix_values(policy, reward_on(tiny_model))
        scores = SequenceClassificationReward(folder)(*zip(*PREFIXES, strict=True))
        np.testing.assert_allclose(values[torch.arange(len(last)), last], scores, atol=1e-5)
        assert np.ptp(scores) > 0.1


def test_reward_models_that_are_given_are_left_as_they_were(tiny_model):
    reward = reward_on(tiny_model)
    before, weight = reward(*zip(*PREFIXES, strict=True)), reward.weight.copy()
    policy = make_policy(tiny_model, "reward", None, reward_model=reward)
    step(policy)
    np.testing.assert_array_equal(reward(*zip(*PREFIXES, strict=True)), before)
    np.testing.assert_array_equal(reward.weight, weight)


def step(policy):
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.05)
    output = policy.evaluate(*batch(), T)
    (output.logprobs.sum() + (output.values - 1).square().sum()).backward()
    optimizer.step()


# What trains


def reached(policy, loss):
    """Which parts of a policy have parameters that this loss moves."""
    names, parameters = zip(*[(n, p) for n, p in policy.named_parameters() if p.requires_grad], strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name.split(".")[0] for name, g in zip(names, gradients, strict=True) if g is not None and g.any()}


VALUE_LOSS_TRAINS = {
    "trunk": {"trunk", "value_head"},
    "detached": {"value_head"},
    "separate": {"value_network", "value_head"},
    "reward": {"value_network", "value_head"},
}


@every_combination
def test_each_loss_trains_what_the_kind_says(tiny_model, value, lora_rank):
    policy = stirred(make_policy(tiny_model, value, lora_rank))
    value_loss = (policy.evaluate(*batch(), T).values - 1).square().sum()
    assert reached(policy, value_loss) == VALUE_LOSS_TRAINS[value]
    assert reached(policy, policy.evaluate(*batch(), T).logprobs.sum()) == {"trunk"}


@every_combination
def test_every_trained_parameter_has_a_loss(tiny_model, value, lora_rank):
    policy = stirred(make_policy(tiny_model, value, lora_rank))
    output = policy.evaluate(*batch(), T)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.logprobs.sum() + output.values.sum(), trained)
    assert all(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_policy_and_reference_do_not_see_the_value_network(tiny_model, lora_rank):
    policy = make_policy(tiny_model, "separate", lora_rank)
    before = policy.evaluate(*batch(), T)
    with torch.no_grad():
        for parameter in [*policy.value_network.parameters()]:
            if parameter.requires_grad:
                parameter.add_(0.5)
    after = policy.evaluate(*batch(), T)
    assert torch.equal(before.logprobs, after.logprobs)
    ids, mask = (x.numpy() for x in batch())
    np.testing.assert_allclose(policy.reference.response_logprobs(ids, mask, T), before.logprobs.detach(), atol=1e-5)
    with torch.no_grad():
        policy.value_head.weight.fill_(1.0)
        states = policy.value_network(*batch())
        assert not torch.allclose(states, policy.lm.hidden_states(*batch()), atol=0.1)


# What it costs


@every_combination
def test_passes(tiny_model, value, lora_rank):
    """One evaluate: one pass where the head reads the policy's states, two where there is a network beside it."""
    policy = make_policy(tiny_model, value, lora_rank)
    calls = []
    policy.trunk.base_model.register_forward_pre_hook(lambda *_: calls.append("policy"))
    if policy.value_network is not None:
        policy.value_network.trunk.register_forward_pre_hook(lambda *_: calls.append("values"))
    policy.evaluate(*batch(), T)
    assert calls == (["policy"] if value in ("trunk", "detached") else ["policy", "values"])
    policy.next_logits(*batch())
    assert calls[-1] == "policy"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_held_once(tiny_model, dtype):
    plain, separate = (make_policy(tiny_model, value, dtype=dtype) for value in ("trunk", "separate"))
    adapters = sum(p.numel() for n, p in separate.value_network.named_parameters() if "lora_" in n)
    assert bytes_of(separate) - bytes_of(plain) == 4 * adapters
    assert adapters > 0 and bytes_of(make_policy(tiny_model, "reward", dtype=dtype)) == bytes_of(separate)
    whole = 4 * sum(p.numel() for p in llama().base_model.parameters())
    both = bytes_of(make_policy(tiny_model, "separate", None, dtype=dtype))
    assert both - bytes_of(make_policy(tiny_model, "trunk", None, dtype=dtype)) == whole


def test_output_heads_are_not_copied(tmp_path):
    """An untied output head belongs to the policy alone."""
    folder = save_model(tmp_path / "untied", llama(tie_word_embeddings=False))
    policy = make_policy(folder, "separate", None)
    assert not any("lm_head" in name for name, _ in policy.value_network.named_parameters())
    assert bytes_of(policy.value_network) < bytes_of(policy.trunk)


def test_shared_copies_share_tensors_and_nothing_else():
    model = llama()
    copied = shared_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    copied.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    assert isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear)


# State


@every_combination
def test_state_goes_over_to_a_fresh_policy(tiny_model, value, lora_rank):
    policy = stirred(make_policy(tiny_model, value, lora_rank))
    fresh = LanguageModelPolicy.from_pretrained(**json.loads(json.dumps(policy.settings)))
    assert fresh.settings == policy.settings
    fresh.load_state_dict(copy.deepcopy(policy.state_dict()))
    one, other = fresh.evaluate(*batch(), T), policy.evaluate(*batch(), T)
    assert torch.equal(one.logprobs, other.logprobs) and torch.equal(one.values, other.values)
    assert one.values.any()


@every_combination
def test_state_holds_what_trains_and_nothing_twice(tiny_model, value, lora_rank):
    policy = make_policy(tiny_model, value, lora_rank)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert set(policy.state_dict()) == trained
    assert any(name.startswith("value_network.") for name in trained) == (value in ("separate", "reward"))


@every_kind
def test_copies_are_independent_and_still_share(tiny_model, value):
    policy = make_policy(tiny_model, value)
    other = copy.deepcopy(policy)
    assert bytes_of(other) == bytes_of(policy)
    before = policy.evaluate(*batch(), T)
    stirred(other)
    assert torch.equal(policy.evaluate(*batch(), T).values, before.values)
    assert not torch.equal(other.evaluate(*batch(), T).values, before.values)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_exports_hold_the_policy_alone(tiny_model, tmp_path, lora_rank):
    from safetensors import safe_open

    names = []
    for value in ("trunk", "separate"):
        make_policy(tiny_model, value, lora_rank).save_pretrained(tmp_path / value)
        [path] = (tmp_path / value).glob("*.safetensors")
        with safe_open(path, "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1] and len(names[0]) > 5


def test_states_of_a_linear_head_are_read(tiny_model):
    """Names and shapes of checkpoints from before there was a choice."""
    head = ValueHead(3, torch.device("cpu"))
    head.load_state_dict(torch.nn.Linear(3, 1).state_dict())
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    assert policy.state_dict()["value_head.weight"].shape == (1, 32) and policy.settings["value"] == "trunk"


def test_heads_by_hand():
    """Features 1 and 3 have mean 2 and standard deviation 1: -1 and 1 when normalised. w = (2, 5), b = 0.5."""
    for normalise, expected in ((True, -2 + 5 + 0.5), (False, 2 + 15 + 0.5)):
        head = ValueHead(2, torch.device("cpu"), normalise=normalise)
        head.start_from(torch.tensor([[2.0, 5.0]]), 0.5)
        assert head(torch.tensor([[1.0, 3.0]])).item() == pytest.approx(expected, abs=1e-4)  # layer norm's eps


# Arithmetic and dropout


@every_combination
def test_bfloat16_trains_in_float32(tiny_model, value, lora_rank):
    policy = make_policy(tiny_model, value, lora_rank, dtype="bfloat16")
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    agent = PPO(policy, lm_envs(tiny_model, 6), PPOConfig(num_minibatches=2, epochs=2, learning_rate=0.01), seed=1)
    before = [p.detach().clone() for p in agent.parameters]
    dtypes = []
    trunks = [policy.trunk.base_model, *([policy.value_network.trunk] if policy.value_network is not None else [])]
    for trunk in trunks:
        trunk.layers[0].mlp.register_forward_hook(lambda _m, _i, out: dtypes.append(out.dtype))
    rollout = agent.rollout()
    for field in ("logprobs", "values", "rewards", "advantages", "returns"):
        assert getattr(rollout, field).dtype == torch.float32, field
    assert len(dtypes) > 2 and set(dtypes) == {torch.bfloat16}
    stats = agent.step()
    assert np.isfinite(stats.value_loss) and np.isfinite(stats.grad_norm)
    assert {p.dtype for p in agent.parameters} == {torch.float32}
    assert not same(before, agent.parameters)


def test_bfloat16_values_are_rounded_and_near(tiny_model):
    path = head_file(tiny_model)
    values, last, scores = prefix_values(make_policy(tiny_model, "reward", dtype="bfloat16"), RewardModel.load(path))
    gaps = np.abs(values[torch.arange(len(last)), last].numpy() - scores)
    assert values.dtype == torch.float32 and 1e-4 < gaps.max() < 0.1 * np.abs(scores).max()


@every_combination
def test_dropout_of_a_models_configuration_never_acts(tmp_path, value, lora_rank):
    folder = save_model(tmp_path / "gpt2", gpt2(dropout=0.1))
    policy = stirred(make_policy(folder, value, lora_rank))
    policy.train()
    one, other = policy.evaluate(*batch(), T), policy.evaluate(*batch(), T)
    assert torch.equal(one.values, other.values) and torch.equal(one.logprobs, other.logprobs)
    assert not any(module.training for module in policy.modules())
    trunk = policy.trunk if policy.value_network is None else policy.value_network.trunk
    with torch.random.fork_rng():
        trunk.train()  # what would happen otherwise
        assert not torch.equal(policy.evaluate(*batch(), T).values, one.values)


@every_kind
def test_loading_leaves_torch_alone(tiny_model, value):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    make_policy(tiny_model, value)
    assert torch.equal(torch.get_rng_state(), before)


# Learning


@pytest.mark.filterwarnings(CUT)
@pytest.mark.parametrize("value", ["detached", "separate", "reward"])
def test_values_learn_what_is_coming(tiny_model, value):
    """Fit the values of one batch: the error falls below that of the best constant."""
    policy = make_policy(tiny_model, value)
    agent = PPO(policy, lm_envs(tiny_model, 8, scorer=letters), PPOConfig(), seed=0)
    rollout = agent.rollout()
    optimizer = torch.optim.AdamW(agent.parameters, 0.01)
    mask = rollout.response_mask
    for _ in range(60):
        optimizer.zero_grad()
        values = policy.evaluate(rollout.input_ids, rollout.attention_mask, rollout.response_tokens).values
        loss = (values - rollout.returns)[mask].square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5 * float(rollout.returns[mask].var(correction=0))


# What is refused


def test_unknown_kinds_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"`value` should be one of \('trunk', .*'reward'\), got 'critic'"):
        LanguageModelPolicy.from_pretrained(tiny_model, value="critic")


@pytest.mark.parametrize("value", ["trunk", "detached", "separate"])
def test_reward_models_that_would_be_ignored_are_refused(tiny_model, value):
    with pytest.raises(ValueError, match=f"value='reward' starts from, got value='{value}', which would ignore it"):
        LanguageModelPolicy.from_pretrained(tiny_model, value=value, reward_model=head_file(tiny_model))


@pytest.mark.parametrize("given", [letters, 3, {"a": 1}])
def test_what_is_no_reward_model_is_refused(tiny_model, given):
    with pytest.raises(TypeError, match=rf"should be a RewardModel, .*got {type(given).__name__}: .* no weights"):
        make_policy(tiny_model, "reward", reward_model=given)


def test_names_that_lead_nowhere_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"No classifier could be loaded from '/nowhere/head\.safetensors'"):
        make_policy(tiny_model, "reward", reward_model="/nowhere/head.safetensors")


def test_other_tokenizers_are_refused(tiny_model, tmp_path):
    """Another vocabulary (the packaged head's), and one vocabulary with something put before every text."""
    with pytest.raises(ValueError, match=r"should have the policy's own tokenizer, got that of .*writes 'The film"):
        make_policy(tiny_model, "reward", reward_model=None)
    folder = save_classifier(tmp_path / "appends", tokenizer=byte_tokenizer(appends_eos=True))
    with pytest.raises(ValueError, match=r"should have the policy's own tokenizer.*would read other text"):
        make_policy(tiny_model, "reward", reward_model=folder)


def test_scores_that_are_not_linear_are_refused(tiny_model, tmp_path):
    folder = save_classifier(tmp_path / "labels", labels=2)
    with pytest.raises(ValueError, match="got a classifier with several labels, whose score is a log-probability"):
        make_policy(tiny_model, "reward", reward_model=SequenceClassificationReward(folder, label=1))
    single = save_classifier(tmp_path / "single")
    with pytest.raises(ValueError, match="got a classifier with a template"):
        reward = SequenceClassificationReward(single, template=lambda prompt, response: response + prompt)
        make_policy(tiny_model, "reward", reward_model=reward)


def test_encoders_are_refused(tiny_model, tmp_path):
    config = BertConfig(
        vocab_size=NAMED, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    folder = save_classifier(tmp_path / "bert", BertForSequenceClassification, config)
    with pytest.raises(ValueError, match="linear head on a causal trunk, got BertForSequenceClassification"):
        make_policy(tiny_model, "reward", reward_model=folder)


def test_heads_of_another_width_are_refused(tiny_model):
    with pytest.raises(ValueError, match="as wide as its trunk's hidden states, 32, got 9"):
        make_policy(tiny_model, "reward", reward_model=reward_on(tiny_model, 9))


def test_objects_train_but_must_be_brought_again(tiny_model, tmp_path):
    reward = reward_on(tiny_model)
    agent = PPO(make_policy(tiny_model, "reward", reward_model=reward), lm_envs(tiny_model), seed=2)
    agent.save(tmp_path / "saved")
    with pytest.raises(TypeError, match=r"started from a RewardModel object, .* pass it, load\(folder, envs, policy="):
        PPO.load(tmp_path / "saved", lm_envs(tiny_model))
    again = make_policy(tiny_model, "reward", reward_model=reward)
    assert PPO.load(tmp_path / "saved", lm_envs(tiny_model), again).iteration == 0


# The packaged reward model


@pytest.mark.slow
def test_packaged_reward_model_on_its_own_trunk():
    """On SmolLM2 the frozen trunk is held once, and values start as the packaged scores."""
    policy = LanguageModelPolicy.from_pretrained(value="reward", lora_rank=2)
    plain = LanguageModelPolicy.from_pretrained(lora_rank=2)
    assert bytes_of(policy) < 1.02 * bytes_of(plain)
    reward = film_review_head()
    texts = [("This film is", " a triumph, warm and funny"), ("The plot was", " a tedious mess")]
    rows = [(reward.tokenizer.encode(a), [*reward.tokenizer.encode(b), 2]) for a, b in texts]
    ids, mask = tensors(*padded(rows, 6, 12))
    with torch.no_grad(), policy.arithmetic():
        values = policy.evaluate(ids, mask, 12).values
    got = [float(values[row, len(response) - 1]) for row, (_, response) in enumerate(rows)]
    np.testing.assert_allclose(got, reward(*zip(*texts, strict=True)), atol=1e-3)
