"""Prompts on their way into episodes: chats, lengths, weights, order, splits, and the context that scorers get."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import gymnasium as gym
import numpy as np
import pytest
from agent_helpers import Counting, lm_agent, lm_envs
from helpers import (
    BAD,
    CLOSE,
    END,
    FILM,
    FILMS,
    GOOD,
    PIECES,
    VOCAB_SIZE,
    PieceTokenizer,
    assert_same,
    text_task,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from lm_helpers import EOS, NAMED, ROWS, byte_tokenizer, llama

from textenv import PromptSet, ScorerError, TextGenerationEnv, TextGenerationVectorEnv, replay
from textenv.evaluation import draw_prompts
from textenv.lm import LanguageModel, TextTokenizer
from textenv.prompts import EncodedPrompt, PromptRecord, context_columns, encode_prompt, load_prompts
from textenv.prompts.overlong import cut_ids
from textenv.rlhf import RLHFOptions, read_prompts
from textenv.scorer_columns import check_takes_columns
from textenv.scoring import call_scorer

TOKENIZER = PieceTokenizer()
MODES = ("NextStep", "SameStep", "Disabled")
LETTERS = [" good", " bad", " film", " a", " is"]


def prompt_set(prompts=LETTERS, **options):
    return PromptSet.encode(prompts, TOKENIZER, VOCAB_SIZE, **options)


# Chats

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}assistant:{% endif %}"
HELLO = [{"role": "system", "content": "be good"}, {"role": "user", "content": "the road"}]
HELLO_TEXT = "system: be good\nuser: the road\nassistant:"


def chat_tokenizer(writes_bos: bool, adds_bos: bool, knows_bos: bool = True) -> TextTokenizer:
    """By whether the template writes a BOS and whether the tokenizer adds one of its own."""
    tokenizer = byte_tokenizer(bos=adds_bos)
    if knows_bos and not adds_bos:
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = ("{{ bos_token }}" if writes_bos else "") + TURNS.replace("\n", " ") + OPENING
    return TextTokenizer(tokenizer, vocab_size=ROWS)


class TestChats:
    @pytest.mark.parametrize(("writes_bos", "adds_bos"), [(True, True), (False, True), (True, False)])
    def test_exactly_one_bos(self, writes_bos, adds_bos):
        tokenizer = chat_tokenizer(writes_bos, adds_bos)
        prompt = encode_prompt(HELLO, tokenizer, ROWS, "it")
        bos = tokenizer.bos_id
        assert prompt.ids[0] == bos and prompt.ids.count(bos) == 1
        assert tokenizer.decode(prompt.ids) == HELLO_TEXT.replace("\n", " ")
        assert tuple(tokenizer.encode(prompt.text)) == prompt.ids  # nothing is lost on the way through text
        if writes_bos and adds_bos:  # what applying both does
            rendered = tokenizer.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
            assert tokenizer.tokenizer(rendered).input_ids[:2] == [bos, bos]

    def test_no_bos_where_nobody_writes_one(self):
        tokenizer = chat_tokenizer(writes_bos=False, adds_bos=False)
        prompt = encode_prompt(HELLO, tokenizer, ROWS, "it")
        assert tokenizer.bos_id is not None and tokenizer.bos_id not in prompt.ids
        assert encode_prompt(HELLO, chat_tokenizer(False, False, False), ROWS, "it").ids == prompt.ids

    def test_the_text_is_the_rendered_one_without_the_bos_that_encoding_adds(self):
        text = HELLO_TEXT.replace("\n", " ")
        assert encode_prompt(HELLO, chat_tokenizer(True, True), ROWS, "it").text == text
        assert encode_prompt(HELLO, chat_tokenizer(False, True), ROWS, "it").text == text
        assert encode_prompt(HELLO, chat_tokenizer(True, False), ROWS, "it").text == "<bos>" + text

    def test_a_bos_that_is_also_a_mark_of_turns_stays_in_the_text(self):
        """As in SmolLM2, whose BOS begins every turn."""
        tokenizer = chat_tokenizer(writes_bos=False, adds_bos=False)
        tokenizer.tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.content }}{% endfor %}<bos>"
        prompt = encode_prompt(HELLO, tokenizer, ROWS, "it")
        assert prompt.text == "<bos>be good<bos>the road<bos>" and prompt.ids.count(tokenizer.bos_id) == 3

    def test_the_template_is_applied_once_and_to_texts_never(self):
        tokenizer = chat_tokenizer(True, True)
        prompt = encode_prompt(HELLO, tokenizer, ROWS, "it")
        assert encode_prompt(prompt, tokenizer, ROWS, "it") is prompt
        plain = encode_prompt("the road", tokenizer, ROWS, "it")
        assert plain.text == "the road" and plain.ids[1:] == tuple(byte_tokenizer()("the road").input_ids)

    def test_messages_and_tokenizer_stay_as_they_are(self):
        messages, tokenizer = copy.deepcopy(HELLO), chat_tokenizer(True, True)
        tokenizer.tokenizer.chat_template = "{% for m in messages %}{{ m.update({'content': 'x'}) }}{% endfor %}b"
        with pytest.raises(ValueError, match="refused them"):  # templates run in a sandbox, on copies
            encode_prompt(messages, tokenizer, ROWS, "it")
        assert messages == HELLO

    def test_an_eos_is_taken_off_only_where_the_tokenizer_appends_it(self):
        tokenizer = byte_tokenizer(bos=True, appends_eos=True)
        text = TextTokenizer(tokenizer)
        assert tokenizer("good<eos>").input_ids[-2:] == [EOS, EOS]
        assert text.encode("good<eos>") == [*text.encode("good"), EOS]
        assert text.encode("<eos>") == [text.bos_id, EOS] and text.encode("") == [text.bos_id]

    def test_it_starts_episodes(self):
        tokenizer = chat_tokenizer(True, True)
        task = text_task(prompts=[HELLO], tokenizer=tokenizer, vocab_size=ROWS)
        env = TextGenerationEnv(task)
        observation, info = env.reset()
        assert info["prompt"] == HELLO_TEXT.replace("\n", " ")
        assert observation["input_ids"][0] == tokenizer.bos_id
        again, info = env.reset(options={"prompt": HELLO})
        assert_same(observation, again)
        with pytest.raises(ValueError, match=r"in `options`: the last message should be one to answer"):
            env.reset(options={"prompt": [*HELLO, {"role": "assistant", "content": "yes"}]})

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([{"role": "user"}], r"prompts\[1\]: message 0 should be a dict .* two texts, got {'role': 'user'}"),
            ([{"content": "hi"}], "message 0 should be a dict"),
            ([HELLO[0], "hi"], "message 1 should be a dict .* got 'hi'"),
            ([{"role": "user", "content": [{"type": "image"}]}], "message 0 should be a dict"),
            ([*HELLO, {"role": "assistant", "content": "2"}], "the last message .* got one of the assistant"),
        ],
    )
    def test_bad_messages(self, messages, message):
        with pytest.raises(ValueError, match=message):
            PromptSet.encode([HELLO, messages], chat_tokenizer(True, True), ROWS)

    def test_tokenizers_that_know_no_chats(self):
        with pytest.raises(ValueError, match=r"prompts\[0\]: chat messages need a tokenizer with a chat template"):
            PromptSet.encode([HELLO], TextTokenizer(byte_tokenizer()), ROWS)
        with pytest.raises(ValueError, match=r"PieceTokenizer has no `encode_chat`.*Pass texts"):
            prompt_set([HELLO])
        strict = chat_tokenizer(True, True)
        strict.tokenizer.chat_template = "{{ raise_exception('no system message, please') }}"
        with pytest.raises(ValueError, match=r"refused them: no system message, please\. Many templates"):
            PromptSet.encode([HELLO], strict, ROWS)

    def test_a_missing_template_engine_is_no_fault_of_the_messages(self, monkeypatch):
        tokenizer = chat_tokenizer(True, True)

        def missing(*_args, **_options):
            raise ImportError("apply_chat_template requires jinja2")

        monkeypatch.setattr(tokenizer.tokenizer, "apply_chat_template", missing)
        with pytest.raises(ImportError, match="jinja2"):
            encode_prompt(HELLO, tokenizer, ROWS, "it")


# Bad prompts, and ids without a token


class TestBadPrompts:
    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([b"abc"], r"prompts\[0\] should be a text .* got b'abc'"),
            ([{"prompt": "a"}], r"got dicts\. One chat is one prompt: write prompts=\[messages\]"),
            ({"prompt": ["a"]}, r"got a dict\. .*load_prompts"),
            ([" good", {"prompt": "a"}], r"prompts\[1\] should be a text .* through textenv\.prompts\.load_prompts"),
            (HELLO, r"got dicts\. One chat is one prompt"),
            ("q.jsonl", r"load_prompts\('q\.jsonl'\) where it names a file"),
            ([" good", "\ud83d"], r"prompts\[1\] should be text that UTF-8 can write, got half of a surrogate pair"),
            (
                [PromptRecord("", place="q.jsonl line 7")],
                r"prompts\[0\] \(q\.jsonl line 7\) should have at least one tok",
            ),
            ([EncodedPrompt("x", (3, 12))], r"ids in \[0, 12\), got \[12\]"),
        ],
    )
    def test_is_refused(self, prompts, message):
        with pytest.raises(ValueError, match=message):
            prompt_set(prompts)

    def test_ids_that_the_tokenizer_does_not_name(self):
        tokenizer = TextTokenizer(byte_tokenizer(), vocab_size=ROWS)
        assert encode_prompt([NAMED - 1], tokenizer, ROWS, "it").ids == (NAMED - 1,)
        with pytest.raises(ValueError, match=rf"it should hold ids that the tokenizer names, in \[0, {NAMED}\), got"):
            encode_prompt([5, NAMED], tokenizer, ROWS, "it")
        with pytest.raises(ValueError, match=rf"it should hold token ids in \[0, {ROWS}\)"):
            encode_prompt([ROWS], tokenizer, ROWS, "it")

    def test_such_ids_are_actions_that_leave_no_text_and_have_no_probability(self):
        tokenizer = TextTokenizer(byte_tokenizer(), vocab_size=ROWS)
        task = text_task(prompts=["the"], tokenizer=tokenizer, vocab_size=ROWS)
        assert task.named_size == NAMED and text_task().named_size is None
        env = TextGenerationEnv(task)
        assert env.action_space.n == ROWS
        info = write(env, [*tokenizer.encode("go"), NAMED, ROWS - 1, END])["info"]
        assert (info["response"], info["response_length"]) == ("go", 4)
        observation, _ = env.reset()
        batch = {key: array[None] for key, array in observation.items()}
        named, bare = (LanguageModel(llama(), source="tiny", named_size=size) for size in (NAMED, None))
        assert np.isneginf(named(batch, np.array([NAMED]))).all()
        assert np.isfinite(bare(batch, np.array([NAMED]))).all()  # without the tokenizer's word it would have some


# Long prompts

LONG = [" good", " a very bad film is not", " films", " a film is very good"]
"""Of 1, 6, 1 and 5 tokens."""


class TestOverlong:
    def test_refused_by_default_with_row_and_line(self):
        records = [PromptRecord(text, place=f"q.jsonl line {i + 1}") for i, text in enumerate(LONG)]
        with pytest.raises(
            ValueError,
            match=r"prompts\[1\] \(q\.jsonl line 2\) should have at most max_prompt_tokens=5 tokens, got 6: ' a very",
        ):
            prompt_set(records, max_prompt_tokens=5)
        whole = prompt_set(records, max_prompt_tokens=6)
        assert (whole.dropped, whole.cut, whole.longest) == (0, 0, 6)

    def test_dropped_and_counted(self):
        prompts = prompt_set(LONG, max_prompt_tokens=5, overlong="drop")
        assert prompts.texts == (LONG[0], LONG[2], LONG[3]) and (prompts.dropped, prompts.cut) == (1, 0)
        assert repr(prompts) == (
            "PromptSet(3 prompts of at most 5 tokens, random order, 1 dropped and 0 cut for their length)"
        )

    @pytest.mark.parametrize(("side", "text"), [("cut-left", " bad film is not"), ("cut-right", " a very bad film")])
    def test_cut_on_the_side_asked_for_and_counted(self, side, text):
        prompts = prompt_set(LONG, max_prompt_tokens=4, overlong=side)
        assert prompts.texts[1] == text and (prompts.dropped, prompts.cut, prompts.longest) == (0, 2, 4)
        assert prompts.ids[1] == tuple(TOKENIZER.encode(text))
        assert (prompts.texts[0], prompts.texts[2]) == (LONG[0], LONG[2])

    def test_the_bos_stays(self):
        tokenizer = TextTokenizer(byte_tokenizer(bos=True))
        cut = PromptSet.encode(["the road"], tokenizer, ROWS, 4, overlong="cut-left")
        assert cut.ids[0][0] == tokenizer.bos_id and cut.texts == ("oad",)
        right = PromptSet.encode(["the road"], tokenizer, ROWS, 4, overlong="cut-right")
        assert right.ids[0][0] == tokenizer.bos_id and right.texts == ("the r",)
        none = PromptSet.encode(["the road"], TextTokenizer(byte_tokenizer()), ROWS, 4, overlong="cut-left")
        assert none.texts == ("road",)  # no BOS, no place for it

    @given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 9), st.booleans())
    def test_lengths_and_contents_of_what_is_left(self, words, budget, bos):
        ids = [*([0] if bos else []), *words]
        if budget >= len(ids):
            return
        left, right = (cut_ids(ids, budget, side, 0) for side in ("cut-left", "cut-right"))
        assert len(left) == len(right) == budget and list(right) == ids[:budget]
        assert list(left) == ([0, *ids[len(ids) - budget + 1 :]] if bos else ids[-budget:])

    def test_context_survives(self):
        records = [PromptRecord(text, {"n": i}) for i, text in enumerate(LONG)]
        for side in ("drop", "cut-left", "cut-right"):
            kept = prompt_set(records, max_prompt_tokens=5, overlong=side).prompts
            assert all(records[p.context["n"]].prompt[:3] == p.text[:3] or side == "cut-left" for p in kept)
            assert [p.context["n"] for p in kept] == ([0, 2, 3] if side == "drop" else [0, 1, 2, 3])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"overlong": "truncate"}, r"`overlong` should be one of \('error', 'drop', .* got 'truncate'"),
            ({"overlong": "drop"}, "overlong='drop' needs `max_prompt_tokens`, got None"),
            (
                {"overlong": "cut-left", "max_prompt_tokens": 0},
                "at least 1 where prompts are cut, got 0: of prompts.0.",
            ),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            prompt_set(LONG, **options)

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="got 2, all of them longer, so that all were dropped"):
            prompt_set([LONG[1], LONG[3]], max_prompt_tokens=2, overlong="drop")
        tokenizer = TextTokenizer(byte_tokenizer(bos=True))
        for side in ("cut-left", "cut-right"):
            with pytest.raises(
                ValueError, match=r"at least 2 .* got 1: of prompts\[0\] nothing would be left but its B"
            ):
                PromptSet.encode(["the road"], tokenizer, ROWS, 1, overlong=side)

    def test_the_context_of_the_model(self):
        """128 positions: 120 for the response leave 8."""
        tokenizer = TextTokenizer(byte_tokenizer(), vocab_size=ROWS, context_length=128)
        long = "a long and winding road"
        records = [PromptRecord("a", place="q.txt line 1"), PromptRecord(long, place="q.txt line 2")]
        options = {"prompts": records, "tokenizer": tokenizer, "vocab_size": ROWS, "max_response_tokens": 120}
        with pytest.raises(
            ValueError,
            match=r"should fit the context of the model \(128 tokens\), got 23 \+ 120 \(the longest prompt is "
            r"prompts\[1\] \(q\.txt line 2\)\)",
        ):
            text_task(**options)
        with pytest.raises(ValueError, match=r"got 9 \+ 120\. Positions beyond it were never trained"):
            text_task(**options | {"prompts": ["a"], "max_prompt_tokens": 9})
        cut = text_task(**options, overlong="cut-left")
        assert cut.mdp.max_prompt_tokens == 8 and cut.prompts.texts == ("a", "ing road") and cut.prompts.cut == 1
        assert text_task(**options, overlong="drop").mdp.max_prompt_tokens == 1
        assert text_task(**options | {"max_response_tokens": 105}).mdp.length == 128


# Weights, curricula, order


def frequencies(prompts, draws=4000, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([prompts.texts.index(prompts.draw(rng, i).text) for i in range(draws)])


class TestWeights:
    def test_prompts_are_drawn_in_proportion(self):
        """4000 draws of shares 1/2, 1/8, 0, 3/8: deviations of at most 32; 5 of them are exceeded once in 10^6 runs."""
        prompts = prompt_set(LETTERS[:4], weights=[4, 1, 0, 3])
        counts = np.bincount(frequencies(prompts), minlength=4)
        assert counts[2] == 0 and (abs(counts - [2000, 500, 0, 1500]) < 160).all()
        alike = np.bincount(frequencies(prompt_set(LETTERS[:4])), minlength=4)
        assert not (abs(alike - [2000, 500, 0, 1500]) < 160).any()  # what ignoring the weights gives

    def test_scale_does_not_matter(self):
        for factor in (1e-300, 1e300):
            np.testing.assert_array_equal(
                frequencies(prompt_set(LETTERS[:3], weights=[factor, 0, factor]), 50),
                frequencies(prompt_set(LETTERS[:3], weights=[1, 0, 1]), 50),
            )

    def test_a_weight_of_0_is_never_drawn_not_even_by_the_smallest_number(self):
        class Smallest:
            def random(self):
                return 0.0

        assert prompt_set(LETTERS[:3], weights=[0, 1, 1]).draw(Smallest()).text == " bad"

    def test_of_records_and_of_those_that_are_left(self):
        records = [PromptRecord(text, weight=w) for text, w in zip(LONG, [1, 5, 0, 1], strict=True)]
        drawn = frequencies(prompt_set(records, max_prompt_tokens=5, overlong="drop"), 1000)  # the 5 goes
        assert set(drawn) == {0, 2} and abs((drawn == 0).sum() - 500) < 80
        given = prompt_set(LONG, max_prompt_tokens=5, overlong="drop", weights=[0, 7, 1, 0])
        assert set(frequencies(given, 100)) == {1}

    def test_in_vector_environments_rows_draw_as_single_ones(self):
        task = text_task(prompts=LETTERS, weights=[3, 1, 0, 1, 2])
        envs = TextGenerationVectorEnv(3, task)
        singles = [TextGenerationEnv(task) for _ in range(3)]
        for step in range(20):
            ours = envs.reset(seed=7 if step == 0 else None)[1]["prompt"].tolist()
            assert ours == [e.reset(seed=7 + i if step == 0 else None)[1]["prompt"] for i, e in enumerate(singles)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weights": [1, 1]}, r"`weights` should be 5 numbers, one per prompt, got shape \(2,\)"),
            ({"weights": [[1] * 5]}, r"got shape \(1, 5\)"),
            ({"weights": ["much"] * 5}, "`weights` should be 5 numbers"),
            ({"weights": [1, 1, float("nan"), 1, 1]}, r"finite and at least 0, got nan for prompts\[2\]"),
            ({"weights": [1, float("inf"), 1, 1, 1]}, r"got inf for prompts\[1\]"),
            ({"weights": [1, 1, 1, 1, -0.5]}, r"got -0\.5 for prompts\[4\]"),
            ({"weights": [0] * 5}, "above 0 for at least one of the 5 prompts to draw from, got 0 for all"),
            ({"weights": [1] * 5, "order": "sequential"}, "got `weights` beside it, which would be ignored"),
            ({"curriculum": [(0, [1] * 5)], "order": "sequential"}, "got `curriculum` beside it"),
            ({"weights": [1] * 5, "curriculum": [(0, [1] * 5)]}, "both say how often prompts are drawn"),
            ({"order": "shuffled"}, r"`order` should be one of \('random', 'sequential'\), got 'shuffled'"),
            ({"curriculum": 3}, "`curriculum` should be a function .* got 3"),
            ({"curriculum": []}, r"got stages that start at \[\]"),
            ({"curriculum": [(1, [1] * 5)]}, r"got stages that start at \[1\]"),
            ({"curriculum": [(0, [1] * 5), (0, [1] * 5)]}, r"start at \[0, 0\]"),
            ({"curriculum": [(0, [1] * 5), (1.5, [1] * 5)]}, r"start at \[0, 1\.5\]"),
            ({"curriculum": [(0, [1] * 5), (9, [0] * 5)]}, "`curriculum` from 9 on should be above 0"),
            ({"curriculum": [(0, [1] * 4)]}, r"`curriculum` from 0 on should be 5 numbers, .* got shape \(4,\)"),
            ({"curriculum": lambda n: [1] * 4}, r"`curriculum`\(0\) should be 5 numbers"),
        ],
    )
    def test_is_refused_before_anything_is_drawn(self, options, message):
        with pytest.raises(ValueError, match=message):
            prompt_set(**options)

    def test_weights_told_twice_or_by_some(self):
        with pytest.raises(ValueError, match="`weights` and the weights of the prompt records both say"):
            prompt_set([PromptRecord(" good", weight=1)], weights=[1])
        with pytest.raises(
            ValueError, match=r"prompts\[1\] \(l\.csv line 3\) should have a weight as other prompts do"
        ):
            prompt_set([PromptRecord(" good", weight=1), PromptRecord(" bad", place="l.csv line 3")])


def rising(drawn):
    """One prompt after the other, whatever the generator says."""
    return np.eye(5)[min(drawn, 4)]


class TestCurricula:
    @pytest.mark.parametrize(
        "curriculum", [rising, [(0, rising(0)), (1, rising(1)), (2, rising(2)), (3, rising(3)), (4, rising(4))]]
    )
    def test_weights_change_with_the_episodes_of_each_row(self, curriculum):
        task = text_task(prompts=LETTERS, curriculum=curriculum)
        env = TextGenerationEnv(task)
        assert [env.reset(seed=0 if i == 0 else None)[1]["prompt"] for i in range(7)] == [*LETTERS, " is", " is"]
        assert env.reset(seed=0)[1]["prompt"] == " good"  # a seed starts from the beginning
        envs = TextGenerationVectorEnv(3, task)
        seen = [set(envs.reset(seed=0 if i == 0 else None)[1]["prompt"]) for i in range(6)]
        assert seen == [{text} for text in [*LETTERS, " is"]]

    @pytest.mark.parametrize("mode", MODES)
    def test_rows_count_for_themselves_and_requests_do_not_count(self, mode):
        envs = TextGenerationVectorEnv(2, text_task(prompts=LETTERS, curriculum=rising), autoreset_mode=mode)
        envs.reset(seed=0)
        for _ in range(2):  # row 0 ends twice, row 1 goes on
            envs.step(np.array([END, GOOD]))
            if mode == "NextStep":
                envs.step(np.array([END, GOOD]))
            if mode == "Disabled":
                envs.reset(options={"reset_mask": np.array([True, False])})
        assert [prompt.text for prompt in envs.prompts_now()] == [" film", " good"]
        envs.reset(options={"prompt": " films"})
        assert envs.reset()[1]["prompt"].tolist() == [" a", " bad"]

    def test_stages_last_until_the_next(self):
        prompts = prompt_set(LETTERS, curriculum=[[0, [1, 1, 0, 0, 0]], [100, [0, 0, 1, 0, 0]]])
        drawn = frequencies(prompts, 200)
        assert set(drawn[:100]) == {0, 1} and set(drawn[100:]) == {2}

    def test_a_function_is_asked_once_per_count(self):
        asked = []
        task = text_task(prompts=LETTERS, curriculum=lambda n: (asked.append(n), rising(n))[1])
        envs = TextGenerationVectorEnv(8, task)
        for _ in range(3):
            envs.reset()
        assert asked == [0, 1, 2]
        assert len(task.prompts.schedule._cumulated) == 1  # what it said before is not kept

    def test_what_goes_wrong_later_is_told(self):
        prompts = prompt_set(LETTERS, curriculum=lambda n: [1 - n] * 5)
        prompts.draw(np.random.default_rng(0), 0)
        with pytest.raises(ValueError, match=r"`curriculum`\(2\) should be finite and at least 0, got -1\.0"):
            prompts.draw(np.random.default_rng(0), 2)


class TestSequential:
    def test_single(self):
        env = TextGenerationEnv(text_task(prompts=LETTERS, order="sequential"))
        assert [env.reset(seed=3 if i == 0 else None)[1]["prompt"] for i in range(7)] == [*LETTERS, *LETTERS[:2]]
        assert env.reset(seed=99)[1]["prompt"] == " good"  # whatever the seed
        env.reset(options={"prompt": " films"})
        assert env.reset()[1]["prompt"] == " bad"

    @pytest.mark.parametrize("num_envs", [1, 2, 3, 5, 8])
    def test_every_prompt_once_in_as_many_resets_as_it_takes(self, num_envs):
        envs = TextGenerationVectorEnv(num_envs, text_task(prompts=LETTERS, order="sequential"))
        seen = []
        for i in range(-(-5 // num_envs)):
            seen += envs.reset(seed=0 if i == 0 else None)[1]["prompt"].tolist()
        assert seen[:5] == LETTERS and seen[5:] == LETTERS[: len(seen) - 5]
        assert [p.text for p in draw_prompts(envs, 5, 1)] == LETTERS

    @pytest.mark.parametrize("mode", MODES)
    def test_rows_go_on_by_themselves(self, mode):
        """Row 0 of 2 takes 0, 2, 4, 1, 3, 0; row 1 stays at 1 while it writes."""
        envs = TextGenerationVectorEnv(
            2, text_task(prompts=LETTERS, order="sequential", max_response_tokens=30), autoreset_mode=mode
        )
        seen = [envs.reset()[1]["prompt"][0]]
        for _ in range(5):
            infos = envs.step(np.array([END, GOOD]))[-1]
            if mode == "NextStep":
                infos = envs.step(np.array([END, GOOD]))[-1]
            if mode == "Disabled":
                infos = envs.reset(options={"reset_mask": np.array([True, False])})[1]
            seen.append(infos["prompt"][0])
        assert seen == [LETTERS[i] for i in (0, 2, 4, 1, 3, 0)]
        assert envs.prompts_now()[1].text == LETTERS[1]

    def test_requests_and_replay_leave_the_place_alone(self):
        envs = TextGenerationVectorEnv(2, text_task(prompts=LETTERS, order="sequential"))
        envs.reset(seed=0)
        replay(envs, envs.prompts_now() * 2, [[END]] * 4)
        envs.reset(options={"prompts": [" films", " films"]})
        assert envs.reset()[1]["prompt"].tolist() == LETTERS[2:4]

    def test_nothing_runs_before_the_first_reset(self):
        with pytest.raises(gym.error.ResetNeeded):
            TextGenerationVectorEnv(2, text_task()).prompts_now()


class TestPlacesAreSaved:
    @pytest.mark.parametrize(
        "options",
        [{"order": "sequential"}, {"weights": [1, 2, 3, 4, 5]}, {"curriculum": [(0, rising(0)), (3, rising(3))]}, {}],
    )
    @pytest.mark.parametrize("make", [TextGenerationEnv, lambda task: TextGenerationVectorEnv(2, task)])
    def test_a_restored_environment_goes_on_as_if_never_stopped(self, make, options):
        task = text_task(prompts=LETTERS, **options)
        env, twin, copied = make(task), make(task), None
        for i in range(2):
            env.reset(seed=5 if i == 0 else None)
        twin.reset(seed=1)
        twin.load_state_dict(json.loads(json.dumps(env.state_dict())))
        copied = pickle.loads(pickle.dumps(copy.deepcopy(env)))
        for _ in range(6):
            expected = env.reset()
            assert_same(expected, twin.reset())
            assert_same(expected, copied.reset())

    def test_older_states_without_a_place(self):
        envs = TextGenerationVectorEnv(2, text_task())
        state = envs.state_dict()
        envs.load_state_dict({"generators": state["generators"]})
        assert envs.state_dict() == state

    @pytest.mark.parametrize("make", [TextGenerationEnv, lambda task: TextGenerationVectorEnv(2, task)])
    def test_other_prompts_are_refused(self, make):
        state = make(text_task(prompts=LETTERS)).state_dict()
        with pytest.raises(ValueError, match=r"same prompts in the same order .* got one of others"):
            make(text_task(prompts=LETTERS[::-1])).load_state_dict(state)

    def test_seeds(self):
        """The same twice, others differ, rows differ."""
        task = text_task(prompts=LETTERS, weights=[1, 2, 3, 4, 5])

        def drawn(seed):
            envs = TextGenerationVectorEnv(2, task)
            return np.array([envs.reset(seed=seed if i == 0 else None)[1]["prompt"] for i in range(20)])

        np.testing.assert_array_equal(drawn(1), drawn(1))
        assert (drawn(1) != drawn(5)).any() and (drawn(1)[:, 0] != drawn(1)[:, 1]).any()


# Splits

MANY = [f"prompt {i}" for i in range(400)]


def many(texts=MANY, **options):
    return PromptSet.encode(texts, TextTokenizer(byte_tokenizer()), NAMED, **options)


class TestSplits:
    def test_every_prompt_is_on_one_side(self):
        train, held = many().split(0.2)
        assert sorted([*train.texts, *held.texts]) == sorted(MANY)
        assert not set(train.texts) & set(held.texts)
        assert abs(len(held) - 80) < 40  # 5 deviations of 8

    def test_sides_stay_when_others_come_and_go(self):
        train, held = many().split(0.2)
        more = [*(f"another {i}" for i in range(100)), *MANY[::-2]]
        again, held_again = many(more).split(0.2)
        assert set(held_again.texts) & set(MANY) == set(held.texts) & set(more)
        assert set(again.texts) & set(MANY) == set(train.texts) & set(more)
        # Drawing sides by place, as a shuffled index would, does not keep them.
        by_place = [np.random.default_rng(0).permutation(n) < n * 0.2 for n in (len(MANY), len(more))]
        first = {t for t, h in zip(MANY, by_place[0], strict=True) if h}
        second = {t for t, h in zip(more, by_place[1], strict=True) if h}
        assert second & set(MANY) != first & set(more)

    def test_duplicates_share_a_side_and_seeds_split_otherwise(self):
        train, held = many([*MANY, *MANY[:50]]).split(0.2)
        assert not set(train.texts) & set(held.texts) and len(train) + len(held) == 450
        assert set(many().split(0.2, seed=1)[1].texts) != set(many().split(0.2)[1].texts)
        assert many().split(0.2, seed=1)[1].texts == many().split(0.2, seed=1)[1].texts

    def test_weights_context_and_names_go_along(self):
        records = [PromptRecord(t, {"n": i}, weight=float(i % 2), place=f"line {i}") for i, t in enumerate(MANY)]
        train, held = many(records).split(0.3)
        for side in (train, held):
            rng = np.random.default_rng(0)
            drawn = [side.draw(rng) for _ in range(100)]
            assert all(prompt.context["n"] % 2 == 1 and prompt.text == MANY[prompt.context["n"]] for prompt in drawn)
            assert side.names[3].endswith(f"(line {side.prompts[3].context['n']})") and side.columns == ("n",)

    def test_weights_are_those_of_the_prompts_given_also_after_dropping(self):
        """The dropped one shifts all places by one."""
        given = ["far too long a prompt", *MANY]
        train, held = many(given, max_prompt_tokens=12, overlong="drop", weights=np.arange(401) % 2).split(0.3)
        assert train.dropped == held.dropped == 1
        for side in (train, held):
            drawn = {side.draw(np.random.default_rng(seed)).text for seed in range(60)}
            assert all(int(text.split()[1]) % 2 == 0 for text in drawn) and len(drawn) > 20

    def test_curricula_go_along(self):
        order = [int(many().split(0.3)[1].texts[i].split()[1]) for i in (3, 7)]  # places before the split
        held = many(curriculum=lambda n: np.eye(400)[order[n % 2]] + 1e-9).split(0.3)[1]
        rng = np.random.default_rng(0)
        assert [held.draw(rng, n).text for n in range(4)] == [MANY[i] for i in order * 2]

    @pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
    def test_bad_fractions(self, fraction):
        with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
            many().split(fraction)

    def test_empty_sides(self):
        with pytest.raises(ValueError, match=r"got none for evaluation: of 2 prompts a share of 0\.001 is expected"):
            many(MANY[:2]).split(0.001)
        with pytest.raises(ValueError, match="got none for training"):
            many(MANY[:2]).split(0.999)

    def test_of_a_task(self):
        options = {"prompts": MANY, "tokenizer": TextTokenizer(byte_tokenizer()), "vocab_size": NAMED}
        train, held = (text_task(**options, split=side, eval_fraction=0.2) for side in ("train", "eval"))
        assert (train.prompts.texts, held.prompts.texts) == tuple(side.texts for side in many().split(0.2))
        assert train.observation_space() == held.observation_space()  # whichever side has the longest prompt
        with pytest.raises(ValueError, match=r"`split` should be one of \('train', 'eval'\) or None, got 'test'"):
            text_task(split="test")


class TestReadySets:
    def test_a_task_takes_them(self):
        ready = prompt_set(LETTERS, order="sequential")
        assert text_task(prompts=ready).prompts is ready

    def test_and_checks_them(self):
        with pytest.raises(
            ValueError, match=r"`order` should be given to PromptSet\.encode, got it beside a PromptSet"
        ):
            text_task(prompts=prompt_set(), order="sequential")
        with pytest.raises(ValueError, match=r"`weights` should be given to PromptSet\.encode"):
            text_task(prompts=prompt_set(), weights=np.ones(5))
        with pytest.raises(ValueError, match=r"prompts\[1\] should have at most max_prompt_tokens=5 tokens, got 6"):
            text_task(prompts=prompt_set(LONG), max_prompt_tokens=5)
        with pytest.raises(ValueError, match=r"prompts\[3\] should hold token ids in \[0, 6\)"):
            text_task(prompts=prompt_set(), vocab_size=6, pad_id=0)


# Context

ANSWERS = [
    PromptRecord(" a film", {"reference_answer": " good", "level": 1}),
    PromptRecord(" films", {"reference_answer": " bad", "level": 2}),
    PromptRecord([FILM], {"reference_answer": " good good", "level": 3}),
]
LEVELS = {" a film": 1, " films": 2, " film": 3}


class Exact:
    """The prompt's level where the response is its reference answer, else -1; remembers what it was given."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, prompts, responses, *, reference_answer, level):
        self.calls.append((prompts, responses, reference_answer, level))
        assert [LEVELS[prompt] for prompt in prompts] == level and all(
            type(c) is list for c in (reference_answer, level)
        )
        return [n if r == a else -1 for r, a, n in zip(responses, reference_answer, level, strict=True)]


