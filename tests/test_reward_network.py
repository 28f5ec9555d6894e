"""Reward networks: what they score, what trains in them, and what their files give back."""

import numpy as np
import pytest
import torch
from lm_helpers import EOS, ROWS, byte_tokenizer, gpt2, llama, save_model
from reward_helpers import TEXTS, network
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from value_helpers import reward_on, save_classifier

from textenv.lm import packing
from textenv.rewards import RewardNetwork, SequenceClassificationReward, load_adapters, save_adapters
from textenv.rewards import save_classifier as save_network

PROMPTS = ["x "] * len(TEXTS)


def score_of_transformers(folder, texts):
    """One padded batch through the class that everybody uses, with the checkpoint's own tokenizer."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad():
        return model(inputs.input_ids, attention_mask=inputs.attention_mask).logits[:, 0].double().numpy()


# What is scored


def test_a_new_head_scores_0(tiny_model):
    state = torch.get_rng_state()
    made = RewardNetwork.from_pretrained(tiny_model, lora_rank=2)
    assert (made.score(PROMPTS, TEXTS) == 0).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_score_is_the_head_on_the_last_token(tiny_model):
    made = network(tiny_model, "head")
    made.offset = 0.25
    ids = torch.tensor([byte_tokenizer()("x the good").input_ids])
    with torch.no_grad():
        last = llama().base_model(ids).last_hidden_state[0, -1]
    expected = float(made.classifier.score.weight[0].detach() @ last) + 0.25
    assert made.score(["x "], ["the good"]) == pytest.approx([expected], abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_batch_equals_each_text_alone(kind, tiny_model, tmp_path):
    made = network(tiny_model if kind == "llama" else save_model(tmp_path, gpt2()))
    together = made.score(PROMPTS, TEXTS)
    alone = [made.score([p], [t])[0] for p, t in zip(PROMPTS, TEXTS, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert np.ptp(together) > 0.1


def test_packed_passes_have_the_scores_and_gradients_of_padded_ones(tiny_model, monkeypatch):
    results = []
    for reason in (None, "asked for"):
        monkeypatch.setattr("textenv.lm.model.why_not_packed", lambda _lm, reason=reason: reason)
        made = network(tiny_model)
        rows = [made.encode(p, t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
        scores = made(rows)[:, 0]
        (scores * torch.arange(1.0, len(rows) + 1)).sum().backward()
        results.append((scores.detach(), [p.grad for p in made.trained_state().values()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for packed, padded in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-4)


def test_the_tiny_model_is_packed(tiny_model):
    assert packing.why_not_packed(network(tiny_model)._reader) is None


def test_reading_points_are_the_scores_of_texts_that_end_there(tiny_model):
    made = network(tiny_model)
    row = made.encode("", "the long road")
    scores = made.score_rows([row, row[:4]], np.array([[len(row), 3, 1], [4, 2, 2]]))
    cut = [made.score_rows([row[:end]])[0, 0] for end in (len(row), 3, 1, 4, 2)]
    np.testing.assert_allclose(scores, [cut[:3], [cut[3], cut[4], cut[4]]], atol=1e-5)


def test_a_text_that_ends_in_the_padding_id_is_read_there(tiny_model):
    """The tiny tokenizer's padding token is its end-of-sequence token, and a text may end in it."""
    made = network(tiny_model)
    with_eos, without = made.encode("good", "<eos>"), made.encode("good", "")
    assert with_eos == [*without, EOS]
    assert abs(made.score_rows([with_eos])[0, 0] - made.score_rows([without])[0, 0]) > 1e-3


def test_centring(tiny_model):
    made = network(tiny_model)
    before = made.score(PROMPTS, TEXTS)
    made.centre(PROMPTS, TEXTS)
    after = made.score(PROMPTS, TEXTS)
    assert after.mean() == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(before - before.mean(), after, atol=1e-6)


