"""One comparison: two responses to a prompt and which of them was preferred. Texts, and where known their token ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampledIds:
    """Token ids of a comparison as a policy saw and wrote them; encoding its texts again may give others.

    Attributes:
        prompt: what it answered.
        chosen: of the preferred response, the stop id included where it ended by itself.
        rejected: of the other one.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class Preference:
    """Somebody preferred `chosen` to `rejected` as a response to `prompt`.

    Attributes:
        prompt: what both respond to; may be empty, as where whole texts are compared.
        chosen: the preferred response, not empty.
        rejected: the other one, not empty.
        margin: by how much the preferred one should win, in units of the score; None where nobody said.
        ids: the tokens that were sampled, where a policy wrote the responses. What a reward model reads is the texts;
            a policy that learns from the comparison learns from these. Files do not keep them, and two comparisons of
            equal texts are equal.

    Raises:
        ValueError: an empty response, two equal ones, or a margin that is not a finite number.
    """

    prompt: str
    chosen: str
    rejected: str
    margin: float | None = None
    ids: SampledIds | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that there is something to learn."""
        for name in ("chosen", "rejected"):
            if not getattr(self, name).strip():
                raise ValueError(
                    f"`{name}` should be a text, got {getattr(self, name)!r}: a reward model reads its score at the "
                    "last token of a response, and an empty one has none. Leave the comparison out."
                )
        if self.chosen == self.rejected:
            raise ValueError(
                f"`chosen` and `rejected` should differ, both are {self.chosen!r}: their scores are equal whatever is "
                "learned, so the comparison would only add a constant to the loss. Leave it out."
            )
        if self.margin is not None and not math.isfinite(self.margin):
            raise ValueError(f"`margin` should be a finite number or None, got {self.margin!r}.")
