"""Preference data from files and datasets: what is read, what is refused with its row, what comes back."""

from __future__ import annotations

import csv
import doctest
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preference_helpers import PARSED, REFUSED, hh, row

from textenv.prompts import files
from textenv.rewards import (
    BadPreferencesError,
    BadRow,
    Preference,
    PreferenceReport,
    load_preferences,
    preference_chat,
    preference_files,
    preference_rows,
    save_preferences,
    split_preferences,
)

ROWS = [
    {"prompt": "What is\n1 + 1, exactly?", "chosen": " 2", "rejected": " 3", "margin": 1.5},
    {"prompt": "", "chosen": 'He said "two"\u2028', "rejected": "two, really\r\n", "margin": None},
    {"prompt": "Größe\x85 \u2029", "chosen": "日本", "rejected": "🎬", "margin": -2.0},
]
PREFERENCES = [Preference(**r) for r in ROWS]


@pytest.mark.parametrize("module", [preference_files, preference_rows])
def test_documented_examples(module):
    assert doctest.testmod(module) == (0, 1)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


class TestFiles:
    def test_json_lines(self, tmp_path):
        path = write_jsonl(tmp_path / "p.jsonl", ROWS)
        assert load_preferences(path) == PREFERENCES
        packed = tmp_path / "p.ndjson.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert load_preferences(str(packed)) == PREFERENCES

    def test_json(self, tmp_path):
        path = tmp_path / "p.json"
        path.write_text(json.dumps(ROWS, indent=2))
        assert load_preferences(path) == PREFERENCES
        assert load_preferences(write_jsonl(path, ROWS)) == PREFERENCES  # JSON lines under another name

    def test_csv(self, tmp_path):
        assert load_preferences(write_csv(tmp_path / "p.csv", ROWS)) == PREFERENCES

    def test_lists_of_dicts_and_other_names_of_columns(self):
        rows = [{"q": r["prompt"], "good": r["chosen"], "bad": r["rejected"], "by": r["margin"]} for r in ROWS]
        columns = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": "by"}
        assert load_preferences(rows, columns=columns) == PREFERENCES
        with pytest.raises(
            ValueError, match=r"the column 'score' that `columns` names for 'margin', got none.*'q', 'go"
        ):
            load_preferences(rows, columns={**columns, "margin": "score"})
        with pytest.raises(ValueError, match="got 'answer'"):
            load_preferences(rows, columns={"answer": "good"})

    @pytest.mark.parametrize(
        ("chosen", "rejected", "prompt"),
        [
            ("The sky is blue.", "The sky is green.", "The sky is"),
            ("The sky is blue", "The sky is black", "The sky is"),  # parts within a word
            ("The sky is blue", "The sky is blueish", "The sky is"),
            ("Q: why?\nA: so", "Q: why?\nA: no", "Q: why?\nA:"),
            ("Q: why?\nSo", "Q: why?\nNo", "Q: why?\n"),
            ("Yes", "No", ""),
        ],
    )
    def test_implicit_prompts(self, chosen, rejected, prompt):
        assert load_preferences([row(chosen, rejected)]) == [
            Preference(prompt, chosen.removeprefix(prompt), rejected.removeprefix(prompt))
        ]
        assert load_preferences([row(chosen, rejected)], format="whole") == [Preference("", chosen, rejected)]

    def test_a_text_that_only_begins_another_leaves_no_response(self):
        _, report = load_preferences([row("A good film", "A good film indeed")], on_bad_row="skip")
        assert report.format == "implicit" and report.counts == {"empty response": 1}

    def test_one_format_for_all_rows(self):
        """A broken transcript among transcripts is no implicit prompt, a row without a prompt no empty one."""
        transcripts = [PARSED["one turn"][0], row("Hello there", "Hello you")]
        assert load_preferences(transcripts, on_bad_row="skip")[1].counts == {"no turns": 1}
        assert load_preferences([*ROWS, row("a b", "a c")], on_bad_row="skip")[1].counts == {"no value": 1}
        assert load_preferences([*ROWS, row([], [])], on_bad_row="skip", format="explicit")[1].counts == {
            "wrong type": 1
        }


