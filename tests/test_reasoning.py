"""reasoning-gym's tasks: against a stand-in with its documented interface, and against the package where it is."""

from __future__ import annotations

import importlib.util
import random
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from helpers import text_task

from textenv import ScorerError, replay
from textenv.rewards import ReasoningTasks, WeightedReward
from textenv.scoring import call_scorer


class Sums:
    """A dataset as reasoning-gym documents them: items by index from a seed, a checker, random ids when iterated."""

    def __init__(self, size, seed, largest=9):
        if largest < 1:
            raise AssertionError("largest must be positive")
        self.size, self.seed, self.largest = size, seed, largest

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        rng = random.Random(f"{self.seed} {row}")
        one, other = rng.randint(0, self.largest), rng.randint(0, self.largest)
        question, answer = f"What is {one} + {other}?", str(one + other)
        return {"question": question, "answer": answer, "metadata": {"terms": [one, other]}}

    def __iter__(self):
        raise RuntimeError("iterating adds a random identifier to each item")

    def score_answer(self, answer, entry):
        if answer is None:
            return 0.0
        if answer == "crash":
            raise RecursionError("too deep")
        return float("nan") if answer == "nan" else 1.0 if answer == entry["answer"] else 0.01


def create_dataset(name, **config):
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**config)


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("reasoning_gym")
    module.create_dataset = create_dataset
    module.__spec__ = types.SimpleNamespace(name="reasoning_gym")  # `importlib.util.find_spec` looks there
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def test_questions_are_prompts_and_entries_their_context(stand_in):
    tasks = ReasoningTasks("sums", size=5, seed=3, largest=4)
    assert [record.prompt for record in tasks.prompts] == [Sums(5, 3, 4)[row]["question"] for row in range(5)]
    assert [record.context for record in tasks.prompts] == [{"reasoning_entry": Sums(5, 3, 4)[row]} for row in range(5)]
    assert tasks.prompts[2].place == "sums question 2"


def test_the_seed_decides(stand_in):
    one, again, other = (ReasoningTasks("sums", size=8, seed=seed).prompts for seed in (0, 0, 1))
    assert one == again and one != other


def test_questions_can_be_put_into_prompts_of_ones_own(stand_in):
    tasks = ReasoningTasks(
        "sums", size=1, prompt=lambda question: [{"role": "user", "content": question + " Briefly."}]
    )
    assert tasks.prompts[0].prompt == [{"role": "user", "content": Sums(1, 0)[0]["question"] + " Briefly."}]


def test_the_datasets_own_checker_scores(stand_in):
    tasks = ReasoningTasks("sums", size=3)
    entries = [record.context["reasoning_entry"] for record in tasks.prompts]
    right = [entry["answer"] for entry in entries]
    scores = tasks(["p"] * 3, [f" {right[0]}\n", "wrong", f"It is {right[2]}"], reasoning_entry=entries, other=[0] * 3)
    assert (scores.dtype, scores.tolist()) == (np.float64, [1.0, 0.01, 0.01])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer> 3 </answer> no, <answer>\n4\n</answer>.", "4"),
        ("so <answer>4", None),
        ("<answer>3</answer> or <answer>4", None),
        ("4", None),
        ("4</answer>", None),
        ("<answer></answer>", ""),
    ],
)
def test_answers_in_tags(stand_in, response, answer):
    assert ReasoningTasks("sums", size=1, answer_tag="answer").answer_of(response) == answer


@pytest.mark.parametrize(
    ("response", "message"), [("crash", "raised RecursionError: too deep, for"), ("nan", "gave nan, for")]
)
def test_a_checker_that_fails_shows_the_sample(stand_in, response, message):
    tasks = ReasoningTasks("sums", size=1)
    context = dict(tasks.prompts[0].context)
    with pytest.raises(ScorerError, match=rf"reasoning-gym's 'sums' {message} prompt 'p', response '{response}'"):
        tasks(["p"], [response], **{name: [value] for name, value in context.items()})
    columns = {"reasoning_entry": [context["reasoning_entry"]] * 2}
    scores = call_scorer(tasks, ["p", "p"], [response, "wrong"], "drop", columns)
    np.testing.assert_array_equal(scores, [np.nan, 0.01])


def test_what_cannot_be_made_is_refused(stand_in):
    with pytest.raises(ValueError, match=r"'products' .*ValueError: Dataset 'products' not registered.*DATASETS"):
        ReasoningTasks("products")
    with pytest.raises(ValueError, match="AssertionError: largest must be positive"):
        ReasoningTasks("sums", largest=0)
    with pytest.raises(ValueError, match=r"TypeError: .*unexpected keyword argument 'smallest'"):
        ReasoningTasks("sums", smallest=0)
    with pytest.raises(ValueError, match="`size` should be at least 1"):
        ReasoningTasks("sums", size=0)


def test_prompts_of_other_origin_are_refused(stand_in):
    tasks = ReasoningTasks("sums", size=1)
    with pytest.raises(TypeError, match="requires 'reasoning_entry'"):
        text_task(scorer=tasks)
    with pytest.raises(ScorerError, match="reasoning-gym's 'sums' should be given the column 'reasoning_entry'"):
        tasks(["p"], ["r"])


def test_a_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ReasoningTasks needs reasoning_gym.*pip install 'textenv\[reasoning\]'"):
        ReasoningTasks("chain_sum")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: pip install 'textenv[reasoning]'",
)
@pytest.mark.filterwarnings("ignore:KLPenalty has no policy attached")
def test_the_package_itself_in_an_environment(tiny_model):
    """Every entry's own answer earns the full score through a replay, a wrong one less."""
    tasks = ReasoningTasks("chain_sum", size=6, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    again = ReasoningTasks("chain_sum", size=6, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert tasks.prompts == again.prompts
    scorer = WeightedReward({"right": (1.0, tasks)})
    options = {"prompts": tasks.prompts, "max_response_tokens": 12, "kl_coef": 0.0}
    envs = gym.make_vec("RLHF-v0", num_envs=4, model=tiny_model, scorer=scorer, **options)
    task = envs.unwrapped.task
    entries = [prompt.context["reasoning_entry"] for prompt in task.prompts.prompts]
    for said, full in ((lambda entry: entry["answer"], True), (lambda entry: "no idea", False)):
        responses = [[*task.tokenizer.encode(said(entry)), 0] for entry in entries]
        replayed = replay(envs, list(task.prompts.prompts), responses)
        assert (replayed.scores == 1.0).all() if full else (replayed.scores < 0.5).all()
        np.testing.assert_array_equal(replayed.infos["score/right"], replayed.scores)
