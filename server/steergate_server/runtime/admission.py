"""Admission: from a decoded request to a plan, or a precise refusal. The rules ring, then the model ring.

Everything that can be known before a token is generated is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from steergate_server.algorithms.registry import registered_algorithms
from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.registry.names import NameIndex
from steergate_server.registry.numbers import canonical, sites_of
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.gates import gate_phases
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, SiteName, VectorGroup, fingerprint
from steergate_server.runtime.selection import selects_phase, unsupported_selectors
from steergate_server.runtime.sites import Site
from steergate_server.schema.errors import PathPart, SteeringError, format_path
from steergate_server.schema.hooks import HOOKS, site_order
from steergate_server.schema.payloads import DirectionPayload
from steergate_server.schema.requests import (
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
from steergate_server.schema.rules import check, check_conversation
from steergate_server.schema.words import VectorKind

Path = tuple[PathPart, ...]
ParamWriter = Callable[[Path], str]


class ModelFacts(NamedTuple):
    """What admission knows of the served model: its name, its number of blocks, the sites that carry ops, and how
    steering runs inside it."""

    name: str
    layers: int
    sites: tuple[Site, ...]
    graph_mode: Literal["eager", "split", "in_graph"] = "in_graph"

    def width(self, hook: str, layer: int) -> int | None:
        """Elements per row at a site, or None where no op stands."""
        return next((site.width for site in self.sites if (site.hook, site.layer) == (hook, layer)), None)


class Admitted(NamedTuple):
    """An admitted request. `digests` are held until `Admission.release`."""

    plan: Plan
    fingerprint: str
    digests: tuple[str, ...]


class _Source(NamedTuple):
    """A resolved source: its digest and the sites that are meant."""

    digest: str
    sites: tuple[SiteName, ...]


class _Place(NamedTuple):
    """Where a site's hook, layer and width stand in the request: what `param` blames."""

    hook_path: Path
    layer_path: Path
    width_path: Path


