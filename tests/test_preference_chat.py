"""Transcripts and messages: what is a turn, where two conversations are split, and what they look like as text."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_helpers import byte_tokenizer
from preference_helpers import KEPT, PARSED, REFUSED, hh, row

from textenv.lm import TextTokenizer
from textenv.rewards import (
    BadPreferencesError,
    ChatTemplate,
    Preference,
    load_preferences,
    parse_transcript,
    preference_chat,
    transcript_text,
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_documented_examples():
    assert doctest.testmod(preference_chat) == (0, 2)


class TestTranscripts:
    @pytest.mark.parametrize("case", PARSED)
    def test_is_parsed(self, case):
        given_row, texts = PARSED[case]
        assert load_preferences([given_row], format="hh") == [Preference(*texts)]

    @pytest.mark.parametrize("case", REFUSED)
    def test_is_refused_with_its_place_and_kind(self, case):
        given_row, kind = REFUSED[case]
        good = row(hh("Hi", "A"), hh("Hi", "B"))
        parsed, report = load_preferences([good, given_row, good], on_bad_row="skip")
        assert len(parsed) == 2 and report.format == "hh" and report.counts == {kind: 1}
        assert (report.refused[0].row, report.refused[0].place) == (1, "row 1")
        assert report.refused[0].reason.startswith("row 1")

    @pytest.mark.parametrize("case", KEPT)
    def test_later_turns_can_be_kept(self, case):
        assert load_preferences([REFUSED[case][0]], later_turns="keep") == [Preference(*KEPT[case])]

    def test_the_reason_says_which_transcript_and_what_stands_there(self):
        _, report = load_preferences([REFUSED["ends with the human"][0]], on_bad_row="skip")
        assert report.refused[0].reason == (
            "row 0, chosen should end with a turn of the assistant, got one of the human at the end: 'And?'. There is "
            "no response to compare. Leave the row out."
        )

    def test_as_messages_through_a_template(self):
        def lines(prompt, response):
            return "|".join(m["content"] for m in prompt), "|".join(m["role"] + m["content"] for m in response)

        rows = [row(hh("Hi", "Yes?", "Tea?", "No."), hh("Hi", "Yes?", "Tea?", "Now."))]
        assert load_preferences(rows, render=lines) == [Preference("Hi|Yes?|Tea?", "assistantNo.", "assistantNow.")]

    def test_a_long_run_of_blank_lines_takes_no_time(self):
        assert parse_transcript("Human: Hi" + "\n" * 200_000 + "x\n\nAssistant: Yo", "t")[1] == assistant("Yo")

    # What people say: any text that does not itself look like a turn, and has no spaces around it.
    said = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1).map(str.strip)
    said = said.filter(lambda text: text and "Human:" not in text and "Assistant:" not in text)

    @given(st.lists(st.tuples(said, said), min_size=1, max_size=4))
    def test_text_of_turns_gives_the_turns_again(self, pairs):
        messages = [message for question, answer in pairs for message in (user(question), assistant(answer))]
        prompt, response = transcript_text(messages[:-1], messages[-1:])
        assert parse_transcript(prompt + response, "it") == messages
        assert prompt.endswith("\n\nAssistant:") and response == " " + messages[-1]["content"]

    @given(st.text("HumanAssit: \n\r", max_size=60), st.text("HumanAssit: \n\r", max_size=60))
    def test_any_text_is_parsed_or_refused(self, chosen, rejected):
        parsed, report = load_preferences([row(chosen, rejected)] * 2, format="hh", on_bad_row="skip")
        assert len(parsed) + len(report.refused) == report.rows == 2


SKY = [user("What color is the sky?")]


# The four forms in which preference data sets hold one conversation.
FORMS = {
    "explicit": {"prompt": SKY, "chosen": [assistant("It is blue.")], "rejected": [assistant("It is green.")]},
    "implicit": {"chosen": [*SKY, assistant("It is blue.")], "rejected": [*SKY, assistant("It is green.")]},
    "both": {
        "prompt": SKY,
        "chosen": [*SKY, assistant("It is blue.")],
        "rejected": [*SKY, assistant("It is green.")],
    },
    "prompt as text": {
        "prompt": "What color is the sky?",
        "chosen": [*SKY, assistant("It is blue.")],
        "rejected": [*SKY, assistant("It is green.")],
    },
    "all but the answer as text": {
        "prompt": "What color is the sky?",
        "chosen": [assistant("It is blue.")],
        "rejected": "It is green.",
    },
    "answers as texts": {"prompt": SKY, "chosen": "It is blue.", "rejected": "It is green."},
}


BAD = {
    "no role": ({"chosen": [{"content": "a"}], "rejected": [assistant("b")]}, "wrong type"),
    "no list": ({"prompt": SKY, "chosen": 1, "rejected": [assistant("b")]}, "wrong type"),
    "an empty list": ({"prompt": SKY, "chosen": [], "rejected": [assistant("b")]}, "wrong type"),
    "another prompt": (
        {"prompt": SKY, "chosen": [user("x"), assistant("a")], "rejected": [user("x"), assistant("b")]},
        "different prompts",
    ),
    "another prompt as text": (
        {"prompt": "y", "chosen": [user("x"), assistant("a")], "rejected": [user("x"), assistant("b")]},
        "different prompts",
    ),
    "no prompt at all": ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "different prompts"),
    "a question at the end": ({"chosen": [*SKY], "rejected": [*SKY, assistant("b")]}, "ends without an answer"),
    "an empty answer": (
        {"prompt": SKY, "chosen": [assistant(" ")], "rejected": [assistant("b")]},
        "empty response",
    ),
    "equal": ({"prompt": SKY, "chosen": [assistant("b")], "rejected": [assistant("b")]}, "equal responses"),
    "a role without a rendering": (
        {"prompt": [{"role": "system", "content": "s"}, *SKY], "chosen": "a", "rejected": "b"},
        "cannot be rendered",
    ),
}


class TestMessages:
    @pytest.mark.parametrize("form", FORMS)
    def test_is_one_comparison(self, form):
        assert load_preferences([FORMS[form]], render=transcript_text) == [
            Preference("\n\nHuman: What color is the sky?\n\nAssistant:", " It is blue.", " It is green.")
        ]

    @pytest.mark.parametrize("case", BAD)
    def test_is_refused(self, case):
        given_row, kind = BAD[case]
        parsed, report = load_preferences([FORMS["explicit"], given_row], render=transcript_text, on_bad_row="skip")
        assert len(parsed) == 1 and report.format == "chat" and report.counts == {kind: 1}

    def test_messages_need_a_rendering(self):
        with pytest.raises(
            ValueError, match=r"the list holds lists of messages.*Pass render=ChatTemplate\(tokenizer\)"
        ):
            load_preferences([FORMS["explicit"]])

    def test_rows_are_left_as_they_are(self):
        given_row = {"prompt": [*SKY], "chosen": [assistant("a")], "rejected": [assistant("b")]}
        load_preferences([given_row], render=transcript_text)
        assert given_row == {"prompt": SKY, "chosen": [assistant("a")], "rejected": [assistant("b")]}


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<eos> {% endfor %}"
OPENING = "{% if add_generation_prompt %}<assistant>{% endif %}"


def chat_tokenizer(bos=False, writes_bos=False, template=TURNS + OPENING):
    tokenizer = byte_tokenizer(bos=bos)
    tokenizer.chat_template = ("{{ bos_token }}" if writes_bos else "") + template
    return TextTokenizer(tokenizer)


ROW = {"prompt": "the sky?", "chosen": [assistant(" good ")], "rejected": [assistant("eos> ")]}


class TestTemplates:
    def test_response_ends_with_the_answer(self):
        """Also where the answer looks like a part of the mark that ends the turn."""
        assert load_preferences([ROW], render=ChatTemplate(chat_tokenizer())) == [
            Preference("<user>the sky?<eos> <assistant>", "good", "eos>")
        ]
        assert load_preferences([ROW], render=ChatTemplate(chat_tokenizer(), end_of_turn=True)) == [
            Preference("<user>the sky?<eos> <assistant>", "good<eos> ", "eos><eos> ")
        ]

    @pytest.mark.parametrize(("bos", "writes_bos"), [(True, True), (True, False), (False, False)])
    def test_exactly_one_bos(self, bos, writes_bos):
        """Case 23: the template's or the tokenizer's, never both, never none where the model has one."""
        tokenizer = chat_tokenizer(bos, writes_bos)
        (preference,) = load_preferences([ROW], render=ChatTemplate(tokenizer))
        for response in (preference.chosen, preference.rejected):
            ids = tokenizer.encode(preference.prompt + response)
            assert ids.count(tokenizer.bos_id) == int(bos) and (not bos or ids[0] == tokenizer.bos_id)
        assert preference.prompt == tokenizer.encode_chat([user("the sky?")])[0]  # what environments show scorers

    def test_later_turns(self):
        rows = [row(hh("a", "b", "c", "d"), hh("a", "e"))]
        assert load_preferences(rows, render=ChatTemplate(chat_tokenizer()), later_turns="keep") == [
            Preference("<user>a<eos> <assistant>", "b<eos> <user>c<eos> <assistant>d", "e")
        ]

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (None, "tokenizer with a chat template, got one without"),
            ("{{ raise_exception('no') }}", "refused them: no"),
            (TURNS + "{% if add_generation_prompt %}<assistant><think>{% endif %}", "behind the turn that it opens"),
            ("{% for m in messages %}{{ m.role }}{% endfor %}" + OPENING, "behind the turn that it opens"),
        ],
    )
    def test_templates_that_cannot_be_used(self, template, message):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        with pytest.raises(BadPreferencesError, match=message) as caught:
            load_preferences([ROW], render=ChatTemplate(TextTokenizer(tokenizer)))
        assert caught.value.report.counts == {"cannot be rendered": 1}

    @pytest.mark.slow
    def test_a_real_model(self):
        from textenv.lm import load_tokenizer

        tokenizer = load_tokenizer("smollm2-135m")
        rows = [row(hh("Hi", "Yes?", "Tea?", "No."), hh("Hi", "Yes?", "Tea?", "Please."))]
        (preference,) = load_preferences(rows, render=ChatTemplate(tokenizer))
        messages = [user("Hi"), assistant("Yes?"), user("Tea?")]
        assert preference.prompt == tokenizer.encode_chat(messages)[0]
        assert preference.prompt.endswith("<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\n")
        assert (preference.chosen, preference.rejected) == ("No.", "Please.")
