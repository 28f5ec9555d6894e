"""Evaluation while training runs: it is logged, it repeats itself, and training does not notice."""

from __future__ import annotations

import copy
import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, Counting, letters, lm_agent, lm_envs, parameters, same, toy_agent, toy_envs
from lm_helpers import GRUPolicy

from textenv import evaluation as evaluation_module
from textenv.agents import PPO, TablePolicy, held_out
from textenv.agents.plots import PANELS, curve
from textenv.agents.run_log import COLUMNS, EVAL_COLUMN
from textenv.layers import layers
from textenv.vector_env import TextGenerationVectorEnv

pytestmark = pytest.mark.filterwarnings(CUT)

STEERED = {"kl_coef": 0.1, "target_kl": 2.0, "normalize_score": True, "missing_eos_penalty": 0.5}
"""Every wrapper that remembers something."""


class Toy:
    config = {"episodes_per_iteration": 20, "num_minibatches": 3, "learning_rate": 0.05}  # noqa: RUF012
    policy = staticmethod(lambda: TablePolicy(TOY.reference_logits))
    per_iteration = 20

    def envs(self, _folder):
        return toy_envs(8, **STEERED)

    def eval_envs(self, _folder):
        return toy_envs(5, **STEERED)

    def agent(self, folder, seed=4):
        return toy_agent(self.policy(), self.envs(folder), seed=seed, **self.config)


class Recurrent(Toy):
    """A policy that has neither `act` nor a reference."""

    policy = staticmethod(lambda: GRUPolicy(6))


class Adapters(Toy):
    policy = staticmethod(lambda: None)
    per_iteration = 6

    def envs(self, folder):
        return lm_envs(folder, 6, **STEERED)

    def eval_envs(self, folder):
        return lm_envs(folder, 3, prompts=["good good", "a the", "road"], **STEERED)

    def agent(self, folder, seed=4):
        config = {"num_minibatches": 2, "epochs": 2, "micro_batch_tokens": 18, "learning_rate": 0.01}
        return lm_agent(folder, self.envs(folder), temperature=0.8, seed=seed, **config)


@pytest.fixture(params=[Toy(), Recurrent(), Adapters()], ids=lambda kind: type(kind).__name__)
def kind(request):
    return request.param


def learn(agent, folder, iterations=5, per_iteration=20, **options):
    return agent.learn(iterations * per_iteration, folder, progress=False, **options)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def training_part(rows):
    """What a run without evaluation would have logged, times left out."""
    kept = [{k: v for k, v in row.items() if "second" not in k and not k.startswith("eval/")} for row in rows]
    return [row for row in kept if len(row) > 2]


