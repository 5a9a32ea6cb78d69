"""The rules that need no model: what a well-formed steering request must still satisfy.

Pure functions over the wire structs, shipped as they are to the client SDK, so that a bad gate fails on the client's
machine with the server's own words. Each rule yields its problems with paths relative to what it was given.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import isfinite
from typing import Protocol

from .errors import PathPart, Problem
from .hooks import GATE_STEERED_HOOKS, HOOK_COMPONENTS, HOOKS, PROBED_HOOKS, site_order
from .payloads import ConceptPairPayload, DirectionPayload, ReftPayload, RouterPayload, SteeringHookPacked
from .requests import (
    AddApply,
    AttenuateApply,
    InlinePayload,
    InlineVec,
    NamedVec,
    ObserveApply,
    ProbeWhen,
    SteeringGate,
    SteeringRequest,
    VectorSpec,
)
from .rules_payload import PAYLOAD_KINDS, check_payload, distinct, finite, packed_rows, router_ids, under, zero_rows
from .rules_where import can_overlap, check_where

__all__ = ["Capability", "check", "check_conversation"]


class Capability(Protocol):
    """What the rules ask of an algorithm's capabilities."""

    @property
    def payload_kind(self) -> str | None: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def params(self) -> Collection[str]: ...
    @property
    def target_component(self) -> str: ...


Problems = Iterator[Problem]
Path = tuple[PathPart, ...]
Packed = Mapping[str, SteeringHookPacked]
Site = tuple[int, str | None]
"""Layer and hook; the hook is None where only the registry knows it."""

_HOOKLESS_KINDS = ("linear", "lowrank", "reft")
_DIVIDING = {"erase": "packed", "clamp": "packed", "concept_replace": "h1"}
"""Algorithms that divide by the norm of a vector, and the member that holds it."""


def check(request: SteeringRequest, capabilities: Mapping[str, Capability]) -> list[Problem]:
    """Return everything that is wrong with a request, in document order; paths start at the request.

    Args:
        request: A decoded request.
        capabilities: By algorithm name. What an algorithm that is not in it can do is not judged.
    """
    problems: list[Problem] = []
    for index, spec in enumerate(request.vectors):
        problems += under(("vectors", index), _vector(spec, capabilities.get(spec.algorithm)))
        if request.conflict == "error":
            problems += under(("vectors", index), _conflicts(request.vectors, index))
    for index, gate in enumerate(request.gates):
        problems += under(("gates", index), _gate(gate))
    return problems


def check_conversation(request: SteeringRequest, conversation_id: str | None) -> list[Problem]:
    """Return the gates that need a conversation where none was named; paths start at the request."""
    if conversation_id is not None:
        return []
    message = "`rest_of_conversation` needs a conversation. Send `conversation_id`, or choose `rest_of_request`."
    return [
        Problem("conversation_id_required", message, ("gates", index, "scope"))
        for index, gate in enumerate(request.gates)
        if gate.scope == "rest_of_conversation"
    ]


# Static vectors


def _vector(spec: VectorSpec, capability: Capability | None) -> Problems:
    yield from _source(spec, capability)
    yield from finite(spec.scale, "scale")
    if spec.algorithm == "clamp" and isfinite(spec.scale) and not 0 <= spec.scale <= 1:
        message = f"{spec.scale} was given; `clamp` takes a scale from 0 to 1, the share of the way to the bound."
        yield Problem("out_of_range", message, ("scale",))
    yield from distinct(spec.layers, "layers")
    yield from _layers_required(spec, capability)
    yield from _hook(spec, capability)
    if capability and spec.normalize and not capability.normalize:
        message = f"`{spec.algorithm}` cannot normalize. Leave `normalize` out."
        yield Problem("normalize_not_supported", message, ("normalize",))
    yield from under(("where",), check_where(spec.where))
    yield from under(("params",), _params(spec, capability))


def _source(spec: VectorSpec, capability: Capability | None) -> Problems:
    steer = spec.steer
    if steer is None:
        if capability and capability.payload_kind not in (None, "router"):
            message = (
                f"`{spec.algorithm}` needs a {capability.payload_kind} payload. Name a vector or send its numbers."
            )
            yield Problem("missing_field", message, ("steer",))
    elif isinstance(steer, NamedVec):
        yield from distinct(steer.layers, "steer", "layers")
        if steer.hook is not None:
            yield from _component(steer.hook, spec, capability, ("steer", "hook"))
    else:
        yield from _inline_source(spec, capability)


