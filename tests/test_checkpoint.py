"""Checkpoints: training goes on as if it had never stopped, and no interruption or stranger's file does harm."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import shutil

import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_agent, lm_envs, parameters, same, toy_agent, toy_envs
from lm_helpers import PROMPTS, GRUPolicy
from value_helpers import COMBINATIONS, make_policy

from textenv.agents import PPO, PPOConfig, TablePolicy, checkpoint
from textenv.prompts import PromptSet

pytestmark = pytest.mark.filterwarnings(CUT)

STEERED = {"kl_coef": 0.1, "target_kl": 2.0, "normalize_score": True, "missing_eos_penalty": 0.5}
"""Every wrapper that remembers something."""


class Table:
    policy = staticmethod(lambda: TablePolicy(TOY.reference_logits))

    def envs(self, _folder):
        return toy_envs(8, **STEERED)

    def agent(self, folder):
        config = {"episodes_per_iteration": 20, "num_minibatches": 3, "learning_rate": 0.05, "weight_decay": 0.01}
        return toy_agent(self.policy(), self.envs(folder), seed=4, **config)


class Recurrent(Table):
    policy = staticmethod(lambda: GRUPolicy(6))


class Adapters:
    policy = staticmethod(lambda: None)  # remade from the checkpoint
    lora_rank: int | None = 4

    def envs(self, folder):
        return lm_envs(folder, 6, **STEERED)

    def agent(self, folder):
        config = {"num_minibatches": 2, "epochs": 2, "micro_batch_tokens": 18, "learning_rate": 0.01}
        return lm_agent(folder, self.envs(folder), self.lora_rank, temperature=0.8, seed=4, **config)


class AllWeights(Adapters):
    lora_rank = None


class Valued(Adapters):
    """A value function other than a head on the policy's trunk."""

    def __init__(self, value, lora_rank, dtype="float32"):
        self.value, self.lora_rank, self.dtype = value, lora_rank, dtype

    def agent(self, folder):
        policy = make_policy(folder, self.value, self.lora_rank, temperature=0.8, dtype=self.dtype)
        config = PPOConfig(num_minibatches=2, epochs=2, micro_batch_tokens=18, learning_rate=0.01, lr_schedule="linear")
        agent = PPO(policy, self.envs(folder), config, seed=4)
        agent.total_episodes = 48  # the schedule's end, as `learn` sets it
        return agent


KINDS = [Table(), Recurrent(), Adapters(), AllWeights()]
KINDS += [Valued(value, lora_rank) for value, lora_rank in COMBINATIONS if value != "trunk"]
KINDS += [Valued("reward", 4, "bfloat16")]


def kind_name(kind):
    return "-".join(map(str, [type(kind).__name__, *vars(kind).values()]))


@pytest.fixture(params=KINDS, ids=kind_name)
def kind(request):
    return request.param


def figures(stats):
    return {name: value for name, value in stats.metrics().items() if "second" not in name}, stats.samples


# The round trip


