"""Sanity environments: scores, exact random returns by other routes, best returns, and what Gymnasium asks of an id."""

from __future__ import annotations

import copy
import doctest
import itertools
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from helpers import assert_same, write

from textenv import ScorerError, bytes, sanity
from textenv.bytes import ByteTokenizer
from textenv.sanity import (
    BANDIT,
    CONDITIONAL,
    COPY_PROMPT,
    LONG_WAIT,
    PASSWORD,
    SANITY_TASKS,
    STOP_NOW,
)

END = 256
TASKS = [pytest.param(task, id=env_id.removeprefix("textenv/")) for env_id, task in SANITY_TASKS.items()]
IDS = list(SANITY_TASKS)


@pytest.mark.parametrize("module", [bytes, sanity])
def test_docstring_examples_run(module):
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0


class TestByteTokenizer:
    @pytest.mark.parametrize("text", ["", "hi", "naïve café", "🙂 日本", "\x00\n\ufffd"])
    def test_text_survives(self, text: str):
        tokenizer = ByteTokenizer()
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode_batch([tokenizer.encode(text), [97, END]]) == [text, "a"]

    def test_the_end_leaves_no_text_wherever_it_stands(self):
        assert ByteTokenizer().decode([END]) == ""
        assert ByteTokenizer().decode(np.array([104, 105, END], dtype=np.int32)) == "hi"
        assert END not in ByteTokenizer().encode("any text\x00")

    def test_every_sequence_decodes_and_ascii_stands_for_itself(self):
        """What the scores' expectations rest on, for every byte before an ASCII one."""
        tokenizer = ByteTokenizer()
        for first in range(256):
            text = tokenizer.decode([first, ord("a")])
            assert len(text) == 2 and text[1] == "a"
            assert text[0] == (chr(first) if first < 128 else "\ufffd")
        assert tokenizer.decode([0xE2, 0x82, ord("a")]) == "\ufffda"  # two broken bytes are one character

    @pytest.mark.parametrize(("ids", "got"), [([97, 257], r"\[257\]"), ([-1], r"\[-1\]")])
    def test_refuses_ids_that_stand_for_nothing(self, ids, got: str):
        with pytest.raises(ValueError, match=f"0 to 256, got {got}.*vocab_size=257"):
            ByteTokenizer().decode(ids)

    def test_refuses_text_that_no_bytes_stand_for(self):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            ByteTokenizer().encode("a\ud800")


class TestScores:
    @pytest.mark.parametrize(
        ("task", "prompt", "scores"),
        [
            (BANDIT, "?", {"9": 1.0, "8": 0.0, "19": 0.0, "a": 0.0, "": 0.0, "\ufffd": 0.0, "²": 0.0}),
            (STOP_NOW, ".", {"": 1.0, " ": 0.0, "\x00": 0.0, "stop": 0.0}),
            (COPY_PROMPT, "ab", {"ab": 1.0, "aa": 0.5, "bb": 0.5, "ba": 0.0, "a": 0.5, "b": 0.0, "": 0.0}),
            (PASSWORD, ":", {"open": 1.0, "opex": 0.75, "oxen": 0.25, "xpen": 0.0, "o": 0.25, "": 0.0}),
            (CONDITIONAL, "three", {"3": 1.0, "1": 0.0, "": 0.0, "33": 0.0, "three": 0.0}),
            (LONG_WAIT, "?", {"9" + "x" * 31: 1.0, "3" + "9" * 31: 0.0, "x9": 0.0}),
        ],
        ids=lambda value: getattr(value, "env_id", None),
    )
    def test_worked_examples(self, task, prompt, scores):
        got = task([prompt] * len(scores), list(scores), reference_answer=["of no interest"] * len(scores))
        assert got.dtype == np.float64
        assert got.tolist() == pytest.approx(list(scores.values()))

    def test_a_right_character_after_a_wrong_one_counts_in_the_copy_and_not_in_the_password(self):
        assert COPY_PROMPT(["ab"], ["xb"]).tolist() == [0.5]
        assert PASSWORD([":"], ["xpen"]).tolist() == [0.0]

    def test_a_prompt_without_an_answer(self):
        with pytest.raises(ValueError, match="one of one, two, three, four, got 'five'"):
            CONDITIONAL(["one", "five"], ["1", "5"])
        env = gym.make("textenv/Conditional-v0")
        env.reset(options={"prompt": "five"})
        with pytest.raises(ScorerError, match="one of one, two, three, four, got 'five'"):
            env.step(ord("5"))

    def test_prompts_and_responses_of_other_lengths(self):
        with pytest.raises(ValueError, match="shorter"):
            BANDIT(["?", "?"], ["9"])