def _inline_source(spec: VectorSpec, capability: Capability | None) -> Problems:
    at: Path = ("steer", "payload") if isinstance(spec.steer, InlinePayload) else ("steer",)
    kind = _kind(spec, None)
    if capability and kind is not None and kind != capability.payload_kind:
        wanted = f"a {capability.payload_kind} payload" if capability.payload_kind else "none"
        message = f"A {kind} payload was given; `{spec.algorithm}` takes {wanted}."
        yield Problem("payload_kind", message, (*at, "kind"))
    if isinstance(spec.steer, InlineVec):
        yield from under((*at, "packed"), packed_rows(spec.steer.packed))
    elif isinstance(spec.steer, InlinePayload):
        yield from under(at, check_payload(spec.steer.payload))
    for member, packed in _packed_members(spec):
        if _DIVIDING.get(spec.algorithm) == member:
            yield from under((*at, member), zero_rows(packed, f"`{spec.algorithm}` divides by its norm"))
        for hook in packed:
            yield from _component(hook, spec, capability, (*at, member, hook))


def _kind(spec: VectorSpec, capability: Capability | None) -> str | None:
    """Tell the payload's kind: from the numbers, else from what the algorithm takes; None if neither tells."""
    if isinstance(spec.steer, InlineVec):
        return "direction"
    if isinstance(spec.steer, InlinePayload):
        return PAYLOAD_KINDS[type(spec.steer.payload)]
    return capability.payload_kind if capability else None


def _packed_members(spec: VectorSpec) -> list[tuple[str, Packed]]:
    source = spec.steer.payload if isinstance(spec.steer, InlinePayload) else spec.steer
    if isinstance(source, ConceptPairPayload):
        return [("h1", source.h1), ("h2", source.h2)]
    return [("packed", source.packed)] if isinstance(source, InlineVec | DirectionPayload) else []


def _component(hook: str, spec: VectorSpec, capability: Capability | None, path: Path) -> Problems:
    component = HOOK_COMPONENTS.get(hook)
    if capability and component is not None and component != capability.target_component:
        allowed = ", ".join(f"`{name}`" for name in HOOKS if HOOK_COMPONENTS[name] == capability.target_component)
        message = f"`{hook}` carries {component}; `{spec.algorithm}` works on {capability.target_component}: {allowed}."
        yield Problem("hook_not_allowed", message, path)


def _layers_required(spec: VectorSpec, capability: Capability | None) -> Problems:
    if spec.layers is not None:
        return
    kind = _kind(spec, capability)
    if isinstance(spec.steer, InlinePayload):
        payload = spec.steer.payload
        missing = kind in _HOOKLESS_KINDS and not (isinstance(payload, ReftPayload) and payload.layer is not None)
    elif spec.steer is None:
        missing = kind == "router"
    else:
        # A registered reft payload may name its layer; only the registry knows.
        missing = kind in ("linear", "lowrank")
    if missing:
        message = f"Nothing here says which layers `{spec.algorithm}` works on. List them in `layers`."
        yield Problem("layers_required", message, ("layers",))


def _hook(spec: VectorSpec, capability: Capability | None) -> Problems:
    kind = _kind(spec, capability)
    if spec.hook is None or kind is None:
        return
    if kind in _HOOKLESS_KINDS:
        yield from _component(spec.hook, spec, capability, ("hook",))
    else:
        yield Problem("hook_not_allowed", f"A {kind} payload names its own hooks. Leave `hook` out.", ("hook",))


# Parameters of algorithms

_PARAM_TYPES: dict[str, dict[str, str]] = {
    "clamp": {"min": "a number", "max": "a number", "value": "a number"},
    "moe_router": {
        "expert_ids": "a list",
        "activate_ids": "a list",
        "deactivate_ids": "a list",
        "mode": "a string",
        "lambda": "a number",
        "epsilon": "a number",
        "topk": "an integer",
        "seed": "an integer",
    },
}
_ROUTER_MODES = ("activate", "deactivate", "soft", "soft_topk", "soft_random")
_LEAST = {"topk": 1, "seed": 0}
_MOST = 2**31 - 1


