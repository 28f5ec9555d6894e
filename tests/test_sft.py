"""SFT: the loss and its gradient by independent routes, exact resumption, and what the next stage starts from."""

from __future__ import annotations

import doctest
import json
import math

import numpy as np
import pytest
import torch
from agent_helpers import CUT, lm_envs, parameters, same, toy_envs
from lm_helpers import NAMED, llama, save_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from textenv import DemonstrationSet
from textenv.agents import PPO, SFT, LanguageModelPolicy, PPOConfig, SFTConfig, TablePolicy, likelihood, offline_config
from textenv.agents.nll import Likelihood, nll_losses
from textenv.agents.offline_config import learning_rate_at
from textenv.agents.rollouts.collect import collect
from textenv.lm.adapters import active_adapters, only_adapters
from textenv.prompts import Demonstration

pytestmark = pytest.mark.filterwarnings(CUT)

PAIRS = [
    ("the a", " good"),
    ("the long and winding road of go", "od the"),
    ("good", " the a"),
    ("a bc", "d"),
    Demonstration("the a", " xyz", ended=False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose ids all have tokens, so that its softmax is transformers' own."""
    return save_model(tmp_path_factory.mktemp("sft") / "tiny", llama(vocab_size=NAMED))


@pytest.fixture(scope="module")
def demonstrations(folder):
    return DemonstrationSet.encode(PAIRS, lm_envs(folder, 2, stop=[], max_response_tokens=6))


def policy_of(folder, lora_rank=4, **options):
    return LanguageModelPolicy.from_pretrained(folder, lora_rank=lora_rank, **options)


def loss_of(policy, demonstrations, budget=None, **options):
    state = demonstrations.state()
    ids, mask = torch.as_tensor(state.input_ids), torch.as_tensor(state.attention_mask)
    losses = list(nll_losses(policy, ids, mask, demonstrations.mdp.max_response_tokens, budget, **options))
    sum(losses).backward()
    return sum(losses).item(), [p.grad for p in policy.parameters() if p.grad is not None]


def transformers_batch(demonstrations):
    """The same demonstrations as transformers wants them: padded on the right, -100 on what is not learned."""
    width = max(len(p.ids) + len(r) for p, r in zip(demonstrations.prompts, demonstrations.responses, strict=True))
    ids, labels, mask = (torch.full((len(demonstrations), width), fill) for fill in (0, -100, 0))
    for row, (prompt, response) in enumerate(zip(demonstrations.prompts, demonstrations.responses, strict=True)):
        start, end = len(prompt.ids), len(prompt.ids) + len(response)
        ids[row, :end] = torch.tensor([*prompt.ids, *response])
        labels[row, start:end] = torch.tensor(response)
        mask[row, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


# The loss


def test_loss_and_gradient_are_those_of_transformers(folder, demonstrations):
    policy = policy_of(folder, None)
    loss, gradients = loss_of(policy, demonstrations)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs(**transformers_batch(demonstrations)).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    own = dict(policy.trunk.named_parameters())
    assert len(gradients) == len(own) > 15
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=2e-6, rtol=1e-4)
    whole = transformers_batch(demonstrations)
    whole["labels"] = torch.where(whole["attention_mask"] == 1, whole["input_ids"], -100)
    assert abs(theirs(**whole).loss.item() - loss) > 0.05  # with the prompts' tokens it is another number


def test_prompts_do_not_weigh_in(folder, demonstrations):
    """Neither does what stands in masked columns."""
    policy, state, width = policy_of(folder), demonstrations.state(), demonstrations.mdp.max_response_tokens
    mask = torch.as_tensor(state.attention_mask)
    results = []
    for fill in (0, 7):
        ids = torch.as_tensor(np.where(state.attention_mask == 1, state.input_ids, fill))
        results.append(torch.stack(list(nll_losses(policy, ids, mask, width))))
    assert torch.equal(*results)


@pytest.mark.parametrize("lora_rank", [4, None])
def test_packed_is_padded_and_micro_batches_add_up(folder, demonstrations, monkeypatch, lora_rank):
    expected = loss_of(policy_of(folder, lora_rank), demonstrations)
    for budget in (1, 20, 45):
        loss, gradients = loss_of(policy_of(folder, lora_rank), demonstrations, budget)
        assert loss == pytest.approx(expected[0], abs=1e-6)
        for one, other in zip(gradients, expected[1], strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)
    monkeypatch.setattr("textenv.lm.model.why_not_packed", lambda lm: "padded for this test")
    loss, gradients = loss_of(policy_of(folder, lora_rank), demonstrations)
    assert loss == pytest.approx(expected[0], abs=1e-6)
    for one, other in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


TABLE = np.log([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.4, 0.1], [0.1, 0.2, 0.3, 0.4]])


def toy_set(*responses, envs=None):
    return DemonstrationSet.encode([([1], list(response)) for response in responses], envs or toy_envs(2))


def table(tokens=8):
    return TablePolicy(np.zeros((tokens, 6)))


def test_likelihood_by_hand():
    """Responses [1, 0] and [2, 1, 0] under a table: every mean over tokens, and over responses."""
    logits = np.full((8, 6), -np.inf)
    logits[:3, :4] = TABLE
    found = likelihood(TablePolicy(logits), toy_set([1, 0], [2, 1, 0]))
    nats = [-math.log(0.25 * 0.25), -math.log(0.125 * 0.25 * 0.1)]
    np.testing.assert_allclose(found.nats, nats, atol=1e-5)
    assert found.tokens.tolist() == [2, 3]
    assert found.nll == pytest.approx(sum(nats) / 5, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(nats) / 5), rel=1e-5)
    assert found.metrics()["nats_per_response"] == pytest.approx(sum(nats) / 2, abs=1e-5)
    assert found.estimate().low < found.nll < found.estimate().high


