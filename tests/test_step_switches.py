"""What trades time for memory changes no number: every switch on and off, on the gradients of a whole PPO update."""

import copy

import pytest
import torch
from agent_helpers import lm_agent, lm_envs
from lm_helpers import gpt2, llama, save_model
from torch import nn
from value_helpers import save_classifier

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.losses import Counts
from textenv.agents.stats import UpdateStats
from textenv.lm import LanguageModel
from textenv.lm.layers import checkpoint_layers, compile_layers, decoder_layers
from textenv.lm.logprobs import token_logprobs
from textenv.lm.offload import Offloaded
from textenv.lm.output_head import OutputHead
from textenv.rewards import SequenceClassificationReward

LAYOUTS = {
    "adapters": {"lora_rank": 4},
    "all weights": {"lora_rank": None},
    "adapters, value network": {"lora_rank": 4, "value": "separate"},
    "all weights, value network": {"lora_rank": None, "value": "separate"},
}


def gradients(policy, folder, rollout=None):
    """Of one minibatch of eight ragged responses, with entropy bonus and KL loss."""
    config = PPOConfig(entropy_coef=0.01, kl_loss_coef=0.1, vf_coef=0.5)
    agent = PPO(policy, lm_envs(folder, 8), config, seed=3)
    rollout = rollout or agent.rollout()
    policy.zero_grad()
    batch, counts = rollout.rows(torch.arange(8)), Counts.of(rollout.response_mask)
    output = agent._evaluate(batch)
    agent._loss(batch, output, batch.logprobs, None, counts, UpdateStats(0.2)).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, rollout


def move_adapters(policy):
    """Adapters start as the identity, where half of their gradients are 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return policy


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys() and one
    assert max(gradient.abs().max() for gradient in one.values()) > 1e-3
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_checkpointing_changes_no_gradient(tiny_model, layout):
    plain, rollout = gradients(move_adapters(LanguageModelPolicy.from_pretrained(tiny_model, **layout)), tiny_model)
    policy = move_adapters(LanguageModelPolicy.from_pretrained(tiny_model, checkpointing=True, **layout))
    passes = []
    for layer in decoder_layers(policy.trunk):
        layer.register_forward_hook(lambda *_: passes.append(1))
    recomputed, _ = gradients(policy, tiny_model, rollout)
    assert_same(plain, recomputed, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_checkpointing_keeps_layer_inputs_alone(make, tmp_path):
    """By count: what autograd keeps for the backward pass, and that layers run again there."""
    folder = save_model(tmp_path / "model", make())
    sizes, runs = {}, []
    for on in (False, True):
        policy = LanguageModelPolicy.from_pretrained(folder, lora_rank=None, checkpointing=on)
        layer = decoder_layers(policy.trunk)[0]
        own = layer.forward.args[0] if on else layer.forward
        counted = lambda *args, own=own, **kwargs: runs.append(1) or own(*args, **kwargs)  # noqa: E731
        if on:
            layer.forward = type(layer.forward)(layer.forward.func, counted)
        ids, mask = torch.randint(100, (4, 20)), torch.ones(4, 20)
        policy.evaluate(ids, mask, 8)  # the first pass also tries out what the model can do
        runs.clear()
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = policy.evaluate(ids, mask, 8)
        sizes[on] = kept
        if on:
            assert runs == [1]
            output.logprobs.sum().backward()
            assert runs == [1, 1]
    assert sizes[True] < 0.5 * sizes[False]


def test_without_gradients_nothing_is_checkpointed(tiny_model, monkeypatch):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, checkpointing=True)
    monkeypatch.setattr("textenv.lm.layers.checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    with torch.no_grad():
        policy.evaluate(torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9), 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler touches what warns, such as .grad of tensors within a graph
def test_compiling_changes_no_gradient(tiny_model):
    layout = {"lora_rank": 4}
    plain, rollout = gradients(move_adapters(LanguageModelPolicy.from_pretrained(tiny_model, **layout)), tiny_model)
    policy = move_adapters(LanguageModelPolicy.from_pretrained(tiny_model, compiled=True, **layout))
    compiled, _ = gradients(policy, tiny_model, rollout)
    assert_same(plain, compiled, atol=1e-5, rtol=1e-4)
    ids, mask = rollout.input_ids[:3], rollout.attention_mask[:3]  # another shape
    whole = policy.evaluate(ids, mask, rollout.response_tokens).logprobs
    torch.testing.assert_close(whole, rollout.logprobs[:3], atol=1e-4, rtol=1e-4)


def test_compiling_what_is_computed_again_is_refused(tiny_model):
    with pytest.raises(ValueError, match="`compiled` and `checkpointing` should not come together"):
        LanguageModelPolicy.from_pretrained(tiny_model, compiled=True, checkpointing=True)


def test_a_model_without_known_layers_is_refused():
    for switch in (checkpoint_layers, compile_layers):
        with pytest.raises(ValueError, match="Linear has no layers that transformers knows"):
            switch(nn.Linear(2, 2))


def test_bfloat16_gradients_point_where_those_of_float32_do(tiny_model):
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = move_adapters(LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype=dtype))
        grads, rollout = gradients(policy, tiny_model, found.get("rollout"))
        found.setdefault("rollout", rollout)
        found[dtype] = torch.cat([gradient.flatten() for gradient in grads.values()])
        assert all(gradient.dtype == torch.float32 for gradient in grads.values())
    cosine = torch.nn.functional.cosine_similarity(found["float32"], found["bfloat16"], dim=0)
    assert cosine > 0.98


# Nothing twice


def trained(tiny_model, keeps, monkeypatch, **config):
    agent = lm_agent(tiny_model, num_minibatches=1, epochs=2, learning_rate=1e-3, **config)
    passes, own = [], LanguageModelPolicy.evaluate
    monkeypatch.setattr(LanguageModelPolicy, "evaluate", lambda self, *a, **k: passes.append(1) or own(self, *a, **k))
    if not keeps:
        whole = agent.rollout
        monkeypatch.setattr(agent, "rollout", lambda **_: whole())
    counts = []
    for _ in range(3):
        passes.clear()
        stats = agent.step()
        counts.append(len(passes))
    monkeypatch.undo()
    return agent, stats, counts


@pytest.mark.parametrize("config", [{}, {"entropy_coef": 0.01}, {"logprobs_from": "engine"}], ids=str)
def test_the_pass_before_the_update_is_its_first(tiny_model, config, monkeypatch):
    """The first iteration checks that two passes agree; from then on one of them is enough."""
    one, one_stats, fewer = trained(tiny_model, True, monkeypatch, **config)
    other, other_stats, more = trained(tiny_model, False, monkeypatch, **config)
    before = 0 if "logprobs_from" in config else 1
    assert (fewer, more) == ([2 + before, 2, 2], [2 + before] * 3)
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert one_stats.approx_kl == pytest.approx(other_stats.approx_kl, abs=1e-5)


def test_several_micro_batches_leave_the_first_pass_without_a_graph(tiny_model):
    for config in ({"micro_batch_tokens": 30}, {"num_minibatches": 2}):
        assert lm_agent(tiny_model, **config).rollout(keep_graph=True).first_pass is None
    assert lm_agent(tiny_model).rollout().first_pass is None
    assert lm_agent(tiny_model).rollout(keep_graph=True).first_pass is not None


# The output head


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("named", [None, 40])
def test_a_trained_head_has_autograds_gradients(temperature, named):
    """Against log_softmax over whole logits, in chunks that do not divide the number of tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=generator) for size in ((11, 8), (50, 8)))
    targets = torch.randint(40, (11,), generator=generator)
    slope = torch.randn(11, generator=generator)
    results = []
    for ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            logprobs, _ = token_logprobs(h, targets, OutputHead(w, None, temperature, named), chunk=4)
        else:
            logits = (h @ w.T / temperature)[:, :named]
            logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)
        results.append((logprobs.detach(), *torch.autograd.grad((slope * logprobs).sum(), (h, w))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_probabilities_that_underflow_keep_their_logprob():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [-300.0], [5.0]])
    logprobs, entropies = token_logprobs(hidden.repeat(2, 1), torch.tensor([1, 2]), OutputHead(weight))
    expected = torch.log_softmax(torch.tensor([0.0, -300.0, 5.0], dtype=torch.float64), -1)
    torch.testing.assert_close(logprobs.double(), expected[[1, 2]], atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(entropies.double(), -(expected.exp() * expected).sum().repeat(2), atol=1e-6, rtol=1e-5)


# Frozen models that rest elsewhere


def test_an_offloaded_reference_is_the_same_and_away_when_it_rests(tiny_model, monkeypatch):
    moves, move = [], nn.Module.to
    plain = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=None)
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=None, offload=True)
    assert isinstance(policy.reference, Offloaded)
    rollout = lm_agent(tiny_model).rollout()
    monkeypatch.setattr(nn.Module, "to", lambda self, where: moves.append(str(where)) or move(self, where))
    arrays = rollout.input_ids.numpy(), rollout.attention_mask.numpy()
    policy.reference._device, where = torch.device("cpu:0"), policy.reference.device
    ours = policy.reference.response_logprobs(*arrays, rollout.response_tokens)
    assert moves == ["cpu:0", "cpu"] and where.type == "cpu"  # there and back, once for all blocks
    assert (ours == plain.reference.response_logprobs(*arrays, rollout.response_tokens)).all()


