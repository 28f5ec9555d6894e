"""The reward model as a scorer, and the one pass that serves scores and reference log-probabilities."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from textenv.lm import LanguageModel, LazyLanguageModel, TextTokenizer
from textenv.replay import text_envs
from textenv.rewards import (
    RewardModel,
    film_review_head,
    film_review_network,
    film_review_reward,
    load_ratings,
    score_and_logprobs,
    shares_trunk,
    split_ratings,
)
from textenv.rewards.reward_model import DEFAULT_TRUNK, pad_left
from textenv.rewards.shared import text_end_columns
from textenv.rewards.train_default import (
    CUTS,
    FIRST_CUT,
    Head,
    held_out_figures,
    pair_accuracy,
    reading_points,
    sentence_states,
)

HIDDEN = 16


def byte_tokenizer() -> TextTokenizer:
    """Byte-level BPE with a few merges, whose padding token is its end-of-sequence token as SmolLM2's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the film is good. the film is bad. it is not one of the best."] * 3, trainer)
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def language_model(source="tiny", width=HIDDEN) -> LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LanguageModel(LlamaForCausalLM(config).eval().requires_grad_(False), source=source)


@pytest.fixture(scope="module")
def trunk():
    return language_model()


@pytest.fixture
def scorer(trunk, tokenizer):
    return RewardModel(trunk, tokenizer, np.random.default_rng(0).normal(size=HIDDEN), 0.25)


@pytest.fixture
def passes(trunk, monkeypatch):
    """Row counts of the trunk's forward passes."""
    rows = []
    whole = trunk.hidden_states
    monkeypatch.setattr(trunk, "hidden_states", lambda ids, mask: rows.append(len(ids)) or whole(ids, mask))
    return rows


PROMPTS = ["the", "it is not one of the best films that were made in that long and dull year", "the film", "bad"]
RESPONSES = [" film is good.", " is", "", " the best of the best of the best, and not one of the bad."]

# Scoring texts