def enumerated(task, ids):
    """The expected return of drawing uniformly from `ids`, by listing every response, through the tokenizer."""
    tokenizer, total = ByteTokenizer(), 0.0
    for length in range(1, task.max_response_tokens + 1):
        for response in itertools.product(ids, repeat=length):
            stopped = response[-1] == END
            if END in response[:-1] or (length < task.max_response_tokens and not stopped):
                continue
            texts = [tokenizer.decode(response)] * len(task.prompts)
            total += task(task.prompts, texts).mean() * float(len(ids)) ** -length
    return total


class TestRandomReturn:
    @pytest.mark.parametrize("task", [BANDIT, CONDITIONAL], ids=lambda task: task.env_id)
    def test_by_listing_every_response(self, task):
        assert enumerated(task, range(257)) == pytest.approx(task.random_return, rel=1e-12)

    @pytest.mark.slow
    def test_by_listing_every_copy(self):
        assert enumerated(COPY_PROMPT, range(257)) == pytest.approx(COPY_PROMPT.random_return, rel=1e-12)

    def test_by_listing_a_small_vocabulary(self):
        """The same forms with V = 7: the letters, two bytes that decode as one character together, and the end."""
        small = [*b"open", 0xC3, 0xA9, END]
        assert enumerated(PASSWORD, small) == pytest.approx(sum(7.0**-j for j in range(1, 5)) / 4, rel=1e-12)
        small = [*b"abcd", 0xC3, 0xA9, END]
        assert enumerated(COPY_PROMPT, small) == pytest.approx((1 / 7 + 6 / 49) / 2, rel=1e-12)
        # Without room for the end among the first tokens the second place would be as likely as the first.
        assert enumerated(COPY_PROMPT, small) != pytest.approx(1 / 7, rel=0.05)

    @pytest.mark.parametrize("task", TASKS)
    def test_by_playing(self, task):
        """Uniform play of one vector environment, within five standard errors."""
        envs = gym.make_vec(task.env_id, num_envs=4000, autoreset_mode="SameStep")
        envs.reset(seed=0)
        rng, scores = np.random.default_rng(0), []
        for _ in range(task.max_response_tokens * 5):
            _, rewards, terminated, truncated, _ = envs.step(rng.integers(task.vocab_size, size=4000))
            scores.append(rewards[terminated | truncated])
        scores = np.concatenate(scores)
        assert len(scores) >= 20_000
        assert scores.mean() == pytest.approx(task.random_return, abs=5 * scores.std() / len(scores) ** 0.5)
        assert scores.mean() < 0.05 * task.best_return


def best_ids(task, prompt):
    """A best response as ids: the answer, then the end where there is room for it, or spaces where there is none."""
    ids = list(task.answers[task.prompts.index(prompt)].encode())
    if len(ids) == task.max_response_tokens:
        return ids
    return [*ids, END] if task.stop_ids else ids + [32] * (task.max_response_tokens - len(ids))


