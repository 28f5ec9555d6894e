"""Minari: what is recorded is what stepping gives, and comes back as demonstrations and preferences with its ids."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import BAD, CLOSE, DOT, END, FILM, FILMS, GOOD, S, text_task, write

from textenv import (
    DemonstrationSet,
    PreferenceSet,
    TextGenerationEnv,
    TextGenerationVectorEnv,
    demonstrations_from_minari,
    preferences_from_minari,
    record_minari,
    replay,
)
from textenv.agents import TablePolicy
from textenv.minari_recording import minari_episodes
from textenv.toy import standard_toy
from textenv.wrappers import MissingEOSPenalty
from textenv.wrappers import vector as vector_wrappers

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def reference():
    return TablePolicy(standard_toy().reference_logits)


def tilted():
    logits = np.random.default_rng(0).normal(size=(8, 6))
    return TablePolicy(logits)


def toy(**options):
    return gym.make_vec("textenv/Toy-v0", num_envs=8, **options)


def stepped(dataset, env):
    """Every recorded episode equals what the environment gives for its actions."""
    for record in dataset.iterate_episodes():
        ids, mask = record.observations["input_ids"], record.observations["attention_mask"]
        prompt = ids[0][mask[0] == 1].tolist()
        steps = write(env, record.actions.tolist(), options={"prompt": prompt})
        assert len(record.actions) == len(record.rewards) == len(ids) - 1
        for key, array in record.observations.items():
            np.testing.assert_array_equal(array, [o[key] for o in steps["observations"]])
            assert array.dtype == steps["observation"][key].dtype
        np.testing.assert_allclose(record.rewards, steps["rewards"], atol=1e-9)
        ends = list(zip(record.terminations.tolist(), record.truncations.tolist(), strict=True))
        assert ends == steps["ends"]
        for key, values in record.infos.items():
            assert np.isnan(values[:-1]).all() and values[-1] == pytest.approx(steps["info"][key])
            assert len(values) == len(ids)


class TestRecording:
    def test_holds_what_stepping_the_toy_gives(self):
        policy = tilted()
        dataset = record_minari(policy, toy(kl_coef=0.1), 20, "toy/tilted-v0", seed=3)
        assert dataset.total_episodes == 20
        env = gym.make("textenv/Toy-v0", kl_coef=0.1)
        env.get_wrapper_attr("attach_policy")(importlib.import_module("textenv.agents.policy").PolicyLogprobs(policy))
        stepped(dataset, env)
        assert any(np.abs(record.rewards[:-1]).max(initial=0) > 0 for record in dataset)  # the toll was charged
        assert set(dataset[0].infos) == {"score", "kl"}

    def test_holds_what_stepping_prompts_of_different_lengths_gives(self):
        rng = np.random.default_rng(0)
        envs = vector_wrappers.MissingEOSPenalty(TextGenerationVectorEnv(4, text_task()), 0.5)
        policy = lambda o: rng.choice([END, GOOD, BAD, FILM, S], len(o["input_ids"]))  # noqa: E731
        dataset = record_minari(policy, envs, 30, "texts-v0")
        stepped(dataset, MissingEOSPenalty(TextGenerationEnv(text_task()), 0.5))
        assert set(dataset[0].infos) == {"score", "shaped_score"}
        assert len({int(record.observations["attention_mask"][0].sum()) for record in dataset}) > 1
        assert {bool(record.truncations[-1]) for record in dataset} == {True, False}
        assert dataset.env_spec is None  # they were not made by an id

    def test_episodes_can_share_their_prompts(self):
        envs, rng = TextGenerationVectorEnv(4, text_task()), np.random.default_rng(0)
        policy = lambda o: rng.integers(0, 10, len(o["input_ids"]))  # noqa: E731
        dataset = record_minari(policy, envs, 12, "pairs-v0", samples_per_prompt=2)
        prompts = [tuple(d.prompt) for d in demonstrations_from_minari(dataset)]
        assert prompts[::2] == prompts[1::2] and len(set(prompts)) > 1
        assert preferences_from_minari(dataset, envs, ties="random").pairs == 6
        with pytest.raises(ValueError, match="`episodes` should be a multiple of samples_per_prompt=2, got 5"):
            record_minari(policy, envs, 5, "odd-v0", samples_per_prompt=2)

    def test_can_be_read_again_and_knows_its_environment(self):
        record_minari(reference(), toy(length_limit="terminate"), 5, "toy/again-v0", description="five")
        dataset = minari.load_dataset("toy/again-v0")
        assert dataset.storage.metadata["description"] == "five"
        env = dataset.recover_environment()
        assert env.unwrapped.task.length_limit == "terminate"
        stepped(dataset, env)

    def test_options_that_json_cannot_hold_leave_the_data(self):
        dataset = record_minari(reference(), toy(language=standard_toy()), 5, "toy/language-v0")
        assert dataset.total_episodes == 5 and dataset.env_spec is None

    def test_equal_seeds_give_equal_episodes_and_environments_are_put_back(self):
        envs = toy()
        envs.reset(seed=0)
        before = envs.unwrapped.state_dict()
        found = [
            [tuple(record.actions) for record in record_minari(reference(), envs, 10, f"toy/seed{i}-v0", seed=seed)]
            for i, seed in enumerate((0, 0, 1))
        ]
        assert found[0] == found[1] != found[2]
        assert envs.unwrapped.state_dict() == before

    def test_refusals(self, monkeypatch):
        with pytest.raises(ValueError, match="`episodes` should be an integer of at least 1, got 0"):
            record_minari(reference(), toy(), 0, "toy/none-v0")
        with pytest.raises(TypeError, match="vector text environments"):
            record_minari(reference(), gym.make("textenv/Toy-v0"), 1, "toy/single-v0")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"`record_minari` needs minari.*pip install 'textenv\[minari\]'"):
            record_minari(reference(), toy(), 1, "toy/missing-v0")


WRITTEN = (
    ("a film", [GOOD, GOOD, END]),  # with the next one: 2 against 1
    ("a film", [GOOD, END]),
    (" films", [BAD, END]),  # -1 against 1; ids that no text encodes to
    (" films", [FILM, S, GOOD, END]),
    ("a film", [DOT, END]),  # a tie
    ("a film", [FILMS, END]),
    (" very good", [GOOD, END]),  # without a partner
    (" films", [BAD, BAD, END]),  # the same twice
    (" films", [BAD, BAD, END]),
    ("a film", [GOOD, GOOD, GOOD, GOOD, GOOD]),  # cut: 5 against 1, less a penalty
    ("a film", [GOOD, DOT, END]),
)


def hand_made(name="hand-v0", penalty=0.0, drop=()):
    """A dataset of given responses, scored by `count_good`."""
    task = text_task(scorer_errors="drop")
    envs = vector_wrappers.MissingEOSPenalty(TextGenerationVectorEnv(3, task), penalty)
    prompts = [" a film" if prompt == "a film" else prompt for prompt, _ in WRITTEN]
    scores = None
    if drop:
        scores = np.array([np.nan if row in drop else 1.0 for row in range(len(WRITTEN))])
    replayed = replay(envs, prompts, [response for _, response in WRITTEN], scores=scores)
    spaces = {"observation_space": envs.single_observation_space, "action_space": envs.single_action_space}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(name, minari_episodes(replayed, task.mdp), **spaces), task


class TestDemonstrations:
    def test_are_the_tokens_that_were_taken(self):
        dataset, task = hand_made()
        demonstrations = demonstrations_from_minari(dataset)
        assert [list(d.response) for d in demonstrations] == [response for _, response in WRITTEN]
        encoded = DemonstrationSet.encode(demonstrations, task)
        assert [list(ids) for ids in encoded.responses] == [response for _, response in WRITTEN]  # no stop id is added
        assert [prompt.text for prompt in encoded.prompts[:3]] == [" a film", " a film", " films"]
        assert demonstrations[3].place == "episode 3"

    def test_episodes_can_be_chosen_before(self):
        dataset, _ = hand_made()
        best = dataset.filter_episodes(lambda episode: episode.infos["score"][-1] > 2)
        assert {d.response for d in demonstrations_from_minari(best)} == {(GOOD, GOOD, END), (GOOD,) * 5}

    def test_budgets_that_count_as_ends_add_no_stop_id(self):
        envs = toy(length_limit="terminate")
        dataset = record_minari(lambda o: np.full(len(o["input_ids"]), 3), envs, 4, "toy/long-v0")
        assert all(record.terminations[-1] for record in dataset)
        assert set(DemonstrationSet.encode(demonstrations_from_minari(dataset), envs).responses) == {(3,) * 8}


class TestPreferences:
    def test_prefer_the_higher_score_of_two_answers_to_one_prompt(self):
        dataset, task = hand_made(penalty=6.0)
        labelled = preferences_from_minari(dataset, task)
        found = [(p.ids.chosen, p.ids.rejected) for p in labelled.preferences]
        assert found == [
            ((GOOD, GOOD, END), (GOOD, END)),
            ((GOOD,) * 5, (GOOD, DOT, END)),
            ((FILM, S, GOOD, END), (BAD, END)),
        ]
        assert labelled.preferences[2].prompt == " films" and labelled.preferences[2].chosen == " films good"
        assert (labelled.pairs, labelled.equal, labelled.dropped_ties, labelled.empty) == (5, 1, 1, 0)
        encoded = PreferenceSet.encode(labelled.preferences, task)
        assert all(encoded.as_sampled)  # " film", "s" would encode as " films"

    def test_prefer_the_higher_return(self):
        dataset, task = hand_made(penalty=6.0)
        labelled = preferences_from_minari(dataset, task, figure="return", margin=True)
        assert labelled.preferences[1].ids.chosen == (GOOD, DOT, END)  # the cut response pays the penalty
        assert labelled.preferences[1].margin == pytest.approx(1 - (5 - 6))

    def test_episodes_without_a_score_are_left_out(self):
        dataset, task = hand_made(drop=(0,))
        firsts = preferences_from_minari(dataset, task, ties="random").preferences[0]
        assert {firsts.ids.chosen, firsts.ids.rejected} == {(GOOD, END), (DOT, END)}

    def test_a_judge_who_errs_is_a_judge_of_the_seed(self):
        envs = toy()
        dataset = record_minari(reference(), envs, 160, "toy/judge-v0")
        found = [preferences_from_minari(dataset, envs, noise=1.0, seed=seed) for seed in (0, 0, 1)]
        assert found[0].preferences == found[1].preferences != found[2].preferences
        assert 0.55 < found[0].agreement < 0.95
        assert preferences_from_minari(dataset, envs).agreement == 1.0

    def test_refusals(self):
        dataset, task = hand_made()
        with pytest.raises(ValueError, match=r"`figure` should be one of \('score', 'return'\), got 'reward'"):
            preferences_from_minari(dataset, task, figure="reward")
        with pytest.raises(ValueError, match="vocabulary of the dataset, 12 tokens, got 6"):
            preferences_from_minari(dataset, toy())
        with pytest.raises(TypeError, match="TextTask"):
            preferences_from_minari(dataset, gym.make("CartPole-v1"))
        single = dataset.filter_episodes(lambda episode: episode.id < 1)
        with pytest.raises(ValueError, match="two episodes of one prompt, got 1"):
            preferences_from_minari(single, task)


def fake(records, **spaces):
    task = text_task()
    defaults = {"observation_space": task.observation_space(), "action_space": task.action_space()}
    return SimpleNamespace(**(defaults | spaces), iterate_episodes=lambda: iter(records))


def test_other_datasets_are_refused():
    cartpole = gym.make("CartPole-v1")
    spaces = {"observation_space": cartpole.observation_space, "action_space": cartpole.action_space}
    with pytest.raises(ValueError, match="should be a Minari dataset of a text environment"):
        demonstrations_from_minari(fake([], **spaces))
    ids, mask = np.array([[CLOSE, GOOD, 0], [CLOSE, GOOD, BAD]]), np.array([[0, 1, 0], [0, 1, 1]])
    record = SimpleNamespace(id=7, actions=np.array([BAD]), rewards=np.array([1.0]), infos={})
    record.observations = {"input_ids": ids, "attention_mask": mask}
    (demonstration,) = demonstrations_from_minari(fake([record]))
    assert (demonstration.prompt, demonstration.response) == ((GOOD,), (BAD,))
    with pytest.raises(ValueError, match="episode 7 should have its score in `infos`, got"):
        preferences_from_minari(fake([record, record]), text_task())
    record.actions = np.array([GOOD])
    with pytest.raises(ValueError, match=r"episode 7 should show its prompt .* the prompt \[1\], the actions \[1\]"):
        demonstrations_from_minari(fake([record]))


@pytest.mark.filterwarnings("ignore")  # it leaves a temporary folder to the garbage collector
def test_minari_s_own_collector_records_episodes_that_can_be_read():
    pytest.importorskip("jax", reason="Minari's DataCollector needs JAX, which is large; record_minari does not")
    env = minari.DataCollector(gym.make("textenv/Toy-v0"))
    rng = np.random.default_rng(0)
    for options in (None, {"minari_autoseed": False}, {"prompt": [3]}, {"prompt": [3]}):
        env.reset(options=options)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(rng.integers(6))
            ended = terminated or truncated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = env.create_dataset("toy/collected-v0")
    stepped(dataset, gym.make("textenv/Toy-v0"))
    labelled = preferences_from_minari(dataset, env, figure="return", ties="random")
    assert labelled.pairs == 2


def test_the_example_learns_and_reads_its_dataset_again(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    example = importlib.import_module("minari_dataset")
    arguments = example.Arguments(episodes=400, epochs=30)
    try:
        rows = example.main(arguments)
    finally:
        torch.set_num_threads(threads)
    assert rows["SFT on the best"].score > rows["reference"].score + 0.5
    assert rows["DPO on pairs"].objective > rows["reference"].objective + 0.5
    assert rows["DPO on pairs"].regret > 0
    again = example.recorded(None, arguments)  # no environment: nothing is recorded anew
    assert (again.id, again.total_episodes) == (rows["dataset"].id, 400)
    assert (tmp_path / "runs" / "minari" / "datasets" / "toy").is_dir()