def test_score_is_the_head_on_the_last_token(scorer, trunk, tokenizer):
    ids = torch.tensor([tokenizer.encode("the film is good.")])
    with torch.no_grad():
        last = trunk.model.base_model(ids).last_hidden_state[0, -1].double().numpy()
    score = scorer(["the film"], [" is good."])
    assert score.shape == (1,) and score.dtype == np.float64
    assert score[0] == pytest.approx(scorer.weight @ last + 0.25, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_padded_batch_equals_single(scorer, batch_size):
    scorer.batch_size = batch_size
    together = scorer(PROMPTS, RESPONSES)
    alone = [scorer([p], [r])[0] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert np.ptp(together) > 0.1


def test_batches_hold_texts_of_like_length(scorer, passes):
    scorer.batch_size = 2
    scorer(["the", "the film is good." * 9, "bad", "it is the film. " * 9], [""] * 4)
    assert passes == [2, 2]


def test_empty_response_is_scored_as_the_prompt(scorer):
    assert scorer(["the film is bad"], [""]) == scorer(["the film"], [" is bad"])


def test_score_does_not_depend_on_where_the_prompt_ends(scorer):
    """Split inside a word that the tokenizer has as one token."""
    np.testing.assert_array_equal(scorer(["the fi"], ["lm is bad"]), scorer(["the film is"], [" bad"]))


def test_no_responses_no_scores(scorer, passes):
    assert scorer([], []).shape == (0,) and passes == []


def test_context_is_ignored(scorer):
    np.testing.assert_array_equal(scorer(PROMPTS, RESPONSES, finish_reason=["stop"] * 4), scorer(PROMPTS, RESPONSES))


def test_no_text_at_all_names_the_row(scorer):
    with pytest.raises(ValueError, match="Row 1: prompt and response are both empty"):
        scorer(["the", ""], ["", ""])


def test_lengths_must_agree(scorer):
    with pytest.raises(ValueError, match="pair up, got 2 and 1"):
        scorer(["the", "a"], [""])


@pytest.mark.parametrize("weight", [np.zeros((HIDDEN, 1)), np.full(HIDDEN, np.nan), 1.0])
def test_head_must_be_a_finite_vector(trunk, tokenizer, weight):
    with pytest.raises(ValueError, match="finite vector"):
        RewardModel(trunk, tokenizer, weight)


def test_head_must_be_as_wide_as_the_trunk(trunk, tokenizer, scorer):
    with pytest.raises(ValueError, match="as wide as the trunk's hidden states, 16, got 17"):
        RewardModel(trunk, tokenizer, np.zeros(HIDDEN + 1))
    with pytest.raises(ValueError, match="as wide as the trunk's hidden states, 17, got 16"):
        scorer.score_states(torch.zeros(2, HIDDEN + 1))


def test_weight_is_a_copy(trunk, tokenizer):
    weight = np.ones(HIDDEN)
    model = RewardModel(trunk, tokenizer, weight)
    weight[:] = 0
    assert (model.weight == 1).all()


def test_pad_left_masks_by_length_not_by_id():
    ids, mask = pad_left([[7], [0, 5, 0]], pad_id=0)
    assert ids.tolist() == [[0, 0, 7], [0, 5, 0]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]


# Files and copies


def test_head_survives_a_round_trip(scorer, trunk, tokenizer, tmp_path):
    scorer.metadata["held_out_accuracy"] = "0.5"
    scorer.save(tmp_path / "head.safetensors")
    loaded = RewardModel.load(tmp_path / "head.safetensors", trunk, tokenizer)
    np.testing.assert_array_equal(loaded.weight, scorer.weight)
    assert loaded.bias == scorer.bias
    assert loaded.metadata == {"held_out_accuracy": "0.5", "trunk": "tiny"}
    np.testing.assert_array_equal(loaded(PROMPTS, RESPONSES), scorer(PROMPTS, RESPONSES))


def test_same_head_same_bytes(scorer, trunk, tokenizer, tmp_path):
    """Metadata in whatever order."""
    entries = {letter: letter * 3 for letter in "abcdefgh"}
    for name, metadata in (("one", entries), ("other", dict(reversed(entries.items())))):
        RewardModel(trunk, tokenizer, scorer.weight, metadata=metadata).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert RewardModel.load(tmp_path / "one", trunk, tokenizer).metadata == {**entries, "trunk": "tiny"}


def test_embedded_trunk_is_saved_by_a_name_that_means_the_same_elsewhere(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "cache"))
    trunk = language_model(source=str(tmp_path / "cache" / DEFAULT_TRUNK))
    RewardModel(trunk, tokenizer, np.zeros(HIDDEN)).save(tmp_path / "head.safetensors")
    assert RewardModel.load(tmp_path / "head.safetensors", trunk, tokenizer).metadata["trunk"] == DEFAULT_TRUNK


def test_files_that_hold_no_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"file that RewardModel\.save wrote"):
        RewardModel.load(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="should hold the tensors"):
        RewardModel.load(tmp_path / "text.safetensors")


def test_other_trunk_object_same_weights(scorer):
    moved = scorer.with_trunk(language_model())
    assert moved.trunk is not scorer.trunk
    np.testing.assert_allclose(moved(PROMPTS, RESPONSES), scorer(PROMPTS, RESPONSES), atol=1e-9)
    with pytest.raises(ValueError, match="should have the weights of 'tiny', got 'other'"):
        scorer.with_trunk(language_model(source="other"))


def save_tiny(folder, tokenizer) -> str:
    language_model().model.save_pretrained(folder)
    tokenizer.tokenizer.save_pretrained(folder)
    return str(folder)


def test_lazy_trunk_is_loaded_by_the_first_score_and_left_behind_by_copies(tmp_path, tokenizer):
    trunk = LazyLanguageModel(save_tiny(tmp_path, tokenizer))
    model = RewardModel(trunk, tokenizer, np.arange(HIDDEN))
    assert trunk._model is None
    scores = model(PROMPTS, RESPONSES)
    assert trunk._model is not None
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert copied.trunk._model is None
        np.testing.assert_array_equal(copied(PROMPTS, RESPONSES), scores)


def test_lazy_trunk_of_another_width_is_found_out_by_the_first_score(tmp_path, tokenizer):
    model = RewardModel(LazyLanguageModel(save_tiny(tmp_path, tokenizer)), tokenizer, np.zeros(HIDDEN + 1))
    with pytest.raises(ValueError, match="as wide as"):
        model(PROMPTS, RESPONSES)


