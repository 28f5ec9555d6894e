"""Text environments, each of which breaks one rule. `SINGLE` and `VECTOR`: class to the one check that must notice."""

from __future__ import annotations

import copy
import dataclasses

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode

from textenv import TextGenerationEnv, TextGenerationVectorEnv
from textenv.mdp import TokenState


class Step(TextGenerationEnv):
    """Edits what `step` returns, through `changed`."""

    def step(self, action):
        return self.changed(*super().step(action))


class Seen(TextGenerationEnv):
    """Edits observations, through `seen`."""

    def _observation(self):
        return self.seen({key: array.copy() for key, array in super()._observation().items()})


# Spaces and observations.


class OneActionShort(TextGenerationEnv):
    def __init__(self, task, **options):
        super().__init__(task, **options)
        self.action_space = gym.spaces.Discrete(task.mdp.vocab_size - 1)


class SpaceOfInt64(TextGenerationEnv):
    def __init__(self, task, **options):
        super().__init__(task, **options)
        ids = gym.spaces.Box(0, task.mdp.vocab_size - 1, (task.mdp.length,), np.int64)
        self.observation_space = gym.spaces.Dict({**self.observation_space, "input_ids": ids})


class FlatSpace(TextGenerationEnv):
    def __init__(self, task, **options):
        super().__init__(task, **options)
        self.observation_space = self.observation_space["input_ids"]


class IdsOfInt64(Seen):
    def seen(self, o):
        return {**o, "input_ids": o["input_ids"].astype(np.int64)}


class PadOutsideTheSpace(Seen):
    def seen(self, o):
        return {**o, "input_ids": np.where(o["attention_mask"] == 1, o["input_ids"], -100).astype(np.int32)}


class NoAttentionMask(Seen):
    def seen(self, o):
        return {"input_ids": o["input_ids"]}


class GrowingObservations(Seen):
    def seen(self, o):
        end = self.task.mdp.max_prompt_tokens + int(self._state_now().response_lengths[0])
        return {key: array[:end] for key, array in o.items()}


class RightPadding(Seen):
    def seen(self, o):
        width = self.task.mdp.max_prompt_tokens
        pads = int((o["attention_mask"][:width] == 0).sum())
        return {key: np.concatenate([np.roll(a[:width], -pads), a[width:]]) for key, a in o.items()}


class PromptChangesMidEpisode(Seen):
    def seen(self, o):
        width, written = self.task.mdp.max_prompt_tokens, int(self._state_now().response_lengths[0])
        o["input_ids"][width - 1] = (o["input_ids"][width - 1] + (written > 1)) % self.task.mdp.vocab_size
        return o


class OneColumnLate(Seen):
    def seen(self, o):
        width = self.task.mdp.max_prompt_tokens
        return {key: np.concatenate([a[:width], np.roll(a[width:], 1)]) for key, a in o.items()}


class MaskFromIds(Seen):
    """Its mask leaves out every pad id; where that is the stop id, the stop is lost."""

    def seen(self, o):
        width = self.task.mdp.max_prompt_tokens
        o["attention_mask"][width:] &= (o["input_ids"] != self.task.mdp.pad_id)[width:]
        return o


class OtherTokenThanSampled(Seen):
    """Decodes and encodes again, as it were: id 3 comes back as id 5."""

    def seen(self, o):
        width = self.task.mdp.max_prompt_tokens
        o["input_ids"][width:] = np.where(o["input_ids"][width:] == 3, 5, o["input_ids"][width:])
        return o


# Ends and rewards.