def test_an_offloaded_model_goes_home_after_an_error(tiny_model, monkeypatch):
    model = Offloaded(copy.deepcopy(llama()), source="tiny")
    moves = []
    monkeypatch.setattr(nn.Module, "to", lambda self, where: moves.append(str(where)) or self)
    with pytest.raises(IndexError):
        model.frozen_pass(torch.full((1, 3), 999), torch.ones(1, 3), 1)
    assert moves[-1] == "cpu" and not model.working


def test_an_offloaded_reward_model_is_the_same_and_moves_once_a_call(tmp_path, monkeypatch):
    folder = save_classifier(tmp_path / "classifier")
    plain, away = (SequenceClassificationReward(folder, offload=offload, batch_size=1) for offload in (False, True))
    moves, move = [], nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda self, where: moves.append(str(where)) or move(self, where))
    texts = ["the a", "good", "bc"], [" the", " go", " a"]
    expected = plain(*texts)
    away(*texts)  # loads
    moves.clear()
    assert (away(*texts) == expected).all()
    assert moves == ["cpu", "cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_weights_are_there_for_the_pass_alone(tiny_model):
    reference = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=None, offload=True, device="cuda").reference
    plain = LanguageModel(copy.deepcopy(reference.model).cuda(), source="tiny")
    ids = torch.ones(2, 9, dtype=torch.int32).numpy()
    assert next(reference.model.parameters()).device.type == "cpu"
    ours = reference.response_logprobs(ids, ids, 4)
    assert next(reference.model.parameters()).device.type == "cpu"
    torch.testing.assert_close(ours, plain.response_logprobs(ids, ids, 4), atol=1e-4, rtol=1e-4)
