"""What a run leaves behind, and what it shows."""

from __future__ import annotations

import json
import logging
import math
import struct

import pytest
from agent_helpers import CUT, TOY, lm_agent, lm_envs, toy_agent, toy_envs

from textenv.agents import PPO, TablePolicy
from textenv.agents.run_log import COLUMNS, RunLog
from textenv.agents.types import IterationStats, Sample

pytestmark = pytest.mark.filterwarnings(CUT)


def stats_of(iteration, **changes):
    """A record in which every figure differs."""
    names = [name for name, kind in IterationStats.__annotations__.items() if kind in ("float", "int")]
    figures = {name: iteration + place / 100 for place, name in enumerate(names)}
    figures |= {"iteration": iteration, "episodes": 10 * iteration, "tokens": 100, "dropped": 0}
    samples = (Sample("the film", " is good.\nBy far", 1.5),)
    return IterationStats(**(figures | {"seconds": {"generate": 2.0, "update": 3.0}, "samples": samples} | changes))


def write(folder, iterations=3, **changes):
    with RunLog(folder, total_episodes=30, progress=False) as log:
        for iteration in range(1, iterations + 1):
            log.record(stats_of(iteration, **changes))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Files


def test_metrics_are_json_lines_with_every_figure(tmp_path):
    write(tmp_path / "run")
    rows = lines(tmp_path / "run")
    assert rows == [stats_of(iteration).metrics() for iteration in (1, 2, 3)]
    assert rows[0]["tokens_per_second/total"] == 20 and rows[0]["seconds/update"] == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_cannot_say_is_null(tmp_path, value):
    write(tmp_path / "run", iterations=2, kl=value)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [row["kl"] for row in lines(tmp_path / "run")] == [None, None]
    assert "kl" not in scalars(tmp_path / "run")


def test_tensorboard_reads_the_same(tmp_path):
    write(tmp_path / "run")
    read = scalars(tmp_path / "run")
    rows = lines(tmp_path / "run")
    assert set(read) == set(rows[0])
    for tag, points in read.items():
        assert [step for step, _ in points] == [1, 2, 3]
        assert [value for _, value in points] == pytest.approx([row[tag] for row in rows], rel=1e-6)


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and header[12:16] == b"IHDR"
    return struct.unpack(">II", header[16:24])


@pytest.mark.parametrize("changes", [{}, {"kl": math.nan}])
def test_plot_is_a_png_of_readable_size(tmp_path, changes):
    write(tmp_path / "run", **changes)
    width, height = png_size(tmp_path / "run" / "training.png")
    assert 600 <= width <= 2000 and 600 <= height <= 2000


def test_plotting_leaves_the_users_figures_alone(tmp_path):
    import matplotlib.pyplot as plt

    before, backend = plt.get_fignums(), plt.get_backend()
    write(tmp_path / "run")
    assert plt.get_fignums() == before and plt.get_backend() == backend


def test_samples_can_be_read(tmp_path):
    write(tmp_path / "run", iterations=2)
    text = (tmp_path / "run" / "samples.txt").read_text()
    assert text.splitlines() == [
        "== iteration 1, episodes 10",
        "+1.50  the film | is good.\\nBy far",
        "== iteration 2, episodes 20",
        "+1.50  the film | is good.\\nBy far",
    ]


def test_learn_writes_all_of_it(tmp_path):
    agent = toy_agent(envs=toy_envs(8))
    agent.learn(24, tmp_path / "run", progress=False)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"metrics.jsonl", "tensorboard", "samples.txt", "training.png", "checkpoint"}
    assert [(row["iteration"], row["episodes"]) for row in lines(tmp_path / "run")] == [(1, 8), (2, 16), (3, 24)]
    assert [step for step, _ in scalars(tmp_path / "run")["score"]] == [1, 2, 3]
    assert (tmp_path / "run" / "samples.txt").read_text().count("== iteration") == 3


def test_no_run_dir_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy_agent(envs=toy_envs(8)).learn(16, run_dir=None, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_automatic_run_dirs_are_named_by_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy_agent(envs=toy_envs(8)).learn(8, progress=False)
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-2") and len(lines(run)) == 1


@pytest.mark.parametrize("save_every, saved", [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4]), (100, [0, 4])])
def test_checkpoints_come_at_the_start_every_so_often_and_at_the_end(tmp_path, monkeypatch, save_every, saved):
    agent = toy_agent(envs=toy_envs(8))
    iterations = []
    monkeypatch.setattr(agent, "save", lambda folder: iterations.append((folder, agent.iteration)))
    agent.learn(32, tmp_path / "run", save_every=save_every, progress=False)
    assert iterations == [(tmp_path / "run" / "checkpoint", iteration) for iteration in saved]


