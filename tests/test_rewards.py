"""Comparisons, the loss learned from them, prompts, and classifiers of other people as scorers."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from textenv.rewards import (
    RatedSentence,
    SequenceClassificationReward,
    bradley_terry_loss,
    draw_comparisons,
    load_openings,
    load_ratings,
    preference_accuracy,
    split_ratings,
)
from textenv.rewards.ratings import make_openings, word_valences
from textenv.rewards.train_default import CUTS, fit_head, pair_accuracy

# The Bradley-Terry loss

CHOSEN = torch.tensor([2.0, 0.5, -1.0, 3.0], dtype=torch.float64)
REJECTED = torch.tensor([1.0, 1.5, 0.0, 1.0], dtype=torch.float64)


def test_worked_example():
    """Differences 1, -1, -1, 2 cost 0.3133, 1.3133, 1.3133, 0.1269."""
    assert bradley_terry_loss(CHOSEN, REJECTED).item() == pytest.approx(0.7667, abs=5e-5)
    assert preference_accuracy(CHOSEN, REJECTED).item() == 0.5


@given(st.floats(-1e3, 1e3))
def test_only_differences_count(shift):
    moved = bradley_terry_loss(CHOSEN + shift, REJECTED + shift)
    assert moved.item() == pytest.approx(bradley_terry_loss(CHOSEN, REJECTED).item(), abs=1e-9)


def test_example_is_unchanged_when_100_is_added():
    assert bradley_terry_loss(CHOSEN + 100, REJECTED + 100).item() == pytest.approx(0.7667, abs=5e-5)


def test_gradient_raises_the_chosen_and_lowers_the_rejected():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    bradley_terry_loss(chosen, rejected).backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()
    assert chosen.grad[1] == pytest.approx(-1 / (1 + np.exp(-1)) / 4)  # a lost comparison by 1: -sigmoid(1), of four


def test_loss_is_finite_where_the_sigmoid_underflows():
    assert bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0])).item() == 1000.0


def test_margin_is_subtracted_from_the_difference():
    expected = bradley_terry_loss(CHOSEN - 0.5, REJECTED)
    assert torch.equal(bradley_terry_loss(CHOSEN, REJECTED, 0.5), expected)
    assert torch.equal(bradley_terry_loss(CHOSEN, REJECTED, torch.full((4,), 0.5)), expected)


def test_ties_are_half_right():
    assert preference_accuracy(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])).item() == 0.75


@pytest.mark.parametrize("function", [bradley_terry_loss, preference_accuracy])
@pytest.mark.parametrize(("chosen", "rejected"), [((4,), (4, 1)), ((4,), (3,)), ((0,), (0,)), ((), ())])
def test_shapes_that_do_not_pair_up_are_refused(function, chosen, rejected):
    with pytest.raises(ValueError, match=r"should both have shape \(B,\)"):
        function(torch.zeros(chosen), torch.zeros(rejected))


# Ratings and comparisons


@pytest.fixture(scope="module")
def sentences():
    return load_ratings()


def test_packaged_ratings(sentences):
    assert len(sentences) == 10_605
    assert sentences[2].text == "Effective but too tepid biopic"
    assert sentences[2].ratings == (-1, 0, -1, 0, -1, -1, -1, -1, 0, -2, 1, 1, -1, -1, -1)
    assert sentences[2].mean == pytest.approx(-9 / 15)
    assert {len(s.ratings) for s in sentences} <= set(range(15, 30))
    assert {r for s in sentences for r in s.ratings} == set(range(-4, 5))


def test_split_is_disjoint_and_complete(sentences):
    train, held_out = split_ratings(sentences)
    assert len(held_out) == 2_105
    assert sorted(s.id for s in train + held_out) == sorted(s.id for s in sentences)
    words = [{s.text.strip(" .'").lower() for s in side} for side in (train, held_out)]
    assert not words[0] & words[1]  # the same sentence twice in the file is not on both sides


def test_split_does_not_depend_on_the_order(sentences):
    train, held_out = split_ratings(sentences)
    again = split_ratings(sentences[::-1])
    assert {s.id for s in again[0]} == {s.id for s in train} and {s.id for s in again[1]} == {s.id for s in held_out}


@pytest.mark.parametrize("held_out", [0, 3, -1])
def test_split_needs_two_sides(held_out):
    with pytest.raises(ValueError, match="between 1 and 2"):
        split_ratings([RatedSentence(i, str(i), (0,)) for i in range(3)], held_out)


def test_comparisons_follow_single_raters_not_means():
    """Sentence 0 has the higher mean (3 against 2), but a third of its raters put it below sentence 1."""
    pair = [RatedSentence(0, "split opinions", (4, 4, 4, 4, 1, 1)), RatedSentence(1, "agreed on", (2,))]
    drawn = draw_comparisons(pair, 4_000, np.random.default_rng(0))
    wins = (drawn.chosen == 0).mean()
    assert wins == pytest.approx(2 / 3, abs=0.03)  # 4 of 6 ratings are above 2; four standard errors
    assert set(drawn.chosen_rating[drawn.chosen == 0]) == {4}
    assert set(drawn.rejected_rating[drawn.rejected == 0]) == {1}


def test_comparisons_hold_ratings_that_were_given(sentences):
    some = sentences[:50]
    drawn = draw_comparisons(some, 2_000, np.random.default_rng(1))
    assert all(len(part) == 2_000 for part in drawn)
    assert (drawn.chosen != drawn.rejected).all() and (drawn.chosen_rating > drawn.rejected_rating).all()
    assert all(rating in some[i].ratings for i, rating in zip(drawn.chosen, drawn.chosen_rating, strict=True))
    assert all(rating in some[i].ratings for i, rating in zip(drawn.rejected, drawn.rejected_rating, strict=True))
    assert set(drawn.chosen) | set(drawn.rejected) == set(range(50))


def test_last_rater_is_drawn_too():
    """Sentences with fewer raters than others: no rating is made up, none is left out."""
    pair = [RatedSentence(0, "", (0,)), RatedSentence(1, "", (1, 2, 3))]
    drawn = draw_comparisons(pair, 200, np.random.default_rng(0))
    assert set(drawn.chosen_rating) == {1, 2, 3} and set(drawn.rejected_rating) == {0}


def test_same_seed_same_comparisons(sentences):
    first, again, other = (draw_comparisons(sentences, 100, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first.chosen, again.chosen) and np.array_equal(first.rejected, again.rejected)
    assert not np.array_equal(first.chosen, other.chosen)


def test_no_comparisons_is_an_empty_draw(sentences):
    assert len(draw_comparisons(sentences, 0, np.random.default_rng(0)).chosen) == 0


@pytest.mark.parametrize("ratings", [[(1, 1), (1,)], [(1, 2)], []])
def test_only_ties_are_refused_rather_than_drawn_forever(ratings):
    same = [RatedSentence(i, "", r) for i, r in enumerate(ratings)]
    with pytest.raises(ValueError, match="different ratings"):
        draw_comparisons(same, 5, np.random.default_rng(0))


# Prompts


def test_packaged_openings_are_those_that_the_code_makes(sentences):
    openings = load_openings()
    assert openings == make_openings(*split_ratings(sentences))
    assert 1_000 <= len(openings) <= 2_000


def test_openings_are_clean_and_come_from_held_out_reviews(sentences):
    train, held_out = split_ratings(sentences)
    openings = load_openings()
    assert len(set(openings)) == len(openings)
    for opening in openings:
        assert opening.isascii() and len(opening.split()) == 4 and opening[-1].isalnum() and opening[0].isupper()
        assert not set('"()[]:;.!?') & set(opening) and "''" not in opening
    seen = {" ".join(s.text.split()[:4]) for s in train}
    assert not seen & set(openings)
    assert set(openings) <= {" ".join(s.text.split()[:4]) for s in held_out if len(s.text.split()) >= 8}


def test_openings_that_judge_or_hang_are_left_out():
    train = [RatedSentence(i, "Awful work all round", (-3,)) for i in range(20)]
    texts = [
        "The awful film that nobody asked to see",
        "The film (which I saw last year) is long",
        "The film 'Heat' is one that people know",
        "It ends. And then it starts all over",
        "Only seven words are in this one",
        "For once, the film is what it says",
        "For once, the film has nothing to say",
        "and so it goes on and on again",
    ]
    held_out = [RatedSentence(100 + i, text, (0,)) for i, text in enumerate(texts)]
    assert make_openings(train, held_out) == ["For once, the film"]


def test_word_valence_is_a_shrunk_mean():
    two = [RatedSentence(0, "Bad bad film", (-4, -2)), RatedSentence(1, "A film", (1, 1))]
    assert word_valences(two, prior=1) == pytest.approx({"bad": -3 / 2, "film": -2 / 3, "a": 1 / 2})


def test_ratings_and_prompts_load_without_torch():
    code = "import sys, textenv.rewards as r; r.load_openings(); r.load_ratings(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Fitting a head


def test_head_recovers_a_linear_judgement():
    """Ratings are a linear function of two of five features; the other reading points repeat the first."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 5)) * [1, 1, 1, 1, 10] + 7
    judgement = features[:, 0] - 2 * features[:, 1]
    people = [
        RatedSentence(i, str(i), tuple(np.rint(j + rng.normal(size=9)).astype(int))) for i, j in enumerate(judgement)
    ]
    states = np.repeat(features[:, None], 1 + CUTS, 1).astype(np.float32)
    head = fit_head(states, people, 20_000, weight_decay=1e-3, seed=0)
    scores = head.scores(states)[:, 0]
    assert np.corrcoef(scores, judgement)[0, 1] > 0.99
    assert scores.mean() == pytest.approx(0, abs=1e-5)
    assert head.weight[1] / head.weight[0] == pytest.approx(-2, abs=0.15)
    again = fit_head(states, people, 20_000, weight_decay=1e-3, seed=0)
    assert np.array_equal(head.weight, again.weight) and head.bias == again.bias