def answered(**options):
    scorer = Exact()
    return scorer, text_task(prompts=ANSWERS, scorer=scorer, **options)


class TestContext:
    def test_single(self):
        scorer, task = answered(order="sequential")
        env = TextGenerationEnv(task)
        assert write(env, [GOOD, END])["rewards"] == [0, 1]
        assert write(env, [GOOD, END])["rewards"] == [0, -1]
        assert scorer.calls[0] == ([" a film"], [" good"], [" good"], [1])
        env.reset()
        env.step(GOOD)
        assert env.score_so_far() == -1

    @pytest.mark.parametrize("mode", MODES)
    def test_vector(self, mode):
        scorer, task = answered(order="sequential")
        envs = TextGenerationVectorEnv(3, task, autoreset_mode=mode)
        envs.reset(seed=0)
        envs.step(np.array([GOOD, GOOD, GOOD]))
        assert envs.score_so_far(np.array([2, 0])).tolist() == [-1, 1]
        assert envs.step(np.array([END, GOOD, GOOD]))[1].tolist() == [1, 0, 0]
        if mode == "Disabled":
            envs.reset(options={"reset_mask": np.array([True, False, False])})
        assert envs.step(np.array([BAD, END, END]))[1].tolist() == [0, -1, 3]
        assert scorer.calls[-1] == ([" films", " film"], [" good good", " good good"], [" bad", " good good"], [2, 3])

    def test_replay_is_stepping(self):
        scorer, task = answered()
        envs = TextGenerationVectorEnv(2, task)
        prompts = [task.prompts.prompts[i] for i in (2, 1, 0, 1, 2)]
        responses = [[GOOD, GOOD, END], [BAD, END], [BAD, END], [END], [GOOD, END]]
        replayed = replay(envs, prompts, responses)
        assert replayed.scores.tolist() == [3, 2, -1, -1, -1] and len(scorer.calls) == 1
        singles = [
            write(TextGenerationEnv(task), r, options={"prompt": p}) for p, r in zip(prompts, responses, strict=True)
        ]
        assert [sum(s["rewards"]) for s in singles] == replayed.rewards.sum(1).tolist()

    def test_prompts_asked_for_bring_their_own(self):
        _, task = answered()
        env = TextGenerationEnv(task)
        record = PromptRecord(" films", {"reference_answer": "", "level": 2})
        assert write(env, [END], options={"prompt": record})["rewards"] == [2]
        with pytest.raises(
            ValueError, match=r"`options` should have the context columns \['level', 'reference_answer'\]"
        ):
            env.reset(options={"prompt": " films"})
        with pytest.raises(ValueError, match=r"got \['level'\]\. A scorer is given a value for every prompt"):
            env.reset(options={"prompt": PromptRecord(" films", {"level": 2})})
        with pytest.raises(ValueError, match=r"context columns \[\] as the other prompts do, got \['level'\]"):
            TextGenerationEnv(text_task()).reset(options={"prompt": PromptRecord(" films", {"level": 2})})
        with pytest.raises(ValueError, match=r"prompts\[1\] should have the context columns"):
            replay(TextGenerationVectorEnv(1, task), [record, " films"], [[END], [END]])

    def test_one_by_one_after_a_fault(self):
        """The fault is found by scoring one by one, each with the context of its own."""

        def picky(prompts, responses, reference_answer):
            if len(prompts) > 1 or responses[0] == " bad":
                raise ZeroDivisionError("no")
            return [float(reference_answer[0])]

        context = {"reference_answer": ["1", "2", "3"]}
        scores = call_scorer(picky, ["a", "b", "c"], ["", " bad", ""], "drop", context)
        np.testing.assert_array_equal(scores, [1, np.nan, 3])
        with pytest.raises(ScorerError, match="ZeroDivisionError: no, for prompt 'b', response ' bad'"):
            call_scorer(picky, ["a", "b", "c"], ["", " bad", ""], "raise", context)

    def test_the_callers_columns_are_not_handed_out(self):
        values = [1, 2]
        call_scorer(lambda p, r, n: [n.pop(), 0.0], ["a", "b"], ["", ""], context={"n": values})
        assert values == [1, 2]

    def test_columns(self):
        assert context_columns([]) == {} == context_columns([EncodedPrompt("a", (1,))])
        assert hash(EncodedPrompt("a", (1,), {"n": [1]})) == hash(EncodedPrompt("a", (1,)))

    @pytest.mark.parametrize(
        ("contexts", "message"),
        [
            (({"n": 1}, {}), r"prompts\[1\] \(line 1\) should have the context columns \['n'\] .* got \[\]"),
            (({}, {"n": 1}), r"prompts\[0\] \(line 0\) should have the context columns \['n'\]"),
            (({"n": 1}, {"m": 1}), r"prompts\[0\] \(line 0\) should have the context columns \['m', 'n'\]"),
            (({"prompts": 1},) * 2, r"other names than \('prompts', 'responses'\).*got 'prompts'"),
            (({3: 1},) * 2, "got 3. Rename the column"),
        ],
    )
    def test_columns_that_cannot_be_passed(self, contexts, message):
        with pytest.raises(ValueError, match=message):
            prompt_set([PromptRecord(" good", context, place=f"line {i}") for i, context in enumerate(contexts)])

    def test_agents_pass_it_on(self, tiny_model):
        """Through collect: drawn prompts keep their context, and it reaches the scorer in their order."""
        seen = []

        def scorer(prompts, responses, number):
            seen.append((prompts, number))
            return [float(n) for n in number]

        texts = ["the a", "the long and winding road of go", "good", "a bc"]
        records = [PromptRecord(text, {"number": i}) for i, text in enumerate(texts)]
        envs = gym.make_vec(
            "RLHF-v0",
            num_envs=4,
            model=tiny_model,
            prompts=records,
            scorer=scorer,
            order="sequential",
            max_response_tokens=6,
            stop=["."],
        )
        rollout = lm_agent(tiny_model, envs, episodes_per_iteration=8).rollout()
        assert list(rollout.prompts) == texts * 2 and rollout.scores.tolist() == [0, 1, 2, 3] * 2
        assert seen == [(texts * 2, [0, 1, 2, 3] * 2)]

    def test_scorers_that_ignore_it(self, tiny_model):
        from textenv.rewards import RewardModel

        assert inspect.signature(RewardModel.__call__).parameters["_context"].kind is inspect.Parameter.VAR_KEYWORD
        check_takes_columns(RewardModel.default(), ["anything"])


