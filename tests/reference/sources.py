"""Decodes the numbers of a steering request: from wire objects to float32 tensors, one per site.

Written from wire.md ("Sources", "Hooks", "Digest") and apart from the server, so that a mistake there shows.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

Json = Mapping[str, Any]
Registered = Mapping[str, Mapping[str, Json]]
"""Registered vectors: ``{"steer": {name: source}, "probe": {name: source}}``.

A source is ``{"packed": {hook: ...}}`` or a payload object with its ``kind``.
"""

HOOKS = ("pre_attn", "attn_heads", "post_attn", "mlp_in", "router_logits", "mlp_out", "post_block")
"""wire.md, Hooks: "Execution order is (layer, this table's order)"."""

HIDDEN_HOOKS = frozenset(HOOKS) - {"attn_heads", "router_logits"}
"""wire.md, Hooks: the hooks of hidden_states, which gates probe and steer."""

SITED = ("direction", "concept_pair")
"""Payload kinds that name their hooks and layers."""


class NotAdmissibleError(ValueError):
    """The request must have been refused before any token; `code` is the error code of wire.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def require(condition: bool, code: str, message: str) -> None:
    """Raise `NotAdmissibleError` unless `condition` holds."""
    if not condition:
        raise NotAdmissibleError(code, message)


class Site(NamedTuple):
    """One place in the decoder, written ``12:post_block``."""

    layer: int
    hook: str

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sites by execution order."""
        return (self.layer, HOOKS.index(self.hook))

    def __str__(self) -> str:
        return f"{self.layer}:{self.hook}"


Numbers = dict[str, torch.Tensor]
"""The tensors of a payload at one site, by field: ``{"v"}``, ``{"h1", "h2"}``, ``{"weight", "bias"}`` ..."""


def fields(given: Json, *, required: tuple[str, ...] = (), **defaults: Any) -> dict[str, Any]:
    """Fill a wire object's defaults; a missing or an unknown field is an error, never ignored."""
    missing = sorted(set(required) - set(given))
    unknown = sorted(set(given) - set(required) - set(defaults))
    require(not missing, "missing_field", f"{missing} in {given}")
    require(not unknown, "unknown_field", f"{unknown} in {given}")
    return {**defaults, **given}


def decode_packed(packed: Json) -> dict[Site, torch.Tensor]:
    """``{hook: SteeringHookPacked}`` to one row per site: "row times its scale in float64, then rounded once"."""
    rows: dict[Site, torch.Tensor] = {}
    for hook, given in packed.items():
        require(hook in HOOKS, "unknown_hook", hook)
        part = fields(given, required=("dtype", "shape", "layer_indices", "data"), scales=None)
        matrix = _decode_array(part["dtype"], part["shape"], part["data"])
        layers = part["layer_indices"]
        scales = [1.0] * len(layers) if part["scales"] is None else part["scales"]
        require(len(set(layers)) == len(layers), "duplicate_layer", f"{layers}")
        require(len(matrix) == len(layers) == len(scales), "shape_mismatch", f"{matrix.shape}, {layers}, {scales}")
        for layer, row, scale in zip(layers, matrix, scales, strict=True):
            rows[Site(layer, hook)] = torch.from_numpy((row * np.float64(scale)).astype(np.float32))
    return rows


def decode_sited(payload: Json) -> dict[Site, Numbers]:
    """The numbers of a direction or a concept_pair at the sites they name."""
    if payload["kind"] == "direction":
        payload = fields(payload, required=("kind", "packed"))
        return {site: {"v": row} for site, row in decode_packed(payload["packed"]).items()}
    payload = fields(payload, required=("kind", "h1", "h2"))
    h1, h2 = decode_packed(payload["h1"]), decode_packed(payload["h2"])
    require(set(h1) == set(h2), "shape_mismatch", "h1 and h2 name different sites")
    return {site: {"h1": h1[site], "h2": h2[site]} for site in h1}


def decode_unsited(payload: Json, layers: list[int] | None, hook: str | None) -> dict[Site, Numbers]:
    """The same numbers at every one of `layers`, or at the layer that a reft payload itself names."""
    tensors = {name: _decode_tensor(value) for name, value in payload.items() if name not in ("kind", "layer")}
    own = [payload["layer"]] if payload.get("layer") is not None else layers
    if own is None:
        raise NotAdmissibleError("layers_required", f"a {payload['kind']} payload names no layer")
    return {Site(layer, hook or "post_block"): tensors for layer in own}  # "there null is `post_block`"


