"""From points to rows, growth exponents and claims. Knows numpy and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]
"""One point: what was asked for, what was measured, and what follows from both."""

SLACK = 0.05
"""By which a fitted exponent may exceed a claimed one: the fit's own scatter over few points."""


@dataclass(frozen=True)
class Fit:
    """A figure against the size that was varied, both as logarithms.

    Attributes:
        figure: name of the row's entry.
        size: name of the entry that it grows with.
        exponent: least-squares slope over all points; None where there are fewer than two.
        last: slope between the two largest; the larger it is than `exponent`, the less that says about the limit.
    """

    figure: str
    size: str
    exponent: float | None
    last: float | None


@dataclass(frozen=True)
class Claim:
    """What should hold, what was measured, and whether it does.

    Attributes:
        text: what is compared.
        bound: the largest figure that is right.
        measured: the figure.
        is_exponent: else a ratio.
    """

    text: str
    bound: float
    measured: float
    is_exponent: bool = False

    @property
    def holds(self) -> bool:
        """Whether the figure is within the bound; for exponents within `SLACK` of it."""
        return self.measured <= self.bound + (SLACK if self.is_exponent else 0.0)


def exponent(sizes: Sequence[float], figures: Sequence[float]) -> float | None:
    """Slope of log figures over log sizes by least squares; None for fewer than two, or figures that are not positive.

    Example:
        >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    if len(sizes) < 2 or min(figures) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])


def fit(rows: Sequence[Row], figure: str, size: str) -> Fit:
    """Fit one figure of rows that are sorted by their size."""
    sizes, figures = ([row[name] for row in rows] for name in (size, figure))
    return Fit(figure, size, exponent(sizes, figures), exponent(sizes[-2:], figures[-2:]))


def to_row(job: dict[str, Any], result: dict[str, Any]) -> Row:
    """What follows from a point: tokens, milliseconds per token with and without attention, memory besides V's own."""
    rows, width = job["batch_size"], job["response_tokens"]
    tokens = rows * (job["prompt_tokens"] + width)
    row = {name: job[name] for name in ("batch_size", "prompt_tokens", "response_tokens")} | result
    row |= {
        "tokens": tokens,
        "per_response_token": 1e3 * result["seconds"] / (rows * width),
        "besides_vocabulary": result["process_memory"] - result["vocabulary_weights"],
    }
    if result["attention"] is not None:
        apart = result["seconds"] * (1 - result["attention"])
        row["apart_per_response_token"] = 1e3 * apart / (rows * width)
        row["apart_per_token"] = 1e3 * apart / tokens
    return row


SWEEP_SIZES = {"length": "tokens", "batch": "tokens", "update": "tokens", "vocabulary": "vocab_size"}
"""What each sweep's figures are fitted against."""


def fits(sweep: str, rows: Sequence[Row]) -> list[Fit]:
    """Seconds and the update's own memory; of the whole update only where the batch fills a micro-batch."""
    if sweep == "update":
        rows = filled(rows)
    return [fit(rows, figure, SWEEP_SIZES[sweep]) for figure in ("seconds", "memory")]


def filled(rows: Sequence[Row]) -> list[Row]:
    """Rows whose tokens are as many as a micro-batch takes, or more."""
    return [row for row in rows if row["tokens"] >= row["budget"]]


def claims(sweeps: dict[str, list[Row]]) -> list[Claim]:
    """The claims that the sweeps at hand can decide."""
    found = []
    for sweep in ("length", "batch"):
        slope = fit(sweeps.get(sweep, []), "memory", "tokens").exponent
        if slope is not None:
            text = f"{sweep}: exponent of the update's own memory in tokens (at most linear)"
            found.append(Claim(text, 1.0, slope, is_exponent=True))
    grown = filled(sweeps.get("update", []))
    if len(grown) > 1:
        text = "whole update: own memory, largest batch over the first that fills a micro-batch (flat)"
        found.append(Claim(text, 1.15, grown[-1]["memory"] / grown[0]["memory"]))
    vocabularies = sweeps.get("vocabulary", [])
    if len(vocabularies) > 1:
        first, last = (row["besides_vocabulary"] for row in (vocabularies[0], vocabularies[-1]))
        text = "vocabulary: the process's peak without its (V, H) weights, largest V over smallest"
        found.append(Claim(text, 1.15, last / first))
    return found + time_claims(sweeps.get("length", []))


def time_claims(rows: Sequence[Row]) -> list[Claim]:
    """Time apart from attention, from the shortest to the longest response of at most 256 tokens.

    Per response token it must not grow; it may fall, because the prompt is shared by more of them. Per token of prompt
    and response it must be flat, up and down.
    """
    rows = [row for row in rows if row["response_tokens"] <= 256]
    if len(rows) < 2:
        return []
    span = f"{rows[0]['response_tokens']} to {rows[-1]['response_tokens']} tokens"
    response, token = ([row[f"apart_per_{kind}"] for row in rows] for kind in ("response_token", "token"))
    found = {
        "response token apart from attention, largest over first": max(response) / response[0],
        "token (P + T) apart from attention, largest over smallest": max(token) / min(token),
    }
    return [Claim(f"length: time per {text}, {span}", 1.2, measured) for text, measured in found.items()]
