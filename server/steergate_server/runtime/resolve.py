"""Resolving: from a request's vectors and gates to planned ones, with every source checked against the model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Literal

from msgspec.structs import replace

from steergate_server.algorithms.registry import get_algorithm, works_on_parts
from steergate_server.capabilities import ALGORITHM_CAPABILITIES, AlgorithmCapabilities
from steergate_server.registry.names import NameIndex
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.plan import PlannedGate, PlannedVector, SiteName
from steergate_server.runtime.sources import ModelFacts, ParamWriter, Path, Place, Resolved, Sources, pick
from steergate_server.schema.errors import SteeringError, format_path
from steergate_server.schema.hooks import HOOK_COMPONENTS, site_name, site_order
from steergate_server.schema.payloads import Payload
from steergate_server.schema.requests import (
    AddApply,
    AttenuateApply,
    ObserveApply,
    ProbeWhen,
    SteeringGate,
    SteeringRequest,
    VectorSpec,
)
from steergate_server.schema.rules_where import can_overlap

_DIVISOR_PATHS = {"erase": "", "clamp": "", "concept_replace": "h1/"}
"""Algorithms that divide by the norm of a row, and how the row's path starts."""


SPECULATIVE_GATES = "Under speculative decoding a probe cannot act on later rows: drafts run before it has fired."