class BothEnds(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated or truncated, terminated or truncated, info


class StopTruncates(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, False, terminated or truncated, info


class BudgetTerminates(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated or truncated, False, info


class EndsAsNumbers(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, int(terminated), int(truncated), info


class ScorePaidTwice(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, 2 * reward, terminated, truncated, info


class RewardBeforeTheEnd(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward if info else 0.01, terminated, truncated, info


class NotANumber(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, np.nan if info else reward, terminated, truncated, info


class RewardArray(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, np.array([reward]), terminated, truncated, info


# Infos and text.


class NoFinishReason(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, {k: v for k, v in info.items() if k != "finish_reason"}


class WrongFinishReason(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, info and {**info, "finish_reason": "stop"}


class ScoreInEveryStep(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, {"score": 0.0, **info}


class ScoreAsText(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, info and {**info, "score": str(info["score"])}


class LengthWithoutTheStop(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        info = info and {**info, "response_length": info["response_length"] - terminated}
        return observation, reward, terminated, truncated, info


class ResponseWithThePrompt(Step):
    def changed(self, observation, reward, terminated, truncated, info):
        info = info and {**info, "response": info["prompt"] + info["response"]}
        return observation, reward, terminated, truncated, info


class SilentReset(TextGenerationEnv):
    def reset(self, **options):
        return super().reset(**options)[0], {}


class StaleRender(TextGenerationEnv):
    """Shows the text as it was one token ago."""

    def step(self, action):
        self._before = super().render()
        return super().step(action)

    def render(self):
        return self._before if self._state_now().response_lengths[0] else super().render()


# Ownership, seeds, refusals.


class ViewsOfTheState(TextGenerationEnv):
    def _observation(self):
        state = self._state_now()
        return {"input_ids": state.input_ids[0], "attention_mask": state.attention_mask[0]}


class OneBuffer(TextGenerationEnv):
    """Fills the same arrays each time; its own state is apart from them."""

    def _observation(self):
        found = super()._observation()
        buffer = vars(self).setdefault("buffer", found)
        for key, array in found.items():
            buffer[key][:] = array
        return buffer


class UnseededPrompts(TextGenerationEnv):
    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.np_random = np.random.default_rng()
        return super().reset(options=options)


class SeedsOnce(TextGenerationEnv):
    def reset(self, *, seed=None, options=None):
        seed = None if vars(self).setdefault("seeded", False) else seed
        self.seeded = True
        return super().reset(seed=seed, options=options)


class WornOut(Step):
    """Pays less for every response that it has ever seen."""

    def changed(self, observation, reward, terminated, truncated, info):
        if info:
            self.seen = vars(self).get("seen", 0) + 1
            info["score"] = reward = reward - self.seen
        return observation, reward, terminated, truncated, info


class StepsBeforeReset(TextGenerationEnv):
    def step(self, action):
        if self._state is None:
            self.reset()
        return super().step(action)


class StepsAfterTheEnd(TextGenerationEnv):
    def step(self, action):
        if self._ended:
            return self._observation(), 0.0, True, False, {}
        return super().step(action)


class RefusesByAssertion(TextGenerationEnv):
    def step(self, action):
        assert self.action_space.contains(action), "no such action"
        return super().step(action)


class ClipsActions(TextGenerationEnv):
    def step(self, action):
        return super().step(np.clip(action, 0, self.task.mdp.vocab_size - 1) if np.ndim(action) == 0 else action)


class LosesTheEpisodeOnABadAction(TextGenerationEnv):
    def step(self, action):
        try:
            return super().step(action)
        except ValueError:
            self.reset(options={"prompt": [1]})
            raise


class NeverWrites(TextGenerationEnv):
    def step(self, action):
        if self._state_now().response_lengths[0] == 2:
            raise RuntimeError("out of ink")
        return super().step(action)


# Copies.


class CopiesShareTheGenerator(TextGenerationEnv):
    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        vars(twin).update({k: v if k == "_np_random" else copy.deepcopy(v, memo) for k, v in vars(self).items()})
        return twin


class CopiesShareTheState(TextGenerationEnv):
    """The copy is the environment itself."""

    def __deepcopy__(self, memo):
        return self


class DeepCopies:
    """Deep copies are sound, whatever pickling does."""

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        vars(twin).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items()})
        return twin


class PicklesWithoutTheGenerator(DeepCopies, TextGenerationEnv):
    def __getstate__(self):
        return {**vars(self), "_np_random": None}


class PicklesWithoutTheEpisode(DeepCopies, TextGenerationEnv):
    def __getstate__(self):
        return {**vars(self), "_state": None}


class CannotBePickled(TextGenerationEnv):
    def __init__(self, task, **options):
        super().__init__(task, **options)
        self.on_end = lambda: None


class RecordsOtherArguments(gym.Wrapper, RecordConstructorArgs):
    """Its spec makes another environment than it is: the constructor's default, whatever was given."""

    def __init__(self, env, factor=1.0):
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self.factor = factor

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward * self.factor, terminated, truncated, info


SINGLE = {
    OneActionShort: "spaces",
    SpaceOfInt64: "spaces",
    FlatSpace: "spaces",
    IdsOfInt64: "observations",
    PadOutsideTheSpace: "observations",
    NoAttentionMask: "observations",
    GrowingObservations: "observations",
    RightPadding: "prompt columns",
    PromptChangesMidEpisode: "prompt columns",
    OneColumnLate: "response columns",
    MaskFromIds: "response columns",
    OtherTokenThanSampled: "response columns",
    BothEnds: "ends",
    StopTruncates: "ends",
    BudgetTerminates: "ends",
    EndsAsNumbers: "ends",
    ScorePaidTwice: "rewards",
    RewardBeforeTheEnd: "rewards",
    NotANumber: "rewards",
    RewardArray: "rewards",
    NoFinishReason: "infos",
    WrongFinishReason: "infos",
    ScoreInEveryStep: "infos",
    ScoreAsText: "infos",
    LengthWithoutTheStop: "infos",
    ResponseWithThePrompt: "infos",
    SilentReset: "infos",
    StaleRender: "render",
    ViewsOfTheState: "aliasing",
    OneBuffer: "aliasing",
    UnseededPrompts: "determinism",
    SeedsOnce: "determinism",
    WornOut: "determinism",
    StepsBeforeReset: "reset needed",
    StepsAfterTheEnd: "reset needed",
    RefusesByAssertion: "bad actions",
    ClipsActions: "bad actions",
    LosesTheEpisodeOnABadAction: "bad actions",
    NeverWrites: "episodes",
    CopiesShareTheGenerator: "deepcopy",
    CopiesShareTheState: "deepcopy",
    PicklesWithoutTheGenerator: "pickle",
    PicklesWithoutTheEpisode: "pickle",
    CannotBePickled: "pickle",
}


class Rows(TextGenerationVectorEnv):
    """Edits what `step` returns, through `changed`."""

    def step(self, actions):
        return self.changed(*super().step(actions))


class FinalObservationLost(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        infos = {key: value for key, value in infos.items() if not key.endswith("final_obs")}
        return observations, rewards, terminations, truncations, infos


class FinalInfoLost(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        if "final_info" in infos:
            infos = {**infos, "final_info": {}}
        return observations, rewards, terminations, truncations, infos


class FinalObservationIsTheNext(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        for row in np.flatnonzero(infos.get("_final_obs", [])):
            infos["final_obs"][row] = {key: array[row].copy() for key, array in observations.items()}
        return observations, rewards, terminations, truncations, infos


class InfosWithoutMasks(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        for ends in (infos, infos.get("final_info", {})):
            ends.pop("_score", None)
        return observations, rewards, terminations, truncations, infos


class RewardForResetting(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and "_prompt" in infos and "score" not in infos:
            rewards = np.where(infos["_prompt"], 1.0, rewards)
        return observations, rewards, terminations, truncations, infos


class OneSeedForAll(TextGenerationVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed if seed is None else [seed] * self.num_envs, options=options)


class SeedsFromTheLastRow(TextGenerationVectorEnv):
    def reset(self, *, seed=None, options=None):
        if isinstance(seed, int):
            seed = [seed + self.num_envs - 1 - row for row in range(self.num_envs)]
        return super().reset(seed=seed, options=options)


class ScoresOfTheNeighbour(TextGenerationVectorEnv):
    """Rows that end together get each other's scores."""

    def __init__(self, num_envs, task, **options):
        def swapped(prompts, responses):
            return np.asarray(task.scorer(prompts, responses))[::-1]

        super().__init__(num_envs, dataclasses.replace(task, scorer=swapped), **options)


class MaskedResetsFromOneGenerator(TextGenerationVectorEnv):
    """In DISABLED mode, rows that are reset by mask draw from the first row's generator."""

    def reset(self, *, seed=None, options=None):
        rows = list(self._generators.rows)
        if options and "reset_mask" in options:
            self._generators.rows = rows[:1] * self.num_envs
        try:
            return super().reset(seed=seed, options=options)
        finally:
            if options and "reset_mask" in options:
                self._generators.rows = rows


class UnnamedMode(TextGenerationVectorEnv):
    def __init__(self, num_envs, task, **options):
        super().__init__(num_envs, task, **options)
        self.metadata = {**self.metadata, "autoreset_mode": None}


class SpaceOfOneRow(TextGenerationVectorEnv):
    def __init__(self, num_envs, task, **options):
        super().__init__(num_envs, task, **options)
        self.observation_space = self.single_observation_space


class ReplayPaysMore(TextGenerationVectorEnv):
    def plan(self, scores, idle_rows=None):
        super().plan(None if scores is None else scores + 1.0, idle_rows)


class RowsPaddedOnTheRight(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        width = self.task.mdp.max_prompt_tokens
        pads = int((observations["attention_mask"][0, :width] == 0).sum())
        for array in observations.values():
            array[0, :width] = np.roll(array[0, :width], -pads)
        return observations, rewards, terminations, truncations, infos


class RowsOfTheState(TextGenerationVectorEnv):
    """Edits of an agent reach the state."""

    def step(self, actions):
        result = super().step(actions)
        state = self._state
        return {"input_ids": state.input_ids, "attention_mask": state.attention_mask}, *result[1:]


class OneBufferForAll(Rows):
    def changed(self, observations, rewards, terminations, truncations, infos):
        buffer = vars(self).setdefault("buffer", observations)
        for key, array in observations.items():
            buffer[key][:] = array
        return buffer, rewards, terminations, truncations, infos


class GoesOnAfterTheEnd(TextGenerationVectorEnv):
    def step(self, actions):
        if self.autoreset_mode is AutoresetMode.DISABLED and self._planned_scores is None and self._ended.any():
            self.reset(options={"reset_mask": self._ended})
        return super().step(actions)


class RendersPromptsOnly(TextGenerationVectorEnv):
    def reset(self, *, seed=None, options=None):
        observations, infos = super().reset(seed=seed, options=options)
        self.prompt_texts = tuple(infos["prompt"])
        return observations, infos

    def render(self):
        return self.prompt_texts


class CopiesShareGenerators(TextGenerationVectorEnv):
    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        vars(twin).update({k: v if k == "_generators" else copy.deepcopy(v, memo) for k, v in vars(self).items()})
        return twin


class ForgetsRowsInPickles(DeepCopies, TextGenerationVectorEnv):
    def __getstate__(self):
        lengths = np.zeros(self.num_envs, dtype=np.int64)
        state = self._state and TokenState(self._state.input_ids, self._state.attention_mask, lengths)
        return {**vars(self), "_state": state}


class CutsLongActionArrays(TextGenerationVectorEnv):
    def step(self, actions):
        return super().step(actions[: self.num_envs])


VECTOR = {
    FinalObservationLost: "vector SAME_STEP",
    FinalInfoLost: "infos",
    FinalObservationIsTheNext: "vector SAME_STEP",
    InfosWithoutMasks: "infos",
    RewardForResetting: "vector NEXT_STEP",
    OneSeedForAll: "row seeds",
    SeedsFromTheLastRow: "row seeds",
    MaskedResetsFromOneGenerator: "vector DISABLED",
    UnnamedMode: "spaces",
    SpaceOfOneRow: "spaces",
    ReplayPaysMore: "replay",
    RowsPaddedOnTheRight: "prompt columns",
    RowsOfTheState: "aliasing",
    OneBufferForAll: "aliasing",
    GoesOnAfterTheEnd: "reset needed",
    RendersPromptsOnly: "render",
    CopiesShareGenerators: "deepcopy",
    ForgetsRowsInPickles: "pickle",
    CutsLongActionArrays: "bad actions",
}
"""`ScoresOfTheNeighbour` has a test of its own: three modes notice it."""

__all__ = ["SINGLE", "VECTOR", "RecordsOtherArguments", "ScoresOfTheNeighbour"]