def test_the_gain_is_paired():
    before, after = (Likelihood(np.array(nats), np.array([2, 3, 5])) for nats in ([4.0, 9.0, 11.0], [3.0, 7.5, 8.5]))
    gain = after.gain_over(before)
    assert gain == pytest.approx((0.5, 0.5, 0.5))  # half a nat per token in each response: no doubt about it
    with pytest.raises(ValueError, match="a likelihood of the same responses"):
        after.gain_over(Likelihood(np.ones(2), np.array([2, 3])))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (math.log(6) * 2 + math.log(6) * 3) / 5),
        ("seq-mean-token-sum", (math.log(6) * 2 + math.log(6) * 3) / 2),
        ("seq-mean-token-mean", math.log(6)),
    ],
)
def test_loss_modes(mode, expected):
    agent = SFT(table(), toy_set([1, 0], [2, 1, 0]), SFTConfig(batch_size=2, loss_mode=mode))
    assert agent.step().nll == pytest.approx(expected, rel=1e-5)


def test_a_table_learns_what_was_demonstrated():
    """Its optimum is known: at each place the shares of the demonstrations, whose entropy is the lowest NLL."""
    responses = [[1, 0]] * 3 + [[2, 1, 0]] * 5 + [[2, 2, 0]] * 2 + [[0]] * 2
    agent = SFT(table(), toy_set(*responses), SFTConfig(epochs=1200, batch_size=12, learning_rate=0.1))
    agent.learn(None, progress=False)
    nats = 0.0
    for place in range(3):
        shares = np.bincount([r[place] for r in responses if len(r) > place], minlength=6)
        shares = shares[shares > 0]
        nats -= (shares * np.log(shares / shares.sum())).sum()
    tokens = sum(map(len, responses))
    found = likelihood(agent.policy, agent.demonstrations)
    assert found.nll == pytest.approx(nats / tokens, abs=2e-3)
    first = torch.softmax(agent.policy.logits[0], -1)[:3]
    assert first.tolist() == pytest.approx([2 / 12, 3 / 12, 7 / 12], abs=5e-3)


