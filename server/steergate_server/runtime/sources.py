"""Resolves the sources of a request: names and inline numbers to digests and sites, checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from steergate_server.registry.names import NameIndex
from steergate_server.registry.numbers import canonical
from steergate_server.registry.outline import Outline, outline
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.plan import SiteName
from steergate_server.runtime.sites import Site
from steergate_server.schema.errors import PathPart, SteeringError, format_path
from steergate_server.schema.hooks import HOOKS
from steergate_server.schema.payloads import (
    ConceptPairPayload,
    DirectionPayload,
    LinearPayload,
    LowRankPayload,
    PackedTensor,
    Payload,
    ReftPayload,
    RouterPayload,
)
from steergate_server.schema.registry import DigestVec
from steergate_server.schema.requests import InlinePayload, InlineVec, NamedVec
from steergate_server.schema.words import VectorKind

Path = tuple[PathPart, ...]
ParamWriter = Callable[[Path], str]


class ModelFacts(NamedTuple):
    """What admission knows of the served model: its name, its number of blocks, the width of its
    residual stream, the sites that carry ops, what an
    engine process has room for, how steering runs inside it, and whether tokens are drafted."""

    name: str
    layers: int
    hidden_width: int
    sites: tuple[Site, ...]
    capacity: Capacity
    graph_mode: Literal["eager", "split", "in_graph"] = "in_graph"
    speculative: bool = False


class Resolved(NamedTuple):
    """A source: what is known of its payload, and which of its sites are meant. `inline`: the numbers came along."""

    outline: Outline
    sites: tuple[SiteName, ...]
    inline: bool


class Sources:
    """Resolves sources for one model. What it holds in the spool is told through `held`."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, names: NameIndex, kinds: Sequence[str]) -> None:
        self._config = config
        self._facts = facts
        # Looked up for every site of every vector.
        self._width = {(known.hook, known.layer): known.width for known in facts.sites}
        self._names = names
        self._kinds = frozenset(kinds)

    def resolve(
        self,
        source: NamedVec | InlineVec | InlinePayload | DigestVec,
        kind: VectorKind,
        path: Path,
        where: ParamWriter,
        held: list[str],
    ) -> Resolved:
        """Resolve a source and hold its payload. Raises SteeringError with `where(...)` of what is to blame."""
        if isinstance(source, DigestVec):
            return self._held(source, kind, path, where, held)
        if isinstance(source, NamedVec):
            return self._named(source, kind, path, where, held)
        if "inline" not in self._kinds:
            raise SteeringError(
                "inline_not_allowed", "This server takes registered vectors only. Name one.", where(path)
            )
        inside: Path = (*path, "payload") if isinstance(source, InlinePayload) else path
        payload = source.payload if isinstance(source, InlinePayload) else DirectionPayload(packed=source.packed)
        self.check_payload(payload, inside, where)
        stored = canonical(payload, where(inside))
        known = outline(stored)
        # Zero bytes were refused by the rules; what is zero only once it is decoded is seen here.
        if kind == "probe" and known.zeros:
            raise SteeringError(
                "zero_vector", "A probe of zeros never tells rows apart. Send a vector that is not zero.", where(inside)
            )
        held.append(self._names.hold_payload(stored))
        return Resolved(known, known.sites, inline=True)

    def _named(self, source: NamedVec, kind: VectorKind, path: Path, where: ParamWriter, held: list[str]) -> Resolved:
        entry = self._names.find(source.name, kind)
        name: Path = (*path, "name")
        if entry is None:
            other: VectorKind = "probe" if kind == "steer" else "steer"
            known = self._names.find(source.name, other) is not None
            hint = f" There is a {other} vector of that name." if known else " Register it, or list what there is."
            raise SteeringError(
                "unknown_vector", f"No {kind} vector is registered as `{source.name}`.{hint}", where(name)
            )
        self._names.hold(entry.digest)
        held.append(entry.digest)
        sites = pick(entry.outline.sites, source.layers, source.hook, path, where)
        self._check_outline(entry.outline, sites, name, where)
        return Resolved(entry.outline, sites, inline=False)

    def _held(self, source: DigestVec, kind: VectorKind, path: Path, where: ParamWriter, held: list[str]) -> Resolved:
        """A payload that the server holds already, by its digest."""
        digest: Path = (*path, "digest")
        try:
            known = self._names.hold_digest(source.digest)
        except SteeringError as error:
            raise SteeringError(error.code, error.message, where(digest)) from None
        held.append(source.digest)
        if kind == "probe" and known.zeros:
            raise SteeringError("zero_vector", "A probe of zeros never tells rows apart.", where(digest))
        sites = pick(known.sites, source.layers, source.hook, path, where)
        self._check_outline(known, sites, digest, where)
        return Resolved(known, sites, inline=False)

    def _check_outline(self, known: Outline, sites: Sequence[SiteName], path: Path, where: ParamWriter) -> None:
        """Check the sites that are meant of a payload that the server holds; path: what is to blame."""
        if known.widths.items() <= self._width.items():  # all of them at once, which is nearly always so
            return
        for site in sites:
            self.check_site(site, known.widths[site], where, Place(path, path, path))

    def check_payload(self, payload: Payload, path: Path, where: ParamWriter) -> None:
        """Check the sites and widths that a payload names against the model."""
        if isinstance(payload, DirectionPayload):
            self._check_packed(payload.packed, (*path, "packed"), where)
        elif isinstance(payload, ConceptPairPayload):
            self._check_packed(payload.h1, (*path, "h1"), where)
            self._check_packed(payload.h2, (*path, "h2"), where)
        elif isinstance(payload, RouterPayload):
            for layer in payload.layers:
                at = (*path, "layers", layer)
                self.check_site(("router_logits", int(layer)), 0, where, Place(at, at, at))
        else:
            member, tensor = _width_tensor(payload)
            if tensor.shape[0] != self._facts.hidden_width:
                raise SteeringError(
                    "width_mismatch",
                    f"`{member}` has {tensor.shape[0]} rows; the residual stream of this model is "
                    f"{self._facts.hidden_width} wide.",
                    where((*path, member, "shape", 0)),
                )

    def _check_packed(self, packed: object, path: Path, where: ParamWriter) -> None:
        assert isinstance(packed, dict)
        for hook, rows in packed.items():
            at = (*path, hook)
            for row, layer in enumerate(rows.layer_indices):
                place = Place(hook=at, layer=(*at, "layer_indices", row), width=(*at, "shape", 1))
                self.check_site((hook, layer), rows.shape[1], where, place)

    def check_site(self, site: SiteName, width: int, where: ParamWriter, place: Place) -> int:
        """Check that an op stands at a site and takes rows of this width (0: any); return the site's own width."""
        hook, layer = site
        if hook not in HOOKS:
            known = ", ".join(HOOKS)
            raise SteeringError("unknown_hook", f"There is no hook `{hook}`. Hooks are {known}.", where(place.hook))
        if layer >= self._facts.layers:
            raise SteeringError(
                "unknown_layer",
                f"Layer {layer} does not exist. This model has layers 0 to {self._facts.layers - 1}.",
                where(place.layer),
            )
        expected = self._width.get(site)
        if expected is None:
            raise SteeringError("hook_not_steerable", self._why_no_op(hook, layer), where(place.hook))
        if width not in (0, expected):
            raise SteeringError(
                "width_mismatch",
                f"The vector has {width} elements per row; {layer}:{hook} of this model has {expected}.",
                where(place.width),
            )
        return expected

    def _why_no_op(self, hook: str, layer: int) -> str:
        if hook in self._config.hooks:
            return f"Layer {layer} of this model has no hook `{hook}`. Capabilities list the layers that have it."
        declared = ", ".join(self._config.hooks)
        return (
            f"Hook `{hook}` carries no steering on this server, which has {declared}. Its operator declares hooks with "
            "--steer-hooks."
        )