# One pass for scores and log-probabilities

EOS = 0


def sampled(tokenizer, rows, response_tokens=24):
    """Padded ids and masks, and the texts that the environment would show, of (prompt, response ids) rows."""
    prompts = [tokenizer.encode(prompt) for prompt, _ in rows]
    width = max(map(len, prompts))
    input_ids = np.zeros((len(rows), width + response_tokens), np.int32)
    attention_mask = np.zeros(input_ids.shape, np.int8)
    for row, (prompt, (_, response)) in enumerate(zip(prompts, rows, strict=True)):
        input_ids[row, width - len(prompt) : width], attention_mask[row, width - len(prompt) : width] = prompt, 1
        input_ids[row, width : width + len(response)], attention_mask[row, width : width + len(response)] = response, 1
    responses = tokenizer.decode_batch([response for _, response in rows])
    return [prompt for prompt, _ in rows], responses, input_ids, attention_mask, response_tokens


SHORT, LONG = "the film is", "it is not one of the best films that were made in one long year"
ROUND_TRIP = {
    "3 tokens, ended by EOS": lambda t: (SHORT, [*t.encode(" good."), EOS]),
    "30 tokens, ended by EOS": lambda t: (LONG, [*t.encode(" bad"), EOS]),
    "ended by an ordinary token": lambda t: (SHORT, t.encode(" not good.")),
    "cut at the budget": lambda t: (LONG, t.encode(" the film is q" + "qz" * 30)[:24]),
    "EOS at once": lambda t: (LONG, [EOS]),
    "nothing": lambda t: (SHORT, []),
}
CHANGED = {
    "letter by letter": lambda t: (SHORT, [*t.encode(" "), *t.encode("t"), *t.encode("h"), *t.encode("e"), EOS]),
    "EOS inside": lambda t: (SHORT, [*t.encode(" good"), EOS, *t.encode(" bad")]),
    "half a character": lambda t: (LONG, t.encode(" é")[:-1]),
    "the prompt's word goes on": lambda t: ("it is not one of the fi", t.encode("lm")),
}


@pytest.fixture(scope="module")
def batch(tokenizer):
    rows = [make(tokenizer) for make in {**ROUND_TRIP, **CHANGED}.values()]
    lengths = [len(tokenizer.encode(prompt)) for prompt, _ in rows]
    assert min(lengths) == 3 and max(lengths) >= 30
    return sampled(tokenizer, rows)


def test_rows_are_what_their_names_say(scorer, batch):
    columns = text_end_columns(scorer, *batch)
    names = [*ROUND_TRIP, *CHANGED]
    assert [name for name, column in zip(names, columns, strict=True) if column < 0] == list(CHANGED)


def test_one_pass_gives_the_scores_of_the_texts_and_the_logprobs_of_the_ids(scorer, trunk, batch):
    prompts, responses, input_ids, attention_mask, response_tokens = batch
    scores, logprobs = score_and_logprobs(scorer, trunk, *batch)
    np.testing.assert_allclose(scores, scorer(prompts, responses), atol=1e-5)
    np.testing.assert_allclose(logprobs, trunk.response_logprobs(input_ids, attention_mask, response_tokens), atol=1e-6)
    assert scores.dtype == logprobs.dtype == np.float64 and logprobs.shape == (len(prompts), response_tokens)
    assert (logprobs[:, :] == 0)[attention_mask[:, -response_tokens:] == 0].all()


def test_each_row_alone_gives_the_same(scorer, trunk, tokenizer, batch):
    scores, logprobs = score_and_logprobs(scorer, trunk, *batch)
    for row, make in enumerate([*ROUND_TRIP.values(), *CHANGED.values()]):
        score, logprob = score_and_logprobs(scorer, trunk, *sampled(tokenizer, [make(tokenizer)]))
        assert score[0] == pytest.approx(scores[row], abs=1e-5)
        np.testing.assert_allclose(logprob[0], logprobs[row], atol=1e-5)


