"""Runs a Hugging Face causal LM one row at a time, greedily, under a steering request: the specification in code.

It follows wire.md (selectors, several vectors, sites), algorithms.md (the mathematics) and gates.md (when x scope x
apply) to the letter and does nothing clever: every row is one forward pass of one token, so each row sees the keys and
values that earlier rows really had under steering. All arithmetic is float32.

The request is taken to be admissible. What the interpreter cannot make sense of raises `NotAdmissibleError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .gates import Gate
from .results import GateRow, GateTrace, Result, VectorTrace
from .sources import Json, NotAdmissibleError, Registered, Site, fields, require
from .static import GENERATION_PARTS, Group, StaticVector, selects

TOP = 5
"""How many of the likeliest tokens each step keeps for comparison."""


@dataclass
class Plan:
    """Everything that steers one request.

    Attributes:
        groups: Static groups in order: "the request's group applies to its [the default's] result".
        locked: A locked default: "it applies last of all, after the gates' adds, and nothing attenuates it".
        gates: The gates of this request, the default's, and the bridged ones.
    """

    groups: list[Group]
    locked: Group | None
    gates: list[Gate]

    def start_row(self, row: int, tokens: Sequence[int], prompt_length: int) -> None:
        """Select the static vectors of this row."""
        for group in self.all_groups():
            group.start_row(row, tokens, prompt_length)

    def all_groups(self) -> list[Group]:
        """The groups in order of application, a locked default last."""
        return [*self.groups, self.locked] if self.locked else self.groups

    def refuse_empty_selections(self, prompt: Sequence[int]) -> None:
        """wire.md: "A clause that selects no row of this prompt and has no generation part is refused"."""
        for vector in (vector for group in self.all_groups() for vector in group.vectors):
            later = any(vector.where.get(name) is not None for name in GENERATION_PARTS)
            now = any(selects(vector.where, row, prompt, len(prompt)) for row in range(len(prompt)))
            require(now or later, "selects_nothing", f"{vector.where}")

    def refuse_unknown_layers(self, layers: int) -> None:
        """No site may lie outside the model: it would be skipped without a word."""
        sites = {site for group in self.all_groups() for vector in group.vectors for site in vector.sites}
        for gate in self.gates:
            sites |= {*gate.steer, *([gate.probe_site] if gate.probe_site else [])}
        outside = sorted(str(site) for site in sites if not 0 <= site.layer < layers)
        require(not outside, "unknown_layer", f"{outside} of {layers} layers")

    def steer(self, row: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """The steered value of one row at one site: x + f (T(x) - x) + sum of w * strength * vector."""
        for gate in self.gates:
            gate.look(row, site, x)
        static = x
        for group in self.groups:
            static = group.apply(row, site, static)
        kept = 1.0
        for gate in self.gates:
            if gate.apply["kind"] == "attenuate":
                kept *= 1 - (1 - gate.apply["keep"]) * gate.weight(row, site)
        value = static if kept == 1 else x + kept * (static - x)
        for gate in self.gates:  # "Gates' adds are not damped"
            if site in gate.steer:
                value = value + gate.weight(row, site) * gate.apply["strength"] * gate.steer[site]
        return self.locked.apply(row, site, value) if self.locked else value

    def end_row(self, row: int) -> None:
        """Let every gate record the row."""
        for gate in self.gates:
            gate.end_row(row)


@contextlib.contextmanager
def hooked(model: PreTrainedModel, change: Callable[[Site, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Call ``change(site, x)`` at every site of a one-row forward, in execution order, and use what it returns.

    Hooks per block (wire.md): pre_attn = the block's input; attn_heads = input of o_proj; post_attn = the residual
    with attention added = input of post_attention_layernorm; mlp_in, mlp_out = input and output of mlp; post_block =
    the block's output.
    """

    def on_input(site: Site) -> Callable[..., tuple[torch.Tensor, ...]]:
        def pre_hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (change(site, args[0][0, 0]).view_as(args[0]), *args[1:])

        return pre_hook

    def on_residual(site: Site) -> Callable[..., None]:
        def pre_hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            # The block keeps this very tensor as its residual, so it is written in place.
            args[0].copy_(change(site, args[0][0, 0].clone()).view_as(args[0]))

        return pre_hook

    def on_output(site: Site) -> Callable[..., torch.Tensor]:
        def hook(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
            return change(site, output[0, 0]).view_as(output)

        return hook

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.model.layers):
            for handle in (
                block.register_forward_pre_hook(on_input(Site(layer, "pre_attn"))),
                block.self_attn.o_proj.register_forward_pre_hook(on_input(Site(layer, "attn_heads"))),
                block.post_attention_layernorm.register_forward_pre_hook(on_residual(Site(layer, "post_attn"))),
                block.mlp.register_forward_pre_hook(on_input(Site(layer, "mlp_in"))),
                block.mlp.register_forward_hook(on_output(Site(layer, "mlp_out"))),
                block.register_forward_hook(on_output(Site(layer, "post_block"))),
            ):
                stack.callback(handle.remove)
        yield


SteeringValue = Json | Sequence[Json] | bool | None
"""What the wire's `steering` field may hold."""