def _params(spec: VectorSpec, capability: Capability | None) -> Problems:
    types = _PARAM_TYPES.get(spec.algorithm, {})
    wrong = False
    for name, value in spec.params.items():
        if capability and name not in capability.params:
            allowed = ", ".join(f"`{key}`" for key in capability.params) or "none"
            yield Problem("unknown_param", f"`{spec.algorithm}` takes no such parameter; it takes {allowed}.", (name,))
        elif value is not None:
            problems = [*_param_value(name, value, types.get(name))]
            wrong = wrong or bool(problems)
            yield from problems
    if capability and not wrong and spec.algorithm == "clamp":
        yield from _clamp_params(spec)
    elif capability and not wrong and spec.algorithm == "moe_router":
        yield from _router_params(spec)


def _param_value(name: str, value: object, wanted: str | None) -> Problems:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        "a number": is_integer or isinstance(value, float),
        "an integer": is_integer,
        "a list": isinstance(value, list),
        "a string": isinstance(value, str),
    }
    if wanted is not None and not fits[wanted]:
        yield Problem("invalid_type", f"Expected {wanted}, got {value!r}.", (name,))
    elif isinstance(value, float):
        yield from finite(value, name)
    elif wanted == "an integer" and isinstance(value, int) and not _LEAST[name] <= value <= _MOST:
        yield Problem("out_of_range", f"{value} was given; it must be from {_LEAST[name]} to {_MOST}.", (name,))
    elif name == "mode" and wanted is not None and value not in _ROUTER_MODES:
        modes = ", ".join(f"`{mode}`" for mode in _ROUTER_MODES)
        yield Problem("unknown_kind", f"{value!r} is none of {modes}.", (name,))


def _number(spec: VectorSpec, name: str) -> float | None:
    value = spec.params.get(name)
    return value if isinstance(value, int | float) else None


def _clamp_params(spec: VectorSpec) -> Problems:
    low, high, value = _number(spec, "min"), _number(spec, "max"), _number(spec, "value")
    if low is None and high is None and value is None:
        yield Problem("missing_field", "`clamp` needs a bound. Give `min`, `max`, both, or `value`.", ())
    elif value is not None:
        for name in ("min", "max"):
            if spec.params.get(name) is not None:
                message = f"`value` pins both bounds. Give `value` alone, or bounds without it: not `{name}` beside it."
                yield Problem("unknown_param", message, (name,))
    elif low is not None and high is not None and low > high:
        yield Problem("out_of_range", f"`min` {low} is above `max` {high}. Give min <= max.", ("min",))


def _router_params(spec: VectorSpec) -> Problems:
    if spec.steer is not None:
        for name in spec.params:
            message = "The payload says it all. Leave `params` empty, or leave `steer` out and give `layers`."
            yield Problem("unknown_param", message, (name,))
        return
    mode = spec.params.get("mode")
    if not isinstance(mode, str):
        modes = ", ".join(f"`{word}`" for word in _ROUTER_MODES)
        yield Problem("missing_field", f"`mode` is missing. It is one of {modes}.", ("mode",))
    else:
        yield from router_ids(mode, {name: ids for name, ids in spec.params.items() if isinstance(ids, list) and ids})


# Conflicts


def _conflicts(vectors: list[VectorSpec], later: int) -> Problems:
    """Find the earlier vectors that may select a row of this one's at a site of this one's."""
    for earlier in range(later):
        first, second = vectors[earlier], vectors[later]
        if first.scale == 0 or second.scale == 0 or not _vector_sites(first) & _vector_sites(second):
            continue
        if any(True for spec in (first, second) for _ in check_where(spec.where)):
            continue
        if can_overlap(first.where, second.where):
            message = (
                f"It can select the same row as vectors[{earlier}] at a site of both, and `conflict` is `error`. "
                "Keep their rows or sites apart, or choose `sequential` or `priority`."
            )
            yield Problem("vector_conflict", message, ())


def _vector_sites(spec: VectorSpec) -> set[tuple[int, str]]:
    """Return the sites as far as the request itself names them; the registry knows those of a bare name."""
    steer = spec.steer
    source = steer.payload if isinstance(steer, InlinePayload) else steer
    sites: Iterable[Site] = ()
    if isinstance(source, NamedVec | InlineVec | DirectionPayload):
        sites = _sites(source)
    elif isinstance(source, ConceptPairPayload):
        sites = [(layer, hook) for hook, rows in source.h1.items() for layer in rows.layer_indices]
    elif isinstance(source, RouterPayload):
        sites = [(int(layer), "router_logits") for layer in source.layers if layer.isascii() and layer.isdecimal()]
    elif isinstance(steer, InlinePayload):
        layer = source.layer if isinstance(source, ReftPayload) else None
        sites = [
            (number, spec.hook or "post_block") for number in ([layer] if layer is not None else spec.layers or ())
        ]
    elif steer is None:
        sites = [(number, "router_logits") for number in spec.layers or ()]
    picked = None if spec.layers is None else set(spec.layers)
    return {(layer, hook) for layer, hook in sites if hook is not None and (picked is None or layer in picked)}