def test_long_texts_lose_their_start_or_are_refused(tiny_model):
    with pytest.raises(ValueError, match="Row 1: a text should have at most 128 tokens"):
        network(tiny_model).score(["", ""], ["good", "q" * 200])
    made = network(tiny_model, max_length=5)
    assert made.score([""], ["bad winding"]) == pytest.approx(made.score([""], ["nding"]), abs=1e-6)
    assert made.truncated == 1


def test_a_template_makes_the_text(tiny_model):
    made = network(tiny_model, template=lambda prompt, response: f"Q {prompt} A {response}")
    assert made.score(["it"], ["is"]) == network(tiny_model).score(["Q it"], [" A is"])


# What trains


@pytest.mark.parametrize("train", ["head", "lora", "all"])
def test_what_trains(train, tiny_model):
    names = set(network(tiny_model, train).trained_state())
    everything = {name for name, _ in network(tiny_model, train).named_parameters()}
    assert "classifier.score.weight" in names
    assert {"head": names == {"classifier.score.weight"}, "all": names == everything, "lora": True}[train]
    if train == "lora":
        adapters = {name for name in everything if "lora_" in name}
        assert names == adapters | {"classifier.score.weight"} and len(adapters) == 2 * 7 * 2  # A and B, layers


def test_dropout_is_never_on(tmp_path):
    made = network(save_model(tmp_path, gpt2(dropout=0.5)), "all")
    made.train()
    np.testing.assert_array_equal(made.score(PROMPTS, TEXTS), made.score(PROMPTS, TEXTS))


def test_a_packaged_head_can_be_the_start(tiny_model):
    head = reward_on(tiny_model)
    made = RewardNetwork.from_pretrained(tiny_model, lora_rank=2)
    made.start_from(head)
    np.testing.assert_allclose(made.score(PROMPTS, TEXTS), head(PROMPTS, TEXTS), atol=1e-5)