def test_training_goes_on_bit_for_bit(kind, tiny_model, tmp_path):
    """Five iterations, or three, a checkpoint, everything made anew, and two."""
    whole = kind.agent(tiny_model)
    expected = [figures(whole.step()) for _ in range(5)]
    first = kind.agent(tiny_model)
    before = [figures(first.step()) for _ in range(3)]
    first.save(tmp_path / "saved")
    del first

    envs = kind.envs(tiny_model)
    envs.reset(seed=99)  # whatever they did before
    torch.manual_seed(99)
    second = PPO.load(tmp_path / "saved", envs, kind.policy())
    after = [figures(second.step()) for _ in range(2)]
    np.testing.assert_equal(before + after, expected)  # NaN equals NaN
    assert same(parameters(second), parameters(whole))
    for ours, theirs in zip(_moments(whole), _moments(second), strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert len({numbers["kl_coef"] for numbers, _ in expected}) > 2  # the controller moved


def _moments(agent):
    return agent.optimizer.state_dict()["state"].values()


def test_everything_is_there_after_loading(kind, tiny_model, tmp_path):
    agent = kind.agent(tiny_model)
    for _ in range(2):
        agent.step()
    agent.save(tmp_path / "saved")
    loaded = PPO.load(tmp_path / "saved", kind.envs(tiny_model), kind.policy())
    assert same(parameters(loaded), parameters(agent))
    assert (loaded.iteration, loaded.episodes, loaded.seed) == (2, agent.episodes, 4)
    assert loaded.config == agent.config
    ours, theirs = agent.optimizer.state_dict()["state"], loaded.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys() and len(ours) == len(agent.parameters)
    for key, state in ours.items():
        assert all(torch.equal(value, theirs[key][name]) for name, value in state.items())
    assert torch.equal(loaded.generator.get_state(), agent.generator.get_state())
    if kind.policy() is None:
        assert loaded.policy.settings == agent.policy.settings and loaded.policy.temperature == 0.8


def forget_statistics(agent):
    agent.envs.env.env.shaper.load_state_dict({"count": 0, "mean": 0.0, "squares": 0.0})


def forget_value_network(agent):
    with torch.no_grad():
        for name, parameter in agent.policy.value_network.named_parameters():
            if "lora_B" in name:
                parameter.zero_()


FORGETTING = {
    "optimizer": lambda agent: agent.optimizer.state.clear(),
    "generator": lambda agent: agent.generator.manual_seed(0),
    "iteration": lambda agent: setattr(agent, "iteration", agent.iteration + 1),
    "schedule": lambda agent: setattr(agent, "episodes", 0),
    "end of the schedule": lambda agent: setattr(agent, "total_episodes", None),
    "value network": forget_value_network,
    "value head": lambda agent: torch.nn.init.zeros_(agent.policy.value_head.weight),
    "prompts": lambda agent: agent.envs.reset(seed=99),
    "kl coefficient": lambda agent: setattr(agent.envs.leash, "kl_coef", 0.1),
    "score statistics": forget_statistics,
}


@pytest.fixture(scope="module")
def gone_on(tiny_model, tmp_path_factory):
    """A checkpoint after three iterations, and the weights after the fourth."""
    folder = tmp_path_factory.mktemp("gone") / "saved"
    agent = Valued("separate", 4).agent(tiny_model)
    for _ in range(3):
        agent.step()
    agent.save(folder)
    agent.step()
    return folder, parameters(agent)


@pytest.mark.parametrize("what", [None, *FORGETTING])
def test_whatever_is_forgotten_shows(tiny_model, gone_on, what):
    """The contrast to the test above: its equality would notice each of these."""
    folder, expected = gone_on
    agent = PPO.load(folder, Valued("separate", 4).envs(tiny_model))
    if what is not None:
        FORGETTING[what](agent)
    agent.step()
    assert same(parameters(agent), expected) == (what is None)


CURRICULUM = [(0, [1, 1, 0, 0]), (4, [0, 1, 1, 1])]


@pytest.mark.parametrize("drawn", [{"order": "sequential"}, {"curriculum": CURRICULUM}], ids=["sequential", "stages"])
def test_the_place_in_the_prompts_is_kept(tiny_model, tmp_path, drawn):
    """Rows that take one prompt after the other, or that begin a stage at their fifth, go on where they were."""

    def envs():
        made = lm_envs(tiny_model, 3, **STEERED)
        task = made.unwrapped.task
        prompts = PromptSet.encode(PROMPTS, task.tokenizer, task.mdp.vocab_size, **drawn)
        made.unwrapped.task = dataclasses.replace(task, prompts=prompts)
        return made

    def agent():
        return PPO(make_policy(tiny_model, "separate"), envs(), PPOConfig(episodes_per_iteration=5), seed=4)

    whole = agent()
    expected = [figures(whole.step()) for _ in range(4)]
    first = agent()
    for _ in range(3):
        first.step()
    first.save(tmp_path / "saved")
    second = PPO.load(tmp_path / "saved", envs())
    np.testing.assert_equal([figures(second.step())], expected[3:])
    assert same(parameters(second), parameters(whole))
    shown = [[sample.prompt for sample in samples] for _, samples in expected]
    assert shown[3] != shown[0]  # starting over would show


def test_drawn_predictions_go_on(tmp_path):
    agent = Table().agent(None)
    observation, _ = agent.envs.reset(seed=0)
    agent.predict(observation, deterministic=False)
    agent.save(tmp_path / "saved")
    loaded = PPO.load(tmp_path / "saved", Table().envs(None), Table.policy())
    fresh, coming = (
        [a.predict(observation, deterministic=False).tolist() for _ in range(4)] for a in (Table().agent(None), agent)
    )
    assert [loaded.predict(observation, deterministic=False).tolist() for _ in range(4)] == coming != fresh


def test_checkpoints_from_before_predictions_were_kept_are_read(saved):
    tensors = torch.load(saved / "optimizer.pt", weights_only=True)
    del tensors["predict_generator"]
    torch.save(tensors, saved / "optimizer.pt")
    assert load(saved).iteration == 1


def test_saving_twice_leaves_the_second(tmp_path):
    agent = Table().agent(None)
    for iteration in (1, 2):
        agent.step()
        agent.save(tmp_path / "saved")
        assert PPO.load(tmp_path / "saved", Table().envs(None), Table.policy()).iteration == iteration
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_only_trained_weights_are_written(tiny_model, tmp_path):
    agent = Adapters().agent(tiny_model)
    agent.save(tmp_path / "deep" / "folder" / "saved")
    files = {path.name: path.stat().st_size for path in (tmp_path / "deep" / "folder" / "saved").iterdir()}
    assert set(files) == checkpoint.FILES
    trained = sum(parameter.numel() for parameter in agent.parameters)
    assert 4 * trained < files["policy.safetensors"] < 4 * trained + 8000


def test_a_run_folder_is_loaded_by_its_own_name(tmp_path):
    Table().agent(None).learn(20, tmp_path / "run", progress=False)
    loaded = PPO.load(tmp_path / "run", Table().envs(None), Table.policy())
    assert loaded.iteration == 1


def test_here_is_a_folder_too(tmp_path, monkeypatch):
    Table().agent(None).save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    assert PPO.load(".", Table().envs(None), Table.policy()).iteration == 0


# Interruptions


class InterruptedAt:
    """The toy's scorer until Ctrl-C at the n-th call."""

    def __init__(self, call):
        self.left = call

    def __call__(self, prompts, responses):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return TOY.scorer(prompts, responses)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


@pytest.mark.parametrize("call", [1, 3])
def test_control_c_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path, capsys, call):
    """At the first and at the third of five iterations."""
    whole = Table().agent(None).learn(100, tmp_path / "whole", progress=False)

    envs = Table().envs(None)
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=InterruptedAt(call))
    agent = toy_agent(Table.policy(), envs, seed=4, **vars(whole.config))
    with pytest.raises(KeyboardInterrupt):
        agent.learn(100, tmp_path / "run", progress=False)
    last = tmp_path / "run" / "checkpoint"
    assert f"Stopped by KeyboardInterrupt; the last checkpoint is {last}." in capsys.readouterr().out

    loaded = PPO.load(tmp_path / "run", Table().envs(None), Table.policy())
    assert loaded.iteration == agent.iteration == call - 1
    loaded.learn(100, tmp_path / "run", progress=False)
    assert same(parameters(loaded), parameters(whole))
    assert without_times(lines(tmp_path / "run")) == without_times(lines(tmp_path / "whole"))