def test_pair_accuracy_counts_pairs_with_distinct_means():
    """Pairs 0-1, 0-2, 1-3, 2-3, 0-3 differ in their means (1-2 does not): four right, the tied score of 0-1 half."""
    scores, means = np.array([1.0, 1.0, 2.0, 3.0]), np.array([-1.0, 0.0, 0.0, 2.0])
    assert pair_accuracy(scores, means) == pytest.approx(4.5 / 5)
    assert pair_accuracy(-means, means) == 0 and pair_accuracy(means, means) == 1


# Sequence-classification checkpoints

WORDS = ["<pad>", "<unk>", "<bos>", "<eos>", *"the film is good bad dull and very not one of".split()]
TEXTS = [
    ("the film", " is good"),
    ("the", " film is very very dull and not good"),
    ("bad", ""),
    ("one of the", " film"),
]


def word_tokenizer(template: str, **names: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [(word, i) for i, word in enumerate(WORDS[:4]) if word in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)


def sizes(**more):
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"vocab_size": len(WORDS), "max_position_embeddings": 16, **narrow, **more}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Three labels, its own padding token, special tokens at both ends."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    names = {"id2label": {0: "bad", 1: "mixed", 2: "good"}, "label2id": {"bad": 0, "mixed": 1, "good": 2}}
    BertForSequenceClassification(BertConfig(**sizes(), **names, pad_token_id=0)).save_pretrained(folder)
    word_tokenizer("<bos> $A <eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


def save_llama(folder, pad_token_id):
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(), num_labels=1, pad_token_id=pad_token_id, bos_token_id=2, eos_token_id=3)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    names = {} if pad_token_id is None else {"pad_token": WORDS[pad_token_id]}
    word_tokenizer("<bos> $A <eos>", bos_token="<bos>", eos_token="<eos>", **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[None, 3, 0], ids=["no pad", "pad is eos", "own pad"])
