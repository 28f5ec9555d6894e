"""What is to be checked: from an id, an environment or a factory to fresh single and vector environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from textenv.env import TextGenerationEnv
from textenv.task import TextTask
from textenv.testing.stand_in import attach_stand_ins
from textenv.vector_env import TextGenerationVectorEnv

Make = Callable[[], Any]
VectorFactory = Callable[[int, AutoresetMode], Any]
"""``(num_envs, autoreset_mode) -> envs``."""


@dataclass
class Subject:
    """Fresh environments of one kind, and why some cannot be had.

    Attributes:
        name: for messages.
        task: what the environments share.
        num_envs: N.
        single: gives a single environment; None if there is none.
        vectors: gives N rows, per autoreset mode that can be reached.
        same_stack: whether single and vector carry the same wrappers; else only their insides are comparable.
        touched: which of ``"single"`` and ``"vector"`` may have been reset by the caller already.
        spec: of the single environment, if `gym.make` made it.
        reasons: what cannot be had, and why.
    """

    name: str
    task: TextTask
    num_envs: int
    single: Make | None = None
    vectors: dict[AutoresetMode, Callable[[int], Any]] = field(default_factory=dict)
    same_stack: bool = True
    touched: set[str] = field(default_factory=set)
    spec: EnvSpec | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def make_single(self) -> Any:
        """A fresh single environment, with log-probabilities for layers that want some."""
        assert self.single is not None
        return self.prepared(self.single())

    def make_vector(self, mode: AutoresetMode, num_envs: int) -> Any:
        """Fresh rows, with log-probabilities for layers that want some.

        Raises:
            LookupError: there are none of that number.
        """
        return self.prepared(self.vectors[mode](num_envs))

    def prepared(self, env: Any) -> Any:
        """The environment, with log-probabilities for layers that want some."""
        attach_stand_ins(env, self.task.mdp.vocab_size)
        return env


def subject_of(target: Any, num_envs: int, make_vector: VectorFactory | None, kwargs: Mapping[str, Any]) -> Subject:
    """Resolve what `check_text_env` was given.

    Raises:
        TypeError: it is nothing that can be checked.
    """
    if isinstance(target, str):
        env = gym.make(target, **kwargs)
        subject = Subject(target, task_of(env), num_envs)
        _add_single(subject, env, None)
        _add_vectors_of_id(subject, target, kwargs) if make_vector is None else _add_vectors(subject, make_vector)
        return subject
    if kwargs:
        raise TypeError(
            f"Keyword arguments go to gym.make and need an id, got {sorted(kwargs)} with {type(target).__name__}. Make "
            "the environment with them, or pass its id."
        )
    fresh: Make | None = None
    if callable(target) and not isinstance(target, gym.Env | VectorEnv):
        fresh, target = target, target()
    if isinstance(target, VectorEnv):
        return _of_vector(target, fresh, make_vector)
    if isinstance(target, gym.Env):
        return _of_single(target, fresh, num_envs, make_vector)
    raise TypeError(
        "`env_or_id` should be an id, a Gymnasium environment, single or vector, or a function that makes one, got "
        f"{type(target).__name__}."
    )


def task_of(env: Any) -> TextTask:
    """The text task at the bottom of a stack.

    Raises:
        TypeError: there is none.
    """
    task = getattr(env.unwrapped, "task", None)
    if not isinstance(task, TextTask):
        raise TypeError(
            f"A text environment should have its TextTask as `env.unwrapped.task`, got {type(task).__name__} in "
            f"{type(env.unwrapped).__name__}. The checks read budgets, stop ids and the tokenizer from it; derive from "
            "TextGenerationEnv or TextGenerationVectorEnv."
        )
    return task


def copied(env: Any) -> Any:
    """A deep copy that shares the task and its parts, which hold no episode, models among them."""
    task = task_of(env)
    return copy.deepcopy(env, {id(part): part for part in (task, *vars(task).values())})


def _of_single(env: Any, fresh: Make | None, num_envs: int, make_vector: VectorFactory | None) -> Subject:
    subject = Subject(str(env), task_of(env), num_envs, touched={"single"} if fresh is None else set())
    _add_single(subject, env, fresh)
    if make_vector is not None:
        _add_vectors(subject, make_vector)
    elif env.spec is not None and _is_as_made(env, lambda: gym.make(env.spec.id, **env.spec.kwargs)):
        _add_vectors_of_id(subject, env.spec.id, env.spec.kwargs)
    elif type(env.unwrapped) is TextGenerationEnv:
        subject.same_stack = env is env.unwrapped
        _add_vectors(subject, _vector_of(subject.task))
    else:
        subject.reasons["vector"] = (
            f"{type(env.unwrapped).__name__} has no known vector form; pass make_vector=(num_envs, autoreset_mode) -> "
            "envs, or a vector environment"
        )
    return subject


def _of_vector(envs: Any, fresh: Make | None, make_vector: VectorFactory | None) -> Subject:
    subject = Subject(str(envs), task_of(envs), envs.num_envs, touched={"vector"} if fresh is None else set())
    own_mode = envs.metadata.get("autoreset_mode")
    made_with = {} if envs.spec is None else dict(envs.spec.kwargs)
    kwargs = {k: v for k, v in made_with.items() if k not in ("autoreset_mode", "num_envs", "vectorization_mode")}
    if envs.spec is not None and _is_as_made(envs, lambda: gym.make_vec(envs.spec.id, envs.num_envs, **kwargs)):
        _add_single(subject, gym.make(envs.spec.id, **kwargs), None)
        _add_vectors_of_id(subject, envs.spec.id, kwargs)
    elif type(envs.unwrapped) is TextGenerationVectorEnv:
        subject.same_stack = envs is envs.unwrapped
        subject.single = lambda: TextGenerationEnv(subject.task)
        if subject.same_stack:
            _add_vectors(subject, _vector_of(subject.task))
    if make_vector is not None:
        _add_vectors(subject, make_vector)
    if subject.single is None:
        subject.reasons["single"] = f"{type(envs.unwrapped).__name__} has no known single form"
    if isinstance(own_mode, AutoresetMode):
        make = fresh or _copies(subject, envs, "vector")
        subject.vectors[own_mode] = lambda num_envs: _of_number(make(), num_envs)
    for mode in AutoresetMode:
        if mode not in subject.vectors:
            subject.reasons[f"vector {mode.name}"] = (
                f"these environments have autoreset_mode {getattr(own_mode, 'name', own_mode)}; pass "
                "make_vector=(num_envs, autoreset_mode) -> envs, or an id"
            )
    return subject


def _add_single(subject: Subject, env: Any, fresh: Make | None) -> None:
    subject.spec = env.spec
    subject.single = fresh or _copies(subject, env, "single")


def _copies(subject: Subject, env: Any, kind: str) -> Make:
    """Fresh environments as copies of one; where it cannot be copied it is used itself, and the report says so."""
    try:
        pristine = copied(env)
    except Exception as error:
        subject.touched.add(kind)
        subject.reasons[f"fresh copies ({kind})"] = (
            f"the environment itself was reset and stepped, since a copy gave {type(error).__name__}: {error}"
        )
        return lambda: env
    return lambda: copied(pristine)


def _is_as_made(env: Any, make: Make) -> bool:
    """Whether an environment is what its id gives, no wrapper more or less."""
    try:
        return env.spec.id in gym.registry and str(make()) == str(env)
    except Exception:  # it was made with other arguments than its spec says
        return False


def _vector_of(task: TextTask) -> VectorFactory:
    return lambda num_envs, mode: TextGenerationVectorEnv(num_envs, task, autoreset_mode=mode)


def _add_vectors_of_id(subject: Subject, env_id: str, kwargs: Mapping[str, Any]) -> None:
    entry = gym.spec(env_id).vector_entry_point
    if entry is None:
        subject.reasons["vector"] = f"{env_id} has no vector entry point; pass make_vector"
        return
    _add_vectors(subject, lambda num_envs, mode: gym.make_vec(env_id, num_envs=num_envs, autoreset_mode=mode, **kwargs))


def _add_vectors(subject: Subject, factory: VectorFactory) -> None:
    """Every mode that the factory can make; what it made is copied, so that models are loaded once per mode."""
    for mode in AutoresetMode:
        subject.vectors[mode] = _kept(subject, factory, mode)


def _kept(subject: Subject, factory: VectorFactory, mode: AutoresetMode) -> Callable[[int], Any]:
    makers: dict[int, Make] = {}

    def make(num_envs: int) -> Any:
        if num_envs not in makers:
            try:
                made = factory(num_envs, mode)
            except Exception as error:
                raise LookupError(f"making {num_envs} rows gave {type(error).__name__}: {error}") from error
            makers[num_envs] = _copies(subject, made, "vector")
        return makers[num_envs]()

    return make


def _of_number(envs: Any, num_envs: int) -> Any:
    if envs.num_envs != num_envs:
        raise LookupError(f"these environments have {envs.num_envs} rows, and {num_envs} were wanted")
    return envs