def steering_request(steering: SteeringValue) -> dict[str, Any]:
    """The `steering` field as a full SteeringRequest; a list is shorthand for its gates."""
    require(steering is not True, "invalid_type", "`true` is refused")
    given: Any = steering or {}
    if isinstance(given, Sequence):
        given = {"gates": given}
    return fields(given, vectors=[], conflict="sequential", gates=[], inherit_default=True, report="none")


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompt_ids: list[int],
    request: SteeringValue,
    *,
    vectors: Registered | None,
    max_tokens: int,
    eos_id: int | None = None,
    bridged: Sequence[Json] = (),
    default: Json | None = None,
    locked: bool = False,
    forced: Sequence[int] | None = None,
) -> Result:
    """Answer greedily under `request`, one row per forward pass.

    Args:
        model: A Llama-like causal LM in float32 on CPU, in eval mode.
        prompt_ids: The whole prompt, P >= 1 tokens.
        request: The wire's `steering` value as Python objects: gates list, SteeringRequest, ``False`` or None.
        vectors: Registered vectors by namespace.
        max_tokens: At most this many answer tokens, at least 1.
        eos_id: Ends the answer once produced, and is part of it.
        bridged: Gates latched by earlier turns: in force at every answer row, and not run if declared again.
        default: The server's default SteeringRequest; its gates run beside the request's (`client_gates: allow`).
        locked: The default can't be opted out of and applies last.
        forced: Takes these tokens in place of the likeliest ones, to compare log-probabilities along a known answer.
    """
    _check_model(model)
    assert prompt_ids, "a prompt has at least one token"
    assert max_tokens >= 1, "at least one token is asked for"
    result = Result()
    plan = _plan(result, len(prompt_ids), request, vectors or {}, bridged, default, locked)
    plan.refuse_empty_selections(prompt_ids)
    plan.refuse_unknown_layers(model.config.num_hidden_layers)
    tokens = list(prompt_ids)
    cache = None
    row = 0

    with hooked(model, lambda site, x: plan.steer(row, site, x)):
        while True:
            plan.start_row(row, tokens, len(prompt_ids))
            output = model(input_ids=torch.tensor([[tokens[row]]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            plan.end_row(row)
            if row >= len(prompt_ids) - 1:  # an answer row: it produces token row + 1
                _emit(result, output.logits[0, -1], None if forced is None else forced[len(result.tokens)])
                tokens.append(result.tokens[-1])
                if len(result.tokens) == max_tokens or result.tokens[-1] == eos_id:
                    break
            row += 1
    return result


def _plan(
    result: Result,
    prompt_length: int,
    request: SteeringValue,
    registered: Registered,
    bridged: Sequence[Json],
    default: Json | None,
    locked: bool,
) -> Plan:
    """Put the default, the request and the bridge together, and hang their traces on `result`."""
    own = steering_request(request)
    inherits = default is not None and request is not False and own["inherit_default"]
    require(inherits or not locked, "default_locked", "there is no opting out")
    base = steering_request(default if inherits else None)

    own_group = Group([StaticVector.decode(spec, registered) for spec in own["vectors"]], own["conflict"])
    base_group = Group([StaticVector.decode(spec, registered) for spec in base["vectors"]], base["conflict"])
    own_gates = [Gate.decode(gate, registered, prompt_length) for gate in own["gates"]]
    base_gates = [Gate.decode(gate, registered, prompt_length) for gate in base["gates"]]
    # "`steering: false` turns the bridge off for that request"
    latched = [Gate.decode(gate, registered, prompt_length) for gate in bridged] if request is not False else []
    bridge = {gate.identity(): gate for gate in latched}  # "a *set*, keyed by gate identity"
    for gate in bridge.values():
        gate.bridged = True
    for gate in (*own_gates, *base_gates):
        # "A request that declares a gate already latched does not run it a second time: it is bridged."
        gate.trace.bridged = gate.trace.latched = gate.identity() in bridge
    running = [gate for gate in (*base_gates, *own_gates) if not gate.trace.bridged]

    result.vectors = [vector.trace for vector in own_group.vectors]
    result.default_vectors = [vector.trace for vector in base_group.vectors]
    result.gates = [gate.trace for gate in own_gates]
    result.default_gates = [gate.trace for gate in base_gates]
    gates = [*running, *bridge.values()]
    return Plan([own_group], base_group, gates) if locked else Plan([base_group, own_group], None, gates)


def _emit(result: Result, logits: torch.Tensor, forced: int | None) -> None:
    """Append the likeliest token (the lowest id of equals), or the forced one, with its log-probability."""
    assert logits.dtype == torch.float32
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    order = torch.sort(logits, descending=True, stable=True).indices
    token = int(order[0]) if forced is None else forced
    result.tokens.append(token)
    result.logprobs.append(float(logprobs[token]))
    result.top_logprobs.append({int(i): float(logprobs[i]) for i in order[:TOP]})


def _check_model(model: PreTrainedModel) -> None:
    wrong = {str(p.dtype) for p in model.parameters()} - {"torch.float32"}
    assert not wrong, f"the reference runs in float32, not {wrong}"
    assert not model.training, "call model.eval()"


__all__ = [
    "GateRow",
    "GateTrace",
    "NotAdmissibleError",
    "Result",
    "Site",
    "VectorTrace",
    "generate",
    "selects",
]
