"""The model ring as far as a server's capabilities tell: what a plan asks for that this model or server cannot do.

The server has the last word; codes and paths here are the ones it would use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from ._check import raise_first
from ._generated.answers import CapabilitiesAnswer, HookInfo
from ._generated.errors import PathPart, Problem
from ._generated.hooks import HOOKS
from ._generated.models import (
    AddApply,
    ConceptPairPayload,
    DirectionPayload,
    InlinePayload,
    InlineVec,
    LinearPayload,
    LowRankPayload,
    NamedVec,
    ProbeWhen,
    ReftPayload,
    RouterPayload,
    SteeringGate,
    SteeringHookPacked,
    SteeringRequest,
    VectorSpec,
)
from .body import Plan, prepare

__all__ = ["check_plan"]

Problems: TypeAlias = Iterator[Problem]


def check_plan(plan: Plan, capabilities: CapabilitiesAnswer) -> None:
    """Check a plan by the rules, with the server's own table of algorithms, and against its model.

    Raises:
        InvalidSteering: The first problem, with `param` as sent.
    """
    prepared = prepare(plan, msgspec.UNSET, capabilities.algorithms)
    if prepared.request is not None:
        raise_first(_Model(capabilities).problems(prepared.request), "steering", as_list=prepared.as_list)


class _Model:
    def __init__(self, capabilities: CapabilitiesAnswer) -> None:
        self._can = capabilities
        self._hooks: dict[str, HookInfo] = {info.hook: info for info in capabilities.hooks}

    def problems(self, request: SteeringRequest) -> Problems:
        """Yield what is wrong; paths start at the request."""
        yield from self._inline_bytes(request)
        for index, spec in enumerate(request.vectors):
            yield from self._vector(spec, ("vectors", index))
        if request.gates and not self._can.gates:
            reason = f": {self._can.gates_reason}" if self._can.gates_reason else ""
            yield Problem("gates_unavailable", f"Gates are switched off on this server{reason}.", ("gates",))
        elif len(request.gates) > self._can.limits.gates:
            message = f"{len(request.gates)} gates were given; this server takes {self._can.limits.gates}. Send fewer."
            yield Problem("too_many_gates", message, ("gates",))
        for index, gate in enumerate(request.gates):
            yield from self._gate(gate, ("gates", index))

    def _vector(self, spec: VectorSpec, path: tuple[PathPart, ...]) -> Problems:
        info = self._can.algorithms.get(spec.algorithm)
        if info is None:
            known = ", ".join(f"`{name}`" for name in self._can.algorithms)
            message = f"`{spec.algorithm}` is no algorithm of this server. It has {known}."
            yield Problem("unknown_algorithm", message, (*path, "algorithm"))
        elif not info.enabled:
            enabled = ", ".join(f"`{name}`" for name, other in self._can.algorithms.items() if other.enabled) or "none"
            message = f"`{spec.algorithm}` is not enabled on this server. Enabled are {enabled}."
            yield Problem("algorithm_not_enabled", message, (*path, "algorithm"))
        steer = spec.steer
        if isinstance(steer, NamedVec):
            yield from self._named(steer, (*path, "steer"))
            yield from self._layers(spec.layers, path)
        if isinstance(steer, InlineVec):
            yield from self._inline(steer.packed, (*path, "steer"), "packed")
        elif isinstance(steer, InlinePayload):
            yield from self._payload(steer.payload, (*path, "steer", "payload"))
        if isinstance(steer, InlinePayload | None):
            yield from self._own_sites(spec, path)

    def _payload(self, payload: Any, path: tuple[PathPart, ...]) -> Problems:
        if isinstance(payload, DirectionPayload):
            yield from self._inline(payload.packed, path, "packed")
        elif isinstance(payload, ConceptPairPayload):
            yield from self._inline(payload.h1, path, "h1")
        else:
            yield from self._sources(path)
        if isinstance(payload, RouterPayload):
            for layer in payload.layers:
                yield from self._site("router_logits", int(layer), (*path, "layers", layer), (*path, "layers", layer))

    def _own_sites(self, spec: VectorSpec, path: tuple[PathPart, ...]) -> Problems:
        """Check where a payload that names no site is applied, and that it is as wide as that site."""
        payload = spec.steer.payload if isinstance(spec.steer, InlinePayload) else None
        if isinstance(payload, LinearPayload):
            width, member = payload.weight.shape[0], "weight"
        elif isinstance(payload, LowRankPayload):
            width, member = payload.projector1.shape[0], "projector1"
        elif isinstance(payload, ReftPayload):
            width, member = payload.rotate_layer.shape[0], "rotate_layer"
        else:
            yield from self._router_layers(spec, path)
            return
        hook = spec.hook or "post_block"
        layers = list(spec.layers or ())
        for index, layer in enumerate(layers):
            yield from self._site(hook, layer, (*path, "hook"), (*path, "layers", index))
        if isinstance(payload, ReftPayload) and payload.layer is not None and not layers:
            yield from self._site(hook, payload.layer, (*path, "hook"), (*path, "steer", "payload", "layer"))
        yield from self._width(hook, width, (*path, "steer", "payload", member, "shape", 0))

    def _router_layers(self, spec: VectorSpec, path: tuple[PathPart, ...]) -> Problems:
        """Check the layers of a vector that has no payload: such a vector is a router's."""
        if spec.steer is None:
            for index, layer in enumerate(spec.layers or ()):
                at = (*path, "layers", index)
                yield from self._site("router_logits", layer, at, at)

    def _gate(self, gate: SteeringGate, path: tuple[PathPart, ...]) -> Problems:
        if isinstance(gate.when, ProbeWhen) and isinstance(gate.when.probe, NamedVec):
            yield from self._named(gate.when.probe, (*path, "when", "probe"))
        if isinstance(gate.apply, AddApply) and isinstance(gate.apply.steer, NamedVec):
            yield from self._named(gate.apply.steer, (*path, "apply", "steer"))
        if isinstance(gate.when, ProbeWhen) and isinstance(gate.when.probe, InlineVec):
            yield from self._inline(gate.when.probe.packed, (*path, "when", "probe"), "packed")
        if isinstance(gate.apply, AddApply) and isinstance(gate.apply.steer, InlineVec):
            yield from self._inline(gate.apply.steer.packed, (*path, "apply", "steer"), "packed")

    def _named(self, source: NamedVec, path: tuple[PathPart, ...]) -> Problems:
        """Check the layers that are picked of a registered vector: it can have none that the model lacks."""
        yield from self._layers(source.layers, path)

    def _layers(self, layers: list[int] | None, path: tuple[PathPart, ...]) -> Problems:
        for index, layer in enumerate(layers or ()):
            if layer >= self._can.layers:
                message = f"No vector has a row for layer {layer}: this model has layers 0 to {self._can.layers - 1}."
                yield Problem("layer_not_in_payload", message, (*path, "layers", index))

    def _inline(self, packed: dict[str, SteeringHookPacked], path: tuple[PathPart, ...], member: str) -> Problems:
        yield from self._sources(path)
        for hook, rows in packed.items():
            at = (*path, member, hook)
            for index, layer in enumerate(rows.layer_indices):
                yield from self._site(hook, layer, at, (*at, "layer_indices", index))
            yield from self._width(hook, rows.shape[1], (*at, "shape", 1))

    def _sources(self, path: tuple[PathPart, ...]) -> Problems:
        if "inline" not in self._can.sources:
            message = "This server takes registered vectors only. Register the numbers and give their name."
            yield Problem("inline_not_allowed", message, path)

    def _site(self, hook: str, layer: int, at_hook: tuple[PathPart, ...], at_layer: tuple[PathPart, ...]) -> Problems:
        info = self._hooks.get(hook)
        steerable = ", ".join(f"`{name}`" for name, other in self._hooks.items() if other.steerable) or "none"
        if hook not in HOOKS:
            yield Problem("unknown_hook", f"`{hook}` is no hook. Hooks are {', '.join(HOOKS)}.", at_hook)
        elif layer >= self._can.layers:
            message = f"There is no layer {layer}: the layers of this model are 0 to {self._can.layers - 1}."
            yield Problem("unknown_layer", message, at_layer)
        elif info is None or not info.steerable:
            message = f"`{hook}` carries no steering on this server. Steerable are {steerable}."
            yield Problem("hook_not_steerable", message, at_hook)
        elif layer not in info.layers:
            message = f"Layer {layer} of this model has no `{hook}`. Layers that have it: {info.layers}."
            yield Problem("unknown_layer", message, at_layer)

    def _width(self, hook: str, width: int, path: tuple[PathPart, ...]) -> Problems:
        info = self._hooks.get(hook)
        if info is not None and info.width != width:
            message = f"The vector is {width} wide; `{hook}` of this model is {info.width}."
            yield Problem("width_mismatch", message, path)

    def _inline_bytes(self, request: SteeringRequest) -> Problems:
        size = sum(_sizes(request))
        if size > self._can.limits.inline_bytes:
            message = (
                f"{size} bytes of inline numbers were given; this server takes {self._can.limits.inline_bytes}. "
                "Register them and give their names."
            )
            yield Problem("payload_too_large", message, ())


def _sizes(value: Any) -> Iterator[int]:
    """Yield the size of every piece of inline numbers."""
    if isinstance(value, bytes):
        yield len(value)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _sizes(getattr(value, name))
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sizes(item)
