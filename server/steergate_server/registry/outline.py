"""What admission needs to know of a payload without its numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..schema.hooks import site_order
from .numbers import StoredPayload


class Outline(NamedTuple):
    """A payload's outline.

    `widths`: by (hook, layer), in execution order, elements per row; empty for payloads that name no site; 0 at
    routers. `shapes`: of every tensor, by its path. `zeros`: paths of the tensors that are all zero. `metadata`: the
    payload's own.
    """

    digest: str
    kind: str
    widths: dict[tuple[str, int], int]
    shapes: dict[str, tuple[int, ...]]
    zeros: frozenset[str]
    metadata: dict[str, Any]

    @property
    def own_width(self) -> int:
        """Elements per row that a payload without sites works on; 0 for payloads with sites."""
        return next((self.shapes[name][0] for name in _WIDTH_TENSORS if name in self.shapes), 0)

    @property
    def sites(self) -> tuple[tuple[str, int], ...]:
        """(hook, layer) of every site that the payload names, in execution order."""
        return tuple(self.widths)


_WIDTH_TENSORS = ("weight", "projector1", "rotate_layer")
"""Of the payloads that name no site, the tensor whose first dimension is the width of the rows it works on."""


def outline(stored: StoredPayload) -> Outline:
    """The outline of a canonical payload."""
    widths: dict[tuple[str, int], int] = {}
    if stored.kind in ("direction", "concept_pair"):
        for path, row in stored.numbers.items():
            *_, hook, layer = path.split("/")
            widths[hook, int(layer)] = row.shape[0]
    elif stored.kind == "router":
        widths = {("router_logits", int(layer)): 0 for layer in stored.metadata["layers"]}
    return Outline(
        digest=stored.digest,
        kind=stored.kind,
        widths=dict(sorted(widths.items(), key=lambda item: site_order(*item[0]))),
        shapes={path: tensor.shape for path, tensor in stored.numbers.items()},
        zeros=frozenset(path for path, tensor in stored.numbers.items() if not tensor.any()),
        metadata=stored.metadata,
    )