class TestBestReturn:
    @pytest.mark.parametrize("task", TASKS)
    def test_a_policy_written_by_hand_reaches_it_from_every_prompt(self, task):
        env = gym.make(task.env_id)
        for prompt in task.prompts:
            done = write(env, best_ids(task, prompt), options={"prompt": prompt})
            assert sum(done["rewards"]) == task.best_return
            assert done["rewards"][:-1] == [0.0] * (len(done["rewards"]) - 1)
            assert done["info"]["score"] == task.best_return

    @pytest.mark.parametrize("task", TASKS)
    def test_nothing_is_above_it(self, task):
        rng = np.random.default_rng(0)
        letters = [*"0123456789abcdopen", ""]
        texts = ["".join(rng.choice(letters, size=task.max_response_tokens)) for _ in range(2000)]
        prompts = [str(prompt) for prompt in rng.choice(task.prompts, size=2000)]
        assert task([*prompts], texts).max() <= task.best_return
        assert task.random_return < task.solved_return < task.best_return
        assert task.solved_return == pytest.approx(0.98 * task.best_return)

    @pytest.mark.parametrize("task", TASKS)
    def test_numbers_can_be_read_off_the_environment(self, task):
        env = gym.make(task.env_id)
        scorer = env.unwrapped.task.scorer
        assert (scorer.best_return, scorer.random_return) == (task.best_return, task.random_return)
        assert env.spec.reward_threshold == task.solved_return


class TestOneReasonOnly:
    """What the plausible fault gets: far less than solves the task."""

    def score_of(self, task, ids):
        """The mean over prompts of one fixed response."""
        env = gym.make(task.env_id)
        return np.mean([write(env, ids, options={"prompt": prompt})["info"]["score"] for prompt in task.prompts])

    def test_never_stopping_and_stopping_late(self):
        assert self.score_of(STOP_NOW, [END]) == 1.0
        assert self.score_of(STOP_NOW, [32, END]) == 0.0
        assert self.score_of(STOP_NOW, [32] * 8) == 0.0

    def test_ignoring_the_prompt(self):
        assert max(self.score_of(CONDITIONAL, [token]) for token in b"01234") == 0.25
        assert max(self.score_of(COPY_PROMPT, list(pair.encode())) for pair in COPY_PROMPT.prompts) == 0.25

    def test_answering_another_prompt(self):
        """Observations of one row given to the next one."""
        shuffled = COPY_PROMPT(COPY_PROMPT.prompts, np.roll(COPY_PROMPT.prompts, 1).tolist())
        assert shuffled.mean() < 0.5
        assert COPY_PROMPT(COPY_PROMPT.prompts, COPY_PROMPT.prompts).mean() == 1.0

    def test_reading_the_prompt_at_the_wrong_places(self):
        assert COPY_PROMPT(COPY_PROMPT.prompts, [p[::-1] for p in COPY_PROMPT.prompts]).mean() == pytest.approx(0.25)

    def test_another_arm_does_not_solve_the_bandit(self):
        assert self.score_of(BANDIT, [ord("8")]) < BANDIT.solved_return

    def test_a_password_without_its_last_letter_does_not_solve_it(self):
        assert self.score_of(PASSWORD, [*b"ope", 32]) == 0.75 < PASSWORD.solved_return

    def test_the_wait_cannot_be_cut_short_and_changes_nothing(self):
        env = gym.make("textenv/LongWait-v0")
        assert env.action_space.n == 256
        done = write(env, [ord("9"), *range(225, 256)])
        assert done["ends"] == [(False, False)] * 31 + [(False, True)]
        assert done["rewards"] == [0.0] * 31 + [1.0]
        assert write(env, [ord("5")] + [ord("9")] * 31)["rewards"] == [0.0] * 32

    def test_one_token_is_the_whole_episode_where_the_budget_is_one(self):
        """Whatever it is, it ends the episode by choice: nothing is cut, so that nothing invites a bootstrap."""
        for token in (0, ord("9"), 255, END):
            done = write(gym.make("textenv/Bandit-v0"), [token])
            assert done["ends"] == [(True, False)]
            assert done["info"]["finish_reason"] == "stop"

    def test_prompts_are_padded_on_the_left(self):
        observation, _ = gym.make("textenv/Conditional-v0").reset(options={"prompt": "one"})
        assert observation["attention_mask"].tolist() == [0, 0, 1, 1, 1, 0]
        assert observation["input_ids"][2:5].tolist() == list(b"one")


