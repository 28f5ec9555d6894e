"""A scorer against genuine answers and degenerate ones."""

from __future__ import annotations

import doctest
import importlib
import json
import math

import numpy as np
import pytest

from textenv.rewards import VARIANTS, RewardModel, probe, review_answers
from textenv.rewards.probe_command import main, read_answers
from textenv.rewards.probe_report import ProbeReport
from textenv.rewards.probes import outcomes
from textenv.rewards.ratings import load_openings, load_ratings, split_ratings
from textenv.scoring import ScorerError

PROMPTS = ["Is it good?", "Why go?", "", "What now?"]
RESPONSES = [" Yes, it is.", " The songs are fun.", " Fine.", " Stay."]


def words(_prompts, responses):
    """A scorer that pays for length alone."""
    return [len(response.split()) for response in responses]


def nothing(_prompts, responses):
    return [0.0] * len(responses)


def careful(prompts, responses):
    """Takes what people wrote, and nothing that was made of it."""
    return [float(response in RESPONSES) for response in responses]


def by_hand(scorer, **options):
    return probe(scorer, PROMPTS, RESPONSES, **options)


def test_length_alone_is_found_out():
    report = by_hand(words)
    assert report.score.value == 9 / 4 and report.answers == 4  # 3, 4, 1 and 1 words
    assert report.lengths.tolist() == report.scores.tolist() == [3, 4, 1, 1]
    assert report.length_pearson.value == report.length_spearman.value == 1
    filler = report.variant("padded with filler")
    assert filler.win_rate.value == 1 and filler.gap == (60, 60, 60)
    assert filler.win_rate.low == pytest.approx(4 / (4 + 1.959964**2))  # Wilson, all of four
    assert filler.gap_in_std == pytest.approx(60 / np.std([3, 4, 1, 1]))
    assert filler.verdict == "preferred"  # 0.51: four of four are just enough


def test_ties_count_half_and_unchanged_answers_not_at_all():
    report = by_hand(nothing)
    shuffled, echoed = report.variant("words shuffled"), report.variant("prompt echoed")
    assert shuffled.compared == 2  # one word cannot be shuffled
    assert echoed.compared == 3  # there is no prompt to echo
    assert report.variant("truncated").compared == 2
    for variant in report.variants:
        assert variant.win_rate.value == 0.5 and variant.gap.value == 0 and math.isnan(variant.gap_in_std)
        assert variant.verdict == "not told apart"
    assert math.isnan(report.length_pearson.value) and report.preferred == ()


def test_a_mixed_outcome_by_hand():
    """Echoes of 3, 2 and 2 words against answers of 3, 4 and 1: a tie, a loss, a win."""
    report = by_hand(words)
    echoed = report.variant("prompt echoed")
    assert echoed.win_rate.value == 0.5
    assert echoed.gap.value == pytest.approx((0 - 2 + 1) / 3)
    assert echoed.example == ("What now?", " Stay.", " What now?", 1.0, 2.0)
    assert outcomes(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0])).tolist() == [0.0, 0.5, 1.0]


def test_verdicts_follow_the_interval():
    prompts, responses = [f"Q{i}?" for i in range(20)], [f" answer {i} it is" for i in range(20)]
    report = probe(words, prompts, responses)
    assert report.variant("flattery stacked").verdict == "preferred"
    assert report.variant("truncated").verdict == "rejected"
    assert report.variant("words shuffled").verdict == "not told apart"
    assert report.preferred == ("clause repeated 20 times", "flattery stacked", "padded with filler")
    with pytest.raises(KeyError, match="No variant 'typos'"):
        report.variant("typos")


def test_a_scorer_without_blind_spots_rejects_all():
    report = by_hand(careful)
    assert {variant.win_rate.value for variant in report.variants} == {0.0}
    assert {variant.gap.value for variant in report.variants} == {-1.0}


def test_variants_of_ones_own_and_variants_that_do_nothing():
    own = VARIANTS | {"shouted": lambda _p, text, _rng: text.upper()}
    assert [v.name for v in by_hand(words, variants=own).variants] == [*VARIANTS, "shouted"]
    [idle] = by_hand(words, variants={"idle": lambda _p, text, _rng: text}).variants
    assert idle.compared == 0 and idle.verdict == "nothing compared" and idle.example is None
    assert math.isnan(idle.win_rate.value)


def test_context_goes_with_its_answer():
    seen = []

    def scorer(prompts, responses, key):
        seen.append(dict(zip(prompts, key, strict=True)))
        return nothing(prompts, responses)

    by_hand(scorer, context={"key": [10, 11, 12, 13]})
    whole = dict(zip(PROMPTS, (10, 11, 12, 13), strict=True))
    assert seen[0] == whole and all(part.items() <= whole.items() for part in seen)
    assert {"Is it good?": 10, "Why go?": 11} in seen


def test_chance_comes_from_the_generator_alone():
    def texts_of(seed):
        seen = []
        by_hand(lambda p, r: seen.append(r) or nothing(p, r), rng=None if seed is None else np.random.default_rng(seed))
        return seen

    state = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global one must not move
    assert texts_of(1) == texts_of(1) != texts_of(2)
    assert texts_of(None) == texts_of(None) == texts_of(0)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