def test_what_wrappers_forbid_is_no_mistake_of_the_policy():
    """The policy that acts is renormalised over the allowed tokens, and so is the one that is trained."""
    demonstrations = toy_set([1, 2, 0], envs=toy_envs(2, min_length=2))
    found = likelihood(table(), demonstrations)
    assert found.nats[0] == pytest.approx(2 * math.log(5) + math.log(6), abs=1e-5)  # without the stop, twice
    agent = SFT(table(), demonstrations, SFTConfig(learning_rate=0.1))
    assert agent.step().nll == pytest.approx(found.nll, abs=1e-5)
    assert agent.policy.logits[0, 0] == 0  # no gradient on what could not be chosen
    with pytest.raises(TypeError, match="should take `action_masks`"):
        SFT(type("Plain", (), {"evaluate": lambda self, ids, mask, tokens: None})(), demonstrations)


# The run


def test_every_epoch_sees_every_demonstration_once():
    agent = SFT(table(), toy_set(*([1] * (i % 4) + [0] for i in range(10))), SFTConfig(epochs=3, batch_size=4), seed=3)
    assert (agent.steps_per_epoch, agent.total_steps) == (3, 9)
    orders = [torch.cat([agent.rows(3 * epoch + step) for step in range(3)]).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    records = list(agent.iterate())
    assert [r.episodes for r in records] == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert records[-1].epoch == 3 and records[0].tokens == sum(
        len(agent.demonstrations.responses[i]) for i in agent.rows(0)
    )
    other = SFT(table(), agent.demonstrations, agent.config, seed=4)
    assert not torch.equal(other.rows(0), agent.rows(0))


def test_learning_rates():
    assert doctest.testmod(offline_config).failed == 0
    cosine = SFTConfig(learning_rate=2.0, lr_schedule="cosine", warmup_fraction=0.0)
    assert [learning_rate_at(s, 4, cosine) for s in (0, 2)] == pytest.approx([2.0, 1.0])
    constant = SFTConfig(learning_rate=2.0, lr_schedule="constant", warmup_fraction=0.5)
    assert [learning_rate_at(s, 4, constant) for s in range(4)] == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "`epochs` should be an integer of at least 1"),
        ({"batch_size": 2.0}, "`batch_size` should be an integer"),
        ({"micro_batch_tokens": 0}, "`micro_batch_tokens` should be an integer"),
        ({"learning_rate": 0}, "`learning_rate` should be a positive number"),
        ({"max_grad_norm": math.nan}, "`max_grad_norm` should be a positive number"),
        ({"weight_decay": -1}, "`weight_decay` should be a number of at least 0"),
        ({"warmup_fraction": 1.0}, "`warmup_fraction` should be at least 0 and below 1"),
        ({"lr_schedule": "step"}, "`lr_schedule` should be one of"),
        ({"loss_mode": "mean"}, "`loss_mode` should be one of"),
    ],
)
def test_settings_that_could_not_train(options, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**options)


def test_what_an_agent_is_made_of_is_checked(folder, demonstrations):
    with pytest.raises(TypeError, match=r"`demonstrations` should be a DemonstrationSet, got list"):
        SFT(table(), PAIRS)
    with pytest.raises(TypeError, match=r"`held_out` should be a DemonstrationSet, got list"):
        SFT(table(), toy_set([0]), held_out=PAIRS)
    with pytest.raises(ValueError, match=r"`held_out` should be of the same task"):
        SFT(table(), toy_set([0]), held_out=demonstrations)
    with pytest.raises(ValueError, match="require a gradient"):
        SFT(policy_of(folder).requires_grad_(False), demonstrations)
    with pytest.raises(ValueError, match="`held_out` should be demonstrations"):
        SFT(table(), toy_set([0])).evaluate()
    for name in ("save_every", "eval_every"):
        with pytest.raises(ValueError, match=f"`{name}` should be an integer of at least 1 or None"):
            SFT(table(), toy_set([0])).learn(None, progress=False, **{name: 0})


