"""Tables of `scaling.py`: a sweep each, then exponents and claims."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from support.scaling_fits import Claim, Fit, Row

TITLES = {
    "length": "Response length: one micro-batch, forward + loss + backward",
    "batch": "Batch: one micro-batch, forward + loss + backward",
    "update": "Batch: the whole update (1 epoch), micro-batches at their default",
    "vocabulary": "Vocabulary: one micro-batch of a random Llama (hidden 64, 2 layers)",
}

COLUMNS: dict[str, Callable[[Row], str]] = {
    "responses": lambda row: str(row["batch_size"]),
    "T": lambda row: str(row["response_tokens"]),
    "V": lambda row: str(row["vocab_size"]),
    "tokens": lambda row: str(row["tokens"]),
    "s": lambda row: f"{row['seconds']:.3f}",
    "ms/response token": lambda row: f"{row['per_response_token']:.3f}",
    "attention": lambda row: f"{row['attention']:.0%}",
    "apart from it": lambda row: f"{row['apart_per_response_token']:.3f}",
    "and per token": lambda row: f"{row['apart_per_token']:.3f}",
    "own MB": lambda row: f"{row['memory'] / 1e6:.0f}",
    "kB/token": lambda row: f"{row['memory'] / row['tokens'] / 1e3:.0f}",
    "process MB": lambda row: f"{row['process_memory'] / 1e6:.0f}",
    "less (V, H) MB": lambda row: f"{row['besides_vocabulary'] / 1e6:.0f}",
}
"""By heading, what a row shows."""

ATTENTION = ("attention", "apart from it", "and per token")
LEFT_OUT = {
    "length": ("V", "less (V, H) MB"),
    "batch": ("V", *ATTENTION, "less (V, H) MB"),
    "update": ("V", *ATTENTION, "kB/token", "less (V, H) MB"),
    "vocabulary": ("tokens", *ATTENTION, "kB/token"),
}
"""Columns that say nothing in a sweep."""

LEGEND = (
    "tokens: P + T of all responses. own: the process's peak over all passes less what it held before. apart from it: "
    "ms per response token without the profiled share of attention's own products and softmax; and per token: the same "
    "over all P + T tokens. less (V, H): the process's peak without embeddings and output head (tied: once)."
)


def print_sweep(console: Console, sweep: str, rows: list[Row]) -> None:
    """One row per point."""
    headings = [heading for heading in COLUMNS if heading not in LEFT_OUT[sweep]]
    table = Table(title=TITLES[sweep])
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(COLUMNS[heading](row) for heading in headings))
    console.print(table)


def print_fits(console: Console, fits: dict[str, list[Fit]]) -> None:
    """Growth exponents: the slope of log figure over log size."""
    table = Table(title="Growth exponents (least squares of logarithms)")
    for heading in ("sweep", "figure", "grows with"):
        table.add_column(heading)
    for heading in ("all points", "last two"):
        table.add_column(heading, justify="right")
    for sweep, found in fits.items():
        for fit in found:
            slopes = ("-" if slope is None else f"{slope:.2f}" for slope in (fit.exponent, fit.last))
            table.add_row(sweep, {"memory": "own memory"}.get(fit.figure, fit.figure), fit.size, *slopes)
    console.print(table)


def print_claims(console: Console, claims: list[Claim]) -> None:
    """Claims beside what was measured."""
    if not claims:
        return
    table = Table(title="Claims")
    for heading in ("claim", "at most", "measured", "holds"):
        table.add_column(heading, justify="left" if heading == "claim" else "right")
    for claim in claims:
        holds = "yes" if claim.holds else "no"
        table.add_row(claim.text, f"{claim.bound:g}", f"{claim.measured:.2f}", holds)
    console.print(table)