class Resolver:
    """Resolves requests for one model. Digests that it holds in the spool are told through `held`."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, names: NameIndex, kinds: Sequence[str]) -> None:
        self.config = config
        self._facts = facts
        self._split = frozenset((site.hook, site.layer) for site in facts.sites if site.part is not None)
        self._names = names
        self._sources = Sources(config, facts, names, kinds)

    def check_registered(self, payload: Payload, prefix: Path) -> None:
        """Check a payload's sites and widths against the model; raise SteeringError, `param` from the body's root.

        prefix: path of the payload in the body.
        """
        self._sources.check_payload(payload, prefix, format_path)

    def vectors(
        self, request: SteeringRequest, where: ParamWriter, held: list[str]
    ) -> tuple[list[PlannedVector], list[int]]:
        """A request's static vectors, those of scale 0 left out, and the place of each in the request."""
        vectors: list[PlannedVector] = []
        numbers: list[int] = []
        for index, spec in enumerate(request.vectors):
            vector = self._vector(spec, ("vectors", index), where, held)
            if vector.scale != 0.0:
                vectors.append(vector)
                numbers.append(index)
        if request.conflict == "error":
            _refuse_overlaps(vectors, numbers, where)
        return vectors, numbers

    def problems(
        self, request: SteeringRequest, where: ParamWriter, skip: Container[tuple[str, int]]
    ) -> tuple[list[SteeringError], dict[int, PlannedVector], dict[int, PlannedGate]]:
        """What is wrong with each vector, and with each probe and addition of a gate; the rest, planned, by index.

        skip: members, as (`vectors` or `gates`, index), that break the rules already. Nothing is held.
        """
        held: list[str] = []
        found: list[SteeringError] = []
        vectors: dict[int, PlannedVector] = {}
        gates: dict[int, PlannedGate] = {}
        for index, spec in enumerate(request.vectors):
            if ("vectors", index) not in skip:
                with _collected(found):
                    vectors[index] = self._vector(spec, ("vectors", index), where, held)
        if request.conflict == "error" and len(vectors) == len(request.vectors):
            with _collected(found):
                kept = {index: vector for index, vector in vectors.items() if vector.scale != 0.0}
                _refuse_overlaps(list(kept.values()), list(kept), where)
        with _collected(found):
            self._check_gates_on(request, where)
        for index, gate in enumerate(request.gates):
            if ("gates", index) in skip:
                continue
            known, planned, path = len(found), _bare_gate(gate), ("gates", index)
            for step in (self._with_scope, self._with_when, self._with_apply):
                with _collected(found):
                    planned = step(planned, gate, path, where, held)
            if len(found) == known:
                gates[index] = planned
        for digest in held:
            self._names.release(digest)
        return found, vectors, gates

    def gates(self, request: SteeringRequest, where: ParamWriter, held: list[str]) -> list[PlannedGate]:
        """A request's gates."""
        self._check_gates_on(request, where)
        return [self._gate(gate, ("gates", index), where, held) for index, gate in enumerate(request.gates)]

    def _check_gates_on(self, request: SteeringRequest, where: ParamWriter) -> None:
        if request.gates and not self.config.gates:
            raise SteeringError(
                "gates_unavailable", "Gates are switched off on this server. Leave `gates` out.", where(("gates",))
            )

    # Vectors ----------------------------------------------------------------------------------------------------

    def _vector(self, spec: VectorSpec, path: Path, where: ParamWriter, held: list[str]) -> PlannedVector:
        capability = self._capability(spec.algorithm, (*path, "algorithm"), where)
        planned = PlannedVector(
            algorithm=spec.algorithm,
            digest=None,
            sites=(),
            where=spec.where,
            scale=spec.scale,
            normalize=spec.normalize,
            params=spec.params,
            label=spec.label,
        )
        if spec.steer is None:
            sites = tuple(("router_logits", layer) for layer in spec.layers or ())
            self._check_experts(sites, spec, None, path, where)
            return replace(planned, sites=sites)
        source = self._sources.resolve(spec.steer, "steer", (*path, "steer"), where, held)
        _check_kind(source, capability, spec, path, where)
        sites = self._vector_sites(source, capability, spec, path, where)
        _refuse_zeros(source, sites, spec, path, where)
        if source.outline.kind == "router":
            self._check_experts(sites, spec, source, path, where)
        rank = _rank(source, spec.algorithm)
        limit = self.config.graph_max_rank
        if self.config.graph_mode == "in_graph" and rank > limit:
            raise SteeringError(
                "rank_too_large",
                f"The payload has rank {rank}; this server takes up to {limit}.",
                where((*path, "steer")),
            )
        return replace(planned, digest=source.outline.digest, sites=sites, rank=rank)

    def _capability(self, name: str, path: Path, where: ParamWriter) -> AlgorithmCapabilities:
        if name not in ALGORITHM_CAPABILITIES:
            known = ", ".join(sorted(ALGORITHM_CAPABILITIES))
            raise SteeringError(
                "unknown_algorithm", f"There is no algorithm `{name}`. Algorithms are {known}.", where(path)
            )
        if name not in self.config.algorithms:
            enabled = ", ".join(self.config.algorithms)
            raise SteeringError(
                "algorithm_not_enabled",
                f"Algorithm `{name}` is not enabled on this server, which has {enabled}. Its operator declares "
                "algorithms with --steer-algorithms.",
                where(path),
            )
        return ALGORITHM_CAPABILITIES[name]

    def _vector_sites(
        self,
        source: Resolved,
        capability: AlgorithmCapabilities,
        spec: VectorSpec,
        path: Path,
        where: ParamWriter,
    ) -> tuple[SiteName, ...]:
        """The sites of a vector: those its payload names, or `hook` at `layers` for a payload that names none."""
        if source.outline.widths:
            sites = pick(source.sites, spec.layers, None, path, where)
        else:
            layers = spec.layers or [layer for layer in [source.outline.metadata.get("layer")] if layer is not None]
            if not layers:
                raise SteeringError(
                    "layers_required", "The payload names no layer. Give `layers`.", where((*path, "layers"))
                )
            sites = tuple((spec.hook or "post_block", layer) for layer in layers)
            width = source.outline.own_width
            for index, site in enumerate(sites):
                steer = (*path, "steer")
                place = Place((*path, "hook"), (*path, "layers", index) if spec.layers else steer, steer)
                self._sources.check_site(site, width, where, place)
        at = where((*path, "steer") if source.outline.widths else (*path, "hook"))
        for hook, layer in sites:
            if HOOK_COMPONENTS[hook] != capability.target_component:
                raise SteeringError(
                    "hook_not_allowed",
                    f"Algorithm `{spec.algorithm}` works on {capability.target_component}; hook `{hook}` is "
                    f"{HOOK_COMPONENTS[hook]}.",
                    at,
                )
            if (hook, layer) in self._split and not works_on_parts(spec.algorithm, normalize=spec.normalize):
                raise SteeringError(
                    "hook_not_allowed",
                    f"This server splits the rows of `{hook}` over several ranks, so only a plain addition works "
                    f"there, such as `attention_add`; `{spec.algorithm}` needs complete rows. Use another hook, or a "
                    "server without tensor parallelism.",
                    at,
                )
        return sites

    def _check_experts(
        self,
        sites: Sequence[SiteName],
        spec: VectorSpec,
        source: Resolved | None,
        path: Path,
        where: ParamWriter,
    ) -> None:
        """Expert ids must exist in every layer that they are for."""
        for index, site in enumerate(sites):
            at = (*path, "layers", index) if source is None else (*path, "steer")
            experts = self._sources.check_site(site, 0, where, Place(at, at, at))
            settings = spec.params if source is None else source.outline.metadata["layers"][str(site[1])]
            for member in ("expert_ids", "activate_ids", "deactivate_ids"):
                listed = settings.get(member)
                for expert in listed if isinstance(listed, list) else ():
                    if expert >= experts:
                        raise SteeringError(
                            "out_of_range",
                            f"Expert {expert} does not exist. Layer {site[1]} has experts 0 to {experts - 1}.",
                            where((*path, "params", member) if source is None else (*path, "steer")),
                        )

    # Gates ------------------------------------------------------------------------------------------------------

    def _gate(self, gate: SteeringGate, path: Path, where: ParamWriter, held: list[str]) -> PlannedGate:
        planned = _bare_gate(gate)
        for step in (self._with_scope, self._with_when, self._with_apply):
            planned = step(planned, gate, path, where, held)
        return planned

    def _with_scope(
        self,
        planned: PlannedGate,
        gate: SteeringGate,
        path: Path,
        where: ParamWriter,
        held: list[str],  # noqa: ARG002 (one of the steps, which take the same)
    ) -> PlannedGate:
        if self._facts.speculative and isinstance(gate.when, ProbeWhen) and gate.scope != "this_token":
            raise SteeringError(
                "gates_unavailable",
                f"{SPECULATIVE_GATES} Use scope `this_token`.",
                where((*path, "scope")),
            )
        return planned

    def _with_when(
        self, planned: PlannedGate, gate: SteeringGate, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        if not isinstance(gate.when, ProbeWhen):
            return planned
        return self._with_probe(planned, gate.when, (*path, "when", "probe"), where, held)

    def _with_apply(
        self, planned: PlannedGate, gate: SteeringGate, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        if isinstance(gate.apply, AddApply):
            return self._with_steer(planned, gate.apply, (*path, "apply", "steer"), where, held)
        return replace(planned, keep=gate.apply.keep) if isinstance(gate.apply, AttenuateApply) else planned

    def _with_probe(
        self, planned: PlannedGate, when: ProbeWhen, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        source = self._sources.resolve(when.probe, "probe", path, where, held)
        if len(source.sites) != 1:
            raise SteeringError(
                "probe_not_single_site",
                f"A probe looks at one site; this one names {len(source.sites)}. Pick one with `layers` and `hook`.",
                where(path),
            )
        return replace(
            planned,
            when="probe",
            probe_digest=source.outline.digest,
            probe_site=source.sites[0],
            threshold=when.threshold,
            sharpness=when.sharpness,
            fires=when.fires,
            score=when.score,
        )

    def _with_steer(
        self, planned: PlannedGate, apply: AddApply, path: Path, where: ParamWriter, held: list[str]
    ) -> PlannedGate:
        source = self._sources.resolve(apply.steer, "steer", path, where, held)
        if source.outline.kind != "direction":
            raise SteeringError(
                "payload_kind", f"A gate adds a direction; this is a {source.outline.kind} payload.", where(path)
            )
        for hook, layer in source.sites:
            if HOOK_COMPONENTS[hook] != "hidden_states":
                raise SteeringError(
                    "hook_not_allowed", f"Gates do not steer {layer}:{hook}. They steer the hidden states.", where(path)
                )
        if planned.probe_site is not None and planned.scope == "this_token":
            early = [site for site in source.sites if site_order(*site) < site_order(*planned.probe_site)]
            if early:
                raise SteeringError(
                    "steer_before_probe",
                    f"Scope `this_token` steers a row after its probe has read it, and {site_name(*early[0])} runs "
                    f"before the probe's {site_name(*planned.probe_site)}. Steer later sites, or choose `next_step`.",
                    where(path),
                )
        return replace(planned, steer_digest=source.outline.digest, steer_sites=source.sites, strength=apply.strength)


@contextmanager
def _collected(found: list[SteeringError]) -> Iterator[None]:
    """Puts a refusal on a list."""
    try:
        yield
    except SteeringError as error:
        found.append(error)


def _bare_gate(gate: SteeringGate) -> PlannedGate:
    """A gate without its numbers."""
    return PlannedGate(
        when="always", at=gate.when.at, scope=gate.scope, apply=_apply_name(gate.apply), label=gate.label
    )


def _check_kind(
    source: Resolved, capability: AlgorithmCapabilities, spec: VectorSpec, path: Path, where: ParamWriter
) -> None:
    if source.outline.kind != capability.payload_kind:
        raise SteeringError(
            "payload_kind",
            f"Algorithm `{spec.algorithm}` takes a {capability.payload_kind} payload; this is a {source.outline.kind}.",
            where((*path, "steer")),
        )
    if spec.hook is not None and source.outline.widths:
        raise SteeringError(
            "hook_not_allowed", "The payload names its own hooks. Leave `hook` out.", where((*path, "hook"))
        )
    if spec.params and source.outline.kind == "router":
        raise SteeringError(
            "unknown_param", "The payload says what is done. Leave `params` out.", where((*path, "params"))
        )


def _refuse_zeros(
    source: Resolved, sites: Sequence[SiteName], spec: VectorSpec, path: Path, where: ParamWriter
) -> None:
    """A row of norm 0 cannot be divided by."""
    start = _DIVISOR_PATHS.get(spec.algorithm)
    if start is None:
        return
    for hook, layer in sites:
        if f"{start}{hook}/{layer:08d}" in source.outline.zeros:
            raise SteeringError(
                "zero_vector",
                f"Algorithm `{spec.algorithm}` divides by the vector's norm, which is 0 at {site_name(hook, layer)}.",
                where((*path, "steer")),
            )


def _rank(source: Resolved, algorithm: str) -> int:
    """Rank of a low-rank payload as its algorithm counts it; 0 for others."""
    if source.outline.widths:
        return 0
    shapes = {name: SimpleNamespace(shape=shape) for name, shape in source.outline.shapes.items()}
    return get_algorithm(algorithm).wire_rank(SimpleNamespace(**shapes)) or 0


def _refuse_overlaps(vectors: Sequence[PlannedVector], numbers: Sequence[int], where: ParamWriter) -> None:
    """conflict `error`: no two clauses may select one row at a shared site."""
    for later, second in enumerate(vectors):
        for earlier, first in enumerate(vectors[:later]):
            shared = sorted(set(first.sites) & set(second.sites), key=lambda site: site_order(*site))
            if shared and can_overlap(first.where, second.where):
                raise SteeringError(
                    "vector_conflict",
                    f"vectors[{numbers[earlier]}] can select the same rows at {site_name(*shared[0])}, and `conflict` "
                    "is `error`. Make the clauses disjoint, or choose another conflict.",
                    where(("vectors", numbers[later])),
                )


def _apply_name(apply: AddApply | AttenuateApply | ObserveApply) -> Literal["add", "attenuate", "observe"]:
    if isinstance(apply, AddApply):
        return "add"
    return "attenuate" if isinstance(apply, AttenuateApply) else "observe"
