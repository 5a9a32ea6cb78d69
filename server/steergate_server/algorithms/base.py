"""The extension API of steering algorithms.

An algorithm transforms the selected rows of one model component. The controller owns hooks, row selection, slots and
conflict resolution; payloads are loaded and validated before execution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch


class BaseSteerVectorAlgorithm(ABC):
    """Base class of every algorithm. Instances hold `payload` (None until `set_payload`) and `normalize`."""

    graph_family: ClassVar[str | None] = None
    """Name of the table family that the algorithm lowers to; None for eager and split execution only."""

    separate_scale: ClassVar[bool] = False
    """Whether a direction comes as `{"direction": v}` with `scale_factor` beside it, rather than scaled already."""

    needs_positions: ClassVar[bool] = False
    """Whether `params["positions"]` must hold the rows' absolute positions `[num_positions]` int64."""

    def __init__(self, *, normalize: bool = False) -> None:
        self.payload: Any = None
        self.normalize = normalize

    @abstractmethod
    def _transform(self, hidden_state: torch.Tensor, params: Any) -> torch.Tensor:
        """Transform rows `[num_positions, width]` with one layer's prepared payload; same shape and dtype out."""

    def set_payload(self, payload: Any, scale_factor: float = 1.0) -> None:
        """Prepare a payload: a tensor is scaled on a private copy, a dict gets `scale_factor` on a private copy.

        Anything else is stored as it is. The source is never changed. Raises ValueError for None.
        """
        if payload is None:
            raise ValueError("a payload is required")
        if isinstance(payload, torch.Tensor):
            self.payload = payload * scale_factor
        elif isinstance(payload, dict):
            self.payload = {**payload, "scale_factor": scale_factor}
        else:
            self.payload = payload

    def _finish(self, original: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """Changed rows `[num_positions, width]` float32 as the dtype of `original`, rescaled to its norms if asked.

        Rescaled before the cast: a row may leave the dtype's range that its old norm brings back.
        """
        rows = self._renormalize(original, changed) if self.normalize else changed
        return rows.to(original.dtype)

    @staticmethod
    def _renormalize(original: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """Rescale rows `[num_positions, width]` of `transformed` to the norms of the rows of `original`.

        Each row is divided by its largest magnitude before its norm is taken, in float32, so that no finite input
        overflows in any of fp16, bf16 and fp32. Rows of zeros stay as they are.
        """
        source, result = original.float(), transformed.float()
        source_peak = source.abs().amax(dim=-1, keepdim=True)
        result_peak = result.abs().amax(dim=-1, keepdim=True)
        one = torch.ones_like(result_peak)
        unit = result / torch.where(result_peak > 0, result_peak, one)
        unit_norm = unit.norm(dim=-1, keepdim=True)
        source_norm = (source / torch.where(source_peak > 0, source_peak, one)).norm(dim=-1, keepdim=True)
        direction = unit / torch.where(unit_norm > 0, unit_norm, one)
        rescaled: torch.Tensor = direction * source_norm * source_peak
        return rescaled.to(transformed.dtype)

    @staticmethod
    def graph_lower(payload: Any, scale: float) -> dict[str, torch.Tensor | None]:
        """Lower one layer's *unscaled* payload and the request's scale to the family's table keys.

        None keeps a table's zero default. Must match `_transform` on the scaled payload.
        """
        raise NotImplementedError("this algorithm does not lower into the graph")

    @classmethod
    def graph_payload_problem(cls, request: Any = None) -> str | None:  # noqa: ARG003 - part of the extension API
        """Why a request's payload cannot lower; without a request, the condition that the name cannot guarantee."""
        return None

    @staticmethod
    def wire_rank(wire: Any) -> int | None:  # noqa: ARG004 - part of the extension API
        """Rank of a low-rank wire payload, for admission against the engine's rank capacity; None for others."""
        return None
