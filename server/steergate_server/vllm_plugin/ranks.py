"""What the ranks of a model that is split by tensor parallelism tell each other.

Every rank holds the same pools and decides from the same rows, so nothing is told of what goes well.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group


def count() -> int:
    """How many ranks the model is split over."""
    size: int = get_tp_group().world_size
    return size


def same(rows: torch.Tensor) -> bool:
    """Whether rows `[rows, width]` are the same numbers on every rank, NaN for NaN. Every rank must ask."""
    if count() == 1:
        return True
    numbers = rows.nan_to_num().contiguous()
    everybody: torch.Tensor = get_tp_group().all_gather(numbers, dim=0)
    return all(torch.equal(other, numbers) for other in everybody.chunk(count()))


def merged(failures: dict[str, Any]) -> dict[str, Any]:
    """The failures by request id that any rank has met; the first rank's where several have. Every rank must ask."""
    if count() == 1:
        return failures
    group = get_tp_group().cpu_group
    # Nearly always there are none: one number tells, without pickling.
    found = torch.tensor([len(failures)])
    torch.distributed.all_reduce(found, group=group)
    if not found.item():
        return failures
    everybody: list[dict[str, Any]] = [{} for _ in range(count())]
    torch.distributed.all_gather_object(everybody, failures, group=group)
    return {request_id: problem for met in reversed(everybody) for request_id, problem in met.items()}
