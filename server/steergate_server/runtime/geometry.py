"""The shape of one step: which requests run which rows, in the order in which the batch holds them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepGeometry(NamedTuple):
    """`request_ids` in batch order; `counts` [requests]: rows of each in this step; `starts` [requests]: absolute
    position of each one's first row. Rows of a request are consecutive, and so are their positions. `drafts`: by
    request, how many of its last rows have a drafted token for input, which may be rejected; it may be empty."""

    request_ids: list[str]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    drafts: Mapping[str, int] = MappingProxyType({})

    @property
    def rows(self) -> int:
        """Rows of the step, padding left out."""
        return int(self.counts.sum())

    @property
    def one_row_each(self) -> bool:
        """Whether every request runs exactly one row."""
        return bool((self.counts == 1).all())
