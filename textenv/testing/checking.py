"""`check_text_env`: every check on everything of a subject that can be reached."""

from __future__ import annotations

from typing import Any

import numpy as np

from textenv.testing.choosing import Chooser
from textenv.testing.report import Findings, Report
from textenv.testing.rules import CHECKS
from textenv.testing.run import Run
from textenv.testing.single import check_singles
from textenv.testing.subject import VectorFactory, subject_of
from textenv.testing.vector import check_vectors


def check_text_env(
    env_or_id: Any,
    *,
    make_vector: VectorFactory | None = None,
    num_envs: int = 3,
    seed: int = 0,
    tolerance: float = 1e-4,
    **kwargs: Any,
) -> Report:
    """Check that an environment keeps the rules of a text environment; raise one error that lists all that it breaks.

    Single and vector forms are checked and compared as far as both can be had: from an id both are made; from an
    environment whose inside is a `TextGenerationEnv` or `TextGenerationVectorEnv` the counterpart is built from its
    task; for subclasses pass `make_vector`. What could not be reached is in the report, with the reason.

    Environments are reset and stepped, on copies where they can be copied. Wrappers that write files write the checks'
    episodes, too. Layers that want a policy's log-probabilities and have none get a made-up one.

    Example:
        >>> report = check_text_env("textenv/Toy-v0", length_limit="terminate")
        >>> "vector SAME_STEP" in report.passed
        True

    Args:
        env_or_id: an id, an environment (single or vector, wrapped or not), or a function that makes a fresh one.
        make_vector: ``(num_envs, autoreset_mode) -> envs``, the vector form with the same wrappers.
        num_envs: rows of the vector form. Given environments keep theirs.
        seed: of the episodes and of the tokens that are written.
        tolerance: how far scores may differ between calls of the scorer with one and with several responses.
        **kwargs: for `gym.make` and `gym.make_vec`, with an id.

    Returns:
        What passed, and what could not be reached.

    Raises:
        ConformanceError: at least one rule does not hold.
        TypeError: nothing that can be checked.
    """
    subject = subject_of(env_or_id, num_envs, make_vector, kwargs)
    run = Run(Findings(CHECKS), subject, Chooser(subject.task, np.random.default_rng(seed)), seed, tolerance)
    check_singles(run)
    check_vectors(run)
    return run.report()