def test_a_loss_that_is_infinite_takes_no_step():
    logits = np.zeros((8, 6))
    logits[:, 3] = -np.inf
    agent = SFT(TablePolicy(logits), toy_set([3, 0]))
    before = parameters(agent)
    with pytest.raises(FloatingPointError, match="loss on demonstrations should be finite, got inf"):
        agent.step()
    assert same(before, parameters(agent)) and agent.iteration == 0


CONFIG = {"epochs": 3, "batch_size": 2, "learning_rate": 0.01, "weight_decay": 0.01, "lr_schedule": "cosine"}
KINDS = [
    ("table", None),
    ("adapters", {"lora_rank": 4, "temperature": 0.8}),
    ("all weights", {"lora_rank": None}),
    ("bfloat16", {"lora_rank": 4, "dtype": "bfloat16"}),
]


@pytest.fixture(params=KINDS, ids=[name for name, _ in KINDS])
def make(request, folder, demonstrations):
    """(policy, or None where a checkpoint remakes it; a fresh agent)"""
    _, options = request.param
    if options is None:
        data = toy_set([1, 0], [2, 1, 0], [0], [3, 3, 0], [1, 1, 1, 0])
        return table, lambda: SFT(table(), data, SFTConfig(**CONFIG), held_out=data, seed=5)
    return lambda: None, lambda: SFT(
        LanguageModelPolicy.from_pretrained(folder, **options),
        demonstrations,
        SFTConfig(**CONFIG),
        held_out=demonstrations,
        seed=5,
    )


def figures(row):
    return {name: value for name, value in row.items() if "second" not in name}


def test_training_goes_on_bit_for_bit(make, tmp_path):
    """Nine steps, or four of them, a checkpoint in the midst of an epoch, everything made anew, and five."""
    remade, agent_of = make
    whole = agent_of()
    expected = [figures(stats.metrics()) for stats in whole.iterate()]
    first = agent_of()
    before = [figures(first.step().metrics()) for _ in range(4)]
    first.save(tmp_path / "saved")
    torch.manual_seed(99)
    second = SFT.load(tmp_path / "saved", first.demonstrations, remade(), held_out=first.demonstrations)
    assert (second.iteration, second.episodes, second.seed) == (4, first.episodes, 5)
    after = [figures(stats.metrics()) for stats in second.iterate()]
    assert before + after == expected and len(expected) == 9
    assert same(parameters(second), parameters(whole))
    assert expected[-1]["nll"] < expected[0]["nll"]