def _sites(source: object) -> list[Site]:
    if isinstance(source, InlineVec | DirectionPayload):
        return [(layer, hook) for hook, rows in source.packed.items() for layer in rows.layer_indices]
    return [(layer, source.hook) for layer in source.layers or ()] if isinstance(source, NamedVec) else []


# Gates


def _gate(gate: SteeringGate) -> Problems:
    when, apply = gate.when, gate.apply
    if isinstance(when, ProbeWhen):
        yield from under(("when",), _probe(when))
    if isinstance(apply, ObserveApply) and gate.scope != "this_token":
        message = f"`observe` changes nothing, so nothing lasts: `{gate.scope}` was given. Choose `this_token`."
        yield Problem("observe_scope", message, ("scope",))
    if isinstance(apply, AttenuateApply):
        yield from finite(apply.keep, "apply", "keep")
    if isinstance(apply, AddApply):
        yield from under(("apply",), _add(apply))
        if gate.scope == "rest_of_conversation" and isinstance(apply.steer, InlineVec):
            message = "Numbers sent with a request are not kept over turns. Register the vector and give its name."
            yield Problem("inline_conversation_steer", message, ("apply", "steer"))
        if gate.scope == "this_token" and isinstance(when, ProbeWhen):
            yield from _order(when, apply)


def _probe(when: ProbeWhen) -> Problems:
    sites = _sites(when.probe)
    if len(sites) > 1:
        message = f"The probe names {len(sites)} sites; it looks at one. Give one hook and one layer."
        yield Problem("probe_not_single_site", message, ("probe",))
    yield from _gate_source(when.probe, "probe", PROBED_HOOKS, "A gate cannot probe `{}`; it can probe {}.")
    if isinstance(when.probe, InlineVec):
        yield from under(("probe", "packed"), zero_rows(when.probe.packed, "a probe of zeros never tells rows apart"))
    yield from finite(when.threshold, "threshold")
    yield from finite(when.sharpness, "sharpness")


def _add(apply: AddApply) -> Problems:
    yield from _gate_source(apply.steer, "steer", GATE_STEERED_HOOKS, "A gate cannot steer `{}`; it can steer {}.")
    yield from finite(apply.strength, "strength")


def _gate_source(source: object, member: str, allowed: Collection[str], refusal: str) -> Problems:
    hooks: list[tuple[str, Path]] = []
    if isinstance(source, InlineVec):
        yield from under((member, "packed"), packed_rows(source.packed))
        hooks = [(hook, (member, "packed", hook)) for hook in source.packed]
    elif isinstance(source, NamedVec):
        yield from distinct(source.layers, member, "layers")
        hooks = [(source.hook, (member, "hook"))] if source.hook is not None else []
    for hook, path in hooks:
        if hook in HOOKS and hook not in allowed:
            words = ", ".join(f"`{name}`" for name in HOOKS if name in allowed)
            yield Problem("hook_not_allowed", refusal.format(hook, words), path)


def _order(when: ProbeWhen, apply: AddApply) -> Problems:
    """Under this_token the weight is known from the probe's site on, so nothing before it can be steered."""
    probes = _sites(when.probe)
    if len(probes) != 1:
        return
    for layer, hook in _sites(apply.steer):
        if _before((layer, hook), probes[0]):
            message = (
                f"The vector steers layer {layer}, before the probe has looked at layer {probes[0][0]}. "
                "Probe an earlier site, steer later ones, or choose the scope `next_step`."
            )
            yield Problem("steer_before_probe", message, ("apply", "steer"))
            return


def _before(site: Site, other: Site) -> bool:
    """Tell whether a site certainly runs before another; hooks that are not known decide nothing."""
    (layer, hook), (other_layer, other_hook) = site, other
    if layer != other_layer or hook not in HOOKS or other_hook not in HOOKS:
        return layer < other_layer
    return hook is not None and other_hook is not None and site_order(hook, layer) < site_order(other_hook, other_layer)
