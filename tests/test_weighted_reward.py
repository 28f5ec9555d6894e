"""`WeightedReward`: the sum, what each part said, context for those that take it, faults that name the part."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from agent_helpers import Counting
from helpers import BAD, END, GOOD, PROMPTS, RESPONSE_TOKENS, count_good, random_responses, text_task, write
from lm_helpers import byte_tokenizer, llama, save_model
from value_helpers import reward_on, save_classifier

from textenv import ScorerError, TextGenerationVectorEnv, replay
from textenv.env import TextGenerationEnv
from textenv.prompts import PromptRecord
from textenv.rewards import ExactMatch, NumericMatch, SequenceClassificationReward, WeightedReward
from textenv.scoring import call_scorer
from textenv.wrappers import RecordResponses
from textenv.wrappers import vector as vector_wrappers

DOCS = Path(__file__).parents[1] / "docs"
NO_POLICY = pytest.mark.filterwarnings("ignore:KLPenalty has no policy attached")


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def both(**options):
    return WeightedReward({"good": (2.0, count_good), "length": (-0.5, length)}, **options)


def test_worked_example():
    """2 x (1 + 0.1 x 2) - 0.5 x 5 and 2 x (-1 + 0.1 x 2) - 0.5 x 4."""
    scorer = both()
    np.testing.assert_allclose(scorer(["ab", "cd"], [" good", " bad"]), [-0.1, -3.6])
    parts = scorer.score_parts(["ab", "cd"], [" good", " bad"])
    np.testing.assert_allclose(parts["good"], [1.2, -0.8])
    np.testing.assert_allclose(parts["length"], [5.0, 4.0])
    assert scorer([], []).shape == (0,) and scorer.score_parts([], [])["good"].shape == (0,)


def test_batches_equal_single_samples():
    """To the last bit: the order of the sum is that of the parts."""
    rng = np.random.default_rng(0)
    values = {str(n): rng.normal(size=3) for n in range(20)}
    third = WeightedReward(
        {k: (0.1 * n + 0.1, lambda p, r, n=n: [values[t][n] for t in r]) for n, k in enumerate("abc")}
    )
    texts = list(values)
    alone = np.concatenate([third(["p"], [text]) for text in texts])
    np.testing.assert_array_equal(third(["p"] * 20, texts), alone)


def test_each_part_is_called_once_per_batch_and_remembered():
    good, other = Counting(count_good), Counting(length)
    scorer = WeightedReward({"good": (1.0, good), "length": (1.0, other)})
    scorer(["a", "b"], ["x", "y"])
    assert scorer.score_parts(["b", "a"], ["y", "x"])["length"].tolist() == [1.0, 1.0]
    assert (good.calls, other.calls) == (1, 1)
    assert scorer.score_parts(["b", "new"], ["y", "four"])["length"].tolist() == [1.0, 4.0]
    assert (good.calls, other.calls) == (2, 2)  # for the new sample


def test_another_context_is_another_sample():
    scorer = WeightedReward({"right": (1.0, ExactMatch())})
    scorer(["p"], ["4"], answer=["4"])
    assert scorer.score_parts(["p"], ["4"], answer=["5"])["right"].tolist() == [0.0]
    assert scorer.score_parts(["p"], ["4"], answer=["4"])["right"].tolist() == [1.0]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("textenv.rewards.weighted.REMEMBERED", 3)
    scorer = both()
    for text in "abcde":
        scorer([text], [text])
    assert list(scorer._known) == [("c", "c"), ("d", "d"), ("e", "e")]


def test_context_goes_to_those_that_take_it():
    seen = []

    def wants_source(prompts, responses, source="none"):
        seen.append(source)
        return [0.0] * len(responses)

    scorer = WeightedReward(
        {"right": (1.0, ExactMatch("answer")), "plain": (1.0, length), "source": (1.0, wants_source)}
    )
    assert scorer(["p"], ["4"], answer=["4"], source=["web"], other=[1]).tolist() == [2.0]
    assert seen == [["web"]]


def test_what_a_part_requires_is_required_of_the_prompts():
    scorer = WeightedReward({"right": (1.0, NumericMatch("gold")), "plain": (1.0, length)})
    with pytest.raises(TypeError, match="requires 'gold'"):
        text_task(scorer=scorer)
    text_task(scorer=scorer, prompts=[PromptRecord(prompt, {"gold": 1}) for prompt in PROMPTS])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scorer: pickle.loads(pickle.dumps(scorer))])
def test_copies_score_alike_and_remember_nothing(copied):
    scorer = both()
    scores = scorer(["ab"], [" good"])
    again = copied(scorer)
    assert not again._known and len(scorer._known) == 1
    np.testing.assert_array_equal(again(["ab"], [" good"]), scores)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, ValueError, "at least one, got {}"),
        ([length], ValueError, 'should be {"name"'),
        ({"a": length}, TypeError, r"pair \(weight, scorer\), got <function"),
        ({"a": (1.0, 2.0)}, TypeError, "pair"),
        ({"": (1.0, length)}, ValueError, "names of `parts` should be texts"),
        ({"a": (math.nan, length)}, ValueError, "finite number, got nan"),
        ({"a": (math.inf, length)}, ValueError, "finite number, got inf"),
        ({"a": ("1", length)}, ValueError, "finite number, got '1'"),
        ({"a": (True, length)}, ValueError, "finite number, got True"),
        ({"a": (0.0, length)}, ValueError, "should not be 0"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        WeightedReward(parts)
    with pytest.raises(ValueError, match="`scorer_errors` should be one of"):
        both(scorer_errors="ignore")


# Faults of a part, as of any scorer


def with_entry(entry):
    return lambda prompts, responses: [entry if "bad" in response else 1.5 for response in responses]


def raises(prompts, responses):
    if any("bad" in response for response in responses):
        raise ZeroDivisionError("no words left")
    return [1.5] * len(responses)


PER_SAMPLE = {
    "None": (with_entry(None), "got None"),
    "NaN": (with_entry(math.nan), "got nan"),
    "inf": (with_entry(math.inf), "got inf"),
    "raises": (raises, "raised ZeroDivisionError: no words left"),
}
WHOLE_BATCH = {
    "one too few": (lambda p, r: [1.0] * (len(r) - 1), r"got list of shape \(\d,\)"),
    "nothing": (lambda p, r: None, r"got NoneType of shape \(\)"),
}
BY_SAMPLE = pytest.mark.parametrize(("faulty", "message"), PER_SAMPLE.values(), ids=PER_SAMPLE)
BY_BATCH = pytest.mark.parametrize(("faulty", "message"), WHOLE_BATCH.values(), ids=WHOLE_BATCH)


@BY_SAMPLE
def test_a_fault_names_the_part_and_the_sample(faulty, message):
    scorer = WeightedReward({"fine": (1.0, length), "faulty": (1.0, faulty)})
    shown = rf"The part 'faulty' of a WeightedReward: .*{message}.*prompt 'b', response ' bad'"
    with pytest.raises(ScorerError, match=shown) as caught:
        call_scorer(scorer, ["a", "b"], [" good", " bad"])
    assert not caught.value.whole_batch


@BY_SAMPLE
@pytest.mark.parametrize("inner", ["raise", "drop"])
def test_or_the_sample_is_dropped(faulty, message, inner):
    scorer = WeightedReward({"fine": (1.0, length), "faulty": (2.0, faulty)}, scorer_errors=inner)
    scores = call_scorer(scorer, ["a", "b", "c"], ["x", " bad", ""], "drop")
    np.testing.assert_array_equal(scores, [4.0, np.nan, 3.0])
    parts = scorer.score_parts(["a", "b", "c"], ["x", " bad", ""])
    np.testing.assert_array_equal(parts["faulty"], [1.5, np.nan, 1.5])
    assert parts["fine"].tolist() == [1.0, 4.0, 0.0]


@BY_BATCH
@pytest.mark.parametrize("on_error", ["raise", "drop"])
@pytest.mark.parametrize("inner", ["raise", "drop"])
def test_a_wrong_number_of_scores_is_always_an_error(faulty, message, on_error, inner):
    scorer = WeightedReward({"fine": (1.0, length), "faulty": (1.0, faulty)}, scorer_errors=inner)
    with pytest.raises(ScorerError, match=rf"The part 'faulty'.*{message}.*prompt 'a', response 'x'"):
        call_scorer(scorer, ["a", "b"], ["x", "y"], on_error)


@BY_SAMPLE
def test_a_fault_fails_a_replay_before_anything_is_stepped(faulty, message):
    envs = TextGenerationVectorEnv(2, text_task(scorer=WeightedReward({"faulty": (1.0, faulty)})))
    envs.reset(options={"prompt": " films"})
    with pytest.raises(ScorerError, match=f"The part 'faulty'.*{message}"):
        replay(envs, [" films", " a film"], [[GOOD, END], [BAD, END]])
    assert envs.render() == (" films", " films")


# Infos and records


def test_infos_say_what_each_part_said():
    end = write(TextGenerationEnv(text_task(scorer=both())), [GOOD, BAD, GOOD, END], options={"prompt": " films"})[
        "info"
    ]
    assert end["score/good"] == pytest.approx(1.6)
    assert end["score/length"] == len(" good bad good")
    assert end["score"] == pytest.approx(2 * 1.6 - 0.5 * 14)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_vector_and_replay_say_the_same(mode):
    """And the parts add up to the score, each scorer called once for the replay of all 12."""
    good = Counting(count_good)
    scorer = WeightedReward({"good": (2.0, good), "length": (-0.5, length)})
    envs = TextGenerationVectorEnv(3, text_task(scorer=scorer), autoreset_mode=mode)
    responses = random_responses(np.random.default_rng(0), 12)
    prompts = [PROMPTS[row % 4] for row in range(12)]
    replayed = replay(envs, prompts, responses)
    assert good.calls == 1
    said = {name: replayed.infos[f"score/{name}"] for name in ("good", "length")}
    np.testing.assert_allclose(2 * said["good"] - 0.5 * said["length"], replayed.scores)
    for row in range(12):
        end = write(TextGenerationEnv(text_task(scorer=both())), responses[row], options={"prompt": prompts[row]})[
            "info"
        ]
        assert end["score/good"] == said["good"][row] and end["score/length"] == said["length"][row]


def test_dropped_samples_have_the_parts_that_there_are():
    scorer = WeightedReward({"fine": (1.0, length), "faulty": (1.0, with_entry(None))})
    steps = write(TextGenerationEnv(text_task(scorer=scorer, scorer_errors="drop")), [BAD, END])
    assert steps["rewards"] == [0.0, 0.0] and steps["info"]["dropped"] is True
    assert steps["info"]["score/fine"] == 4.0 and math.isnan(steps["info"]["score/faulty"])


def test_other_scorers_have_no_parts():
    end = write(TextGenerationEnv(text_task()), [GOOD, END])["info"]
    assert not [key for key in end if key.startswith("score/")]


def test_records_hold_the_parts(tmp_path):
    env = RecordResponses(TextGenerationEnv(text_task(scorer=both())), tmp_path / "single.jsonl")
    write(env, [GOOD, END], options={"prompt": " films"})
    envs = vector_wrappers.RecordResponses(
        TextGenerationVectorEnv(1, text_task(scorer=both())), tmp_path / "vector.jsonl"
    )
    envs.reset(options={"prompt": " films"})
    envs.step(np.array([GOOD]))
    envs.step(np.array([END]))
    lines = [json.loads((tmp_path / name).read_text()) for name in ("single.jsonl", "vector.jsonl")]
    assert lines[0] == lines[1]
    assert (lines[0]["score/good"], lines[0]["score/length"]) == (1.6, 5.0)


# Different tokenizers in one run


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Two folders whose tokenizers give other ids for the same text, other sizes, other special tokens."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("classifiers")
    plain = save_classifier(folder / "plain")
    tokenizer = byte_tokenizer(bos=True, appends_eos=True)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.4, pad_token_id=0, eos_token_id=0, **sizes)
    return plain, save_classifier(folder / "other", config=config, tokenizer=tokenizer)


@NO_POLICY
def test_two_reward_models_with_different_tokenizers_on_one_environment(classifiers, tmp_path):
    """Text goes in between: scores are those of scoring the texts alone, for a policy with a third tokenizer size."""
    one, other = (SequenceClassificationReward(folder) for folder in classifiers)
    assert one._tokenizer("good").input_ids != other._tokenizer("good").input_ids
    policy = save_model(tmp_path / "policy", llama())
    scorer = WeightedReward({"one": (1.0, one), "other": (0.5, other), "length": (-0.1, length)})
    options = {"prompts": ["the a", "good"], "max_response_tokens": 6, "kl_coef": 0.0}
    envs = gym.make_vec("RLHF-v0", num_envs=3, model=policy, scorer=scorer, **options)
    envs.reset(seed=0)
    rng, ends, rewards = np.random.default_rng(0), [], np.zeros(3)
    while len(ends) < 3:
        _, step_rewards, _, _, infos = envs.step(rng.integers(1, 90, 3))
        if "score" in infos:
            rewards += step_rewards
            ends = [{key: infos[key][row] for key in infos if not key.startswith("_")} for row in range(3)]
    for row, end in enumerate(ends):
        alone = [SequenceClassificationReward(folder)([end["prompt"]], [end["response"]])[0] for folder in classifiers]
        assert end["score/one"] == pytest.approx(alone[0], abs=1e-5)
        assert end["score/other"] == pytest.approx(alone[1], abs=1e-5)
        assert end["score"] == pytest.approx(alone[0] + 0.5 * alone[1] - 0.1 * len(end["response"]), abs=1e-4)
        assert rewards[row] == pytest.approx(end["score"])
    assert abs(ends[0]["score/one"] - ends[0]["score/other"]) > 1e-3


@NO_POLICY
def test_a_reward_model_on_the_policys_trunk_goes_with_one_on_another(classifiers, tiny_model):
    reward, classifier = reward_on(tiny_model), SequenceClassificationReward(classifiers[1])
    scorer = WeightedReward({"trunk": (1.0, reward), "other": (1.0, classifier)})
    options = {"prompts": ["the a", "good"], "max_response_tokens": RESPONSE_TOKENS, "kl_coef": 0.05}
    envs = gym.make_vec("RLHF-v0", num_envs=2, model=tiny_model, scorer=scorer, **options)
    replayed = replay(envs, ["the a", "good"], [[7, 8, 0], [9, 10, 11, 0]])
    texts = list(replayed.infos["response"])
    expected = reward(["the a", "good"], texts) + classifier(["the a", "good"], texts)
    np.testing.assert_allclose(replayed.scores, expected, atol=1e-5)


# Beside the code


def test_no_source_loads_torch(tmp_path):
    names = "ExactMatch NumericMatch RegexMatch PythonCheck Normalize ReasoningTasks WeightedReward RemoteScorer"
    names += " serve_scorer ScorerServer Judge ScoringJudge ComparingJudge Comparison Labels"
    code = f"import sys; from textenv.rewards import {', '.join(names.split())}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


BLOCKS = re.findall(r"^```python\n(.*?)^```", (DOCS / "reward_sources.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_blocks_of_the_docs_that_need_no_server_run(tmp_path):
    whole = [block for block in BLOCKS if "NumericMatch" in block or "serve_scorer" in block]
    assert len(whole) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(whole)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.strip("[] \n")) > 0  # "a delight"


def test_names_in_the_docs_exist():
    import textenv.rewards

    imported = {
        name
        for block in BLOCKS
        for names in re.findall(r"from textenv.rewards import (.*)", block)
        for name in names.split(", ")
    }
    assert len(imported) >= 9 and imported <= set(textenv.rewards.__all__)
    for name in textenv.rewards.__all__:
        assert getattr(textenv.rewards, name) is not None