def test_an_interrupted_run_goes_on_in_its_folder(tmp_path, monkeypatch):
    data = toy_set([1, 0], [2, 1, 0], [0], [3, 3, 0], [1, 1, 1, 0])

    def agent_of():
        return SFT(table(), data, SFTConfig(**CONFIG), held_out=data, seed=5)

    whole = agent_of().learn(tmp_path / "whole", progress=False, save_every=2, eval_every=2)
    broken = agent_of()
    step = broken.step

    def interrupted():
        if broken.iteration == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(broken, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broken.learn(tmp_path / "run", progress=False, save_every=2, eval_every=2)
    resumed = SFT.load(tmp_path / "run", data, table(), held_out=data)
    assert resumed.iteration == 4
    resumed.learn(tmp_path / "run", progress=False, save_every=2, eval_every=2)
    one, other = (
        [figures(json.loads(line)) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    )
    assert one == other
    assert [row["iteration"] for row in one] == list(range(10))
    assert [row["iteration"] for row in one if "eval/nll" in row] == [0, 2, 4, 6, 8, 9]
    assert same(parameters(resumed), parameters(whole))


def test_a_run_leaves_what_it_promises(folder, demonstrations, tmp_path, capsys):
    agent = SFT(policy_of(folder), demonstrations, SFTConfig(epochs=2, batch_size=2), held_out=demonstrations)
    agent.learn(tmp_path / "run")
    for name in ("metrics.jsonl", "training.png", "checkpoint/state.json", "checkpoint/policy.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name
    assert (tmp_path / "run" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/nll"]))
    assert last["episodes"] == 10 and last["learning_rate"] < 2e-4
    shown = capsys.readouterr().out
    assert "held-out NLL" in shown and "step 6 of 6" in shown and "Metrics, plot and checkpoint" in shown
    with pytest.raises(FileExistsError, match="already holds a run"):
        SFT(policy_of(folder), demonstrations).learn(tmp_path / "run", progress=False)


def test_measuring_leaves_no_trace(folder, demonstrations):
    agents = [SFT(policy_of(folder), demonstrations, held_out=held) for held in (None, demonstrations)]
    for agent in agents:
        agent.learn(None, progress=False, eval_every=1)
    assert same(*map(parameters, agents))


def test_checkpoints_of_other_runs_are_refused(folder, demonstrations, tmp_path):
    agent = SFT(table(), toy_set([1, 0], [2, 0]))
    agent.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"demonstrations should be as for training.*load\(folder, demonstrations\)"):
        SFT.load(tmp_path / "saved", toy_set([2, 0], [1, 0]), table())
    with pytest.raises(ValueError, match=r"which cannot be remade .*load\(folder, demonstrations, policy="):
        SFT.load(tmp_path / "saved", toy_set([1, 0], [2, 0]))
    with pytest.raises(ValueError, match="saved by SFT, got PPO"):
        PPO.load(tmp_path / "saved", toy_envs(2), table())
    with pytest.raises(FileNotFoundError):
        SFT.load(tmp_path, toy_set([0]))


# The next stage


@pytest.fixture(scope="module")
def trained(folder, demonstrations, tmp_path_factory):
    """A low-rank policy after SFT far enough to be another model, and a folder with its adapter."""
    policy = policy_of(folder)
    before = likelihood(policy, demonstrations).nll
    SFT(policy, demonstrations, SFTConfig(epochs=30, batch_size=5, learning_rate=0.02)).learn(None, progress=False)
    assert likelihood(policy, demonstrations).nll < before - 1
    saved = tmp_path_factory.mktemp("trained")
    policy.save_pretrained(saved / "adapter")
    return policy, saved


def logprobs(model, demonstrations):
    state = demonstrations.state()
    return model.response_logprobs(state.input_ids, state.attention_mask, demonstrations.mdp.max_response_tokens)


ROADS = ["merged", "merged, all weights", "kept", "kept, separate value", "kept, bfloat16"]


def start(road, folder, trained, tmp_path):
    policy, saved = trained
    if road == "merged":
        return policy.merged(tmp_path / "merged")
    if road == "merged, all weights":
        return policy.merged(tmp_path / "merged", lora_rank=None)
    options = {"kept": {}, "kept, separate value": {"value": "separate"}, "kept, bfloat16": {"dtype": "bfloat16"}}
    return policy_of(folder, adapter=saved / "adapter", **options[road])


@pytest.mark.parametrize("road", ROADS)
def test_the_next_stage_starts_at_its_reference(road, folder, demonstrations, trained, tmp_path):
    """Policy and reference are what SFT left, not the base model; PPO's own check agrees, and goes on learning."""
    policy = start(road, folder, trained, tmp_path)
    rounding = 0.1 if "bfloat16" in road else 1e-4
    expected, base = logprobs(trained[0], demonstrations), logprobs(trained[0].reference, demonstrations)
    ours, reference = logprobs(policy, demonstrations), logprobs(policy.reference, demonstrations)
    assert np.abs(ours - reference).max() <= (0.05 if "bfloat16" in road else 1e-5)
    assert np.abs(ours - expected).mean() <= rounding
    assert np.abs(ours - base).max() > 1
    agent = PPO(policy, lm_envs(folder, 6, kl_coef=0.1), PPOConfig(learning_rate=0.01), seed=1)
    assert abs(agent.step().kl) < rounding
    assert abs(agent.step().kl) > 1e-4
    np.testing.assert_array_equal(logprobs(policy.reference, demonstrations), reference)  # the reference stays


@pytest.mark.parametrize("road", ["merged", "kept"])
def test_checkpoints_of_the_next_stage_go_on(road, folder, demonstrations, trained, tmp_path):
    policy = start(road, folder, trained, tmp_path)
    agent = PPO(policy, lm_envs(folder, 6), PPOConfig(learning_rate=0.01), seed=1)
    agent.step()
    agent.save(tmp_path / "saved")
    loaded = PPO.load(tmp_path / "saved", lm_envs(folder, 6))
    assert loaded.policy.settings == policy.settings
    np.testing.assert_array_equal(logprobs(loaded.policy, demonstrations), logprobs(policy, demonstrations))
    np.testing.assert_array_equal(
        logprobs(loaded.policy.reference, demonstrations), logprobs(policy.reference, demonstrations)
    )


@pytest.mark.parametrize("road", ["merged", "kept", "all weights"])
def test_a_merged_folder_is_a_model_of_transformers(road, folder, demonstrations, trained, tmp_path):
    policy = policy_of(folder, None) if road == "all weights" else start(road, folder, trained, tmp_path)
    agent = PPO(policy, lm_envs(folder, 6), PPOConfig(learning_rate=0.01), seed=1)
    agent.step()  # trained on, so that all adapters count
    policy.save_merged(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert not getattr(model, "_hf_peft_config_loaded", False)
    batch = transformers_batch(demonstrations)
    nll = likelihood(policy, demonstrations).nll
    assert model(**batch).loss.item() == pytest.approx(nll, abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "whole")("the").input_ids == policy.tokenizer.encode("the")
    with pytest.raises(FileExistsError, match="holds a model already"):
        policy.save_merged(tmp_path / "whole")


def test_merging_a_bfloat16_policy_keeps_what_it_learned(folder, demonstrations, tmp_path):
    """Small changes of a weight would be rounded away in bfloat16; the folder holds float32."""
    policy = policy_of(folder, dtype="bfloat16")
    SFT(policy, demonstrations, SFTConfig(learning_rate=1e-4, warmup_fraction=0.0)).step()
    policy.save_merged(tmp_path / "whole")
    layer = policy.trunk.model.layers[0].self_attn.q_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16
    learned = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    saved = load_file(tmp_path / "whole" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(saved - layer.base_layer.weight.float(), learned.detach(), atol=1e-7, rtol=1e-3)
    assert (saved.bfloat16() == layer.base_layer.weight).float().mean() > 0.5  # what rounding would have left


def test_a_kept_adapter_stays_as_it_is(folder, trained):
    for value in ("trunk", "separate"):
        policy = policy_of(folder, adapter=trained[1] / "adapter", dtype="bfloat16", value=value)
        kept = [(n, p) for n, p in policy.trunk.named_parameters() if ".kept." in n]
        assert kept and all(p.dtype == torch.float32 and not p.requires_grad for _, p in kept)
        assert active_adapters(policy.trunk) == ("kept", "default")
        assert not any(".kept." in name for name in policy.state_dict())
    with only_adapters(policy.trunk, ()):
        assert all(m._disable_adapters for m in policy.trunk.modules() if hasattr(m, "_disable_adapters"))
    with only_adapters(policy.trunk, ("kept",)):
        assert active_adapters(policy.trunk) == ("kept",)
    assert active_adapters(policy.trunk) == ("kept", "default")
    own = active_adapters(policy.value_network)
    assert own == ("kept", "default")  # values start as the model after SFT does


def test_the_engine_writes_with_both_adapters(folder, trained):
    """What it reports of its tokens is what the trainer reads, after training has moved the second adapter."""
    policy = policy_of(folder, adapter=trained[1] / "adapter")
    envs = lm_envs(folder, 6, kl_coef=0.1)
    PPO(policy, envs, PPOConfig(learning_rate=0.05), seed=1).step()
    episodes = collect(policy, envs, policy.engine(), episodes=6, seed=2)
    torch.testing.assert_close(episodes.engine_logprobs, episodes.logprobs, atol=1e-4, rtol=1e-4)
    assert np.abs(episodes.replayed.infos["kl"]).max() > 1e-3


def test_adapters_that_cannot_be_kept(folder, trained, tmp_path):
    with pytest.raises(ValueError, match="should be a folder with a low-rank adapter"):
        policy_of(folder, adapter=folder)
    with pytest.raises(ValueError, match=r"`adapter` is kept beside adapters that train"):
        policy_of(folder, None, adapter=trained[1] / "adapter")
    other = save_model(tmp_path / "other", llama(vocab_size=NAMED, hidden_size=64))
    with pytest.raises(ValueError, match="should hold an adapter of this model, got another's"):
        policy_of(other, adapter=trained[1] / "adapter")
    deeper = save_model(tmp_path / "deeper", llama(vocab_size=NAMED, num_hidden_layers=1))
    with pytest.raises(ValueError, match="should hold an adapter of this model, got another's"):
        policy_of(deeper, adapter=trained[1] / "adapter")
    with pytest.raises(ValueError, match=r"exported whole, .* Use save_merged"):
        policy_of(folder, adapter=trained[1] / "adapter").save_pretrained(tmp_path / "half")


def test_a_reward_head_reads_its_own_trunk_not_the_reference_with_an_adapter(folder, trained):
    """Scores are of the base model's hidden states; the reference's are others once an adapter is in it."""
    policy = policy_of(folder, adapter=trained[1] / "adapter")
    assert policy.reference.source == policy.lm.source != policy_of(folder).reference.source
    assert str(trained[1] / "adapter") in policy.reference.source


# Film reviews


def test_review_demonstrations_are_openings_and_how_they_went_on():
    from textenv.rewards import RatedSentence, load_openings, load_review_demonstrations, review_demonstrations

    good = RatedSentence(1, "The film provides  some great insight into minds.", (3, 4))
    bad = RatedSentence(2, "The film provides some poor insight into minds.", (-3, 4))
    short = RatedSentence(3, "The film is great.", (4, 4))
    assert review_demonstrations([good, bad, short]) == [
        Demonstration("The film provides some", " great insight into minds.", place="sentence 1")
    ]
    with pytest.raises(ValueError, match=r"At least one sentence should be rated 4\.5"):
        review_demonstrations([good], min_rating=4.5)
    train, held_out = load_review_demonstrations()
    assert len(train) > 1000 and len(held_out) > 250
    assert not {d.prompt + d.response for d in train} & {d.prompt + d.response for d in held_out}
    assert not {d.prompt for d in train} & set(load_openings())


@pytest.mark.slow
def test_smollm2_learns_to_write_film_reviews():
    """One epoch on 96 sentences: the held-out NLL falls, by an interval that excludes zero."""
    import gymnasium as gym

    from textenv.rewards import load_review_demonstrations

    envs = gym.make_vec("RLHF-v0", num_envs=2, max_prompt_tokens=16, max_response_tokens=32)
    train, held_out = (
        DemonstrationSet.encode(side[:count], envs, unfit="drop")
        for side, count in zip(load_review_demonstrations(), (110, 40), strict=True)
    )
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=8)
    agent = SFT(policy, train, SFTConfig(batch_size=16, learning_rate=1e-3), held_out=held_out)
    before = agent.evaluate()
    agent.learn(None, progress=False)
    after = agent.evaluate()
    gain = after.gain_over(before)
    assert gain.low > 0.05, gain
    assert 2 < after.nll < before.nll < 6