class TestDatasets:
    def test_objects_folders_and_files(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list([{**r, "other": 1} for r in ROWS])
        assert load_preferences(dataset) == PREFERENCES
        dataset.to_parquet(str(tmp_path / "p.parquet"))
        assert load_preferences(tmp_path / "p.parquet") == PREFERENCES
        both = datasets.DatasetDict(train=dataset, test=dataset.select([1]))
        both.save_to_disk(str(tmp_path / "both"))
        assert load_preferences(str(tmp_path / "both"), split="test") == PREFERENCES[1:2]
        assert load_preferences(both, split="train") == PREFERENCES

    def test_rows_are_named(self):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list([PARSED["one turn"][0], REFUSED["equal"][0]])
        with pytest.raises(BadPreferencesError, match=r"1 x equal responses: dataset row 1"):
            load_preferences(dataset)

    def test_messages(self):
        datasets = pytest.importorskip("datasets")
        question, answers = {"role": "user", "content": "a"}, [{"role": "assistant", "content": c} for c in "bc"]
        dataset = datasets.Dataset.from_list([{"chosen": [question, answers[0]], "rejected": [question, answers[1]]}])
        render = lambda prompt, response: (prompt[0]["content"], response[0]["content"])  # noqa: E731
        assert load_preferences(dataset, render=render) == [Preference("a", "b", "c")]

    def test_the_hub(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        asked = []

        def load_dataset(*args, **kwargs):
            asked.append((args, kwargs))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert load_preferences("someone/preferences", config="small", split="train") == PREFERENCES
        assert asked == [(("someone/preferences", "small"), {"split": "train"})]
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
        with pytest.raises(ValueError, match="No comparisons could be had from 'someone/nothing'"):
            load_preferences("someone/nothing")


BROKEN = (
    "\n".join(
        [
            json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}),
            "",
            '{"prompt": "a", "chosen": ',
            '["a", "b"]',
            json.dumps({"prompt": "a", "chosen": "", "rejected": "c"}),
            json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}),
            json.dumps({"prompt": "a", "chosen": "b"}),
            json.dumps({"prompt": "a", "chosen": 1, "rejected": "c"}),
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
            '{"prompt": "a", "chosen": "b", "chosen": "d", "rejected": "c"}',
            '{"prompt": "a", "chosen": "\\ud83d", "rejected": "c"}',
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": ' + "1" * 5000 + "}",
            "[" * 100_000,
            json.dumps({"prompt": "a", "chosen": "d", "rejected": "c", "margin": "0.5"}),
        ]
    ).encode()
    + b'\n{"prompt": "caf\xe9", "chosen": "b", "rejected": "c"}\n'
)


WHOLE = {
    "half.json": ('[{"prompt": "a"}, ', r"half\.json should be one JSON list of objects, but could not be read"),
    "twice.csv": ("chosen,chosen\na,b\n", "should name each column once"),
    "head.csv": ('"chosen" x,b\na,b\n', r"head\.csv line 1 should be CSV"),
    "empty.jsonl": ("\n", "should hold at least one row, got none"),
    "p.txt": ("a\n", r"should end in one of \.jsonl, \.ndjson, \.json, \.csv .*got '\.txt'"),
    "p.jsonl.gz": ("not packed", "should be a whole gzip file"),
}