class Admission:
    """Admits requests for one model."""

    def __init__(
        self, config: EngineConfig, facts: ModelFacts, names: NameIndex, *, sources: Sequence[str] = ("name", "inline")
    ) -> None:
        self.config = config
        self.facts = facts
        self.names = names
        self.sources = frozenset(sources)

    def admit(self, request: SteeringRequest, *, as_list: bool = False, conversation_id: str | None = None) -> Admitted:
        """Admit a request, or raise SteeringError with the first problem, `param` as sent.

        as_list: the member was a bare list of gates, which shows in `param`. The payloads of an admitted request are
        held until `release`.
        """
        where = _param_writer(as_list)
        problems = [*check(request, ALGORITHM_CAPABILITIES), *check_conversation(request, conversation_id)]
        if problems:
            raise SteeringError(problems[0].code, problems[0].message, where(problems[0].path))
        held: list[str] = []
        try:
            plan = self._resolve(request, where, held)
        except BaseException:
            self.release(held)
            raise
        return Admitted(plan, fingerprint(plan), tuple(held))

    def release(self, digests: Sequence[str]) -> None:
        """Give the payloads of a request back."""
        for digest in digests:
            self.names.release(digest)

    def check_registered(self, payload: DirectionPayload, prefix: Path) -> None:
        """Check a payload's sites and widths against the model; raise SteeringError, `param` from the body's root.

        prefix: path of the payload's packed rows in the body.
        """
        self._check_payload(payload, prefix, format_path)

    def _check_payload(self, payload: DirectionPayload, path: Path, where: ParamWriter) -> None:
        for hook, packed in payload.packed.items():
            at = (*path, hook)
            for row, layer in enumerate(packed.layer_indices):
                place = _Place(hook_path=at, layer_path=(*at, "layer_indices", row), width_path=(*at, "shape", 1))
                self._check_site(hook, layer, packed.shape[1], where, place)

    def _resolve(self, request: SteeringRequest, where: ParamWriter, held: list[str]) -> Plan:
        if request.conflict != "sequential" and len(request.vectors) > 1:
            raise SteeringError(
                "not_implemented",
                f"conflict {request.conflict!r} is not built yet; use 'sequential'",
                where(("conflict",)),
            )
        vectors: list[PlannedVector] = []
        for index, spec in enumerate(request.vectors):
            vector = self._vector(spec, ("vectors", index), where, held)
            if vector.scale != 0.0:
                vectors.append(vector)
        self._check_gate_count(request, where)
        gates = tuple(
            self._gate(gate, ("gates", index), where, held, vectors) for index, gate in enumerate(request.gates)
        )
        if request.report == "scores":
            raise SteeringError(
                "not_implemented", "report 'scores' is not built yet; use 'summary'", where(("report",))
            )
        groups = (VectorGroup(vectors=tuple(vectors), conflict=request.conflict),) if vectors else ()
        return Plan(groups=groups, gates=gates, report=request.report)

    # Vectors ----------------------------------------------------------------------------------------------------

    def _vector(self, spec: VectorSpec, path: Path, where: ParamWriter, held: list[str]) -> PlannedVector:
        self._check_algorithm(spec.algorithm, (*path, "algorithm"), where)
        if spec.normalize:
            raise SteeringError("not_implemented", "normalize is not built yet", where((*path, "normalize")))
        for name in unsupported_selectors(spec.where):
            raise SteeringError(
                "not_implemented",
                f"the selector {name!r} is not built yet; use prompt, generation or answer",
                where((*path, "where", name)),
            )
        if spec.steer is None:
            raise SteeringError(
                "payload_kind", f"algorithm {spec.algorithm!r} needs a vector in 'steer'", where((*path, "steer"))
            )
        source = self._source(spec.steer, "steer", (*path, "steer"), where, held)
        if spec.layers is not None:
            source = _pick(source, spec.layers, None, path, where)
        return PlannedVector(
            algorithm=spec.algorithm,
            digest=source.digest,
            sites=source.sites,
            where=spec.where,
            scale=spec.scale,
            normalize=spec.normalize,
            params=spec.params,
            label=spec.label,
        )

    def _check_algorithm(self, name: str, path: Path, where: ParamWriter) -> None:
        if name not in ALGORITHM_CAPABILITIES:
            known = ", ".join(sorted(ALGORITHM_CAPABILITIES))
            raise SteeringError("unknown_algorithm", f"unknown algorithm {name!r}; known: {known}", where(path))
        if name not in registered_algorithms():
            raise SteeringError("not_implemented", f"algorithm {name!r} is not built yet", where(path))
        if name not in self.config.algorithms:
            enabled = ", ".join(self.config.algorithms)
            raise SteeringError(
                "algorithm_not_enabled",
                f"algorithm {name!r} is not enabled on this server (enabled: {enabled}); "
                "the operator declares it with --steer-algorithms",
                where(path),
            )

    # Gates ------------------------------------------------------------------------------------------------------

    def _check_gate_count(self, request: SteeringRequest, where: ParamWriter) -> None:
        if request.gates and not self.config.gates:
            raise SteeringError("gates_unavailable", "gates are switched off on this server", where(("gates",)))
        if len(request.gates) > self.config.max_gates:
            raise SteeringError(
                "too_many_gates",
                f"{len(request.gates)} gates given, at most {self.config.max_gates} allowed on this server",
                where(("gates",)),
            )

    def _gate(
        self, gate: SteeringGate, path: Path, where: ParamWriter, held: list[str], vectors: list[PlannedVector]
    ) -> PlannedGate:
        if gate.scope == "rest_of_conversation":
            raise SteeringError(
                "not_implemented", "scope 'rest_of_conversation' is not built yet", where((*path, "scope"))
            )
        planned = PlannedGate(
            when="always", at=gate.when.at, scope=gate.scope, apply=_apply_name(gate.apply), label=gate.label
        )
        if isinstance(gate.when, ProbeWhen):
            planned = self._with_probe(planned, gate.when, (*path, "when", "probe"), where, held)
        if isinstance(gate.apply, AddApply):
            planned = self._with_steer(planned, gate.apply, (*path, "apply", "steer"), where, held)
        elif isinstance(gate.apply, AttenuateApply):
            planned = replace(planned, keep=gate.apply.keep)
            if not any(_reaches(planned, vector) for vector in vectors):
                raise SteeringError(
                    "nothing_to_attenuate",
                    "the request has no static steering that this gate could ever reach",
                    where((*path, "apply")),
                )
        return planned

    def _with_probe(
        self, planned: PlannedGate, when: ProbeWhen, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        source = self._source(when.probe, "probe", path, where, held)
        if len(source.sites) != 1:
            raise SteeringError(
                "probe_not_single_site",
                f"a probe looks at one site, this one names {len(source.sites)}; pick one with 'layers' and 'hook'",
                where(path),
            )
        return replace(
            planned,
            when="probe",
            probe_digest=source.digest,
            probe_site=source.sites[0],
            threshold=when.threshold,
            sharpness=when.sharpness,
            fires=when.fires,
            score=when.score,
        )

    def _with_steer(
        self, planned: PlannedGate, apply: AddApply, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        source = self._source(apply.steer, "steer", path, where, held)
        if planned.probe_site is not None and planned.scope == "this_token":
            early = [site for site in source.sites if site_order(*site) < site_order(*planned.probe_site)]
            if early:
                hook, layer = early[0]
                raise SteeringError(
                    "steer_before_probe",
                    f"scope 'this_token' steers a row after its probe has read it: {layer}:{hook} runs before the "
                    f"probe's {planned.probe_site[1]}:{planned.probe_site[0]}",
                    where(path),
                )
        return replace(planned, steer_digest=source.digest, steer_sites=source.sites, strength=apply.strength)

    # Sources ----------------------------------------------------------------------------------------------------

    def _source(
        self,
        source: NamedVec | InlineVec | InlinePayload,
        kind: VectorKind,
        path: Path,
        where: ParamWriter,
        held: list[str],
    ) -> _Source:
        if isinstance(source, NamedVec):
            return self._named(source, kind, path, where, held)
        if "inline" not in self.sources:
            raise SteeringError(
                "inline_not_allowed", "this server takes registered vectors only; name one", where(path)
            )
        inside: Path = (*path, "payload") if isinstance(source, InlinePayload) else path
        payload = source.payload if isinstance(source, InlinePayload) else DirectionPayload(packed=source.packed)
        if not isinstance(payload, DirectionPayload):
            raise SteeringError("not_implemented", "only direction payloads are built yet", where(inside))
        self._check_payload(payload, (*inside, "packed"), where)
        stored = canonical(payload, where(inside))
        # Zero bytes were refused by the rules; what is zero only once it is decoded is seen here.
        if kind == "probe" and not any(row.any() for row in stored.numbers.values()):
            raise SteeringError("zero_vector", "a probe of zeros never tells rows apart", where(inside))
        digest = self.names.hold_payload(stored)
        held.append(digest)
        sites = [(hook, layer) for hook, layer, _ in sites_of(payload)]
        return _Source(digest, tuple(sorted(sites, key=lambda site: site_order(*site))))

    def _named(self, source: NamedVec, kind: VectorKind, path: Path, where: ParamWriter, held: list[str]) -> _Source:
        entry = self.names.find(source.name, kind)
        if entry is None:
            other: VectorKind = "probe" if kind == "steer" else "steer"
            hint = (
                f"; there is a {other} vector of that name" if self.names.find(source.name, other) is not None else ""
            )
            raise SteeringError(
                "unknown_vector", f"no {kind} vector is registered as {source.name!r}{hint}", where((*path, "name"))
            )
        self.names.hold(entry.digest)
        held.append(entry.digest)
        sites = sorted(((hook, layer) for hook, layer, _ in entry.sites), key=lambda site: site_order(*site))
        resolved = _pick(_Source(entry.digest, tuple(sites)), source.layers, source.hook, path, where)
        widths = {(hook, layer): width for hook, layer, width in entry.sites}
        for hook, layer in resolved.sites:
            name = (*path, "name")
            self._check_site(hook, layer, widths[hook, layer], where, _Place(name, name, name))
        return resolved

    def _check_site(self, hook: str, layer: int, width: int, where: ParamWriter, place: _Place) -> None:
        if hook not in HOOKS:
            raise SteeringError(
                "unknown_hook", f"unknown hook {hook!r}; known: {', '.join(HOOKS)}", where(place.hook_path)
            )
        if layer >= self.facts.layers:
            raise SteeringError(
                "unknown_layer",
                f"layer {layer} does not exist: this model has layers 0 to {self.facts.layers - 1}",
                where(place.layer_path),
            )
        expected = self.facts.width(hook, layer)
        if expected is None:
            raise SteeringError(
                "hook_not_steerable",
                f"hook {hook!r} carries no steering on this server (declared: {', '.join(self.config.hooks)}); "
                "the operator declares hooks with --steer-hooks",
                where(place.hook_path),
            )
        if width != expected:
            raise SteeringError(
                "width_mismatch",
                f"the vector is {width} wide, {layer}:{hook} of this model is {expected}",
                where(place.width_path),
            )


def _param_writer(as_list: bool) -> ParamWriter:
    """Writes paths as the client sent them: a bare list of gates has no member `gates`."""

    def write(path: Path) -> str:
        if as_list and path[:1] == ("gates",):
            path = path[1:]
        return format_path(path, "steering")

    return write


def _pick(source: _Source, layers: Sequence[int] | None, hook: str | None, path: Path, where: ParamWriter) -> _Source:
    """The sites of a source at some layers and a hook; what it lacks is refused."""
    if hook is not None:
        here = tuple(site for site in source.sites if site[0] == hook)
        if not here:
            hooks = ", ".join(sorted({site[0] for site in source.sites}))
            code = "layer_not_in_payload" if hook in HOOKS else "unknown_hook"
            raise SteeringError(
                code, f"the vector has no rows at hook {hook!r} (it has: {hooks})", where((*path, "hook"))
            )
        source = source._replace(sites=here)
    if layers is not None:
        present = {site[1] for site in source.sites}
        for index, layer in enumerate(layers):
            if layer not in present:
                raise SteeringError(
                    "layer_not_in_payload",
                    f"the vector has no row for layer {layer} (it has: {', '.join(map(str, sorted(present)))})",
                    where((*path, "layers", index)),
                )
        source = source._replace(sites=tuple(site for site in source.sites if site[1] in layers))
    return source


def _reaches(gate: PlannedGate, vector: PlannedVector) -> bool:
    """Whether an attenuating gate can ever meet a static vector: a row that both touch, at a site in reach."""
    selected = selects_phase(vector.where)
    if not any(selected[phase] for phase in gate_phases(gate).reach):
        return False
    if gate.probe_site is None or gate.scope != "this_token":
        return True
    probe = gate.probe_site
    return any(site_order(*site) >= site_order(*probe) for site in vector.sites)


def _apply_name(apply: AddApply | AttenuateApply | ObserveApply) -> Literal["add", "attenuate", "observe"]:
    if isinstance(apply, AddApply):
        return "add"
    return "attenuate" if isinstance(apply, AttenuateApply) else "observe"
