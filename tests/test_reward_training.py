"""Training a reward network on comparisons: losses by hand, micro-batches, resuming, and what it must learn."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from reward_helpers import TEXTS, network, preferences

from textenv.lm.token_blocks import block_sizes
from textenv.rewards import (
    Preference,
    PreferenceData,
    RatedData,
    RatedSentence,
    RewardNetwork,
    RewardTrainer,
    RewardTrainingConfig,
    bradley_terry_loss,
    centering_loss,
    evaluate_preferences,
)
from textenv.rewards.train import Arguments, run
from textenv.rewards.training import learning_rate_at

# Losses


def test_label_smoothing_by_hand():
    """d = log 3: -log sigmoid(d) = log 4/3 and -log sigmoid(-d) = log 4; 0.9 and 0.1 of them."""
    loss = bradley_terry_loss(torch.tensor([math.log(3)]), torch.zeros(1), label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothed_loss_is_smallest_at_the_log_odds_of_a_right_label(smoothing):
    gap = torch.tensor([math.log((1 - smoothing) / smoothing)], requires_grad=True)
    bradley_terry_loss(gap, torch.zeros(1), label_smoothing=smoothing).backward()
    assert gap.grad.item() == pytest.approx(0, abs=1e-6)


def test_weights_take_the_place_of_the_mean():
    chosen, rejected, margin = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0, 1])
    whole = bradley_terry_loss(chosen, rejected, margin, label_smoothing=0.2)
    parts = [
        bradley_terry_loss(chosen[s], rejected[s], margin[s], label_smoothing=0.2, weight=torch.full((n,), 1 / 3))
        for s, n in ((slice(0, 1), 1), (slice(1, 3), 2))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_centering_loss_by_hand():
    """(2 + 1)^2 and (0 - 1)^2; mean 5."""
    assert centering_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, -1.0])).item() == 5
    weight = torch.tensor([1.0, 0.5])
    assert centering_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, -1.0]), weight).item() == 9.5


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, math.nan])
def test_smoothing_must_leave_labels_their_way_round(smoothing):
    with pytest.raises(ValueError, match=r"at least 0 and below 0\.5"):
        bradley_terry_loss(torch.ones(1), torch.zeros(1), label_smoothing=smoothing)


# The schedule and the blocks


def test_learning_rate_rises_and_falls():
    config = RewardTrainingConfig(learning_rate=8.0, warmup=0.2)
    rates = [learning_rate_at(step, 10, config) for step in range(10)]
    assert rates == [4, 8, 8, 7, 6, 5, 4, 3, 2, 1]
    assert [learning_rate_at(s, 2, RewardTrainingConfig(learning_rate=1.0, warmup=0)) for s in (0, 1)] == [1, 0.5]


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [([6, 7, 8, 9], 16, [2, 1, 1]), ([6, 7], None, [2]), ([], 4, []), ([9, 9], 4, [1, 1]), ([1, 1, 2, 2], 4, [2, 2])],
)
def test_block_sizes(lengths, budget, sizes):
    assert block_sizes(lengths, budget) == sizes


# What a step holds


def encode(prompt, response, _row=""):
    return list(map(ord, prompt + response))


def test_every_comparison_comes_once_an_epoch():
    given = preferences(23)
    data = PreferenceData(given, encode, batch_size=5, tokens_per_pass=60, seed=1)
    seen = []
    for index in range(data.steps_per_epoch):
        batches = data.step(0, index)
        assert sum(batch.weight.sum() for batch in batches) == pytest.approx(1)
        for batch in batches:
            rows = ["".join(map(chr, data.rows[i])) for i in batch.texts]
            assert len(batch.chosen) == 1 or len(batch.texts) * max(map(len, rows)) <= 60
            for c, r, m in zip(batch.chosen, batch.rejected, batch.margin, strict=True):
                seen.append((rows[c], rows[r], float(m)))
    expected = [(p.prompt + p.chosen, p.prompt + p.rejected, p.margin or 0.0) for p in given]
    assert sorted(seen) == sorted(expected)
    assert data.steps_per_epoch == 5 and len(data.rows) == len(TEXTS)


def test_epochs_have_their_own_order_and_seeds_theirs():
    datas = [PreferenceData(preferences(30), encode, batch_size=30, seed=seed) for seed in (0, 0, 1)]
    order = [[b.chosen.tolist() for b in d.step(e, 0)] for d, e in ((datas[0], 0), (datas[1], 0), (datas[2], 0))]
    assert order[0] == order[1] and datas[0].fingerprint == datas[1].fingerprint != datas[2].fingerprint
    small = PreferenceData(preferences(30), encode, batch_size=5)
    assert small.step(0, 0)[0].margin.tolist() != small.step(1, 0)[0].margin.tolist() or (
        small.step(0, 0)[0].texts.tolist() != small.step(1, 0)[0].texts.tolist()
    )


def test_a_text_that_cannot_be_encoded_is_named(tiny_model):
    made = RewardNetwork.from_pretrained(tiny_model, train="head")
    with pytest.raises(ValueError, match="Comparison 1, rejected: a text should have at most 128 tokens"):
        PreferenceData([Preference("", "a", "b"), Preference("", "a", "q" * 200)], made.encode)
    with pytest.raises(ValueError, match="at least one comparison"):
        PreferenceData([], made.encode)


def rated(*ratings):
    return [RatedSentence(k, f"sentence {k}", row) for k, row in enumerate(ratings)]


def test_rated_pairs_are_single_raters_comparisons():
    """Ratings of the first are always above those of the others, which are equal: only its pairs are decided."""
    sentences = rated((3, 4), (1, 1, 1), (1, 1))
    rows, points = [[0] * 9, [1] * 8, [2] * 7], np.array([[9, 5, 6], [8, 5, 6], [7, 5, 6]])
    data = RatedData(sentences, rows, points, batch_size=3, cut_share=0.1)
    (batch,) = data.step(0, 0)
    first = int(np.flatnonzero(batch.texts == 0)[0])
    assert len(batch.chosen) == 4  # two pairs, whole and cut
    assert (batch.chosen // 3 == first).all() and (batch.rejected // 3 != first).all()
    assert (batch.chosen[:2] % 3 == 0).all() and (batch.chosen[2:] % 3 > 0).all() and (batch.rejected[2:] % 3 > 0).all()
    np.testing.assert_allclose(batch.weight, [0.45, 0.45, 0.05, 0.05], atol=1e-7)


def test_a_rater_is_drawn_for_every_pair_as_often_as_they_rated():
    """(0, 2) against (1,): the first wins half of the time; no mean rating would say so."""
    rows, points = [[0], [1]], np.ones((2, 1), np.int64)
    data = RatedData(rated((0, 2), (1,)), rows, points, batch_size=2, cut_share=0.0)
    wins = [int(b.texts[b.chosen[0]] == 0) for epoch in range(400) for b in data.step(epoch, 0)]
    assert 0.4 < np.mean(wins) < 0.6  # four standard errors


def test_every_sentence_comes_once_an_epoch():
    sentences = rated(*[(k % 5, 4 - k % 3) for k in range(23)])
    data = RatedData(sentences, [[k] for k in range(23)], np.ones((23, 1), np.int64), batch_size=5, cut_share=0.0)
    texts = [i for index in range(data.steps_per_epoch) for b in data.step(0, index) for i in b.texts]
    assert sorted(texts) == list(range(23)) and data.steps_per_epoch == 4


def test_raters_that_agree_on_everything_are_refused():
    data = RatedData(rated((1,), (1,)), [[0], [1]], np.ones((2, 1), np.int64), cut_share=0.0)
    with pytest.raises(ValueError, match="larger `batch_size`"):
        data.step(0, 0)
    with pytest.raises(ValueError, match="`cut_share`"):
        RatedData(rated((1,), (2,)), [[0], [1]], np.ones((2, 1), np.int64), cut_share=0.1)


# Training


def trainer(model, train="lora", *, data=None, checkpoint=None, tokens_per_pass=2048, **config):
    made = network(model, train)
    data = data or PreferenceData(preferences(), made.encode, batch_size=4, tokens_per_pass=tokens_per_pass)
    return RewardTrainer(made, data, RewardTrainingConfig(**({"epochs": 2} | config)), checkpoint)


def weights(of):
    return {name: p.detach().clone() for name, p in of.network.trained_state().items()}


def test_the_first_step_is_the_plain_loss(tiny_model):
    """Scores of the scorer, the loss of bradley_terry_loss with margins, and its centring term."""
    given = preferences(4)
    one = trainer(tiny_model, label_smoothing=0.1, centering_coef=0.01, epochs=1)
    one.data = PreferenceData(given, one.network.encode, batch_size=4)
    chosen, rejected = (
        torch.tensor(one.network.score([p.prompt for p in given], [getattr(p, side) for p in given]))
        for side in ("chosen", "rejected")
    )
    margin = torch.tensor([p.margin or 0.0 for p in given])
    expected = bradley_terry_loss(chosen, rejected, margin, label_smoothing=0.1) + 0.01 * centering_loss(
        chosen, rejected
    )
    (stats,) = one.train(progress=False)
    assert stats.loss == pytest.approx(expected.item(), abs=1e-5)
    assert stats.accuracy == ((chosen > rejected).double().mean()).item()


@pytest.mark.parametrize("train", ["lora", "all"])
def test_micro_batches_do_not_matter(train, tiny_model):
    """One pass over a step against a pass for every comparison."""
    whole, parts = trainer(tiny_model, train, tokens_per_pass=None), trainer(tiny_model, train, tokens_per_pass=1)
    assert len(whole.data.step(0, 0)) == 1 and len(parts.data.step(0, 0)) == 4
    (a,), (b,) = whole.train(until=1, progress=False), parts.train(until=1, progress=False)
    assert a.loss == pytest.approx(b.loss, abs=1e-5) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    for one, other in zip(whole.optimizer.state.values(), parts.optimizer.state.values(), strict=True):
        torch.testing.assert_close(one["exp_avg"], other["exp_avg"], atol=1e-6, rtol=1e-3)  # a tenth of the gradient


@pytest.mark.parametrize("train", ["head", "lora", "all"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(train, tiny_model, tmp_path):
    whole = trainer(tiny_model, train)
    whole.train(progress=False)
    path = tmp_path / "run" / "checkpoint.safetensors"
    stopped = trainer(tiny_model, train, checkpoint=path, save_every=2)
    stopped.train(until=3, progress=False)
    resumed = trainer(tiny_model, train, checkpoint=path)
    assert resumed.steps_done == 3
    resumed.train(progress=False)
    assert resumed.history == whole.history and resumed.steps_done == whole.total_steps == 6
    for (name, a), b in zip(weights(whole).items(), weights(resumed).values(), strict=True):
        assert torch.equal(a, b), name
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    done = trainer(tiny_model, train, checkpoint=path)
    assert done.train(progress=False) == whole.history


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, "same config, got epochs=2 then and 3 now"),
        ({"train": "head"}, "same network, got train='lora' then and 'head' now"),
        ({"seed": 1}, "same data"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, message, tiny_model, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    trainer(tiny_model, checkpoint=path).train(until=1, progress=False)
    if "seed" in change:
        made = network(tiny_model)
        change = {"data": PreferenceData(preferences(), made.encode, batch_size=4, seed=1)}
    with pytest.raises(ValueError, match=message):
        trainer(tiny_model, checkpoint=path, **change)


def test_a_file_that_is_no_checkpoint_is_refused(tiny_model, tmp_path):
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ValueError, match="should be a checkpoint that a RewardTrainer wrote"):
        trainer(tiny_model, checkpoint=tmp_path / "x")


def test_a_frozen_trunk_reads_each_text_once(tiny_model, monkeypatch):
    one = trainer(tiny_model, "head", epochs=3)
    rows, states = [], one.network.states
    monkeypatch.setattr(one.network, "states", lambda r, p=None: rows.extend(r) or states(r, p))
    one.train(progress=False)
    assert sorted(rows) == sorted(one.data.rows)


def test_states_of_a_trunk_that_trains_are_refused(tiny_model):
    one = trainer(tiny_model, "lora")
    with pytest.raises(ValueError, match="out of date"):
        one.use_states(torch.zeros(len(one.data.rows), 1, 32))


def test_a_step_without_a_finite_loss_changes_nothing(tiny_model):
    one = trainer(tiny_model)
    with torch.no_grad():
        one.network.classifier.score.weight[0, 0] = math.nan
    name = "classifier.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    before = weights(one)[name]
    with pytest.raises(FloatingPointError, match="Step 0 has a loss of nan"):
        one.train(progress=False)
    assert torch.equal(before, weights(one)[name])


@pytest.mark.parametrize("train", ["head", "lora", "all"])
def test_it_learns_what_orders_texts(train, tiny_model):
    """Texts are preferred by how many letters "o" they have; fresh texts are ordered by it afterwards."""
    rng = np.random.default_rng(0)
    words = ["go", "the", "good", "bad", "road", "a", "is", "no"]
    texts = list(dict.fromkeys(" ".join(rng.choice(words, 3)) for _ in range(700)))
    pairs = [(a, b) for a, b in zip(texts[::2], texts[1::2], strict=False) if a.count("o") != b.count("o")]
    known = [Preference("", max(p, key=lambda t: t.count("o")), min(p, key=lambda t: t.count("o"))) for p in pairs]
    learned, fresh = known[:-40], known[-40:]
    made = RewardNetwork.from_pretrained(tiny_model, train=train, lora_rank=4)
    data = PreferenceData(learned, made.encode, batch_size=16)
    rate = {"head": 3e-2, "lora": 1e-2, "all": 3e-3}[train]
    history = RewardTrainer(made, data, RewardTrainingConfig(learning_rate=rate, epochs=15)).train(progress=False)
    assert history[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert np.mean([s.loss for s in history[-4:]]) < 0.35
    assert evaluate_preferences(made.score, learned).accuracy.value >= 0.85
    if train != "head":  # random features do not hold what a linear head could carry over
        assert evaluate_preferences(made.score, fresh).accuracy.value >= 0.8


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"epochs": 0},
        {"warmup": 1.0},
        {"weight_decay": -1.0},
        {"save_every": True},
        {"label_smoothing": 0.5},
        {"max_grad_norm": -1.0},
        {"centering_coef": math.inf},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` should be"):
        RewardTrainingConfig(**wrong)


# The command line


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_trains_measures_and_goes_on(tiny_model, tmp_path):
    rows = [{k: v for k, v in dataclasses.asdict(p).items() if v is not None} for p in preferences(20)]
    texts = [{"prompt": "x ", "response": text} for text in TEXTS]
    arguments = Arguments(
        data=write_lines(tmp_path / "train.jsonl", rows),
        held_out=write_lines(tmp_path / "held_out.jsonl", rows[:8]),
        centre=write_lines(tmp_path / "centre.jsonl", texts),
        output=tmp_path / "out",
        model=tiny_model,
        lora_rank=2,
        dtype="float32",
    )
    evaluation = run(arguments, progress=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "checkpoint.safetensors",
        "classifier",
        "history.json",
        "report.json",
        "calibration.png",
        "scores.png",
    }
    assert json.loads((tmp_path / "out" / "report.json").read_text())["comparisons"] == 8
    assert run(arguments, progress=False).summary() == evaluation.summary()
    from textenv.rewards import SequenceClassificationReward

    scores = SequenceClassificationReward(tmp_path / "out" / "classifier")(["x "] * len(TEXTS), TEXTS)
    assert scores.mean() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("role", ["data", "held_out", "centre"])
def test_bad_lines_are_named_before_anything_is_loaded(role, tmp_path):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"}\n')
    bad.write_text(good.read_text() + '{"prompt": "a", "chosen": "b"}\n')
    files = {"data": good, "held_out": good, "centre": good, role: bad}
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2"):
        run(Arguments(**files, output=tmp_path / "out", model="no such model"), progress=False)
