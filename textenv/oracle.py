"""The exact optimum of a toy language: what RLHF converges to when nothing but the objective limits it.

The objective of a policy pi, with the KL over whole responses in nats (Ziegler et al. 2019, arXiv:1909.08593, eq. 2):

    J(pi) = E_pi[score] - kl_coef * KL(pi || reference)

Its optimum is the reference tilted by the score (Korbak et al. 2022, arXiv:2205.11275; Rafailov et al. 2023,
arXiv:2305.18290, eq. 4):

    pi*(y) = reference(y) exp(score(y) / kl_coef) / Z        J* = kl_coef log Z

and every other policy falls short by J* - J(pi) = kl_coef KL(pi || pi*), so a division gives its distance in nats.
At kl_coef = 0 the limit is meant: J* is the best score within the support of the reference, and pi* is the reference
restricted to the responses that reach it.

Two roads lead there. Additive scores take soft backward induction (Levine 2018, arXiv:1805.00909): the same tilt, one
position at a time. Any other score takes one tilt over the list of all responses.

Legend: M responses in the language, T horizon, V vocabulary. Response arrays are (M, T), -1 right of the last token.
"""

from textenv.oracle_evaluation import Evaluation, SequenceLogprobs, evaluate, evaluate_sequences
from textenv.oracle_listing import DEFAULT_LIMIT, enumerate_responses
from textenv.oracle_optimum import FrontierPoint, Optimum, frontier, solve
from textenv.oracle_policies import evaluate_policy

__all__ = [
    "DEFAULT_LIMIT",
    "Evaluation",
    "FrontierPoint",
    "Optimum",
    "SequenceLogprobs",
    "enumerate_responses",
    "evaluate",
    "evaluate_policy",
    "evaluate_sequences",
    "frontier",
    "solve",
]