def two(prompts, responses):
    """No context."""


def named(prompts, responses, answer, level=0):
    """Some of it."""


def open_to_all(prompts, responses, **context):
    """All of it."""


def only_positions(prompts, responses, /, **context):
    """Its own names are free."""


class TestScorersAreAskedFirst:
    @pytest.mark.parametrize(
        ("scorer", "columns"),
        [
            (two, []),
            (named, ["answer"]),
            (named, ["answer", "level"]),
            (open_to_all, []),
            (open_to_all, ["a", "b c"]),
            (only_positions, ["responses"]),
            (lambda *both, answer: 0, ["answer"]),
            (lambda p, r, s=3: 0, []),
            (Counting(two), []),
            (print, []),
            (max, ["whatever"]),  # written in C, says nothing of itself
        ],
    )
    def test_what_fits(self, scorer, columns):
        check_takes_columns(scorer, columns)

    @pytest.mark.parametrize(
        ("scorer", "columns", "message"),
        [
            (two, ["answer"], r"scorer\(prompts, responses, answer\), got two\(prompts, responses\), .* take 'answer'"),
            (named, ["answer", "more"], "does not take 'more'"),
            (open_to_all, ["prompts"], "does not take 'prompts'"),
            (lambda a, b, /, c, **k: 0, ["d"], r"requires 'c'.*context=\['c'\]"),
            (lambda a, b, c, /: 0, ["c"], "does not take 'c'"),
            (
                named,
                [],
                r"context \(there is none\), got named\(prompts, responses, answer, level=0\).*requires 'answer'",
            ),
            (named, ["level"], "requires 'answer'"),
        ],
    )
    def test_what_does_not(self, scorer, columns, message):
        with pytest.raises(TypeError, match=message):
            check_takes_columns(scorer, columns)

    def test_when_the_task_is_made(self):
        with pytest.raises(TypeError, match="which does not take 'reference_answer'"):
            text_task(prompts=ANSWERS)
        with pytest.raises(TypeError, match="requires 'reference_answer'"):
            text_task(scorer=Exact())