class TestBadRows:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "broken.jsonl"
        path.write_bytes(BROKEN)
        return path

    def test_are_left_out_on_request_and_all_accounted_for(self, path):
        parsed, report = load_preferences(path, on_bad_row="skip")
        assert parsed == [Preference("a", "b", "c"), Preference("a", "d", "c", 0.5)]
        assert [(bad.row, bad.place, bad.kind) for bad in report.refused] == [
            (1, "broken.jsonl line 3", "broken line"),
            (2, "broken.jsonl line 4", "no object"),
            (3, "broken.jsonl line 5", "empty response"),
            (4, "broken.jsonl line 6", "equal responses"),
            (5, "broken.jsonl line 7", "no value"),
            (6, "broken.jsonl line 8", "wrong type"),
            (7, "broken.jsonl line 9", "bad margin"),
            (8, "broken.jsonl line 10", "broken line"),
            (9, "broken.jsonl line 11", "half a surrogate pair"),
            (10, "broken.jsonl line 12", "broken line"),
            (11, "broken.jsonl line 13", "broken line"),
            (13, "broken.jsonl line 15", "not UTF-8"),
        ]
        assert report.rows == 14 and report.parsed == 2
        assert "the name 'chosen' stands in it twice" in report.refused[7].reason
        assert "the byte 0xe9" in report.refused[-1].reason

    def test_are_an_error_that_counts_them_and_names_the_first(self, path):
        with pytest.raises(
            BadPreferencesError,
            match=r"(?s)got 12 of 14 that are none\.\nbroken\.jsonl \(format 'explicit'\): 14 rows, 2 comparisons, "
            r"12 left out\n  4 x broken line: broken\.jsonl line 3, .*The first of them:\n  broken\.jsonl line 3 "
            r"should be one JSON object, got .*on_bad_row='skip'",
        ) as caught:
            load_preferences(path)
        assert caught.value.report == load_preferences(path, on_bad_row="skip")[1]

    def test_of_csv(self, tmp_path):
        path = tmp_path / "p.csv"
        path.write_bytes(
            b'prompt,chosen,rejected\na,b,c\na,b\n"a" b,b,c\na,caf\xe9,c\n\na,"b, or\nd",c\na,d,c\na,"b,c\na,e,c\n'
        )
        parsed, report = load_preferences(path, on_bad_row="skip")
        assert [p.chosen for p in parsed] == ["b", "b, or\nd", "d"]
        assert [(bad.place, bad.kind) for bad in report.refused] == [
            ("p.csv line 3", "broken line"),
            ("p.csv line 4", "broken line"),
            ("p.csv line 5", "not UTF-8"),
            ("p.csv line 11", "broken line"),
        ]
        assert "of a record that begins in line 10" in report.refused[-1].reason

    def test_of_json(self, tmp_path):
        path = tmp_path / "p.json"
        path.write_bytes(b'[{"chosen": "a b", "rejected": "a c"}, 3, {"chosen": "\xe9", "rejected": "b"}, {}]')
        parsed, report = load_preferences(path, on_bad_row="skip")
        assert parsed == [Preference("a", " b", " c")]
        assert [(bad.place, bad.kind) for bad in report.refused] == [
            ("p.json row 1", "no object"),
            ("p.json row 2", "not UTF-8"),
            ("p.json row 3", "no value"),
        ]

    def test_of_a_list(self):
        _, report = load_preferences([*ROWS, "text"], on_bad_row="skip")
        assert [(bad.row, bad.place, bad.kind) for bad in report.refused] == [(3, "row 3", "no object")]

    @pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
    @pytest.mark.parametrize("name", WHOLE)
    def test_what_cannot_be_read_at_all_is_an_error_either_way(self, tmp_path, name, on_bad_row):
        content, message = WHOLE[name]
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            load_preferences(tmp_path / name, on_bad_row=on_bad_row)

    @pytest.mark.parametrize(
        ("source", "options", "message"),
        [
            (ROWS, {"format": "dpo"}, r"`format` should be one of \('auto', 'explicit', .*got 'dpo'"),
            (ROWS, {"on_bad_row": "drop"}, r"`on_bad_row` should be one of \('raise', 'skip'\), got 'drop'"),
            (ROWS, {"later_turns": "cut"}, "`later_turns` should be one of"),
            (ROWS, {"split": "train"}, "`split` chooses among those of a dataset, got 'train' for a list"),
            (ROWS, {"config": "x"}, "`config` chooses among those of a dataset, got 'x' for a list"),
            (3, {}, "`source` should be a path, .* got int"),
            ("nowhere.jsonl", {}, "There should be a file or folder 'nowhere.jsonl' to read comparisons from"),
            ("no/where.csv", {}, "There should be a file or folder"),
        ],
    )
    def test_options_and_sources_that_make_no_sense(self, source, options, message):
        with pytest.raises(ValueError, match=message):
            load_preferences(source, **options)

    def test_a_report_that_would_hide_a_row_is_none(self):
        bad = BadRow(0, "row 0", "empty response", "...")
        assert str(PreferenceReport("x", "hh", 2, 1, (bad,))).splitlines() == [
            "x (format 'hh'): 2 rows, 1 comparisons, 1 left out",
            "  1 x empty response: row 0",
        ]
        with pytest.raises(ValueError, match=r"got 3 and 1 \+ 1: a row would be lost unseen"):
            PreferenceReport("x", "hh", 3, 1, (bad,))

    value = st.none() | st.integers() | st.text("ab :\n", max_size=4) | st.lists(st.integers(), max_size=1)

    @given(st.lists(st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "margin"]), value), max_size=8))
    def test_every_row_is_accounted_for(self, rows):
        parsed, report = load_preferences(rows, on_bad_row="skip", render=lambda p, r: ("", r[0]["content"]))
        assert len(parsed) == report.parsed and report.parsed + len(report.refused) == report.rows == len(rows)
        assert sorted({bad.row for bad in report.refused}) == [bad.row for bad in report.refused]

    @given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), min_size=1))
    def test_any_bytes_are_accounted_for(self, tmp_path_factory, lines):
        path = tmp_path_factory.mktemp("bytes") / "any.jsonl"
        path.write_bytes(b"\n".join([*lines, b'{"chosen": "a b", "rejected": "a c"}']))
        parsed, report = load_preferences(path, on_bad_row="skip")
        decoded = [line.decode("utf-8", "surrogateescape") for line in path.read_bytes().split(b"\n")]
        decoded[0] = decoded[0].removeprefix("\ufeff")
        assert report.rows == sum(bool(line.strip()) for line in decoded)
        assert parsed == [Preference("a", " b", " c")] and len(report.refused) == report.rows - 1


