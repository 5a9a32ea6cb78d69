"""The builders: gates (`When`), rows (`Where`) and whole plans (`Steering`). Immutable, and checked as they grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

from msgspec.structs import replace

from ._capabilities import packaged
from ._check import checked, made, raise_first, refuse_vectors, request_problems
from ._gates import Scoped, When, refuse_unfinished, source_text
from ._generated import models
from ._generated.models import (
    InlinePayload,
    InlineVec,
    NamedVec,
    SteeringGate,
    SteeringRequest,
    VectorSpec,
)
from ._generated.words import Conflict, ReportLevel
from ._sources import AnyPayload, Layers, StaticSource, as_layers, inline
from ._where import Where, clause_of

__all__ = ["Scoped", "Steering", "When", "Where"]

Param: TypeAlias = int | float | str | bool | list[int] | None

_HOOKLESS = ("linear", "lowrank", "reft")
"""Payload kinds that name neither layer nor hook: the vector itself does."""


class Steering:
    """A plan: static vectors, gates, and how they go together. Each method returns a new plan.

    Examples:
        >>> from steergate import Steering, When, Where
        >>> damp = When.probe("refusal", layer=14, threshold=3.1).scope("this_token").attenuate(keep=0.2)
        >>> plan = Steering().vector("happy", scale=2.0, where=Where.answer()).gate(damp).report("summary")
        >>> plan
        Steering().vector('happy', where=Where.answer(), scale=2.0).gate(<1 of 1>).report('summary')
        >>> len(plan.request.gates)
        1
    """

    __slots__ = ("_request",)

    def __init__(self, request: SteeringRequest | None = None) -> None:
        """Start with nothing, or with a wire struct.

        Raises:
            InvalidSteering: The struct is not valid.
        """
        self._request = SteeringRequest() if request is None else checked(request, SteeringRequest)
        raise_first(request_problems(self._request), "")

    @property
    def request(self) -> SteeringRequest:
        """The wire struct."""
        return self._request

    def vector(
        self,
        source: StaticSource | None,
        *,
        where: Where | models.Where,
        scale: float = 1.0,
        algorithm: str = "direct",
        layers: Layers = None,
        hook: str | None = None,
        normalize: bool = False,
        params: Mapping[str, Param] | None = None,
        label: str | None = None,
    ) -> Steering:
        """Add static steering.

        Args:
            source: The numbers: a registered name, a `VectorSet`, an array [width] or [layers, width], or a payload of
                `steergate.payloads`. None for an algorithm that lives on `params` alone.
            where: Which rows.
            scale: The algorithm's coefficient; 0 drops the vector.
            algorithm: What is done with the numbers; a server's capabilities list what it can.
            layers: Only these layers of the vector; for an array, the layer of each row; for payloads that name no
                layer (linear, lowrank, reft), where they are applied.
            hook: Only the rows at this hook; for an array and for payloads that name no hook, where they are applied,
                `post_block` if left out.
            normalize: Rescale changed rows to their norm before the change, where the algorithm can.
            params: The algorithm's own parameters.
            label: Name in logs and reports.

        Raises:
            InvalidSteering: The vector is not valid, or does not go with the others; `param` starts at `vectors[i]`.

        Examples:
            >>> plan = Steering().vector([[0.5, 1.0], [0.0, 2.0]], layers=[3, 4], where=Where.generation())
            >>> plan.request.vectors[0].steer.packed["post_block"].layer_indices
            [3, 4]
        """
        index = len(self._request.vectors)
        steer, own_layers, own_hook = _static_source(source, algorithm, as_layers(layers), hook, index)
        spec = made(
            VectorSpec,
            where=clause_of(where),
            steer=steer,
            algorithm=algorithm,
            scale=scale,
            layers=own_layers,
            hook=own_hook,
            normalize=normalize,
            params=dict(params or {}),
            label=label,
        )
        vectors = [*self._request.vectors, checked(spec, VectorSpec, "vectors", index)]
        if len(vectors) > packaged().limits.vectors:
            refuse_vectors(vectors)
        return self._with(vectors=vectors)

    def gate(self, gate: SteeringGate) -> Steering:
        """Add a gate that `When` made.

        Raises:
            InvalidSteering: The gate is not valid; `param` starts at `gates[i]`.
            TypeError: It is no gate, or not a finished one.
        """
        refuse_unfinished(gate)
        index = len(self._request.gates)
        return self._with(gates=[*self._request.gates, checked(gate, SteeringGate, "gates", index)])

    def conflict(self, conflict: Conflict) -> Steering:
        """Say what happens where several static vectors select one row at one site.

        Args:
            conflict: `sequential`: all apply, in order. `priority`: the earlier one owns the row. `error`: vectors
                that could meet are refused.

        Raises:
            InvalidSteering: `vector_conflict`, or no such word.
        """
        return self._with_word(replace(self._request, conflict=conflict))

    def inherit_default(self, inherit: bool) -> Steering:
        """Say whether the server's default steering applies first, as it does if nothing is said."""
        return self._with_word(replace(self._request, inherit_default=inherit))

    def report(self, level: ReportLevel) -> Steering:
        """Ask for a report of what was applied: `none`, a `summary`, or all `scores`."""
        return self._with_word(replace(self._request, report=level))

    def _with(self, **changes: Any) -> Steering:
        changed = Steering.__new__(Steering)
        changed._request = replace(self._request, **changes)
        raise_first(request_problems(changed._request), "")
        return changed

    def _with_word(self, request: SteeringRequest) -> Steering:
        # The lists have been checked and may hold megabytes: look at the words alone.
        checked(replace(request, vectors=[], gates=[]), SteeringRequest)
        return self._with(conflict=request.conflict, inherit_default=request.inherit_default, report=request.report)

    def __eq__(self, other: object) -> bool:
        return self._request == other._request if isinstance(other, Steering) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self._request))

    def __repr__(self) -> str:
        request = self._request
        calls = [f".vector({_vector_text(spec)})" for spec in request.vectors]
        count = len(request.gates)
        for number, gate in enumerate(request.gates, 1):
            calls.append(f".gate(<{gate.label or f'{number} of {count}'}>)")
        for name, default in (("conflict", "sequential"), ("inherit_default", True), ("report", "none")):
            if getattr(request, name) != default:
                calls.append(f".{name}({getattr(request, name)!r})")
        return f"Steering(){''.join(calls)}"