def llama(request, tmp_path_factory):
    """One logit; every text ends with EOS, which is also the padding token of one of the three."""
    return save_llama(tmp_path_factory.mktemp("llama"), request.param)


def both(rows):
    return [p for p, _ in rows], [r for _, r in rows]


def alone_and_together(scorer):
    together = scorer(*both(TEXTS))
    assert together.shape == (4,) and together.dtype == np.float64 and np.isfinite(together).all()
    return together, np.concatenate([scorer([p], [r]) for p, r in TEXTS])


def test_decoder_is_read_at_its_last_real_token(llama):
    together, alone = alone_and_together(SequenceClassificationReward(llama))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    model = LlamaForSequenceClassification.from_pretrained(llama).eval()
    model.config.pad_token_id = None  # with none declared, transformers reads the very last column
    words = [["<bos>", *(p + r).split(), "<eos>"] for p, r in TEXTS]
    with torch.no_grad():
        expected = [model(torch.tensor([[WORDS.index(w) for w in row]])).logits.item() for row in words]
    np.testing.assert_allclose(together, expected, atol=1e-6)
    assert np.ptp(together) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_order_and_batch_size_do_not_matter(llama, batch_size):
    small, whole = SequenceClassificationReward(llama, batch_size=batch_size), SequenceClassificationReward(llama)
    np.testing.assert_allclose(small(*both(TEXTS[::-1]))[::-1], whole(*both(TEXTS)), atol=1e-6)


