"""Where prompts come from, what scorers may do, and how their faults are told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import BAD, END, FILM, FILMS, GOOD, VOCAB_SIZE, CountingScorer, PieceTokenizer, S, text_task, write

from textenv import PromptSet, ScorerError, TextGenerationEnv, TextGenerationVectorEnv, replay
from textenv.prompts import EncodedPrompt, decoder, encode_prompt
from textenv.scoring import call_scorer

TOKENIZER = PieceTokenizer()


class TestPrompts:
    def test_texts_and_ids_mixed(self):
        prompts = PromptSet.encode([" films", [FILM, S], np.array([GOOD])], TOKENIZER, VOCAB_SIZE)
        assert prompts.texts == (" films", " films", " good")
        assert prompts.ids == ((FILMS,), (FILM, S), (GOOD,))
        assert (len(prompts), prompts.longest) == (3, 2)
        assert all(type(i) is int for ids in prompts.ids for i in ids)

    def test_every_prompt_is_equally_likely(self):
        prompts = PromptSet.encode([" good", " bad", " films"], TOKENIZER, VOCAB_SIZE)
        rng = np.random.default_rng(0)
        counts = np.bincount([prompts.ids.index(prompts.draw(rng).ids) for _ in range(3000)])
        # Each count has mean 1000 and deviation 26; 5 deviations are exceeded once in 10^6 runs, and the seed is fixed.
        assert (abs(counts - 1000) < 130).all()

    def test_an_encoded_prompt_stays_as_it_is(self):
        encoded = EncodedPrompt(" films", (FILM, S))
        assert encode_prompt(encoded, TOKENIZER, VOCAB_SIZE, "it") is encoded

    def test_the_budget_may_be_wider_than_the_prompts(self):
        task = text_task(prompts=[" good"], max_prompt_tokens=4)
        assert (task.mdp.max_prompt_tokens, task.observation_space()["input_ids"].shape) == (4, (9,))
        assert text_task(prompts=[" good", " a film"]).mdp.max_prompt_tokens == 2

    def test_batches_are_decoded_in_one_call_where_the_tokenizer_can(self):
        class Batched(PieceTokenizer):
            calls = 0

            def decode_batch(self, rows):
                Batched.calls += 1
                return [self.decode(row) for row in rows]

        assert decoder(Batched())([[GOOD], [FILM, S]]) == decoder(TOKENIZER)([[GOOD], [FILM, S]]) == [" good", " films"]
        assert Batched.calls == 1

    def test_tokenizers_get_plain_ints(self):
        class Strict(PieceTokenizer):
            def decode(self, ids):
                assert all(type(i) is int for i in ids)
                return super().decode(ids)

        write(TextGenerationEnv(text_task(tokenizer=Strict())), [GOOD, END], options={"prompt": np.array([FILM])})


# One fault of each kind, as (what the scorer does, what the error says of it).


def raises(_prompts: list[str], responses: list[str]) -> list[float]:
    if any("bad" in response for response in responses):
        raise ZeroDivisionError("no words left")
    return [1.5] * len(responses)


def with_entry(entry: Any) -> Any:
    return lambda prompts, responses: [entry if "bad" in response else 1.5 for response in responses]


PER_SAMPLE = {
    "None": (with_entry(None), r"one finite number per response, got None"),
    "NaN": (with_entry(math.nan), r"one finite number per response, got nan"),
    "inf": (with_entry(math.inf), r"one finite number per response, got inf"),
    "-inf": (with_entry(-math.inf), r"one finite number per response, got -inf"),
    "raises": (raises, r"raised ZeroDivisionError: no words left"),
}
WHOLE_BATCH = {
    "one too few": (lambda p, r: [1.0] * (len(r) - 1), r"scores, shape \(\d,\), got list of shape \(\d,\)"),
    "nothing": (lambda p, r: None, r"got NoneType of shape \(\)"),
    "a number": (lambda p, r: 1.0, r"got float of shape \(\)"),
    "a column": (lambda p, r: np.ones((len(r), 1)), r"got ndarray of shape \(\d, 1\)"),
    "words": (lambda p, r: ["fine"] * len(r), r"got list \("),
    "a dict": (lambda p, r: dict.fromkeys(r, 1.0), r"got dict \("),
}
BY_SAMPLE = pytest.mark.parametrize(("scorer", "message"), PER_SAMPLE.values(), ids=PER_SAMPLE)
BY_FAULT = pytest.mark.parametrize("scorer", [scorer for scorer, _ in PER_SAMPLE.values()], ids=PER_SAMPLE)
BY_BATCH = pytest.mark.parametrize(("scorer", "message"), WHOLE_BATCH.values(), ids=WHOLE_BATCH)
SHOWN = r".*prompt ' a film', response ' bad'"


class TestFaults:
    @BY_SAMPLE
    def test_the_error_shows_the_sample(self, scorer, message):
        with pytest.raises(ScorerError, match=message + SHOWN):
            call_scorer(scorer, [" films", " a film"], [" good", " bad"])

    @BY_BATCH
    @pytest.mark.parametrize("on_error", ["raise", "drop"])
    def test_a_wrong_number_of_scores_is_always_an_error(self, scorer, message, on_error):
        with pytest.raises(ScorerError, match=message + SHOWN):
            call_scorer(scorer, [" a film", " films"], [" bad", " good"], on_error)

    @BY_FAULT
    def test_or_the_sample_is_dropped(self, scorer):
        scores = call_scorer(scorer, [" films", " a film", " films"], [" good", " bad", ""], "drop")
        np.testing.assert_array_equal(scores, [1.5, np.nan, 1.5])

    def test_how_many_more_there_are(self):
        with pytest.raises(ScorerError, match=r"response ' bad' \(and 2 more of the batch\)"):
            call_scorer(with_entry(None), ["a"] * 5, [" bad", "", " bad", "", " bad"])

    def test_a_scorer_that_takes_no_batches(self):
        def one_at_a_time(prompts, _responses):
            if len(prompts) > 1:
                raise MemoryError("too many")
            return [2.0]

        with pytest.raises(ScorerError, match=r"MemoryError: too many, for a batch of 2 .* batches of any size"):
            call_scorer(one_at_a_time, ["a", "b"], ["c", "d"])
        assert call_scorer(one_at_a_time, ["a", "b"], ["c", "d"], "drop").tolist() == [2.0, 2.0]

    def test_the_cause_is_kept(self):
        with pytest.raises(ScorerError) as caught:
            call_scorer(raises, ["a"], [" bad"])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_an_interruption_is_no_fault_of_the_scorer(self):
        def interrupted(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            call_scorer(interrupted, ["a"], ["b"], "drop")

    @pytest.mark.parametrize(
        "scores", [[1, 2], (1.0, 2.0), np.array([1, 2], np.int8), np.array([1.0, 2.0], np.float16)]
    )
    def test_whatever_holds_numbers_is_taken(self, scores):
        returned = call_scorer(lambda p, r: scores, ["a", "b"], ["c", "d"])
        assert (returned.dtype, returned.tolist()) == (np.float64, [1.0, 2.0])

    def test_tensors_are_taken(self):
        torch = pytest.importorskip("torch")
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            scores = torch.tensor([1, 2], dtype=dtype)
            assert call_scorer(lambda p, r, s=scores: s, ["a", "b"], ["c", "d"]).tolist() == [1.0, 2.0]
        grown = torch.tensor([1.0, 2.0], requires_grad=True)
        assert call_scorer(lambda p, r: grown * 1, ["a", "b"], ["c", "d"]).tolist() == [1.0, 2.0]

    def test_what_the_scorer_returned_is_not_edited(self):
        scores = np.array([1.0, np.nan, np.inf])
        call_scorer(lambda p, r: scores, ["a"] * 3, ["b"] * 3, "drop")
        assert np.isinf(scores[2])


class TestFaultsInEnvironments:
    @BY_SAMPLE
    def test_single(self, scorer, message):
        env = TextGenerationEnv(text_task(scorer=scorer))
        with pytest.raises(ScorerError, match=message + SHOWN):
            write(env, [BAD, END], options={"prompt": " a film"})

    @BY_SAMPLE
    @pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
    def test_vector(self, scorer, message, mode):
        envs = TextGenerationVectorEnv(2, text_task(scorer=scorer), autoreset_mode=mode)
        envs.reset(options={"prompt": " a film"})
        envs.step(np.array([GOOD, BAD]))
        with pytest.raises(ScorerError, match=message + SHOWN):
            envs.step(np.array([END, END]))

    @BY_SAMPLE
    def test_replay_fails_before_anything_is_stepped(self, scorer, message):
        envs = TextGenerationVectorEnv(2, text_task(scorer=scorer))
        envs.reset(options={"prompt": " films"})
        with pytest.raises(ScorerError, match=message + SHOWN):
            replay(envs, [" films", " a film"], [[GOOD, END], [BAD, END]])
        assert envs.render() == (" films", " films")  # the episodes that were running still are
        envs.step(np.array([GOOD, GOOD]))

    @BY_FAULT
    @pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
    def test_dropped_samples_are_counted_and_earn_nothing(self, scorer, mode):
        task = text_task(scorer=scorer, scorer_errors="drop")
        steps = write(TextGenerationEnv(task), [BAD, END])
        assert steps["rewards"] == [0.0, 0.0]
        assert math.isnan(steps["info"]["score"]) and steps["info"]["dropped"] is True

        envs = TextGenerationVectorEnv(3, task, autoreset_mode=mode)
        envs.reset()
        envs.step(np.array([BAD, GOOD, GOOD]))
        _, rewards, _, _, infos = envs.step(np.array([END, END, GOOD]))
        ends = infos.get("final_info", infos)
        assert rewards.tolist() == [0.0, 1.5, 0.0]
        assert (ends["dropped"].tolist(), ends["_dropped"].tolist()) == ([True, False, False], [True, True, False])

        replayed = replay(envs, [" films"] * 3, [[BAD, END], [GOOD, END], [END]])
        np.testing.assert_array_equal(replayed.scores, [np.nan, 1.5, 1.5])
        np.testing.assert_array_equal(replayed.infos["score"], [np.nan, 1.5, 1.5])
        assert replayed.infos["dropped"].tolist() == [True, False, False]
        assert replayed.rewards.sum(axis=1).tolist() == [0.0, 1.5, 1.5]

    def test_without_dropping_there_is_no_such_info(self):
        assert "dropped" not in write(TextGenerationEnv(text_task()), [END])["info"]

    def test_only_finished_responses_are_scored(self):
        scorer = CountingScorer()
        env = TextGenerationEnv(text_task(scorer=scorer))
        env.reset()
        env.step(GOOD)
        write(env, [BAD, END], options={"prompt": " films"})
        assert scorer.calls == [([" films"], [" bad"])]