def test_iterations_that_were_logged_but_not_saved_are_logged_once(tmp_path):
    """A crash after the third of three iterations, with a checkpoint of the second."""
    agent = Table().agent(None)
    step = agent.step

    def dies_at_the_fourth():
        if agent.iteration == 3:
            raise MemoryError
        return step()

    agent.step = dies_at_the_fourth
    with pytest.raises(MemoryError):
        agent.learn(100, tmp_path / "run", save_every=2, progress=False)
    assert [row["iteration"] for row in lines(tmp_path / "run")] == [1, 2, 3]
    loaded = PPO.load(tmp_path / "run", Table().envs(None), Table.policy())
    assert loaded.iteration == 2
    loaded.learn(100, tmp_path / "run", progress=False)
    assert [row["iteration"] for row in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["torch.save", "safetensors.torch.save_file", "json.dumps"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_interrupted_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch, place, fault):
    agent = Table().agent(None)
    agent.step()
    agent.save(tmp_path / "saved")
    agent.step()

    def broken(*_args, **_kwargs):
        raise fault("no space left")

    if place == "safetensors.torch.save_file":
        monkeypatch.setattr(checkpoint, "save_file", broken)
    else:
        monkeypatch.setattr(place, broken)
    with pytest.raises(fault):
        agent.save(tmp_path / "saved")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert PPO.load(tmp_path / "saved", Table().envs(None), Table.policy()).iteration == 1


@pytest.mark.parametrize("in_run", [False, True])
def test_interruption_between_the_renames_is_survived(tmp_path, monkeypatch, in_run):
    folder = tmp_path / "run" / "checkpoint" if in_run else tmp_path / "saved"
    agent = Table().agent(None)
    agent.step()
    agent.save(folder)
    agent.step()
    rename, calls = pathlib.Path.rename, []

    def interrupted(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        agent.save(folder)
    monkeypatch.undo()
    assert not folder.exists()
    name = tmp_path / "run" if in_run else folder
    loaded = PPO.load(name, Table().envs(None), Table.policy())
    assert loaded.iteration == 1
    loaded.step()
    loaded.save(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert PPO.load(name, Table().envs(None), Table.policy()).iteration == 2


# What is refused


@pytest.fixture
def saved(tmp_path):
    agent = Table().agent(None)
    agent.step()
    agent.save(tmp_path / "saved")
    return tmp_path / "saved"


def load(folder, envs=None, policy=None):
    return PPO.load(folder, Table().envs(None) if envs is None else envs, policy or Table.policy())


def test_folders_that_are_no_checkpoints(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("something")
    for name in ("missing", "notes", "notes/todo.txt"):
        with pytest.raises(FileNotFoundError, match=rf"{name} should be a folder that `save` wrote .* no state\.json"):
            load(tmp_path / name)


def test_what_is_there_is_not_overwritten(tmp_path, saved):
    """Notes, a file, and a checkpoint's folder in which a run has been logged since."""
    agent = Table().agent(None)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("something")
    (saved / "metrics.jsonl").write_text("{}")
    for place in (tmp_path / "notes", tmp_path / "notes" / "todo.txt", saved):
        with pytest.raises(FileExistsError, match="holds more than a checkpoint; it is not overwritten"):
            agent.save(place)
    assert (tmp_path / "notes" / "todo.txt").read_text() == "something" and (saved / "metrics.jsonl").exists()
    (tmp_path / "empty").mkdir()
    agent.save(tmp_path / "empty")
    assert load(tmp_path / "empty").iteration == 0


def test_policies_of_ones_own_must_be_brought(saved):
    with pytest.raises(ValueError, match=r"holds a TablePolicy, which cannot be remade .* load\(folder, envs, policy="):
        PPO.load(saved, Table().envs(None))


def test_policies_of_another_shape_are_refused(saved):
    with pytest.raises(RuntimeError, match="size mismatch for logits"):
        load(saved, policy=TablePolicy(np.zeros((8, 7))))
    with pytest.raises(RuntimeError, match="Missing key"):
        load(saved, policy=GRUPolicy(6))


@pytest.mark.parametrize("options", [{}, {"normalize_score": True}, {"target_kl": 2.0, "missing_eos_penalty": 0.5}])
def test_environments_wrapped_otherwise_are_refused(saved, options):
    wrappers = r"\['KLPenalty', 'MissingEOSPenalty', 'NormalizeScore', 'TextGenerationVectorEnv'\]"
    with pytest.raises(ValueError, match=f"should be wrapped as for training, {wrappers}, got"):
        load(saved, toy_envs(8, **options))


def test_another_number_of_environments_is_refused(saved):
    with pytest.raises(ValueError, match=r"should be of 9 environments, got 8\. Make num_envs equal"):
        load(saved, toy_envs(9, **STEERED))


def test_checkpoints_of_another_agent_or_time_are_refused(saved):
    state = json.loads((saved / "state.json").read_text())
    for change, expected in (
        ({"version": 99}, "is a checkpoint of version 99, this textenv reads 1"),
        ({"agent": "Other"}, r"was saved by Other, got PPO: load it with Other\.load"),
    ):
        (saved / "state.json").write_text(json.dumps(state | change))
        with pytest.raises(ValueError, match=expected):
            load(saved)


class Malicious:
    """Runs code where a pickle is loaded without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def raw_pickle(content, path):
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("write", [torch.save, raw_pickle])
def test_no_code_of_a_checkpoint_is_run(saved, tmp_path, write):
    marker = tmp_path / "was here"
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists()  # that is what it does
    marker.unlink()
    write({"optimizer": Malicious(marker), "generator": None}, saved / "optimizer.pt")
    with pytest.raises(pickle.UnpicklingError):
        load(saved)
    assert not marker.exists()


def test_no_file_of_a_checkpoint_but_the_optimisers_is_a_pickle(tiny_model, tmp_path):
    Adapters().agent(tiny_model).save(tmp_path / "saved")
    for path in (tmp_path / "saved").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                assert len(list(file.keys())) > 0
        else:
            torch.load(path, weights_only=True)


def test_checkpoints_can_be_moved(saved, tmp_path):
    shutil.move(saved, tmp_path / "elsewhere")
    assert load(tmp_path / "elsewhere").iteration == 1
