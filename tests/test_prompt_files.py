"""Prompts from files and datasets: what is read, and how a fault in a file is told."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textenv.prompts import PromptRecord, is_source, load_prompts
from textenv.prompts import hf_datasets as hub

datasets = pytest.importorskip("datasets")

QUESTIONS = [
    {"question": "What is\n1 + 1, exactly?", "answer": "2", "often": 1.5, "picture": "not wanted"},
    {"question": 'He said "two"\u2028', "answer": "", "often": 0, "picture": "x"},
    {"question": " a leading space", "answer": "4", "often": 2, "picture": "x"},
]
COLUMNS = {"prompt": "question", "context": ["answer"], "weight": "often"}


def expected(places):
    """Those questions as records from some places."""
    return [
        PromptRecord(row["question"], {"answer": row["answer"]}, float(row["often"]), place)
        for row, place in zip(QUESTIONS, places, strict=True)
    ]


def write_jsonl(path, rows=QUESTIONS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path, rows=QUESTIONS):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def gzipped(path):
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


class TestWhatIsRead:
    def test_json_lines(self, tmp_path):
        path = write_jsonl(tmp_path / "q.jsonl")
        places = ["q.jsonl line 1", "q.jsonl line 2", "q.jsonl line 3"]
        assert load_prompts(path, **COLUMNS) == expected(places)
        assert load_prompts(str(gzipped(path)), **COLUMNS) == expected([p.replace("l ", "l.gz ") for p in places])
        # A line separator inside a text ends no line; a reader that splits as str.splitlines does would see four.
        assert len(path.read_text(encoding="utf-8").splitlines()) == 4

    def test_csv_with_line_breaks_quotes_and_places_by_line(self, tmp_path):
        path = write_csv(tmp_path / "q.csv")
        records = load_prompts(path, **COLUMNS)
        assert records == expected(["q.csv line 3", "q.csv line 4", "q.csv line 5"])  # the first record takes two lines
        assert [r.prompt for r in load_prompts(gzipped(path), prompt="question")] == [q["question"] for q in QUESTIONS]

    def test_text_keeps_spaces_and_leaves_out_lines_with_nothing_on_them(self, tmp_path):
        path = tmp_path / "p.txt"
        path.write_bytes("\ufeff a film\r\n\r\n  \nfilms \nlast".encode())
        assert load_prompts(path) == [
            PromptRecord(" a film", place="p.txt line 1"),
            PromptRecord("films ", place="p.txt line 4"),
            PromptRecord("last", place="p.txt line 5"),
        ]

    def test_a_byte_order_mark_is_no_part_of_the_first_column(self, tmp_path):
        path = tmp_path / "excel.csv"
        path.write_bytes("\ufeffprompt,answer\r\nhi,1\r\n\r\nho,2\r\n".encode())
        assert [(r.prompt, r.context) for r in load_prompts(path, context=("answer",))] == [
            ("hi", {"answer": "1"}),
            ("ho", {"answer": "2"}),
        ]

    def test_ids_and_chats_in_json(self, tmp_path):
        chat = [{"role": "user", "content": "hi"}]
        path = write_jsonl(tmp_path / "mixed.ndjson", [{"prompt": [3, 4]}, {"prompt": chat}])
        assert [record.prompt for record in load_prompts(path)] == [[3, 4], chat]

    def test_the_messages_themselves_as_context(self, tmp_path):
        chat = [{"role": "user", "content": "hi"}]
        path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat}])
        assert load_prompts(path, prompt="messages", context=["messages"]) == [
            PromptRecord(chat, {"messages": chat}, place="chat.jsonl line 1")
        ]

    def test_lists_of_dicts(self):
        assert load_prompts(QUESTIONS, **COLUMNS) == expected(["row 0", "row 1", "row 2"])

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
    def test_any_text_survives_json_and_csv(self, tmp_path_factory, texts):
        folder = tmp_path_factory.mktemp("any")
        rows = [{"prompt": text} for text in texts]
        assert [r.prompt for r in load_prompts(write_jsonl(folder / "a.jsonl", rows))] == texts
        if all("\0" not in text for text in texts):
            assert [r.prompt for r in load_prompts(write_csv(folder / "a.csv", rows))] == texts

    def test_what_needs_reading(self):
        rows = datasets.Dataset.from_list(QUESTIONS)
        assert all(map(is_source, ["a.txt", rows, datasets.DatasetDict(train=rows), QUESTIONS]))
        assert not any(map(is_source, [None, [], ["a"], [[1]], [[{"role": "user", "content": "a"}]], ["a", {}]]))


class TestDatasets:
    def test_an_object(self):
        dataset = datasets.Dataset.from_list(QUESTIONS)
        assert load_prompts(dataset, **COLUMNS) == expected(["dataset row 0", "dataset row 1", "dataset row 2"])
        assert load_prompts(dataset.with_format("numpy"), **COLUMNS) == load_prompts(dataset, **COLUMNS)

    def test_chats(self):
        chat = [{"role": "user", "content": "hi"}]
        assert load_prompts(datasets.Dataset.from_list([{"prompt": chat}]))[0].prompt == chat

    def test_saved_folders_and_their_splits(self, tmp_path):
        rows = datasets.Dataset.from_list(QUESTIONS)
        rows.save_to_disk(str(tmp_path / "one"))
        both = datasets.DatasetDict(train=rows, test=rows.select([2]))
        both.save_to_disk(str(tmp_path / "two"))
        assert load_prompts(tmp_path / "one", **COLUMNS) == expected(["one row 0", "one row 1", "one row 2"])
        assert [r.prompt for r in load_prompts(str(tmp_path / "two"), prompt="question", split="test")] == [
            " a leading space"
        ]
        assert len(load_prompts(both, prompt="question", split="train")) == 3
        only = datasets.DatasetDict(test=rows)
        assert len(load_prompts(only, prompt="question")) == 3  # a single split needs no name
        with pytest.raises(ValueError, match=r"two has the splits 'train', 'test', got split=None\. Choose one"):
            load_prompts(tmp_path / "two", prompt="question")
        with pytest.raises(ValueError, match=r"the dataset has the splits 'train', 'test', got split='dev'"):
            load_prompts(both, prompt="question", split="dev")
        with pytest.raises(ValueError, match=r"one dataset without splits, got split='train'\. Leave it out"):
            load_prompts(tmp_path / "one", prompt="question", split="train")

    def test_parquet_and_arrow_files(self, tmp_path):
        dataset = datasets.Dataset.from_list(QUESTIONS)
        dataset.to_parquet(str(tmp_path / "q.parquet"))
        dataset.save_to_disk(str(tmp_path / "saved"))
        arrow = next((tmp_path / "saved").glob("*.arrow"))
        places = ["q.parquet row 0", "q.parquet row 1", "q.parquet row 2"]
        assert load_prompts(tmp_path / "q.parquet", **COLUMNS) == expected(places)
        assert [r.prompt for r in load_prompts(arrow, prompt="question")] == [q["question"] for q in QUESTIONS]
        with pytest.raises(ValueError, match="one file without splits, got split='train'"):
            load_prompts(tmp_path / "q.parquet", prompt="question", split="train")

    def test_the_hub(self, monkeypatch):
        asked = []

        def load_dataset(*args, **kwargs):
            asked.append((args, kwargs))
            return datasets.DatasetDict(train=datasets.Dataset.from_list(QUESTIONS))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        records = load_prompts("someone/questions", **COLUMNS, config="main")
        assert records == expected([f"someone/questions row {row}" for row in range(3)])
        assert asked == [(("someone/questions", "main"), {"split": None})]

    def test_the_hub_without_a_network(self, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            ValueError,
            match=r"No prompts could be had from 'someone/nothing-here'. There is no file or folder of that name here"
            r".*\(split 'train'\) it could not be loaded, which needs a network the first time.*Cause: ",
        ) as caught:
            load_prompts("someone/nothing-here", split="train")
        assert caught.value.__cause__ is not None

    def test_streams_are_refused(self):
        stream = datasets.Dataset.from_list(QUESTIONS).to_iterable_dataset()
        with pytest.raises(ValueError, match=r"of known length, got IterableDataset, which is streamed.*dataset\.take"):
            load_prompts(stream, prompt="question")
        assert len(load_prompts(list(stream.take(2)), prompt="question")) == 2  # what the message says

    def test_the_library_may_be_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr("textenv.optional.importlib.util.find_spec", lambda _name: None)
        (tmp_path / "folder").mkdir()
        for source in ("someone/questions", tmp_path / "folder"):
            with pytest.raises(ImportError, match=r"needs datasets, .* pip install 'textenv\[data\]'"):
                load_prompts(source)
        assert load_prompts(write_jsonl(tmp_path / "q.jsonl"), prompt="question")  # files need nothing

    def test_broken_files_and_folders(self, tmp_path):
        (tmp_path / "folder").mkdir()
        with pytest.raises(ValueError, match=r"folder that `Dataset.save_to_disk` wrote.*name one of the files"):
            load_prompts(tmp_path / "folder")
        (tmp_path / "bad.parquet").write_text("no parquet")
        with pytest.raises(ValueError, match=r"bad\.parquet should be Parquet, but could not be read"):
            load_prompts(tmp_path / "bad.parquet")

    def test_hub_ids_by_their_looks(self):
        assert hub.HUB_ID.fullmatch("openai/gsm8k") and hub.HUB_ID.fullmatch("a.b/c-d_1")
        assert not any(map(hub.HUB_ID.fullmatch, ["name", "./a", "a/b/c", "/a", "a/b c", "../x"]))


FILES = {
    "empty.jsonl": ("", {}, r"empty\.jsonl should hold at least one prompt, got a file without rows"),
    "blank.txt": ("\n  \n", {}, "should hold at least one prompt"),
    "header.csv": ("prompt\n", {}, "should hold at least one prompt"),
    "broken.jsonl": ('{"prompt": "a"}\n\n{"prompt": \n', {}, r"broken\.jsonl line 3 should be one JSON object, got '{"),
    "list.jsonl": ('{"prompt": "a"}\n"b"\n', {}, r"list\.jsonl line 2 should be a JSON object .*, got str"),
    "lacks.jsonl": (
        '{"prompt": "a"}\n{"promt": "b"}\n',
        {},
        r"lacks\.jsonl line 2 should have a value in the column 'prompt', got the columns 'promt'\. .*prompt_column=",
    ),
    "nothing.jsonl": ("{}\n", {}, "got the columns none"),
    "null.jsonl": ('{"prompt": null}\n', {}, r"null\.jsonl line 1 .* column 'prompt', got no value there"),
    "gap.jsonl": (
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n',
        {"context": ["answer"]},
        r"gap\.jsonl line 2 should have a value in the column 'answer', got .*context=\.\.\. \(of RLHF-v0: context_c",
    ),
    "hole.jsonl": (
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": null}\n',
        {"context": ["answer"]},
        r"hole\.jsonl line 2 should have a value in the column 'answer', got no value there",
    ),
    "heavy.jsonl": ('{"prompt": "a", "w": "much"}\n', {"weight": "w"}, r"line 1 .* number as weight .*'w', got 'much'"),
    "list.csv": ("prompt,w\na,[1]\n", {"weight": "w"}, r"list\.csv line 2 should have a number as weight"),
    "short.csv": ("prompt,answer\na,1\nb\n", {}, r"short\.csv line 3 should have 2 cells.*got 1: \['b'\].*quotes"),
    "long.csv": ("prompt\nyes, of course\n", {}, r"long\.csv line 2 should have 1 cells"),
    "quote.csv": ('prompt\n"a" b\n', {}, r"quote\.csv line 2 should be CSV"),
    "open.csv": ('prompt\n"a\nb\n', {}, r"open\.csv line 3 should be CSV"),
    "twice.csv": ("prompt,a,a\nx,1,2\n", {}, r"twice\.csv line 1 should name each column once, got 'a'"),
    "other.csv": ("text\nx\n", {}, r"other\.csv line 2 .* got the columns 'text'"),
    "columns.txt": ("a\n", {"prompt": "question"}, r"columns\.txt is a text file.*no columns, got \['question'\]"),
    "context.txt": ("a\n", {"context": ["answer"]}, r"which has no columns, got \['prompt', 'answer'\]"),
    "what.json": ("[]", {}, r"should end in one of \.txt, \.jsonl, .*, got '\.json'"),
    "split.txt": ("a\n", {"split": "train"}, "one file without splits, got split='train'"),
    "config.txt": ("a\n", {"config": "main"}, "`config` chooses among those of a dataset on the hub, got 'main' for"),
    "packed.txt.gz": ("not packed", {}, "should be a whole gzip file"),
}


class TestBadFiles:
    @pytest.mark.parametrize("name", FILES)
    def test_is_refused_with_file_and_line(self, tmp_path, name):
        content, options, message = FILES[name]
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            load_prompts(tmp_path / name, **options)

    def test_other_encodings(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
        with pytest.raises(ValueError, match=r"latin\.txt should be UTF-8 text, got the byte 0xe9"):
            load_prompts(tmp_path / "latin.txt")

    def test_half_a_gzip_file(self, tmp_path):
        packed = gzip.compress(b"a film\n" * 1000)
        (tmp_path / "half.txt.gz").write_bytes(packed[: len(packed) // 2])
        with pytest.raises(ValueError, match=r"half\.txt\.gz should be a whole gzip file"):
            load_prompts(tmp_path / "half.txt.gz")

    @pytest.mark.parametrize("source", ["nowhere.jsonl", "no/where.jsonl", "a/b/c", "What is 1 + 1?"])
    def test_files_that_are_not_there(self, source):
        with pytest.raises(
            ValueError, match=r"should be a file or folder .* got none .*Mend the path; if it is the pro"
        ):
            load_prompts(source)

    @pytest.mark.parametrize(
        ("source", "options", "message"),
        [
            (QUESTIONS, {"prompt": "question", "context": "answer"}, r"Write context=\['answer'\]"),
            (QUESTIONS, {"prompt": "question", "split": "train"}, "got split='train' for a list"),
            (QUESTIONS, {"prompt": "question", "config": "main"}, "`config` chooses .* got 'main'"),
            (QUESTIONS, {}, r"row 0 should have a value in the column 'prompt'"),
            ([{"role": "user", "content": "hi"}], {}, r"one chat is one prompt: write prompts=\[messages\]"),
            ([], {}, "`source` should hold at least one prompt, got no rows"),
            (["a film"], {}, r"got list\. Prompts without columns need no loading: pass them as prompts="),
            (3, {}, "`source` should be a path, .* got int"),
            ("nowhere", {"config": "main"}, "`config` chooses among those of a dataset on the hub"),
        ],
    )
    def test_other_sources(self, source, options, message):
        with pytest.raises(ValueError, match=message):
            load_prompts(source, **options)

    def test_a_dataset_without_rows_or_without_the_column(self):
        dataset = datasets.Dataset.from_list(QUESTIONS)
        with pytest.raises(ValueError, match="The dataset should hold at least one prompt, got no rows"):
            load_prompts(dataset.filter(lambda row: False), prompt="question")
        with pytest.raises(
            ValueError, match=r"dataset row 0 should have a value in the column 'prompt', got the columns"
        ):
            load_prompts(dataset)
