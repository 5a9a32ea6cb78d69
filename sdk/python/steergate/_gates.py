"""The builder of gates: when, scope, apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from ._check import checked_gate, made
from ._generated.models import (
    AddApply,
    AlwaysWhen,
    AttenuateApply,
    InlineVec,
    NamedVec,
    ObserveApply,
    ProbeWhen,
    SteeringGate,
)
from ._generated.words import At, Fires, ProbeAt, Scope, Score
from ._sources import Layers, Source, gate_source

__all__ = ["Scoped", "When", "refuse_unfinished", "source_text"]


class When:
    """When a gate acts: the first of three steps, when, scope, apply.

    Examples:
        >>> from steergate import When
        >>> refusal = When.probe("refusal", layer=14, threshold=3.1, sharpness=8, at="answer")
        >>> gate = refusal.scope("rest_of_request").add("calm", strength=2.0)
        >>> gate.scope, gate.apply.strength
        ('rest_of_request', 2.0)
    """

    __slots__ = ("_when",)

    def __init__(self, when: AlwaysWhen | ProbeWhen) -> None:
        """Wrap a wire struct; `probe` and `always` are the usual ways to get one."""
        self._when = when

    if not TYPE_CHECKING:  # type checkers say it by themselves

        def __getattr__(self, name: str) -> Any:
            if name in ("add", "attenuate", "observe"):
                scopes = ", ".join(get_args(Scope))
                raise AttributeError(f".{name}() comes after .scope(...): say how far it reaches, one of {scopes}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def probe(
        cls,
        source: Source,
        *,
        threshold: float,
        layer: int | None = None,
        hook: str | None = None,
        sharpness: float = 1.0,
        fires: Fires = "above",
        score: Score = "dot",
        at: ProbeAt = "generated",
    ) -> When:
        """Act when the residual stream's score against a probe passes a threshold.

        Args:
            source: The probe: a registered name, a `VectorSet` or an array of shape [width]. It must come down to a
                single site.
            threshold: The score at which it fires: a dot product in float32, or a cosine.
            layer: The layer where it looks; needed for an array, and where the vector has several.
            hook: The hook where it looks; for an array, `post_block` if left out.
            sharpness: Slope of the soft weight sigmoid(sharpness (score - threshold)), used by `this_token` alone.
            fires: On scores above the threshold, or below it.
            score: The dot product, or that divided by both norms.
            at: Where it looks: at generated rows, at the prompt's last row once, or at both.

        Raises:
            InvalidSteering: The array is not in order.

        Examples:
            >>> When.probe([0.5, -1.0, 0.25, 0.0], layer=3, threshold=0.2, score="cosine").scope("next_step")
            <When.probe(an inline vector at 3:post_block, threshold=0.2, ...).scope('next_step')>
        """
        return cls(
            made(
                ProbeWhen,
                probe=gate_source(source, layer, hook, "when", "probe"),
                threshold=threshold,
                sharpness=sharpness,
                fires=fires,
                score=score,
                at=at,
            )
        )

    @classmethod
    def always(cls, at: At = "generated") -> When:
        """Act at every generated row, or at every answer row: those and the prompt's last.

        Examples:
            >>> When.always(at="answer").scope("this_token").add("calm").apply.strength
            1.0
        """
        return cls(made(AlwaysWhen, at=at))

    def scope(self, scope: Scope) -> Scoped:
        """Say how far a firing reaches.

        Args:
            scope: `this_token`: the row itself, with the soft weight. `next_step`: the row after. `rest_of_request`:
                every row from the first firing on. `rest_of_conversation`: that, and every answer row of later turns.
        """
        return Scoped(self._when, scope)

    def __eq__(self, other: object) -> bool:
        return self._when == other._when if isinstance(other, When) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self._when))

    def __repr__(self) -> str:
        return f"<{_when_text(self._when)}>"


class Scoped:
    """A gate that lacks only what it does; `When.scope` makes one, and each of its methods finishes the gate."""

    __slots__ = ("_scope", "_when")

    def __init__(self, when: AlwaysWhen | ProbeWhen, scope: Scope) -> None:
        self._when = when
        self._scope = scope

    def add(
        self,
        source: Source,
        strength: float = 1.0,
        *,
        layers: Layers = None,
        hook: str | None = None,
        label: str | None = None,
    ) -> SteeringGate:
        """Add a vector, times its strength and the gate's weight, after everything static at a site.

        Args:
            source: The vector: a registered name, a `VectorSet`, or an array [width] or [layers, width].
            strength: Its coefficient; may be negative.
            layers: Only these layers of it; for an array, the layer of each row.
            hook: Only its rows at this hook; for an array, `post_block` if left out.
            label: Name of the gate in logs and reports.

        Raises:
            InvalidSteering: The gate is not valid; `param` is the path inside of it.

        Examples:
            >>> gate = When.always().scope("this_token").add("calm", strength=-0.5, layers=range(10, 13))
            >>> gate.apply.steer.layers
            [10, 11, 12]
        """
        apply = made(AddApply, steer=gate_source(source, layers, hook, "apply", "steer"), strength=strength)
        return self._finished(apply, label)

    def attenuate(self, *, keep: float, label: str | None = None) -> SteeringGate:
        """Turn the request's static steering down while the gate acts.

        Args:
            keep: The share of static steering that is left, from 0 (none) to 1 (all).
            label: Name of the gate in logs and reports.

        Raises:
            InvalidSteering: The gate is not valid; `param` is the path inside of it.

        Examples:
            >>> When.probe("refusal", layer=14, threshold=3.1).scope("this_token").attenuate(keep=0.2).apply.keep
            0.2
        """
        return self._finished(AttenuateApply(keep=keep), label)

    def observe(self, *, label: str | None = None) -> SteeringGate:
        """Change nothing: the gate is scored and reported. The scope must be `this_token`.

        Args:
            label: Name of the gate in logs and reports.

        Raises:
            InvalidSteering: The gate is not valid; `param` is the path inside of it.

        Examples:
            >>> When.probe("refusal", layer=14, threshold=3.1).scope("this_token").observe(label="refusal").label
            'refusal'
        """
        return self._finished(ObserveApply(), label)

    def _finished(self, apply: AddApply | AttenuateApply | ObserveApply, label: str | None) -> SteeringGate:
        return checked_gate(SteeringGate(when=self._when, scope=self._scope, apply=apply, label=label))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scoped):
            return NotImplemented
        return (self._when, self._scope) == (other._when, other._scope)

    def __hash__(self) -> int:
        return hash((repr(self._when), self._scope))

    def __repr__(self) -> str:
        return f"<{_when_text(self._when)}.scope({self._scope!r})>"


def refuse_unfinished(gate: object) -> None:
    """Raise TypeError for a gate that lacks a step."""
    if isinstance(gate, When):
        raise TypeError(f"{gate!r} is not finished: say .scope(...), then .add(...), .attenuate(...) or .observe()")
    if isinstance(gate, Scoped):
        raise TypeError(f"{gate!r} is not finished: say .add(...), .attenuate(...) or .observe()")


def source_text(source: Any) -> str:
    """Write a source the way reprs show it."""
    if isinstance(source, NamedVec):
        return repr(source.name)
    if isinstance(source, InlineVec):
        sites = [f"{layer}:{hook}" for hook, rows in source.packed.items() for layer in rows.layer_indices]
        return f"an inline vector at {sites[0]}" if len(sites) == 1 else f"an inline vector at {len(sites)} sites"
    return repr(None) if source is None else f"a {type(source.payload).__name__}"


def _when_text(when: AlwaysWhen | ProbeWhen) -> str:
    if isinstance(when, AlwaysWhen):
        return f"When.always(at={when.at!r})"
    return f"When.probe({source_text(when.probe)}, threshold={when.threshold!r}, ...)"