# The id


def questions(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [{"q": text, "n": i, "w": i % 2} for i, text in enumerate(["the a", "good", "a bc", "road of go"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbers(prompts, responses, n):
    return [float(i) for i in n]


class TestRLHF:
    def make(self, model, **options):
        return gym.make_vec("RLHF-v0", num_envs=2, model=model, max_response_tokens=3, **options)

    def test_prompts_by_path_and_columns_by_name(self, tiny_model, tmp_path):
        columns = {"prompt_column": "q", "context_columns": ["n"], "scorer": numbers}
        envs = self.make(tiny_model, prompts=questions(tmp_path), order="sequential", **columns)
        assert envs.reset(seed=0)[1]["prompt"].tolist() == ["the a", "good"]
        assert envs.unwrapped.task.prompts.columns == ("n",)
        records = load_prompts(questions(tmp_path), prompt="q", context=["n"])
        again = self.make(tiny_model, prompts=records, scorer=numbers, order="sequential")
        assert again.unwrapped.task.prompts.prompts == envs.unwrapped.task.prompts.prompts
        heavy = self.make(tiny_model, prompts=questions(tmp_path), weight_column="w", **columns)
        drawn = {text for i in range(20) for text in heavy.reset(seed=i)[1]["prompt"]}
        assert drawn == {"good", "road of go"}

    def test_a_specification_in_json_makes_it_again(self, tiny_model, tmp_path):
        env = gym.make(
            "RLHF-v0",
            model=tiny_model,
            prompts=questions(tmp_path),
            prompt_column="q",
            context_columns=("n",),
            curriculum=[(0, [0, 0, 1, 0]), (1, [1, 0, 0, 0])],
            split=None,
            overlong="cut-left",
            max_prompt_tokens=3,
        )
        again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
        drawn = [[e.reset(seed=0 if i == 0 else None)[1]["prompt"] for i in range(3)] for e in (env, again)]
        assert drawn[0] == drawn[1] == [" bc", "the a", "the a"]
        assert again.unwrapped.task.prompts.cut == 2

    def test_splits(self, tiny_model):
        texts = [f"a {i}" for i in range(60)]
        train, held = (
            self.make(tiny_model, prompts=texts, split=side, eval_fraction=0.3).unwrapped.task.prompts.texts
            for side in ("train", "eval")
        )
        assert sorted([*train, *held]) == sorted(texts) and not set(train) & set(held)

    def test_chats_of_a_model_without_a_template(self, tiny_model):
        with pytest.raises(ValueError, match=r"prompts\[0\]: chat messages need a tokenizer with a chat template"):
            self.make(tiny_model, prompts=[HELLO])

    def test_rows_of_columns_and_the_films_by_default(self):
        rows = [{"q": "the a", "n": 1}]
        assert read_prompts(RLHFOptions(prompts=rows, prompt_column="q")) == [PromptRecord("the a", place="row 0")]
        assert read_prompts(RLHFOptions(prompts=["the a"], context_columns=[])) == ["the a"]
        assert len(read_prompts(RLHFOptions())) > 1000

    @pytest.mark.parametrize(
        "options",
        [
            {"prompt_column": "q"},
            {"context_columns": ["n"], "prompts": ["the a"]},
            {"weight_column": "w", "prompts": [[1]]},
            {"dataset_split": "train", "prompts": ["the a"]},
            {"dataset_config": "main"},
        ],
    )
    def test_columns_of_prompts_that_have_none(self, options):
        name = next(iter(options))
        with pytest.raises(
            ValueError, match=f"`{name}` should be given with a file, a dataset or a list of dicts, got"
        ):
            read_prompts(RLHFOptions(**options))

    @pytest.mark.parametrize("prompts", ["no such file.jsonl", "The film is"])
    def test_paths_that_are_none(self, tiny_model, prompts):
        with pytest.raises(ValueError, match=r"if it is the prompt itself, write prompts=\["):
            self.make(tiny_model, prompts=prompts)
        with pytest.raises(ValueError, match=r"context=\['n'\]"):
            self.make(tiny_model, prompts=[{"prompt": "a"}], context_columns="n")


# In company


def test_a_short_and_a_long_prompt_in_one_batch_are_what_each_is_alone(tiny_model):
    """Prompts of 3 and 30 tokens: what is written after them has the same log-probabilities and scores."""
    texts = ["a b", "the long and winding roads off go"]
    tokenizer = TextTokenizer(byte_tokenizer())
    assert [len(tokenizer.encode(text)) for text in texts] == [3, 30]
    responses = [[5, 9, EOS], [7, 5, 9, 4, 8, EOS]]
    model = LanguageModel(llama(), source="tiny", named_size=NAMED)

    def replayed(prompts, written):
        envs = lm_envs(tiny_model, len(prompts), prompts=prompts, stop=(), kl_coef=None)
        result = replay(envs, prompts, written)
        return result, model.response_logprobs(result.input_ids, result.attention_mask, 6)

    together, logprobs = replayed(texts, responses)
    for row, (text, response) in enumerate(zip(texts, responses, strict=True)):
        alone, own = replayed([text], [response])
        np.testing.assert_allclose(logprobs[row], own[0], atol=1e-5)
        assert together.scores[row] == alone.scores[0]
    # Positions counted from the first column, padding included, are those of another text.
    shifted = together.attention_mask.copy()
    shifted[0] = 1
    wrong = model.response_logprobs(together.input_ids, shifted, 6)
    assert np.abs(wrong[0, :3] - logprobs[0, :3]).max() > 0.1


def test_reward_models_of_other_tokenizers_see_the_text():
    """Ids that spell one text in two ways give one score, because text is in between."""
    seen = []
    task = text_task(prompts=[" a"], scorer=lambda prompts, responses: seen.append((prompts, responses)) or [0.0])
    env = TextGenerationEnv(task)
    for ids in ([FILMS, END], [FILM, PIECES.index("s"), CLOSE, END]):
        write(env, ids)
    assert seen == [([" a"], [" films"])] * 2