# Runs in the same folder


def test_another_runs_folder_is_refused_and_kept(tmp_path):
    toy_agent(envs=toy_envs(8)).learn(16, tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    fresh, experienced = toy_agent(envs=toy_envs(8)), toy_agent(envs=toy_envs(8))
    experienced.learn(8, tmp_path / "other", progress=False)
    for agent in (fresh, experienced):
        with pytest.raises(FileExistsError, match=r"already holds a run.*Choose another run_dir, or go on .* load\("):
            agent.learn(32, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_the_same_agent_goes_on_in_its_folder(tmp_path):
    agent = toy_agent(envs=toy_envs(8))
    agent.learn(16, tmp_path / "run", progress=False)
    agent.learn(32, tmp_path / "run", progress=False)
    assert [row["iteration"] for row in lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert [step for step, _ in scalars(tmp_path / "run")["score"]] == [1, 2, 3, 4]


def test_a_loaded_agent_goes_on_in_the_folder_it_came_from(tmp_path):
    toy_agent(envs=toy_envs(8)).learn(16, tmp_path / "run", progress=False)
    loaded = PPO.load(tmp_path / "run", toy_envs(8), TablePolicy(TOY.reference_logits))
    loaded.learn(24, tmp_path / "run", progress=False)
    assert [row["iteration"] for row in lines(tmp_path / "run")] == [1, 2, 3]


def test_lines_of_an_earlier_attempt_are_dropped(tmp_path):
    write(tmp_path / "run", iterations=3)
    with RunLog(tmp_path / "run", 30, iteration=1, progress=False, goes_on=True) as log:
        log.record(stats_of(2, score=77.0))
    assert [(row["iteration"], row["score"]) for row in lines(tmp_path / "run")][1:] == [(2, 77.0)]
    assert scalars(tmp_path / "run")["score"] == [(1, pytest.approx(lines(tmp_path / "run")[0]["score"])), (2, 77.0)]


# What is shown


def test_lines_and_now_and_then_samples_where_there_is_no_terminal(tmp_path, capsys):
    toy_agent(envs=toy_envs(8)).learn(56, tmp_path / "run")
    price, header, *body, last = capsys.readouterr().out.splitlines()
    rows = [line.split()[:2] for line in body if " | " not in line]
    assert price.startswith("This run needs about ") and price.endswith("FLOP per token.")
    assert header.split() == list(COLUMNS)
    assert rows == [[str(i), str(8 * i)] for i in range(1, 8)]
    logged = (tmp_path / "run" / "samples.txt").read_text().splitlines()
    shown = [line for line in body if " | " in line]
    assert shown == logged[1:5] + logged[26:30]  # the samples of iterations 1 and 6
    assert last == f"Metrics, samples, plot and checkpoint are in {tmp_path / 'run'}/"


def test_silence_where_it_is_asked_for(tmp_path, capsys):
    toy_agent(envs=toy_envs(8)).learn(16, tmp_path / "run", progress=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_gets_a_live_table_with_samples(tiny_model, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    envs = lm_envs(tiny_model, 4, prompts=["[bold]the", "[/nonsense]a"])
    lm_agent(tiny_model, envs).learn(8, run_dir=None)
    out = capsys.readouterr().out
    assert "8 of 8 episodes" in out and "distinct-2" in out
    assert "[bold]the |" in out or "[/nonsense]a |" in out  # prompts are shown, not obeyed


def test_folders_with_brackets_are_named_as_they_are(tmp_path, capsys):
    toy_agent(envs=toy_envs(8)).learn(8, tmp_path / "[/run]")
    assert f"{tmp_path}/[/run]/" in capsys.readouterr().out


def test_errors_pass_through_with_what_there_is_drawn(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path / "run", 30, progress=False) as log:
        log.record(stats_of(1))
        raise ZeroDivisionError
    assert "Stopped by ZeroDivisionError" in capsys.readouterr().out
    assert png_size(tmp_path / "run" / "training.png") and len(lines(tmp_path / "run")) == 1


def test_nothing_to_draw_is_no_error(tmp_path):
    with RunLog(tmp_path / "run", 30, progress=False):
        pass
    assert not (tmp_path / "run" / "training.png").exists()


def test_logging_of_the_process_is_left_alone(tmp_path):
    root = logging.getLogger()
    before = list(root.handlers), root.level
    toy_agent(envs=toy_envs(8)).learn(8, tmp_path / "run", progress=False)
    assert (root.handlers, root.level) == before