def evaluation_part(rows):
    return {row["iteration"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in rows}


def evaluated(rows):
    return [iteration for iteration, figures in evaluation_part(rows).items() if figures]


def states(envs):
    return copy.deepcopy([layer.state_dict() for layer in layers(envs)])


# Training does not notice


def test_training_is_the_same_bit_for_bit(kind, tiny_model, tmp_path):
    plain = learn(kind.agent(tiny_model), tmp_path / "plain", 4, kind.per_iteration)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    agent, eval_envs = kind.agent(tiny_model), kind.eval_envs(tiny_model)
    eval_envs.reset(seed=7)
    left = states(eval_envs)
    learn(agent, tmp_path / "run", 4, kind.per_iteration, eval_envs=eval_envs, eval_every=1, eval_episodes=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(parameters(agent), parameters(plain))
    assert torch.equal(agent.generator.get_state(), plain.generator.get_state())
    assert states(agent.envs) == states(plain.envs)  # prompts to come, KL coefficient, score statistics
    assert states(eval_envs) == left
    rows = lines(tmp_path / "run")
    assert training_part(rows) == training_part(lines(tmp_path / "plain"))
    assert evaluated(rows) == [0, 1, 2, 3, 4]
    assert len({figures["eval/score"] for figures in evaluation_part(rows).values()}) > 2  # the policy moved
    samples = [(folder / "samples.txt").read_text() for folder in (tmp_path / "plain", tmp_path / "run")]
    assert all(line in samples[1] for line in samples[0].splitlines())


def careless(_policy, envs, episodes, *, seed):
    """An evaluation that leaves its environments as it happens to: generators, coefficients and statistics moved."""
    observations, _ = envs.reset(seed=seed)
    for _ in range(20):
        envs.step(np.zeros(len(observations["input_ids"]), dtype=np.int64))
    return Constant(episodes)


class Constant:
    """An evaluation that always finds the same."""

    samples = (("prompt", "response", 1.0),)

    def __init__(self, episodes):
        self.episodes = episodes
        self.score = dataclasses.make_dataclass("Score", [("value", float)])(1.5)

    def metrics(self):
        return {"score": 1.5, "kl": float("nan"), "length": 2.0, "episodes": float(self.episodes)}


def test_a_careless_evaluation_is_harmless_in_environments_of_its_own_only(monkeypatch):
    monkeypatch.setattr(evaluation_module, "evaluate", careless)
    plain = learn(Toy().agent(None), None)
    apart = learn(Toy().agent(None), None, eval_envs=toy_envs(8, **STEERED), eval_every=1)
    assert same(parameters(apart), parameters(plain))
    monkeypatch.setattr(held_out, "_check_apart", lambda *_: None)
    shared = Toy().agent(None)
    learn(shared, None, eval_envs=shared.envs, eval_every=1)
    assert not same(parameters(shared), parameters(plain))


def test_environments_of_training_are_refused(tmp_path):
    agent = Toy().agent(None)
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(agent.envs)
    for eval_envs, what in ((agent.envs, "KLPenalty"), (wrapped, "KLPenalty"), (agent.envs.unwrapped, "Text")):
        with pytest.raises(ValueError, match=f"`eval_envs` should be environments of their own, got .* a {what}"):
            learn(agent, tmp_path / "run", eval_envs=eval_envs)
    one_leash = toy_envs(8, **STEERED)
    one_leash.leash = agent.envs.leash
    with pytest.raises(ValueError, match=r"share a KLLeash .* move its KL coefficient"):
        learn(agent, tmp_path / "run", eval_envs=one_leash)
    assert not (tmp_path / "run").exists()


def test_one_task_may_serve_both(tmp_path):
    """Prompts and scorer hold no state of an episode."""
    agent = Toy().agent(None)
    bare = TextGenerationVectorEnv(4, agent.envs.unwrapped.task)
    learn(agent, tmp_path / "run", eval_envs=bare)
    assert evaluated(lines(tmp_path / "run")) == [0, 5]


def test_a_policy_in_training_mode_is_evaluated_without_dropout():
    modes = []

    class Noting(TablePolicy):
        def next_logits(self, input_ids, attention_mask):
            modes.append(self.training)
            return super().next_logits(input_ids, attention_mask)

    agent = toy_agent(Noting(TOY.reference_logits))
    agent.policy.train()
    held_out.held_out(agent, toy_envs(4), 1, None).evaluate()
    assert modes and not any(modes)


def test_nothing_of_an_evaluation_stays_in_memory(tiny_model):
    """Not even the cache with which the policy wrote, after Ctrl-C either."""
    agent = Adapters().agent(tiny_model)
    held = held_out.held_out(agent, Adapters().eval_envs(tiny_model), 10, None)
    held_sizes = []
    act = agent.policy.act

    def watched(*args, **kwargs):
        tokens = act(*args, **kwargs)
        held_sizes.append(agent.policy.stepper().nbytes)
        if len(held_sizes) == 3:
            raise KeyboardInterrupt
        return tokens

    agent.policy.act = watched
    with pytest.raises(KeyboardInterrupt):
        held.evaluate()
    assert min(held_sizes) > 0 and agent.policy.stepper().nbytes == 0
    held_sizes += [1]
    held.evaluate()
    assert agent.policy.stepper().nbytes == 0


# When, and how often


@pytest.mark.parametrize(
    "every, iterations, expected",
    [(1, 3, [0, 1, 2, 3]), (2, 5, [0, 2, 4, 5]), (2, 4, [0, 2, 4]), (10, 3, [0, 3])],
)
def test_evaluations_come_before_training_every_so_often_and_at_the_end(tmp_path, every, iterations, expected):
    learn(Toy().agent(None), tmp_path / "run", iterations, eval_envs=toy_envs(4), eval_every=every)
    assert evaluated(lines(tmp_path / "run")) == expected
    assert [row["iteration"] for row in lines(tmp_path / "run")] == list(range(iterations + 1))


@pytest.mark.parametrize("given, expected", [(None, 5), (3, 3), (12, 12)])
def test_number_of_episodes(given, expected):
    envs = toy_envs(5)
    scored = Counting(TOY.scorer)
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=scored)
    record = held_out.held_out(Toy().agent(None), envs, 10, given).evaluate()
    assert record.episodes == expected and scored.calls > 0


def test_evaluations_repeat_themselves_and_seeds_differ(kind, tiny_model):
    """The same policy, prompts and random numbers: the same figures, training in between or not."""
    agent = kind.agent(tiny_model)
    held = held_out.held_out(agent, kind.eval_envs(tiny_model), 10, 12)
    first, weights = held.evaluate(), copy.deepcopy(agent.policy.state_dict())
    assert held.evaluate().metrics() == pytest.approx(first.metrics(), nan_ok=True, abs=0)
    agent.step()
    assert held.evaluate().samples != first.samples
    agent.policy.load_state_dict(weights)
    again = held.evaluate()
    assert again.samples == first.samples and again.score == first.score
    other = held_out.held_out(kind.agent(tiny_model, seed=5), kind.eval_envs(tiny_model), 10, 12).evaluate()
    assert other.samples != first.samples


def test_held_out_prompts_are_the_ones_answered(tiny_model):
    agent = Adapters().agent(tiny_model)
    record = held_out.held_out(agent, Adapters().eval_envs(tiny_model), 10, 8).evaluate()
    assert {prompt for prompt, _, _ in record.samples} <= {"good good", "a the", "road"}
    assert record.kl.value == pytest.approx(0.0, abs=1e-4)
    agent.step()
    assert abs(held_out.held_out(agent, Adapters().eval_envs(tiny_model), 10, 8).evaluate().kl.value) > 1e-3


def test_constraints_of_the_evaluation_bind_there_alone(tiny_model):
    agent = Adapters().agent(tiny_model)
    envs = {length: lm_envs(tiny_model, 4, min_length=length) for length in (None, 4)}
    lengths = {k: held_out.held_out(agent, e, 10, 12).evaluate().length.value for k, e in envs.items()}
    assert lengths[4] >= 5 > lengths[None]
    assert agent.rollout().response_mask.sum(1).min() < 4


# What it leaves behind


def test_figures_are_logged_everywhere(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learn(Toy().agent(None), tmp_path / "run", 3, eval_envs=Toy().eval_envs(None), eval_every=2)
    rows = lines(tmp_path / "run")
    assert set(rows[0]) == {"iteration", "episodes"} | {name for name in rows[2] if name.startswith("eval/")}
    assert {"eval/score", "eval/kl", "eval/length", "eval/eos_rate"} < set(rows[0])
    assert "eval/score" not in rows[1] and rows[2]["score"] != rows[2]["eval/score"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("eval/score")]
    assert [step for step, _ in points] == [0, 2, 3]
    assert [v for _, v in points] == pytest.approx([rows[i]["eval/score"] for i in (0, 2, 3)], rel=1e-6)
    text = (tmp_path / "run" / "samples.txt").read_text()
    titles = [line for line in text.splitlines() if line.startswith("==")]
    assert titles == [
        "== evaluation before training",
        "== iteration 1, episodes 20",
        "== iteration 2, episodes 40",
        "== evaluation after iteration 2",
        "== iteration 3, episodes 60",
        "== evaluation after iteration 3",
    ]


def test_the_plot_has_a_curve_of_its_own(tmp_path):
    learn(Toy().agent(None), tmp_path / "run", 3, eval_envs=toy_envs(4), eval_every=2)
    rows = lines(tmp_path / "run")
    assert curve(rows, "score") == ([20, 40, 60], [row["score"] for row in rows[1:]])
    assert curve(rows, "eval/score") == ([0, 40, 60], [rows[i]["eval/score"] for i in (0, 2, 3)])
    assert np.isnan(curve([{"episodes": 1, "kl": None}], "kl")[1]).all()
    assert all(held in rows[0] for _, held, _ in PANELS)
    assert (tmp_path / "run" / "training.png").stat().st_size > 10_000


def test_lines_have_a_column_for_it(capsys):
    Toy().agent(None).learn(60, None, eval_envs=toy_envs(4), eval_every=2)
    _price, header, *body = capsys.readouterr().out.splitlines()
    assert header.split() == [*COLUMNS, EVAL_COLUMN]
    rows = [line.split() for line in body if " | " not in line and " |" not in line]
    assert [(row[0], len(row)) for row in rows] == [("0", 3), ("1", 8), ("2", 9), ("3", 9)]
    Toy().agent(None).learn(20, None)
    assert EVAL_COLUMN not in capsys.readouterr().out


def test_a_terminal_shows_it_too(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    Toy().agent(None).learn(40, None, eval_envs=toy_envs(4), eval_every=1)
    assert EVAL_COLUMN in capsys.readouterr().out


# Interruptions


class InterruptedAt:
    """The toy's scorer until Ctrl-C at the n-th call."""

    def __init__(self, call):
        self.left = call

    def __call__(self, prompts, responses, **_context):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return TOY.scorer(prompts, responses)


def interrupted(envs, call):
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=InterruptedAt(call))
    return envs


EVALUATION = {"eval_every": 2, "eval_episodes": 6}


@pytest.mark.parametrize("during", ["evaluation", "iteration"])
@pytest.mark.parametrize("call, completed", [(1, 0), (2, 1), (3, 3)])
def test_control_c_loses_at_most_the_iteration(tmp_path, capsys, during, call, completed):
    """Stopped in the evaluation before training, after iteration 2 and after 4, or in the iterations 1, 2 and 4."""
    whole = learn(Toy().agent(None), tmp_path / "whole", eval_envs=Toy().eval_envs(None), **EVALUATION)
    if during == "evaluation":
        envs, eval_envs = Toy().envs(None), interrupted(Toy().eval_envs(None), call)
    else:
        envs, eval_envs = interrupted(Toy().envs(None), completed + 1), Toy().eval_envs(None)
    agent = toy_agent(Toy.policy(), envs, seed=4, **Toy.config)
    with pytest.raises(KeyboardInterrupt):
        learn(agent, tmp_path / "run", eval_envs=eval_envs, **EVALUATION)
    assert "Stopped by KeyboardInterrupt; the last checkpoint is" in capsys.readouterr().out
    loaded = PPO.load(tmp_path / "run", Toy().envs(None), Toy.policy())
    assert loaded.iteration == completed
    learn(loaded, tmp_path / "run", eval_envs=Toy().eval_envs(None), **EVALUATION)
    assert same(parameters(loaded), parameters(whole))
    rows, expected = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert training_part(rows) == training_part(expected)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    np.testing.assert_equal(evaluation_part(rows), evaluation_part(expected))


def test_a_resumed_run_keeps_the_schedule_and_repeats_nothing(tmp_path, monkeypatch):
    """Evaluations after 2, 4 and the last of a run of three iterations that goes on to five."""
    calls = []

    def counted(_policy, _envs, episodes, *, seed):
        calls.append(seed)
        return Constant(episodes)

    monkeypatch.setattr(evaluation_module, "evaluate", counted)
    agent = learn(Toy().agent(None), tmp_path / "run", 3, eval_envs=toy_envs(4), eval_every=2)
    assert len(calls) == 3  # 0, 2, 3
    loaded = PPO.load(tmp_path / "run", Toy().envs(None), Toy.policy())
    learn(loaded, tmp_path / "run", 5, eval_envs=toy_envs(4), eval_every=2)
    assert len(calls) == 5 and set(calls) == {agent.seed}
    assert evaluated(lines(tmp_path / "run")) == [0, 2, 3, 4, 5]
    loaded.learn(100, tmp_path / "run", progress=False, eval_envs=toy_envs(4))  # nothing is left to do
    assert len(calls) == 5


# What is refused


@pytest.mark.parametrize("name", ["eval_every", "eval_episodes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "10"])
def test_numbers_that_evaluate_nothing_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be an integer of at least 1, got {value!r}: nothing would"):
        learn(Toy().agent(None), tmp_path / "run", eval_envs=toy_envs(4), **{name: value})
    assert not (tmp_path / "run").exists()


def test_episodes_without_environments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`eval_episodes`=8 needs `eval_envs` to run in, got None\. Make them on"):
        learn(Toy().agent(None), tmp_path / "run", eval_episodes=8)


def test_environments_without_text_are_refused(tmp_path):
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    with pytest.raises(TypeError, match="should be vector text environments"):
        learn(Toy().agent(None), tmp_path / "run", eval_envs=envs)
    envs.close()


def test_scorers_that_fail_in_evaluation_say_so(tiny_model, tmp_path):
    from textenv.scoring import ScorerError

    def broken(_prompts, responses, **_context):
        return [float("nan")] * len(responses)

    agent = Adapters().agent(tiny_model)
    with pytest.raises(ScorerError):
        agent.learn(6, tmp_path / "run", progress=False, eval_envs=lm_envs(tiny_model, 2, scorer=broken))
    assert letters(None, ["aB"]) == [1]