def test_encoder_gives_the_log_probability_of_a_label(bert):
    scorers = [SequenceClassificationReward(bert, label=label) for label in (0, "mixed", "good")]
    scores = np.stack([scorer(*both(TEXTS)) for scorer in scorers])  # (C, B)
    np.testing.assert_allclose(np.exp(scores).sum(0), 1, atol=1e-6)
    together, alone = alone_and_together(scorers[2])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_independent_labels_give_their_own_log_probability(bert, tmp_path):
    model = BertForSequenceClassification.from_pretrained(bert, problem_type="multi_label_classification")
    model.save_pretrained(tmp_path)
    word_tokenizer("<bos> $A <eos>", pad_token="<pad>").save_pretrained(tmp_path)
    score = SequenceClassificationReward(tmp_path, label="good")(["the film"], [" is good"])
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[2, 4, 5, 6, 7, 3]])).logits
    assert score.item() == pytest.approx(torch.sigmoid(logits[0, 2]).log().item(), abs=1e-6)


def test_template_makes_the_text_and_its_bos_is_not_doubled(llama):
    plain = SequenceClassificationReward(llama)(["the film"], [" is good"])
    seen = []

    def template(prompt, response):
        seen.append((prompt, response))
        return f"<bos>{prompt}{response}"

    np.testing.assert_allclose(
        SequenceClassificationReward(llama, template=template)(["the film"], [" is good"]), plain
    )
    assert seen == [("the film", " is good")]


def test_long_texts_name_the_row_or_lose_their_start(llama):
    with pytest.raises(ValueError, match=r"Row 1: .* at most 16 tokens .* got 34"):
        SequenceClassificationReward(llama)(["the film", "the film"], ["", " very" * 30])
    cutting = SequenceClassificationReward(llama, max_length=6)
    scores = cutting(["bad bad bad", "the film"], [" the film is good", " is good"])
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)  # <bos> the film is good <eos>
    assert cutting.truncated == 1


def test_label_errors_name_the_labels(bert, llama):
    for label in (None, "excellent", 3):
        with pytest.raises(ValueError, match=r"0 \(bad\), 1 \(mixed\), 2 \(good\)"):
            SequenceClassificationReward(bert, label=label)
    assert SequenceClassificationReward(llama, label=0).label_id is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "float16"}, "dtype"), ({"batch_size": 0}, "batch_size"), ({"max_length": 0}, "max_length")],
)
def test_bad_options(llama, options, message):
    with pytest.raises(ValueError, match=message):
        SequenceClassificationReward(llama, **options)


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="should be a folder holding"):
        SequenceClassificationReward(tmp_path / "nothing")


def test_language_model_without_a_head_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**sizes(), num_labels=1)).save_pretrained(tmp_path)
    word_tokenizer("$A").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        SequenceClassificationReward(tmp_path)(["the"], [" film"])


def test_empty_text_names_the_row(tmp_path):
    LlamaForSequenceClassification(LlamaConfig(**sizes(), num_labels=1)).save_pretrained(tmp_path)
    word_tokenizer("$A").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Row 1: the text '' has no tokens"):
        SequenceClassificationReward(tmp_path)(["the", ""], [" film", ""])


def test_copies_leave_the_weights_behind_and_score_alike(llama):
    scorer = SequenceClassificationReward(llama)
    scores = scorer(*both(TEXTS))
    for copied in (pickle.loads(pickle.dumps(scorer)), copy.deepcopy(scorer)):
        assert copied._model is None
        np.testing.assert_array_equal(copied(*both(TEXTS)), scores)


def test_bfloat16_is_close(llama):
    exact, rough = (SequenceClassificationReward(llama, dtype=dtype)(*both(TEXTS)) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(rough, exact, atol=0.02)
