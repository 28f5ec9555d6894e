"""Bad input: an error of the right type that says what was expected, what came, and what to do about it."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import END, GOOD, PrefixLogprobs, text_task

from textenv import TextGenerationEnv, TextGenerationVectorEnv, TextTask, attach_policy, replay
from textenv import wrappers as single_wrappers
from textenv.optional import require
from textenv.wrappers import vector as vector_wrappers


def refuses(action: Any, kind: type[Exception], expected: str, got: str, fix: str) -> None:
    """The action raises just this type, and the message has all three parts, in plain text."""
    with pytest.raises(kind) as caught:
        action()
    assert caught.type is kind
    message = str(caught.value)
    for part, words in (("expected", expected), ("got", got), ("fix", fix)):
        assert re.search(words, message), f"no word of what is {part} ({words!r}) in: {message}"


def env(**changes: Any) -> TextGenerationEnv:
    return TextGenerationEnv(text_task(**changes))


def envs(mode: str = "NextStep", **changes: Any) -> TextGenerationVectorEnv:
    return TextGenerationVectorEnv(3, text_task(**changes), autoreset_mode=mode)


def after_reset(made: Any, **options: Any) -> Any:
    made.reset(**options)
    return made


class TestTask:
    @pytest.mark.parametrize(
        ("changes", "kind", "expected", "got", "fix"),
        [
            ({"prompts": []}, ValueError, "at least one prompt", "got none", "check the file or filter"),
            (
                {"prompts": " a film"},
                ValueError,
                "a list of texts",
                "got the single text ' a film'",
                r"Write prompts=\[",
            ),
            ({"prompts": [" good", ""]}, ValueError, r"prompts\[1\] .* at least one token", "got ''", "or a word"),
            ({"prompts": [" good", []]}, ValueError, r"prompts\[1\] .* at least one token", r"got \[\]", "or a word"),
            (
                {"prompts": [[3, 12]]},
                ValueError,
                r"prompts\[0\] .* ids in \[0, 12\)",
                r"got \[12\]",
                "encode the prompt",
            ),
            (
                {"prompts": [[3, -1]]},
                ValueError,
                r"prompts\[0\] .* ids in \[0, 12\)",
                r"got \[-1\]",
                "encode the prompt",
            ),
            ({"prompts": [[1.7]]}, ValueError, r"prompts\[0\] .* list of token ids", r"got \[1\.7\]", "Pass the text"),
            ({"prompts": [None]}, ValueError, r"prompts\[0\] should be a text", "got None", "Pass the text"),
            (
                {"prompts": [" films"], "vocab_size": 5},
                ValueError,
                r"ids in \[0, 5\)",
                r"got \[5\]",
                "tokenizer of the model",
            ),
            (
                {"prompts": [" good", " a very bad film"], "max_prompt_tokens": 3},
                ValueError,
                r"prompts\[1\] should have at most max_prompt_tokens=3",
                "got 4: ' a very bad film'",
                "Raise max_prompt_tokens, or shorten",
            ),
            ({"max_response_tokens": 0}, ValueError, "`max_response_tokens` .* at least 1", "got 0", "Give it room"),
            ({"max_response_tokens": -3}, ValueError, "`max_response_tokens` .* at least 1", "got -3", "Give it room"),
            ({"max_response_tokens": 2.5}, ValueError, "`max_response_tokens` .* integer", r"got 2\.5", "Give it room"),
            ({"max_response_tokens": True}, ValueError, "`max_response_tokens` .* integer", "got True", "Give it room"),
            ({"max_prompt_tokens": 0}, ValueError, "at most max_prompt_tokens=0", "got 2", "Raise max_prompt_tokens"),
            ({"stop_ids": [0, 12]}, ValueError, r"`stop_ids` .* \[0, 12\)", r"got \[12\]", "tokenizer and model"),
            ({"pad_id": -1}, ValueError, r"`pad_id` .* \[0, 12\)", r"got \[-1\]", "tokenizer and model"),
            (
                {"length_limit": "cut"},
                ValueError,
                "`length_limit` .*'truncate', 'terminate'",
                "got 'cut'",
                "Choose one",
            ),
            ({"scorer_errors": "skip"}, ValueError, "`scorer_errors` .*'raise', 'drop'", "got 'skip'", "Choose one"),
            (
                {"scorer": "good"},
                TypeError,
                r"`scorer` .* function",
                "got str",
                r"scorer\(prompts, responses\) -> scores",
            ),
        ],
        ids=str,
    )
    def test_construction(self, changes, kind, expected, got, fix):
        refuses(lambda: text_task(**changes), kind, expected, got, fix)

    def test_an_option_that_there_is_not(self):
        with pytest.raises(TypeError, match="max_tokens"):
            text_task(max_tokens=3)
        assert isinstance(text_task(), TextTask)


class TestEnvironments:
    @pytest.mark.parametrize("make", [TextGenerationEnv, lambda t, **k: TextGenerationVectorEnv(2, t, **k)])
    def test_render_mode(self, make):
        refuses(
            lambda: make(text_task(), render_mode="rgb_array"),
            ValueError,
            r"`render_mode` should be None or one of \['ansi'",
            "got 'rgb_array'",
            "Choose one",
        )

    @pytest.mark.parametrize("num_envs", [0, -1, 2.0, True, None])
    def test_number_of_environments(self, num_envs):
        refuses(
            lambda: TextGenerationVectorEnv(num_envs, text_task()),
            ValueError,
            "`num_envs` .* at least 1",
            f"got {num_envs}",
            "use 1 for a single episode",
        )

    @pytest.mark.parametrize(
        ("action", "expected", "got", "fix"),
        [
            (12, r"token id in \[0, 12\)", "got 12", "Choose among"),
            (-1, r"token id in \[0, 12\)", "got -1", "Choose among"),
            (1.0, "one token id, an integer", "got float64", r"action_space\.sample"),
            (True, "one token id, an integer", "got bool", r"action_space\.sample"),
            ([1], "one token id, an integer", r"got int64 of shape \(1,\)", r"action_space\.sample"),
            ("good", "one token id, an integer", "got <U4", r"action_space\.sample"),
            (None, "one token id, an integer", "got object", r"action_space\.sample"),
        ],
    )
    def test_action_of_one(self, action, expected, got, fix):
        running = after_reset(env())
        refuses(lambda: running.step(action), ValueError, expected, got, fix)
        running.step(np.int64(GOOD))  # the episode is as it was
        assert running.render().endswith(" good")

    @pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
    @pytest.mark.parametrize(
        ("actions", "expected", "got", "fix"),
        [
            ([1, 12, 1], r"token id in \[0, 12\)", r"got 12 \(row 1\)", "Choose among"),
            ([1, 1, -1], r"token id in \[0, 12\)", r"got -1 \(row 2\)", "Choose among"),
            ([1.0, 1.0, 1.0], r"3 token ids, an integer array of shape \(3,\)", "got float64", r"action_space\.sample"),
            (
                [1, 1],
                r"3 token ids, an integer array of shape \(3,\)",
                r"got int64 of shape \(2,\)",
                r"action_space\.sample",
            ),
            ([[1], [1], [1]], r"an integer array of shape \(3,\)", r"of shape \(3, 1\)", r"action_space\.sample"),
            (1, r"an integer array of shape \(3,\)", r"of shape \(\)", r"action_space\.sample"),
        ],
        ids=str,
    )
    def test_actions_of_many(self, mode, actions, expected, got, fix):
        running = after_reset(envs(mode))
        refuses(lambda: running.step(np.array(actions)), ValueError, expected, got, fix)
        running.step(np.array([GOOD] * 3))
        assert all(text.endswith(" good") for text in running.render())

    def test_stepping_before_reset(self):
        for made in (env(), envs()):
            for action in (lambda m=made: m.step(np.array(END)), made.render):
                refuses(
                    action, gym.error.ResetNeeded, "should be running", "none (was|were) started", r"call reset\(\)"
                )

    def test_stepping_after_the_end(self):
        running = after_reset(env())
        running.step(END)
        for _ in range(2):
            refuses(
                lambda: running.step(GOOD), gym.error.ResetNeeded, "should be running", "has ended", r"call reset\(\)"
            )
        running.reset()
        running.step(GOOD)

    def test_stepping_after_the_end_of_a_row(self):
        running = after_reset(envs("Disabled"))
        running.step(np.array([GOOD, END, GOOD]))
        refuses(
            lambda: running.step(np.array([GOOD] * 3)),
            gym.error.ResetNeeded,
            "DISABLED",
            "Row 1 has ended",
            r'call reset\(options=\{"reset_mask": ended\}\)',
        )


class TestReset:
    @pytest.mark.parametrize("make", [env, envs])
    @pytest.mark.parametrize(
        ("options", "expected", "got", "fix"),
        [
            ({"promt": " films"}, "should be among 'prompt'", "got 'promt'", "mend its name"),
            ({"prompt": ""}, "at least one token", "got ''", "or a word"),
            ({"prompt": " a film" * 4}, "at most 6 tokens", "got 8", "larger max_prompt_tokens"),
            ({"prompt": [12]}, r"ids in \[0, 12\)", r"got \[12\]", "encode the prompt"),
            ({"prompt": 3.5}, "a text or a list of token ids", r"got 3\.5", "Pass the text"),
        ],
        ids=str,
    )
    def test_options(self, make, options, expected, got, fix):
        running = after_reset(make(), options={"prompt": " films"})
        refuses(lambda: running.reset(options=options), ValueError, expected, got, fix)
        texts = running.render()
        assert texts == " films" if isinstance(texts, str) else texts == (" films",) * 3  # still the old episodes

    @pytest.mark.parametrize(
        "options",
        [
            {"prompts": [" films"] * 2},
            {"prompts": " films"},
            {"prompts": [" films"] * 3, "prompt": " films"},
        ],
        ids=str,
    )
    def test_prompts_per_row(self, options):
        refuses(
            lambda: envs().reset(options=options),
            ValueError,
            r"`prompts` .* one prompt per row \(3",
            "got",
            "Use `prompt`",
        )

    @pytest.mark.parametrize(
        "mask", [[True, False, False], np.ones(2, bool), np.ones(3, int), np.zeros(3, bool), np.ones((3, 1), bool)]
    )
    def test_reset_mask(self, mask):
        refuses(
            lambda: after_reset(envs()).reset(options={"reset_mask": mask}),
            ValueError,
            r"`reset_mask` .* bool array of shape \(3,\) with at least one True",
            "got",
            r"terminations \| truncations",
        )

    def test_reset_mask_before_the_first_reset(self):
        mask = np.array([True, False, False])
        refuses(
            lambda: envs().reset(options={"reset_mask": mask}),
            gym.error.ResetNeeded,
            "should be running",
            "none were started",
            r"call reset\(\)",
        )

    def test_seeds(self):
        refuses(lambda: envs().reset(seed=[1, 2]), ValueError, "an int or 3 of them", "got 2", "An int gives row i")


class TestIds:
    """Options of `gym.make` and `gym.make_vec`."""

    @pytest.mark.parametrize("make", [gym.make, lambda *a, **k: gym.make_vec(*a, num_envs=2, **k)])
    @pytest.mark.parametrize(
        ("options", "kind", "expected", "got", "fix"),
        [
            (
                {"kl_coeff": 0.1},
                TypeError,
                "Known are .*kl_coef",
                "unexpected keyword argument 'kl_coeff'",
                r"Did you mean 'kl_coef'\?",
            ),
            ({"zebra": 1}, TypeError, "Known are .*kl_coef", "unexpected keyword argument 'zebra'", "Known are"),
            ({"kl_coef": -0.1}, ValueError, "`kl_coef` .* at least 0", r"got -0\.1", "0 measures the KL"),
            ({"kl_coef": float("nan")}, ValueError, "`kl_coef` .* finite", "got nan", "0 measures the KL"),
            ({"kl_coef": float("inf")}, ValueError, "`kl_coef` .* finite", "got inf", "0 measures the KL"),
            ({"kl_coef": "0.1"}, ValueError, "`kl_coef` .* number", "got '0.1'", "0 measures the KL"),
            ({"target_kl": 3.0}, ValueError, r"`target_kl`=3\.0 needs a `kl_coef`", "got None", "to start from"),
            ({"kl_coef": 0.1, "target_kl": 0.0}, ValueError, "`target_kl` .* positive", r"got 0\.0", "None keeps"),
            ({"kl_coef": 0.1, "target_kl": "6"}, ValueError, "`target_kl` .* positive number", "got '6'", "None keeps"),
            ({"kl_coef": 0.0, "target_kl": 6.0}, ValueError, "kl_coef above 0", "got kl_coef=0", "Start from"),
            ({"missing_eos_penalty": -1.0}, ValueError, "`penalty` .* at least 0", r"got -1\.0", "it is subtracted"),
            ({"length_limit": "cut"}, ValueError, "`length_limit` .*'truncate'", "got 'cut'", "Choose one"),
        ],
        ids=str,
    )
    def test_toy(self, make, options, kind, expected, got, fix):
        refuses(lambda: make("textenv/Toy-v0", **options), kind, expected, got, fix)

    def test_an_episode_length_that_only_the_outside_knows(self):
        refuses(
            lambda: gym.make_vec("textenv/Toy-v0", num_envs=2, max_episode_steps=5),
            TypeError,
            "takes its episode length from max_response_tokens",
            "got max_episode_steps=5",
            "part of the task",
        )


@pytest.mark.parametrize("wrappers", [single_wrappers, vector_wrappers], ids=["single", "vector"])
class TestWrappers:
    @pytest.mark.parametrize(
        ("options", "expected", "got", "fix"),
        [
            ({"kl_coef": -1}, "`kl_coef` .* at least 0", "got -1", "0 measures"),
            ({"kl_coef": float("nan")}, "`kl_coef` .* finite", "got nan", "0 measures"),
            ({"kl_coef": None}, "`kl_coef` .* number", "got None", "0 measures"),
            ({"target_kl": -6.0}, "`target_kl` .* positive", r"got -6\.0", "None keeps"),
            ({"target_kl": float("nan")}, "`target_kl` .* positive", "got nan", "None keeps"),
            (
                {"target_kl": 1.0, "episodes_per_update": 0},
                "`episodes_per_update` .* at least 1",
                "got 0",
                "None takes",
            ),
            (
                {"target_kl": 1.0, "episodes_per_update": 1.5},
                "`episodes_per_update` .* integer",
                r"got 1\.5",
                "None takes",
            ),
        ],
        ids=str,
    )
    def test_kl_penalty(self, wrappers, options, expected, got, fix):
        made = env() if wrappers is single_wrappers else envs()
        refuses(lambda: wrappers.KLPenalty(made, **options), ValueError, expected, got, fix)

    @pytest.mark.parametrize(
        ("options", "expected", "got"),
        [
            ({"penalty": -1.0}, "`penalty` .* at least 0", r"got -1\.0"),
            ({"penalty": float("nan")}, "`penalty` .* finite", "got nan"),
            ({"mode": "add"}, "`mode` .*'subtract', 'replace'", "got 'add'"),
        ],
        ids=str,
    )
    def test_missing_eos_penalty(self, wrappers, options, expected, got):
        made = env() if wrappers is single_wrappers else envs()
        refuses(lambda: wrappers.MissingEOSPenalty(made, **options), ValueError, expected, got, "subtract")

    @pytest.mark.parametrize(
        ("options", "expected", "got"),
        [
            ({"mean": 1.0}, "given together", r"mean=1\.0, std=None"),
            ({"std": 1.0}, "given together", r"mean=None, std=1\.0"),
            ({"mean": 0.0, "std": 0.0}, "`std` positive", r"std=0\.0"),
            ({"mean": float("nan"), "std": 1.0}, "`mean` should be finite", "mean=nan"),
        ],
        ids=str,
    )
    def test_normalize_score(self, wrappers, options, expected, got):
        made = env() if wrappers is single_wrappers else envs()
        refuses(lambda: wrappers.NormalizeScore(made, **options), ValueError, expected, got, "running")


class TestReplay:
    @pytest.mark.parametrize(
        ("prompts", "responses", "expected", "got", "fix"),
        [
            ([], [], "at least one", "got 0 prompts and 0 responses", "Pass a prompt for each"),
            (
                [" films"] * 2,
                [[END]],
                "one response per prompt",
                "got 2 prompts and 1 responses",
                "Pass a prompt for each",
            ),
            ([" films"], [[]], r"responses\[0\] .* 1 to 5 token ids", r"got shape \(0,\)", "without padding"),
            (
                [" films"],
                [[1] * 6],
                r"responses\[0\] .* 1 to 5 token ids",
                r"got shape \(6,\)",
                "cut at max_response_tokens",
            ),
            ([" films"], [[[1, END]]], r"responses\[0\] .* 1 to 5 token ids", r"got shape \(1, 2\)", "a list of ids"),
            ([" films"], [[12, END]], r"ids in \[0, 12\)", r"got \[12, 0\]", "that the engine sampled"),
            ([" films"], [[-1, END]], r"ids in \[0, 12\)", r"got \[-1, 0\]", "that the engine sampled"),
            ([" films"], [[1.0, 0.0]], r"ids in \[0, 12\)", r"got \[1\.0, 0\.0\]", "as integers"),
            ([" films"], [[END, 1]], "end at its first stop id", r"got \[0, 1\]", "Cut it behind"),
            ([" films"], [[END, END]], "end at its first stop id", r"got \[0, 0\]", "Cut it behind"),
            ([" films"], [[1, 1]], "or at 5 tokens", r"got \[1, 1\]", "let the engine write on"),
            ([" films", ""], [[END]] * 2, r"prompts\[1\] .* at least one token", "got ''", "or a word"),
            ([" films", None], [[END]] * 2, r"prompts\[1\] should be a text", "got None", "Pass the text"),
            ([" a film" * 4], [[END]], r"prompts\[0\] .* at most 6 tokens", "got 8", "larger max_prompt_tokens"),
        ],
        ids=str,
    )
    def test_what_no_episode_could_have_been(self, prompts, responses, expected, got, fix):
        refuses(lambda: replay(envs(), prompts, responses), ValueError, expected, got, fix)

    @pytest.mark.parametrize("name", ["logprobs", "ref_logprobs"])
    @pytest.mark.parametrize("shape", [(2,), (2, 4), (3, 5), ()])
    def test_log_probabilities_of_a_wrong_shape(self, name, shape):
        charged = vector_wrappers.KLPenalty(envs(), PrefixLogprobs(1), PrefixLogprobs(2))
        refuses(
            lambda: replay(charged, [" films"] * 2, [[END]] * 2, **{name: np.zeros(shape)}),
            ValueError,
            rf"`{name}` should be \(B, T\) = \(2, 5\)",
            re.escape(f"got shape {shape}"),
            "one column per response token",
        )

    def test_a_callable_of_a_wrong_shape(self):
        charged = vector_wrappers.KLPenalty(envs(), PrefixLogprobs(1), lambda *_: 0.0)
        refuses(
            lambda: replay(charged, [" films"] * 2, [[END]] * 2),
            ValueError,
            r"one number per row, shape \(2,\)",
            r"got shape \(\)",
            "Return the log-probability of each action",
        )

    @pytest.mark.parametrize("scores", [[1.0], [1.0, np.nan], [np.inf, 1.0], [[1.0], [1.0]]])
    def test_scores_that_are_none(self, scores):
        with pytest.raises(RuntimeError, match="prompt ' films', response ''"):
            replay(envs(), [" films"] * 2, [[END]] * 2, scores=scores)

    @pytest.mark.parametrize("action", [lambda e: replay(e, [" films"], [[END]])])
    def test_environments_that_are_none_of_ours(self, action):
        for other in (env(), gym.vector.SyncVectorEnv([env])):
            refuses(
                lambda o=other: action(o),
                TypeError,
                "`envs` should be vector text environments",
                f"got {type(other).__name__}",
                r"gym\.make_vec",
            )
        attach_policy(envs(), PrefixLogprobs(1))  # nobody there who wants one: no error


def test_a_missing_package_names_the_command():
    refuses(
        lambda: require("no_such_package", "train", "RLHF-v0"),
        ImportError,
        "RLHF-v0 needs no_such_package",
        "not installed",
        r"pip install 'textenv\[train\]'",
    )
