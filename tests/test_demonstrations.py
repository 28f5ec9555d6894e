"""Demonstrations as episodes: what the environment would show, what cannot be used, where they are read from."""

from __future__ import annotations

import doctest
import gzip
import json

import numpy as np
import pytest
from helpers import (
    CLOSE,
    DOT,
    END,
    FILM,
    FILMS,
    GOOD,
    IS,
    NOT,
    RESPONSE_TOKENS,
    VERY,
    A,
    S,
    assert_same,
    text_task,
    write,
)
from lm_helpers import byte_tokenizer

import textenv.prompts.demonstrations
from textenv import DemonstrationSet, TextGenerationEnv, TextGenerationVectorEnv, TextTask, load_demonstrations
from textenv.lm.tokenizer import TextTokenizer
from textenv.prompts import Demonstration
from textenv.wrappers import vector as wrappers

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "the good"},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "a road"},
]


def encode(*demonstrations, task=None, **options):
    return DemonstrationSet.encode(list(demonstrations), task or text_task(), **options)


def chat_task(template=CHATML, **options):
    tokenizer = byte_tokenizer(**options)
    tokenizer.chat_template = template
    wrapped = TextTokenizer(tokenizer)
    return TextTask.build(
        prompts=["hi"],
        scorer=lambda prompts, responses: [0.0] * len(responses),
        tokenizer=wrapped,
        vocab_size=wrapped.vocab_size,
        stop_ids=wrapped.stop_ids,
        max_prompt_tokens=120,
        max_response_tokens=20,
        pad_id=wrapped.pad_id,
    )


# What they become


def test_doctests_hold():
    assert doctest.testmod(textenv.prompts.demonstrations).failed == 0


@pytest.mark.parametrize("prompt", [" a film", " a very bad film is not", (A, FILM)])
@pytest.mark.parametrize("response", [" is good", [IS, VERY, NOT, VERY, GOOD], [END]])
def test_they_are_what_stepping_would_show(prompt, response):
    task = text_task()
    demonstrations = encode(Demonstration(prompt, response, ended=len(response) != 5), task=task)
    state = demonstrations.state()
    steps = write(TextGenerationEnv(task), demonstrations.responses[0], options={"prompt": prompt})
    assert_same(state.input_ids[0], steps["observation"]["input_ids"])
    assert_same(state.attention_mask[0], steps["observation"]["attention_mask"])
    assert not any(terminated or truncated for terminated, truncated in steps["ends"][:-1])
    terminated, truncated = steps["ends"][-1]
    assert (terminated, truncated) == ((True, False) if len(response) != 5 else (False, True))
    assert steps["info"]["response_length"] == state.response_lengths[0] == demonstrations.tokens


def test_a_response_that_ended_by_itself_learns_its_end():
    whole = encode((" a film", " is good"), Demonstration(" a film", " is good", ended=False))
    assert whole.responses == ((IS, GOOD, END), (IS, GOOD))
    assert whole.prompts[0].ids == (A, FILM)
    assert whole.tokens == 5
    state = whole.state([1])
    assert state.attention_mask[0].sum() == 4 and state.input_ids[0, -1] == CLOSE  # the pad id, not a stop


def test_a_stop_that_the_text_ends_with_is_enough():
    task = text_task(stop_ids=[END, DOT])
    assert encode((" a film", " is good."), task=task).responses == ((IS, GOOD, DOT),)


def test_texts_encode_together_where_they_can_and_alone_where_they_melt():
    """ " film" and "s" would become " films", another prompt than the environment shows."""
    assert encode((" a film", "s")).responses == ((S, END),)
    assert encode((" a", " films")).responses == ((FILMS, END),)


def test_only_one_bos_and_none_in_the_response():
    task = chat_task(bos=True)
    encoded = encode(("the", "x good"), task=task)
    pieces = task.tokenizer.tokenizer.convert_ids_to_tokens(list(encoded.prompts[0].ids + encoded.responses[0]))
    assert pieces[:2] == ["<bos>", "the"] and pieces.count("<bos>") == 1 and pieces[-1] == "<eos>"


