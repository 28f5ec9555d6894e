"""Comparisons as pairs of episodes: whose ids they hold, where they end, and what becomes of those that do not fit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from agent_helpers import TOY, lm_envs, toy_envs
from helpers import BAD, CLOSE, DOT, END, FILM, FILMS, GOOD, IS, A, S, text_task

from textenv import PreferenceSet
from textenv.agents import LanguageModelPolicy, TablePolicy, sample_preferences
from textenv.rewards import Preference, SampledIds, load_preferences, save_preferences, split_preferences

TASK = text_task(prompts=[" a film", " films"])


def pair(chosen=" is good.", rejected=" is bad.", prompt=" a film", **options):
    return Preference(prompt, chosen, rejected, **options)


def responses(pairs):
    return [list(response) for response in pairs.episodes.responses]


def test_texts_are_encoded_and_end_with_a_stop():
    pairs = PreferenceSet.encode([pair(), pair(" films", " good")], TASK)
    assert len(pairs) == 2 and pairs.as_sampled == (False, False)
    assert responses(pairs) == [[IS, GOOD, DOT, END], [IS, BAD, DOT, END], [FILMS, END], [GOOD, END]]
    assert [list(p.ids) for p in pairs.episodes.prompts] == [[A, FILM]] * 4
    assert responses(PreferenceSet.encode([pair()], TASK, ended=False)) == [[IS, GOOD, DOT], [IS, BAD, DOT]]
    assert "2 pairs, 12 response tokens, 0 as they were sampled" in repr(pairs)


def test_sampled_ids_are_taken_as_they_are():
    """ " film" and "s" read " films", which encodes as one id; the second response was cut by the budget."""
    ids = SampledIds((A, FILM), (FILM, S, END), (BAD,) * 5)
    pairs = PreferenceSet.encode([pair(" films", " bad" * 5, ids=ids)], TASK)
    assert responses(pairs) == [[FILM, S, END], [BAD] * 5] and pairs.as_sampled == (True,)
    with pytest.raises(ValueError, match="a response of at most 5 tokens, got 6 with its end"):
        PreferenceSet.encode([pair(" films", " bad" * 5)], TASK)


def test_ids_of_another_tokenizer_are_not_taken():
    for ids in (SampledIds((0,), (GOOD, END), (BAD, END)), SampledIds((0,), (500,), (3,))):
        pairs = PreferenceSet.encode([pair(ids=ids)], TASK)
        assert responses(pairs)[0] == [IS, GOOD, DOT, END] and pairs.as_sampled == (False,)


def test_states_hold_pairs_one_behind_the_other():
    pairs = PreferenceSet.encode([pair(), pair(" films", " good", prompt=" films")], TASK)
    state = pairs.state([1])
    assert state.input_ids.tolist() == [
        [CLOSE, FILMS, FILMS, END, CLOSE, CLOSE, CLOSE],
        [CLOSE, FILMS, GOOD, END, CLOSE, CLOSE, CLOSE],
    ]
    assert state.attention_mask.tolist() == [[0, 1, 1, 1, 0, 0, 0]] * 2
    np.testing.assert_array_equal(pairs.state().input_ids[2:], state.input_ids)


def test_what_no_episode_holds():
    long, alike = pair(" bad" * 5), pair(" good" * 5 + " bad", " good" * 5 + ".")
    with pytest.raises(ValueError, match=r"preferences\[1\] should have a response of at most 5.*or say what to do"):
        PreferenceSet.encode([pair(), long], TASK)
    dropped = PreferenceSet.encode([pair(), long], TASK, unfit="drop")
    assert (len(dropped), dropped.dropped, dropped.cut) == (1, 1, 0)
    cut = PreferenceSet.encode([long, alike], TASK, unfit="cut")
    assert responses(cut) == [[BAD] * 5, [IS, BAD, DOT, END]]
    assert (len(cut), cut.dropped, cut.cut) == (1, 1, 1)  # where both are cut to the same, nothing is left to compare
    with pytest.raises(ValueError, match="At least one pair should fit the task, got 1, of which 1 were dropped"):
        PreferenceSet.encode([long], TASK, unfit="drop")
    for unfit in ("error", "cut"):
        with pytest.raises(ValueError, match="should have a prompt of at most 2 tokens, got 6"):
            PreferenceSet.encode([pair(prompt=" a very bad film is not")], TASK, unfit=unfit)


def test_what_cannot_be_encoded():
    with pytest.raises(ValueError, match="a list of at least one Preference"):
        PreferenceSet.encode([], TASK)
    with pytest.raises(TypeError, match=r"preferences\[0\] should be a Preference"):
        PreferenceSet.encode([("a", "b", "c")], TASK)
    with pytest.raises(ValueError, match="`unfit` should be one of"):
        PreferenceSet.encode([pair()], TASK, unfit="skip")
    with pytest.raises(TypeError, match="`envs` should be text environments"):
        PreferenceSet.encode([pair()], gym.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"The prompt of preferences\[0\] should have at least one token"):
        PreferenceSet.encode([pair(prompt="")], TASK)
    with pytest.raises(ValueError, match="`eos_id` should be one of the task's stop ids"):
        PreferenceSet.encode([pair()], TASK, eos_id=GOOD)


def test_what_wrappers_forbid_is_refused():
    envs = toy_envs(2, min_length=2)
    fine = Preference(" 0", " 1 1 0", " 2 2 0")
    pairs = PreferenceSet.encode([fine], envs)
    assert pairs.constraint is not None and pairs.action_masks(pairs.state()).index.shape == (2, 8)
    with pytest.raises(ValueError, match=r"preferences\[0\], chosen to preferences\[0\], rejected"):
        PreferenceSet.encode([Preference(" 0", " 1 1 0", " 0")], envs)


def test_a_split_keeps_pairs_and_prompts_together():
    prompts = [" a film", " films", " good", " bad"]
    ids = SampledIds((FILMS,), (IS, GOOD, DOT, END), (IS, BAD, DOT, END))
    preferences = [pair(prompt=prompt, ids=ids if prompt == " films" else None) for prompt in prompts for _ in range(3)]
    pairs = PreferenceSet.encode(preferences, TASK)
    train, held_out = pairs.split(0.5, seed=1)
    assert len(train) + len(held_out) == 12
    sides = [{p.text for p in side.episodes.prompts} for side in (train, held_out)]
    assert sides[0] | sides[1] == set(prompts) and not sides[0] & sides[1]
    for side in (train, held_out):
        assert responses(side) == responses(pairs)[: 2 * len(side)]  # chosen before rejected
        assert sum(side.as_sampled) == (3 if " films" in {p.text for p in side.episodes.prompts} else 0)
    assert len({s.fingerprint for s in (pairs, train, held_out)}) == 3


def test_sampled_preferences_carry_what_was_sampled(tiny_model, tmp_path):
    """Also through a split by prompts; files hold texts, and so do comparisons for a reward model."""
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    envs = lm_envs(tiny_model, 4, stop=[])
    found = sample_preferences(policy, None, envs, None, 60, 0).preferences
    train, held_out = split_preferences(found, 0.4)
    sides = [PreferenceSet.encode(side, envs) for side in (train, held_out)]
    assert all(all(side.as_sampled) for side in sides) and sum(map(len, sides)) == len(found) > 20
    budget = envs.unwrapped.task.mdp.max_response_tokens
    cut = [r for side in sides for r in side.episodes.responses if len(r) == budget]
    assert cut  # none of them got an end that nobody chose
    for preference in found:
        assert policy.tokenizer.decode(preference.ids.chosen) == preference.chosen
    save_preferences(found, tmp_path / "pairs.jsonl")
    read = load_preferences(tmp_path / "pairs.jsonl")
    assert read == found and all(preference.ids is None for preference in read)
    changed = sum(
        policy.tokenizer.encode(p.prompt + getattr(p, side)) != [*p.ids.prompt, *getattr(p.ids, side)]
        for p in found
        for side in ("chosen", "rejected")
    )
    assert changed  # what encoding the texts would have given


def test_the_chosen_ids_are_those_of_the_chosen_text():
    noise = np.random.default_rng(1).normal(size=TOY.reference_logits.shape)
    one, other = TablePolicy(TOY.reference_logits), TablePolicy(TOY.reference_logits + 2 * noise)
    envs = toy_envs(8)
    read = envs.unwrapped.task.tokenizer.decode
    found = sample_preferences(one, other, envs, None, 100, 0, noise=3.0).preferences
    assert {p.ids.chosen == p.ids.rejected for p in found} == {False}
    for preference in found:
        assert (read(preference.ids.chosen), read(preference.ids.rejected)) == (preference.chosen, preference.rejected)