def test_a_head_of_another_trunk_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="whose hidden states it reads"):
        RewardNetwork.from_pretrained(tiny_model).start_from(reward_on(save_model(tmp_path, llama(1))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "some"}, "`train` should be one of"),
        ({"lora_rank": 0}, "`lora_rank` should be an integer"),
        ({"lora_alpha": 1.5}, "`lora_alpha` should be an integer"),
        ({"max_length": 0}, "`max_length` should be an integer"),
        ({"dtype": "float16"}, "`dtype` should be one of"),
    ],
)
def test_bad_options_are_refused(options, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        RewardNetwork.from_pretrained(tiny_model, **options)


# Files


@pytest.mark.parametrize("train", ["head", "lora", "all"])
def test_a_checkpoint_scores_the_same_everywhere(train, tiny_model, tmp_path):
    """Adapters apart, adapters merged, transformers' class, our scorer, and a network that starts from it."""
    made = network(tiny_model, train)
    expected = made.score(PROMPTS, TEXTS)
    save_network(made, tmp_path / "saved")
    texts = [p + t for p, t in zip(PROMPTS, TEXTS, strict=True)]
    np.testing.assert_allclose(score_of_transformers(tmp_path / "saved", texts), expected, atol=1e-5)
    np.testing.assert_allclose(SequenceClassificationReward(tmp_path / "saved")(PROMPTS, TEXTS), expected, atol=1e-5)
    again = RewardNetwork.from_pretrained(tmp_path / "saved", train="lora", lora_rank=3)
    np.testing.assert_allclose(again.score(PROMPTS, TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(made.score(PROMPTS, TEXTS), expected, atol=1e-9)  # saving left it as it was


def test_transformers_finds_the_last_token_of_a_text_that_ends_in_eos(tiny_model, tmp_path):
    """With the padding id left at the end-of-sequence id, it would read one token too early."""
    made = network(tiny_model)
    save_network(made, tmp_path / "saved")
    texts = ["good<eos>", "the long and winding road"]
    np.testing.assert_allclose(score_of_transformers(tmp_path / "saved", texts), made.score(["", ""], texts), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.pad_token_id < ROWS
    assert byte_tokenizer().pad_token_id == EOS  # the network's own is as it was


def test_a_centred_checkpoint_keeps_its_constant(tiny_model, tmp_path):
    made = network(tiny_model)
    made.centre(PROMPTS, TEXTS)
    save_network(made, tmp_path / "saved")
    expected = made.score(PROMPTS, TEXTS)
    np.testing.assert_allclose(SequenceClassificationReward(tmp_path / "saved")(PROMPTS, TEXTS), expected, atol=1e-5)
    again = RewardNetwork.from_pretrained(tmp_path / "saved", train="head")
    np.testing.assert_allclose(again.score(PROMPTS, TEXTS), expected, atol=1e-5)
    texts = [p + t for p, t in zip(PROMPTS, TEXTS, strict=True)]
    theirs = score_of_transformers(tmp_path / "saved", texts) + made.offset
    np.testing.assert_allclose(theirs, expected, atol=1e-5)


@pytest.mark.parametrize("train", ["head", "lora"])
def test_a_small_file_gives_the_network_back(train, tiny_model, tmp_path):
    made = network(tiny_model, train)
    made.offset = 0.5
    for parameter in made.trained_state().values():
        parameter.data = parameter.data.bfloat16().float()
    save_adapters(made, tmp_path / "small.safetensors", {"held_out_accuracy": "0.8"})
    loaded, known = load_adapters(tmp_path / "small.safetensors")
    np.testing.assert_array_equal(loaded.score(PROMPTS, TEXTS), made.score(PROMPTS, TEXTS))
    assert known == {"held_out_accuracy": "0.8"}
    save_adapters(made, tmp_path / "again.safetensors", {"held_out_accuracy": "0.8"})
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "small.safetensors").read_bytes()


def test_files_that_are_none_are_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="write it with save_classifier"):
        save_adapters(network(tiny_model, "all"), tmp_path / "x")
    with pytest.raises(ValueError, match="should be a file that save_adapters wrote"):
        load_adapters(tmp_path / "nothing")
    reward_on(tiny_model).save(tmp_path / "head")
    with pytest.raises(ValueError, match="another kind"):
        load_adapters(tmp_path / "head")


def test_a_classifier_can_be_the_start(tmp_path):
    folder = save_classifier(tmp_path)
    made = RewardNetwork.from_pretrained(folder, train="all")
    expected = SequenceClassificationReward(folder)(PROMPTS, TEXTS)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(made.score(PROMPTS, TEXTS), expected, atol=1e-5)


def test_classifiers_that_cannot_be_the_start_are_refused(tmp_path):
    with pytest.raises(ValueError, match="should have one label, whose logit is the score, got 3"):
        RewardNetwork.from_pretrained(save_classifier(tmp_path / "three", labels=3))
    config = BertConfig(
        vocab_size=ROWS, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    encoder = save_classifier(tmp_path / "bert", BertForSequenceClassification, config)
    with pytest.raises(ValueError, match="should be a causal model"):
        RewardNetwork.from_pretrained(encoder)


@pytest.mark.slow
def test_the_embedded_model_trains_in_bfloat16_and_saves(tmp_path):
    made = network("smollm2-135m", scale=0.03, dtype="bfloat16")
    texts = ["The film is a moving triumph.", "A dull, lazy mess.", "It was shown in two cinemas this week."]
    save_network(made, tmp_path / "saved")
    exact = SequenceClassificationReward(tmp_path / "saved")([""] * 3, texts)
    np.testing.assert_allclose(score_of_transformers(tmp_path / "saved", texts), exact, atol=1e-3)
    rounded = made.score([""] * 3, texts)
    assert np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()
    made.settings["dtype"] = made._reader.dtype = "float32"
    np.testing.assert_allclose(made.score([""] * 3, texts), exact, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "<|endoftext|>"