def test_pairs_and_fingerprints():
    one = encode((" a film", " is good"), (" films", " is"))
    assert one.fingerprint == encode((" a film", " is good"), (" films", " is")).fingerprint
    others = [
        encode((" films", " is"), (" a film", " is good")),
        encode((" a film", " is good")),
        encode((" a", " film is good"), (" films", " is")),
        encode((" a film", " is good"), (" films", " is"), task=text_task(max_response_tokens=6)),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert repr(one) == "DemonstrationSet(2 demonstrations, 5 response tokens, 0 dropped and 0 cut)"


def test_a_prompt_is_on_one_side_of_a_split():
    pairs = [(((A, FILM, IS, NOT, VERY)[i % 5],) * (1 + i % 6), [GOOD] * (1 + i % 3)) for i in range(60)]
    train, held_out = encode(*pairs).split(0.5, seed=1)
    assert len(train) + len(held_out) == 60
    assert not {p.ids for p in train.prompts} & {p.ids for p in held_out.prompts}
    assert all(held_out.responses[i] in {(GOOD,) * n + (END,) for n in (1, 2, 3)} for i in range(len(held_out)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        train.split(0.0)


# What does not fit


def test_over_the_budget():
    long = (" a film", " is not very very")  # four tokens and the stop are five; one more is too many
    assert encode(long).responses == ((IS, NOT, VERY, VERY, END),)
    longer = (" a film", " is not very very good")
    with pytest.raises(ValueError, match=r"demonstrations\[1\] should have a response of at most 5 tokens, got 6"):
        encode(long, longer)
    cut = encode(long, longer, unfit="cut")
    assert cut.responses[1] == (IS, NOT, VERY, VERY, GOOD) and (cut.cut, cut.dropped) == (1, 0)
    dropped = encode(long, longer, unfit="drop")
    assert len(dropped) == 1 and (dropped.cut, dropped.dropped) == (0, 1)
    assert dropped.names == ("demonstrations[0]",)


def test_text_behind_a_stop():
    onwards = (" a film", [IS, END, GOOD])
    with pytest.raises(ValueError, match=r"should end at its first stop id, got 0 as token 1 of 4"):
        encode(onwards)
    assert encode(onwards, unfit="cut").responses == ((IS, END),)
    late = (" a film", [IS, NOT, VERY, VERY, GOOD, END, GOOD])  # the budget comes first
    assert encode(late, unfit="cut").responses == ((IS, NOT, VERY, VERY, GOOD),)


def test_long_prompts():
    task = text_task(max_prompt_tokens=6)
    long = (" a very bad film is not very", " good")
    with pytest.raises(ValueError, match=r"a prompt of at most 6 tokens, got 7"):
        encode(long, task=task)
    with pytest.raises(ValueError, match=r"a prompt of at most 6 tokens, got 7"):
        encode(long, task=task, unfit="cut")
    with pytest.raises(ValueError, match=r"At least one demonstration should fit the task, got 1, of which 1 were"):
        encode(long, task=task, unfit="drop")


def test_which_stop_ends_a_response():
    task = text_task(stop_ids=[END, CLOSE])
    with pytest.raises(ValueError, match=r"one of the task's stop ids .* Say so with eos_id"):
        encode((" a film", " is"), task=task)
    assert encode((" a film", " is"), task=task, eos_id=CLOSE).responses == ((IS, CLOSE),)
    with pytest.raises(ValueError, match=r"`eos_id` should be one of the task's stop ids"):
        encode((" a film", " is"), task=task, eos_id=GOOD)
    endless = text_task(stop_ids=[])
    assert encode((" a film", [IS] * RESPONSE_TOKENS), task=endless).tokens == RESPONSE_TOKENS
    with pytest.raises(ValueError, match=r"got 1 tokens without one"):
        encode((" a film", " is"), task=endless)
    assert encode(Demonstration(" a film", " is", ended=False), task=endless).tokens == 1


def test_forbidden_tokens_are_refused_and_allowed_ones_known():
    envs = wrappers.MinLength(TextGenerationVectorEnv(2, text_task()), 2)
    with pytest.raises(ValueError, match=r"demonstrations\[0\] to demonstrations\[1\].*row 1, response token 1"):
        DemonstrationSet.encode([(" a film", " is good"), (" films", " is")], envs)
    allowed = DemonstrationSet.encode([(" a film", " is good")], envs)
    masks = allowed.action_masks(allowed.state())
    assert masks is not None and not masks.allows(np.full((1, 5), END))[0, :2].any()
    assert encode((" a film", " is good")).action_masks(allowed.state()) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "a list of at least one Demonstration"),
        ("text", "a list of at least one Demonstration"),
        ([" a film"], r"demonstrations\[0\] should be a Demonstration or a pair"),
        ([(" a film", " is"), {"prompt": " a"}], r"demonstrations\[1\] should be a Demonstration or a pair"),
        ([("", " is")], r"demonstrations\[0\] should have at least one token"),
        ([(" a film", [VERY, 99])], r"The response of demonstrations\[0\] should hold token ids .*99"),
        ([Demonstration((99,), " is", place="x.csv line 7")], r"demonstrations\[0\] \(x.csv line 7\) .*99"),
        ([(" a film", 3)], "`response` should be a text or token ids, got 3"),
        ([(" a film", None)], "`response` should be a text or token ids, got None"),
        ([(" a film", "")], "`response` should have at least one token, got ''"),
        ([(" a film", [])], r"`response` should have at least one token, got \[\]"),
    ],
)
def test_what_cannot_be_used_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        DemonstrationSet.encode(given, text_task())


def test_options_that_mean_nothing():
    with pytest.raises(ValueError, match="`unfit` should be one of"):
        encode((" a", " film"), unfit="skip")
    with pytest.raises(TypeError, match=r"`envs` should be text environments .* got str"):
        DemonstrationSet.encode([(" a", " film")], "RLHF-v0")