def _width_tensor(payload: LinearPayload | LowRankPayload | ReftPayload) -> tuple[str, PackedTensor]:
    """The tensor whose first dimension is the width of the rows that a payload without sites works on."""
    if isinstance(payload, LinearPayload):
        return "weight", payload.weight
    if isinstance(payload, LowRankPayload):
        return "projector1", payload.projector1
    return "rotate_layer", payload.rotate_layer


class Place(NamedTuple):
    """Where a site's hook, layer and width stand in the request: what `param` blames."""

    hook: Path
    layer: Path
    width: Path


def param_writer(as_list: bool, prefix: str = "steering") -> ParamWriter:
    """Writes paths as the client sent them: a bare list of gates has no member `gates`."""

    def write(path: Path) -> str:
        if as_list and path[:1] == ("gates",):
            path = path[1:]
        return format_path(path, prefix)

    return write


def pick(
    sites: tuple[SiteName, ...], layers: Sequence[int] | None, hook: str | None, path: Path, where: ParamWriter
) -> tuple[SiteName, ...]:
    """The sites at some layers and a hook; what the payload lacks is refused."""
    if hook is not None:
        here = tuple(site for site in sites if site[0] == hook)
        if not here:
            hooks = ", ".join(sorted({site[0] for site in sites})) or "none"
            code = "layer_not_in_payload" if hook in HOOKS else "unknown_hook"
            raise SteeringError(
                code, f"The vector has no rows at hook `{hook}`. It has {hooks}.", where((*path, "hook"))
            )
        sites = here
    if layers is None:
        return sites
    present = sorted({site[1] for site in sites})
    for index, layer in enumerate(layers):
        if layer not in present:
            raise SteeringError(
                "layer_not_in_payload",
                f"The vector has no row for layer {layer}. It has {', '.join(map(str, present)) or 'none'}.",
                where((*path, "layers", index)),
            )
    return tuple(site for site in sites if site[1] in layers)