class TestGymnasium:
    @pytest.mark.parametrize("options", [{}, {"length_limit": "terminate"}], ids=["truncate", "terminate"])
    @pytest.mark.parametrize("env_id", IDS)
    def test_check_env(self, env_id: str, options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gym.make(env_id, **options).unwrapped)

    @pytest.mark.parametrize("env_id", IDS)
    def test_stable_baselines3_check_env(self, env_id: str):
        checker = pytest.importorskip("stable_baselines3.common.env_checker")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checker.check_env(gym.make(env_id))

    @pytest.mark.parametrize("env_id", IDS)
    def test_a_spec_survives_json(self, env_id: str):
        env = gym.make(env_id, length_limit="terminate", missing_eos_penalty=0.5)
        twin = gym.make(EnvSpec.from_json(env.spec.to_json()))
        assert str(twin) == str(env)
        response = best_ids(SANITY_TASKS[env_id], SANITY_TASKS[env_id].prompts[0])
        assert_same(write(env, response, seed=3), write(twin, response, seed=3))
        assert_same(env.reset(seed=5), twin.reset(seed=5))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
    @pytest.mark.parametrize("env_id", IDS)
    def test_copies_and_pickles_go_on_alike(self, env_id: str, duplicate):
        env = gym.make(env_id)
        env.reset(seed=1)
        twin = duplicate(env)
        assert_same(env.step(49), twin.step(49))
        assert_same(env.reset(), twin.reset())

    @pytest.mark.parametrize("mode", list(AutoresetMode))
    @pytest.mark.parametrize("env_id", IDS)
    def test_vector_equals_single(self, env_id: str, mode):
        """Row i is a single environment with seed + i: observations, rewards, ends and final infos."""
        envs = gym.make_vec(env_id, num_envs=3, autoreset_mode=mode)
        singles = [gym.make(env_id) for _ in range(3)]
        rng, space = np.random.default_rng(0), envs.single_action_space.n
        observations, _ = envs.reset(seed=7)
        rows = [env.reset(seed=7 + i)[0] for i, env in enumerate(singles)]
        assert_rows(observations, rows)
        idle = np.zeros(3, dtype=bool)
        for _ in range(2 * SANITY_TASKS[env_id].max_response_tokens + 3):
            actions = np.where(rng.random(3) < 0.2, space - 1, rng.integers(48, 58, size=3))
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            ended = terminated | truncated
            for i, env in enumerate(singles):
                if idle[i]:  # NEXT_STEP: this step ignored its action and reset the row
                    rows[i], expected = env.reset()[0], (0.0, False, False)
                else:
                    rows[i], *expected, _ = env.step(actions[i])
                    if ended[i] and mode is AutoresetMode.SAME_STEP:
                        rows[i] = env.reset()[0]
                assert tuple(expected[:3]) == (rewards[i], terminated[i], truncated[i])
            assert_rows(observations, rows)
            idle = ended & (mode is AutoresetMode.NEXT_STEP)
            if mode is AutoresetMode.DISABLED and ended.any():
                observations, _ = envs.reset(options={"reset_mask": ended})
                rows = [env.reset()[0] if ended[i] else rows[i] for i, env in enumerate(singles)]
                assert_rows(observations, rows)

    @pytest.mark.parametrize("make", [gym.make, lambda *a, **k: gym.make_vec(*a, num_envs=2, **k)])
    def test_an_unknown_option_names_the_id_and_the_known_ones(self, make):
        with pytest.raises(
            TypeError, match=r"textenv/Password-v0 got an .* 'lenght_limit'.*Did you mean 'length_limit'"
        ):
            make("textenv/Password-v0", lenght_limit="terminate")


def assert_rows(observations, rows):
    for i, row in enumerate(rows):
        for key, array in row.items():
            np.testing.assert_array_equal(observations[key][i], array)