def narrow(sites: dict[Site, Numbers], *, layers: list[int] | None, hook: str | None = None) -> dict[Site, Numbers]:
    """Keep the sites of `hook` and `layers`, null keeps all: they pick among sites, and what is lacking is refused."""
    if hook is not None:
        sites = {site: numbers for site, numbers in sites.items() if site.hook == hook}
        require(bool(sites), "unknown_hook", f"the payload has no {hook}")
    if layers is not None:
        lacking = set(layers) - {site.layer for site in sites}
        require(not lacking, "layer_not_in_payload", f"{sorted(lacking)}")
        sites = {site: numbers for site, numbers in sites.items() if site.layer in layers}
    return sites


def resolve(
    source: Json,
    namespace: str,
    registered: Registered,
    *,
    layers: list[int] | None = None,
    hook: str | None = None,
) -> tuple[str, dict[Site, Numbers]]:
    """A NamedVec, InlineVec or InlinePayload to (payload kind, numbers by site), in execution order.

    `layers` and `hook` are a VectorSpec's own. Its layers pick among what a NamedVec's own selection left; its hook is
    only for payloads that name none.
    """
    named: dict[str, Any] = {"layers": None, "hook": None}
    match source.get("kind"):
        case "name":
            named = fields(source, required=("kind", "name"), layers=None, hook=None)
            known = registered.get(namespace, {})
            require(named["name"] in known, "unknown_vector", f"{named['name']} is not a registered {namespace} vector")
            payload = {"kind": "direction", **known[named["name"]]}
        case "inline":
            payload = {"kind": "direction", "packed": fields(source, required=("kind", "packed"))["packed"]}
        case "payload":
            payload = fields(source, required=("kind", "payload"))["payload"]
        case other:
            raise NotAdmissibleError("unknown_kind", f"{other}")
    if payload["kind"] in SITED:
        require(hook is None, "hook_not_allowed", f"a {payload['kind']} payload names its hooks")
        sites = narrow(decode_sited(payload), layers=named["layers"], hook=named["hook"])
    else:
        sites = decode_unsited(payload, layers, hook)
    sites = narrow(sites, layers=layers)
    return payload["kind"], dict(sorted(sites.items(), key=lambda item: item[0].order))


def directions(source: Json, namespace: str, registered: Registered) -> dict[Site, torch.Tensor]:
    """The rows of a gate's own vector: a direction on hooks that gates may probe and steer."""
    kind, sites = resolve(source, namespace, registered)
    require(kind == "direction", "payload_kind", f"gates take directions, not {kind}")
    wrong = [str(site) for site in sites if site.hook not in HIDDEN_HOOKS]
    require(not wrong, "hook_not_allowed", f"gates neither probe nor steer {wrong}")
    return {site: numbers["v"] for site, numbers in sites.items()}


def same_numbers_key(rows: Mapping[Site, torch.Tensor]) -> str:
    """One string for equal rows at equal sites, however they were spelled ("names are labels")."""
    digest = hashlib.sha256()
    for site in sorted(rows, key=lambda site: site.order):
        digest.update(f"{site} {rows[site].shape[0]} ".encode() + rows[site].numpy().tobytes())
    return digest.hexdigest()


def _decode_tensor(tensor: Json) -> torch.Tensor:
    """A PackedTensor, rounded to float32."""
    tensor = fields(tensor, required=("dtype", "shape", "data"))
    array = _decode_array(tensor["dtype"], tensor["shape"], tensor["data"])
    return torch.from_numpy(array.astype(np.float32))


def _decode_array(dtype: str, shape: list[int], data: str) -> np.ndarray:
    """Strict base64 of little-endian, C-contiguous bytes to a finite float64 array."""
    raw = base64.b64decode(data, validate=True)
    match dtype:
        case "float16" | "float32" | "float64":
            flat = np.frombuffer(raw, dtype=np.dtype(dtype).newbyteorder("<")).astype(np.float64)
        case "bfloat16":  # a bfloat16 is the upper half of a float32
            flat = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case _:
            raise NotAdmissibleError("out_of_range", f"dtype {dtype}")
    require(flat.size == math.prod(shape), "shape_mismatch", f"{flat.size} numbers for shape {shape}")
    require(bool(np.isfinite(flat).all()), "not_finite", "payload")
    return flat.reshape(shape)