def test_one_trunk_pass_where_all_rows_round_trip(scorer, trunk, tokenizer, passes):
    rows = [make(tokenizer) for make in ROUND_TRIP.values()]
    score_and_logprobs(scorer, trunk, *sampled(tokenizer, rows))
    assert passes == [len(rows)]


def test_changed_rows_share_one_more_pass(scorer, trunk, batch, passes):
    score_and_logprobs(scorer, trunk, *batch)
    assert passes == [len(batch[0]), len(CHANGED)]


def test_reading_the_last_column_instead_would_be_wrong(scorer, trunk, tokenizer):
    """The state at EOS is another one than that at the text's last token."""
    rows = sampled(tokenizer, [ROUND_TRIP["3 tokens, ended by EOS"](tokenizer)])
    last = np.flatnonzero(rows[3][0])[-1:]
    wrong = scorer.score_states(trunk.states_at(rows[2], rows[3], last))
    assert abs(wrong[0] - score_and_logprobs(scorer, trunk, *rows)[0][0]) > 1e-2


def test_values_in_padding_do_not_matter(scorer, trunk, batch):
    prompts, responses, input_ids, attention_mask, response_tokens = batch
    garbage = np.where(attention_mask == 1, input_ids, 17)
    first = score_and_logprobs(scorer, trunk, *batch)
    second = score_and_logprobs(scorer, trunk, prompts, responses, garbage, attention_mask, response_tokens)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_sharing_needs_the_same_weights_and_a_plain_reward_model(scorer, trunk, tokenizer):
    class Louder(RewardModel):
        def __call__(self, *texts, **context):
            return 2 * super().__call__(*texts, **context)

    assert shares_trunk(scorer, trunk)
    assert shares_trunk(scorer, language_model())
    assert not shares_trunk(scorer, language_model(source="other"))
    assert not shares_trunk(scorer, None)
    assert not shares_trunk(lambda prompts, responses: [0.0], trunk)
    assert not shares_trunk(Louder(trunk, tokenizer, scorer.weight), trunk)
    with pytest.raises(ValueError, match="should have the weights of"):
        score_and_logprobs(scorer, language_model(source="other"), ["the"], [""], np.ones((1, 2)), np.ones((1, 2)), 1)


# What the head is trained on


def test_reading_points_are_the_end_and_word_ends_after_the_fifth_word(tokenizer):
    text = "it is not one of the best films that were made"
    ids = tokenizer.encode(text)
    points = [reading_points(text, ids, tokenizer, np.random.default_rng(seed)) for seed in range(60)]
    assert all(p[0] == len(ids) and len(p) == 1 + CUTS for p in points)
    read = {tokenizer.decode(ids[:end]) for p in points for end in p[1:]}
    words = text.split()
    assert read == {" ".join(words[:count]) for count in range(FIRST_CUT, len(words))}


def test_short_texts_are_read_to_their_end(tokenizer):
    ids = tokenizer.encode("it is bad")
    assert reading_points("it is bad", ids, tokenizer, np.random.default_rng(0)) == [len(ids)] * (1 + CUTS)


def test_sentence_states_are_those_of_whole_and_cut_texts(trunk, tokenizer, scorer):
    texts = ["the film is good. it is not one of the best.", "bad", "it is not one of the best films that were made"]
    states = sentence_states(trunk, tokenizer, texts, np.random.default_rng(0))  # (S, K, H)
    rng = np.random.default_rng(0)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        for k, end in enumerate(reading_points(text, ids, tokenizer, rng)):
            cut = tokenizer.decode(ids[:end])
            score = scorer.score_states(torch.as_tensor(states[row, k][None]))
            np.testing.assert_allclose(score, scorer([cut], [""]), atol=1e-5)


# What is packaged for film reviews: the default model, and a head that shares the reference's pass

PACKAGED = {"adapters": film_review_reward, "head": film_review_head}
OPINIONS = [
    " a moving and beautifully acted triumph.",
    " shown in two cinemas this week.",
    " a boring, lazy and badly written mess.",
]
FIGURES = {"adapters": (0.82, 0.80), "head": (0.78, 0.74)}
"""Pair accuracy and correlation with the human means on held-out sentences, at least."""