text = st.text(st.characters(exclude_categories=["Cs"]))
response = text.filter(str.strip)
preferences = st.builds(
    lambda prompt, pair, margin: Preference(prompt, *pair, margin),
    text,
    st.tuples(response, response).filter(lambda pair: pair[0] != pair[1]),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


class TestSaving:
    @given(st.lists(preferences, min_size=1))
    def test_what_is_read_is_what_was_written(self, tmp_path_factory, written):
        folder = tmp_path_factory.mktemp("saved")
        for name in ("p.jsonl", "p.jsonl.gz"):
            save_preferences(written, folder / name)
            assert load_preferences(folder / name) == written
        assert len((folder / "p.jsonl").read_text(encoding="utf-8").splitlines()) == len(written)

    def test_unicode_stays_readable_and_line_separators_end_no_line(self, tmp_path):
        save_preferences(PREFERENCES, tmp_path / "p.jsonl")
        content = (tmp_path / "p.jsonl").read_text(encoding="utf-8")
        assert "日本" in content and len(content.splitlines()) == 3
        assert load_preferences(tmp_path / "p.jsonl") == PREFERENCES

    def test_transcripts_and_numpy_margins_come_back(self, tmp_path):
        written = [Preference(hh("Hi") + "\n\nAssistant:", hh("a"), hh("b"), np.float32(0.5))]
        save_preferences(written, tmp_path / "p.jsonl")
        assert load_preferences(tmp_path / "p.jsonl") == written

    def test_nothing_is_written_unless_everything_can_be(self, tmp_path):
        bad = [*PREFERENCES, Preference("", "\ud83d", "b")]
        with pytest.raises(ValueError, match=r"preferences\[3\] should be text that UTF-8 can write"):
            save_preferences(bad, tmp_path / "p.jsonl")
        with pytest.raises(ValueError, match="at least one comparison"):
            save_preferences([], tmp_path / "p.jsonl")
        with pytest.raises(ValueError, match=r"should end in \.jsonl or \.jsonl\.gz, got 'p\.csv'"):
            save_preferences(PREFERENCES, tmp_path / "p.csv")
        assert not list(tmp_path.iterdir())


MANY = [Preference(f"prompt {i % 500}", f"a{i}", f"b{i}") for i in range(1500)]


class TestSplitting:
    def test_no_prompt_is_on_both_sides_and_nothing_is_lost(self):
        train, held_out = split_preferences(MANY, 0.2)
        assert not {p.prompt for p in train} & {p.prompt for p in held_out}
        assert sorted(train + held_out, key=MANY.index) == MANY
        assert len({p.prompt for p in held_out}) / 500 == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / 500) ** 0.5)

    def test_a_side_follows_from_the_words_of_the_prompt_alone(self):
        _, held_out = split_preferences(MANY, 0.2)
        _, fewer = split_preferences(MANY[::-1][:700], 0.2)
        assert {p.prompt for p in fewer} == {p.prompt for p in held_out if p in MANY[800:]}
        shouted = [Preference(f" {p.prompt.upper()}!", p.chosen, p.rejected) for p in MANY]
        assert [p.chosen for p in split_preferences(shouted, 0.2)[1]] == [p.chosen for p in held_out]
        assert {p.prompt for p in held_out} < {p.prompt for p in split_preferences(MANY, 0.5)[1]}

    @pytest.mark.parametrize("rows", [[], [Preference("", "a", "b"), Preference("", "c", "d")]])
    def test_sides_that_would_be_empty(self, rows):
        with pytest.raises(ValueError, match="split the texts before they are paired"):
            split_preferences(rows)

    @pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
    def test_shares_that_leave_a_side_empty(self, share):
        with pytest.raises(ValueError, match="`held_out` should be a share between 0 and 1"):
            split_preferences(MANY, share)


KINDS = {
    files: ("BROKEN", "UNDECODABLE", "NO_OBJECT"),
    preference_rows: ("NO_VALUE", "WRONG_TYPE", "BAD_MARGIN", "HALF"),
    preference_chat: (
        *("NO_TURNS", "MISSING", "EMPTY_TURN", "NO_ANSWER", "EMPTY", "EQUAL", "APART", "LATER", "UNRENDERED"),
    ),
}


@pytest.mark.slow
def test_the_blocks_of_the_documentation_run(tmp_path, monkeypatch, capsys):
    """One after the other, as the page says."""
    page = (Path(__file__).parent.parent / "docs" / "preferences.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 10 and "1 x empty response: row 2" in capsys.readouterr().out


def test_kinds_of_the_documentation_are_those_there_are():
    page = (Path(__file__).parent.parent / "docs" / "preferences.md").read_text(encoding="utf-8")
    table = page.split("| Kind | |")[1].split("\n\n")[0]
    named = {kind for line in table.strip().splitlines() for kind in re.findall(r"`([^`]+)`", line.split("|")[1])}
    kinds = {getattr(home, name) for home, names in KINDS.items() for name in names}
    assert named == kinds