@pytest.mark.parametrize("text", ["the<eos>", "<eos>", "good <eos> the"])
def test_special_tokens_spelt_in_a_text_are_refused(text):
    for prompt in ("the", CHAT[:1]):
        with pytest.raises(ValueError, match=r"demonstrations\[0\] .*without special tokens in its text, got token 0"):
            encode((prompt, text), task=chat_task())


# Chats


@pytest.mark.parametrize("bos", [False, True])
def test_the_assistants_turn_is_learned_and_nothing_else(bos):
    task = chat_task(bos=bos)
    (demonstration,) = load_demonstrations([{"messages": CHAT}], messages="messages")
    encoded = encode(demonstration, task=task)
    tokenizer = task.tokenizer.tokenizer
    prompt = tokenizer.decode(encoded.prompts[0].ids)
    assert prompt.removeprefix("<bos>") == "<|user|>hi<eos><|assistant|>the good<eos><|user|>go on<eos><|assistant|>"
    assert tokenizer.decode(encoded.responses[0]) == "a road<eos>"
    assert encoded.prompts[0].ids == tuple(task.tokenizer.encode_chat(CHAT[:-1])[1])


def test_every_turn_of_the_assistant_can_be_learned():
    found = load_demonstrations([{"chat": CHAT}], messages="chat", turns="all")
    assert [(len(d.prompt), d.response) for d in found] == [(1, "the good"), (3, "a road")]


def test_a_template_that_writes_turns_otherwise_still_gives_the_answer():
    """Here an answer stands behind another mark than the one that opens the turn."""
    template = CHATML.replace("'<|' + m['role']", "'<|the ' + m['role']")
    task = chat_task(template)
    encoded = encode((CHAT[:1], "a road"), task=task)
    assert task.tokenizer.encode_turn(CHAT[:1], "a road") is None
    assert task.tokenizer.tokenizer.decode(encoded.responses[0]) == "a road<eos>"


def test_a_turn_that_was_cut_off_does_not_end():
    task = chat_task()
    (cut,) = encode(Demonstration(CHAT[:1], "a road", ended=False), task=task).responses
    assert task.tokenizer.tokenizer.decode(cut) == "a road"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (CHAT[:3], r"row 0 should end with a turn of the assistant .* \['user', 'assistant', 'user'\]"),
        (CHAT[:1], "there is no answer to learn"),
        (CHAT[1:2], "there is no answer to learn"),
        ("hi", "row 0 should hold chat messages"),
        ([CHAT[0], {"role": "assistant", "content": None}], r"`response` \(row 0\) should be a text"),
        ([CHAT[0], {"role": "assistant", "content": ""}], r"`response` \(row 0\) should have at least one token"),
    ],
)
def test_chats_without_an_answer_are_named(chat, message):
    with pytest.raises(ValueError, match=message):
        load_demonstrations([{"messages": chat}], messages="messages")


def test_broken_messages_before_the_answer_are_named():
    (found,) = load_demonstrations([{"m": [{"role": "user"}, CHAT[1]]}], messages="m")
    with pytest.raises(ValueError, match=r"demonstrations\[0\] \(row 0\): message 0 should be a dict"):
        encode(found, task=chat_task())


# Files


def test_files_are_read_with_their_lines(tmp_path):
    lines = [{"q": " a film", "a": " is good"}, {"q": " films", "a": " is"}]
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    found = load_demonstrations(path, prompt="q", response="a")
    assert found == [
        Demonstration(" a film", " is good", place="train.jsonl.gz line 1"),
        Demonstration(" films", " is", place="train.jsonl.gz line 3"),
    ]
    table = tmp_path / "train.csv"
    table.write_text('prompt,response\n" a film"," is good"\n')
    assert load_demonstrations(table, ended=False) == [
        Demonstration(" a film", " is good", ended=False, place="train.csv line 2")
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"}', "bad.jsonl line 2 should have a value in the column 'response'"),
        ('{"response": "x"}', "bad.jsonl line 2 should have a value in the column 'prompt'"),
        ('{"prompt": "x", "response": null}', "bad.jsonl line 2 should have a value in the column 'response'"),
        ('{"prompt": "x", "response": ""}', r"`response` \(bad.jsonl line 2\) should have at least one token"),
        ('{"prompt": "x", "response": 4}', r"`response` \(bad.jsonl line 2\) should be a text or token ids"),
        ('{"prompt": "x", "response": ', "bad.jsonl line 2 should be one JSON object"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_demonstrations(path)


def test_datasets_are_read():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"messages": CHAT, "other": 1}])
    assert [d.response for d in load_demonstrations(rows, messages="messages")] == ["a road"]


def test_unknown_turns():
    with pytest.raises(ValueError, match="`turns` should be one of"):
        load_demonstrations([{"m": CHAT}], messages="m", turns="first")