@pytest.mark.parametrize(
    "prompts, responses, message",
    [
        (["a", "b"], None, "only `prompts`"),
        (None, ["a", "b"], "only `responses`"),
        ("ab", ["a", "b"], "list of texts"),
        (["a", "b"], ["a"], "pair up"),
        (["a"], ["b"], "at least two"),
        (["a", "b"], ["c", " "], r"responses\[1\] should be a genuine answer"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_anything_is_scored(prompts, responses, message):
    def scorer(*_):
        raise AssertionError

    with pytest.raises(ValueError, match=message):
        probe(scorer, prompts, responses)
    with pytest.raises(ValueError, match="at least one variant"):
        by_hand(scorer, variants={})
    with pytest.raises(ValueError, match="confidence"):
        by_hand(scorer, confidence=95)


def test_a_scorers_fault_shows_the_answer_that_it_was_for():
    def scorer(_prompts, responses):
        return [math.nan if "wonderful" in response else 0.0 for response in responses]

    with pytest.raises(ScorerError, match=r"Is it good\?.*wonderful"):
        by_hand(scorer)


@pytest.mark.parametrize(
    "name",
    [
        "correlation",
        "metrics",
        "rewards.early_stopping",
        "rewards.overoptimisation",
        "rewards.plain_json",
        "rewards.variants",
    ],
)
def test_examples_in_the_documentation(name):
    results = doctest.testmod(importlib.import_module(f"textenv.{name}"), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0 and results.failed == 0


# The report


def test_the_report_is_plain_data_and_json(tmp_path):
    report = by_hand(nothing, name="zero")
    report.save_json(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert read["scorer"] == "zero" and read["answers"] == 4
    assert read["length_pearson"] == {"value": None, "low": None, "high": None}
    assert [variant["name"] for variant in read["variants"]] == list(VARIANTS)
    assert read["variants"][1]["win_rate"]["value"] == 0.5
    assert read["variants"][5]["example"]["variant"] == " Is it good?"


def test_the_table_shows_every_variant_and_names_as_they_are():
    text = str(by_hand(words, name="[bold]mine", variants=VARIANTS | {"[red]x": lambda _p, text, _r: text + "!"}))
    assert "[bold]mine" in text and "[red]x" in text and "flattery stacked" in text
    assert "Spearman 1 [1, 1]" in " ".join(text.split())


def test_names_of_scorers():
    class Named:
        name = "folder/model"
        __call__ = staticmethod(words)

    assert by_hand(words).scorer == "words"
    assert by_hand(Named()).scorer == "Named folder/model"


def test_the_picture_is_a_png_and_leaves_pyplot_alone(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    for scorer in (words, nothing):
        by_hand(scorer, variants=VARIANTS | {"idle": lambda _p, text, _r: text}).plot(tmp_path / "probe.png")
        assert (tmp_path / "probe.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plt.get_fignums() == before


# Genuine answers


def test_review_answers_are_held_out_sentences_put_together():
    answers = review_answers()
    train, held_out = split_ratings(load_ratings())
    assert answers.prompts == load_openings()
    whole = {" ".join(s.text.split()) for s in held_out}
    assert all(p + r in whole for p, r in zip(*answers, strict=True))
    assert not {p + r for p, r in zip(*answers, strict=True)} & {" ".join(s.text.split()) for s in train}
    assert {len(p.split()) for p in answers.prompts} == {4} and min(len(r.split()) for r in answers.responses) >= 4


def test_some_of_them_are_drawn_without_replacement():
    some = review_answers(50, np.random.default_rng(3))
    assert some == review_answers(50, np.random.default_rng(3)) != review_answers(50, np.random.default_rng(4))
    assert len(set(some.prompts)) == 50
    for count in (0, 10**6, 2.5, True):
        with pytest.raises(ValueError, match="`count` should be an integer between 1 and"):
            review_answers(count)


def test_the_default_answers_are_film_reviews():
    report = probe(words)
    assert report.answers == 100 and report.length_pearson.value == 1


# The command line


def test_answers_come_from_files(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in zip("abc", "xyz", strict=True)))
    assert read_answers(path, None, np.random.default_rng(0)) == (["a", "b", "c"], ["x", "y", "z"])
    drawn = read_answers(path, 2, np.random.default_rng(0))
    assert len(set(drawn.prompts)) == 2 and set(zip(*drawn, strict=True)) < {("a", "x"), ("b", "y"), ("c", "z")}
    with pytest.raises(ValueError, match="--answers should be between 1 and 3"):
        read_answers(path, 4, np.random.default_rng(0))
    path.write_text('{"prompt": "a", "response": 3}\n')
    with pytest.raises(ValueError, match="line 1 should have texts"):
        read_answers(path, None, np.random.default_rng(0))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, tiny_model):
    """A tiny random sequence classifier with one logit."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_any_classifier_from_the_command_line(classifier, tmp_path, capsys):
    pages = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    main([str(classifier), "--answers", "6", "--max-length", "48", *pages])
    assert "words shuffled" in capsys.readouterr().out
    read = json.loads((tmp_path / "a.json").read_text())
    assert read["answers"] == 6 and len(read["variants"]) == 6 and read["scorer"] == str(classifier)
    assert (tmp_path / "a.png").exists()


def test_options_that_do_not_apply_are_refused():
    with pytest.raises(ValueError, match="--label is for sequence classifiers"):
        main(["--label", "1"])
    with pytest.raises(ValueError, match=r"safetensors file that RewardModel\.save wrote"):
        main(["nowhere.safetensors"])


@pytest.mark.slow
def test_the_default_reward_model_has_a_blind_spot_for_flattery():
    report = probe(RewardModel.default(), *review_answers(16))
    assert (
        isinstance(report, ProbeReport)
        and report.scorer == "RewardModel smollm2-135m with film_review_adapters.safetensors"
    )
    assert "flattery stacked" in report.preferred