def _static_source(
    source: Any, algorithm: str, layers: list[int] | None, hook: str | None, index: int
) -> tuple[NamedVec | InlineVec | InlinePayload | None, list[int] | None, str | None]:
    """Return the source, and the layers and hook that stay with the vector itself."""
    if isinstance(source, str):
        known = packaged().algorithms.get(algorithm)
        if known is None or known.payload_kind in _HOOKLESS:
            return NamedVec(name=source), layers, hook
        return NamedVec(name=source, layers=layers, hook=hook), None, None
    if isinstance(source, get_args(AnyPayload)):
        return InlinePayload(payload=source), layers, hook
    if source is None or isinstance(source, NamedVec | InlineVec | InlinePayload):
        return source, layers, hook
    return InlineVec(packed=inline(source, layers, hook, "vectors", index, "steer").packed()), None, None


# Words for people


def _vector_text(spec: VectorSpec) -> str:
    parts = [source_text(spec.steer), f"where={Where(spec.where)!r}"]
    plain = VectorSpec(steer=spec.steer, where=spec.where)
    for name in ("scale", "algorithm", "layers", "hook", "normalize", "params", "label"):
        if getattr(spec, name) != getattr(plain, name):
            parts.append(f"{name}={getattr(spec, name)!r}")
    return ", ".join(parts)