@pytest.fixture(scope="module", params=PACKAGED)
def packaged(request):
    return request.param, PACKAGED[request.param]()


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKAGED)
def test_packaged_models_load_no_weights_until_they_score(kind):
    model = PACKAGED[kind]()
    assert model.trunk._model is None
    assert len(model.weight) == 576
    assert film_review_head().metadata["trunk"] == DEFAULT_TRUNK


@pytest.mark.slow
def test_the_default_is_the_one_with_adapters():
    task = text_envs(gym.make_vec("RLHF-v0", num_envs=1)).task
    assert task.scorer.source == RewardModel.default().source == film_review_reward().source
    assert task.scorer.source != film_review_head().source == task.reference.source


@pytest.mark.slow
def test_packaged_models_order_plain_opinions(packaged):
    good, plain, bad = packaged[1](["The film is"] * 3, OPINIONS)
    assert good > plain + 1 > bad + 2


@pytest.mark.slow
def test_packaged_models_reach_their_figures(packaged):
    """Re-measured on 150 held-out sentences: the standard error of the accuracy is near 0.015, of the other 0.035."""
    kind, model = packaged
    accuracy, correlation = FIGURES[kind]
    assert float(model.metadata["held_out_accuracy"]) >= accuracy
    assert float(model.metadata["held_out_correlation"]) >= correlation
    some = split_ratings(load_ratings())[1][::14]
    scores = model([s.text for s in some], [""] * len(some))
    means = np.array([s.mean for s in some])
    assert pair_accuracy(scores, means) > accuracy - 0.05
    assert np.corrcoef(scores, means)[0, 1] > correlation - 0.1


@pytest.mark.slow
def test_merged_adapters_score_as_the_network_does(packaged):
    kind, model = packaged
    if kind == "adapters":
        theirs = film_review_network().score(["The film is"] * 3, OPINIONS)
        np.testing.assert_allclose(model(["The film is"] * 3, OPINIONS), theirs, atol=1e-4)
        again = pickle.loads(pickle.dumps(model))
        assert again.trunk._model is None
        np.testing.assert_array_equal(again(["The film is"], OPINIONS[:1]), model(["The film is"], OPINIONS[:1]))


@pytest.mark.slow
def test_a_head_on_adapters_is_not_saved_as_one_on_the_plain_model(tmp_path):
    with pytest.raises(ValueError, match=r"a trunk with adapters from .*film_review_adapters.*adapted_reward reads it"):
        RewardModel.default().save(tmp_path / "head.safetensors")


@pytest.mark.slow
def test_the_head_shares_its_pass_with_the_reference():
    head = film_review_head()
    reference = LazyLanguageModel(DEFAULT_TRUNK)
    assert shares_trunk(head, reference)
    assert not shares_trunk(RewardModel.default(), reference)
    tokenizer = head.tokenizer
    (stop,) = tokenizer.stop_ids
    rows = [
        ("The film is", [*tokenizer.encode(" a moving triumph."), stop]),
        ("Director Chris Wedge and", tokenizer.encode(" his team have made a film that nobody asked for")),
        ("The film", [*tokenizer.encode(" "), *tokenizer.encode("i"), *tokenizer.encode("s")]),
        ("The film", [stop]),
    ]
    batch = sampled(tokenizer, rows)
    scores, logprobs = score_and_logprobs(head, reference.load(), *batch)
    np.testing.assert_allclose(scores, head(*batch[:2]), atol=1e-4)
    np.testing.assert_allclose(logprobs, reference.response_logprobs(*batch[2:]), atol=1e-4)


def test_held_out_figures_tell_whole_from_cut():
    """One feature is the mean rating itself, read at the end; at the cut it is its negative."""
    people = load_ratings()[::500]
    means = np.array([s.mean for s in people], np.float32)
    states = np.stack([means, -means, -means], 1)[..., None]  # (S, K, 1)
    figures = held_out_figures(Head(np.ones(1), 0.0), states, people)
    assert figures["held_out_accuracy"] == 1 and figures["held_out_correlation"] == pytest.approx(1)
    assert figures["cut_accuracy"] == 0 and figures["cut_correlation"] == pytest.approx(-1)
