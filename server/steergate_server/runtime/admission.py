"""Admission: from a decoded request to a plan, or a precise refusal. The rules ring, then the model ring.

Everything that can be known before a token is generated is decided here: first without the prompt, then with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.registry.names import NameIndex
from steergate_server.runtime.capacity import demand_of, rows_by_component, shortage
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.conversations import CONVERSATION_SCOPE
from steergate_server.runtime.default import InstalledDefault, install
from steergate_server.runtime.gates import reaches
from steergate_server.runtime.lowering import lowering_problem
from steergate_server.runtime.plan import (
    Conversation,
    Plan,
    PlannedGate,
    PlannedVector,
    Stack,
    VectorGroup,
    fingerprint,
)
from steergate_server.runtime.resolve import Resolver
from steergate_server.runtime.selection import Selection, TooManySetsError, has_generation_part
from steergate_server.runtime.sources import ModelFacts, ParamWriter, Path, param_writer
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.hooks import site_name
from steergate_server.schema.payloads import Payload
from steergate_server.schema.registry import ServerDefault
from steergate_server.schema.requests import SteeringRequest
from steergate_server.schema.rules import check, check_conversation

DefaultUse = Literal["inherited", "overridden", "none"]

_NOTHING = SteeringRequest()


class Admitted(NamedTuple):
    """An admitted request. `digests` are held until `Admission.release`; `where` writes paths as they were sent."""

    plan: Plan
    fingerprint: str
    digests: tuple[str, ...]
    numbers: tuple[int | None, ...]
    """Place in the request of each of the plan's own vectors: those of scale 0 were dropped; None for the default's."""
    where: ParamWriter
    default: DefaultUse = "none"
    overridden: tuple[PlannedGate, ...] = ()
    """The client's gates that the server default keeps from running."""
    asked: bool = True
    """Whether the client sent steering."""

    @property
    def announced(self) -> bool:
        """Whether the answer names what was applied: the request asked for steering, or inherited some."""
        return self.asked or self.default == "inherited"


class Admission:
    """Admits requests for one model."""

    def __init__(
        self, config: EngineConfig, facts: ModelFacts, names: NameIndex, *, sources: Sequence[str] = ("name", "inline")
    ) -> None:
        self.config = config
        self.facts = facts
        self.names = names
        self.default: InstalledDefault | None = None
        self._resolver = Resolver(config, facts, names, sources)

    # Requests ---------------------------------------------------------------------------------------------------

    def admit(
        self,
        request: SteeringRequest | None,
        *,
        as_list: bool = False,
        conversation_id: str | None = None,
        conversation: Conversation | None = None,
        prefix: str = "steering",
    ) -> Admitted:
        """Admit a request, or raise SteeringError with the first problem, `param` as sent.

        request: None where the client sent no steering. as_list: the member was a bare list of gates, which shows in
        `param`; so does prefix, the request's own place. conversation: the turn, where `conversation_id` was sent. The
        payloads of an admitted request are held until `release`.
        """
        where = param_writer(as_list, prefix)
        asked, request = request is not None, request or _NOTHING
        problems = [*check(request, ALGORITHM_CAPABILITIES), *check_conversation(request, conversation_id)]
        if problems:
            raise SteeringError(problems[0].code, problems[0].message, where(problems[0].path))
        default = self._inherited(request, where)
        held: list[str] = []
        try:
            vectors, numbers = self._resolver.vectors(request, where, held)
            gates = self._resolver.gates(request, where, held)
            if default is not None:
                self._hold(default.digests, held)
            plan, overridden = self._compose(request, vectors, gates, default, where)
        except BaseException:
            self.release(held)
            raise
        plan = replace(plan, report=request.report, conversation=conversation)
        if conversation is None:
            plan = replace(plan, gates=tuple(map(_for_this_request, plan.gates)))
        use: DefaultUse = "none" if self.default is None else "overridden" if default is None else "inherited"
        inherited = len(plan.vectors) - len(numbers)
        return Admitted(
            plan, fingerprint(plan), tuple(held), (*(None,) * inherited, *numbers), where, use, tuple(overridden), asked
        )

    def admit_opt_out(self, conversation: Conversation | None, *, param: str | None = "steering") -> Admitted | None:
        """`steering: false`. None where the request is simply plain; raises SteeringError (`default_locked`).

        param: the request's own place.
        """
        if self.default is not None and self.default.locked:
            raise _locked(param)
        if conversation is None:
            return None
        plan = Plan(conversation=replace(conversation, opted_out=True))
        return Admitted(plan, fingerprint(plan), (), (), param_writer(False), asked=False)

    def problems(self, request: SteeringRequest | None, *, as_list: bool = False) -> list[SteeringError]:
        """Everything that is wrong with a request, `param` from the request itself; nothing is held.

        What only its prompt or its conversation can tell is not looked at.
        """
        where = param_writer(as_list, "")
        request = request or _NOTHING
        broken = check(request, ALGORITHM_CAPABILITIES)
        errors = [SteeringError(problem.code, problem.message, where(problem.path)) for problem in broken]
        default = self.default
        try:
            default = self._inherited(request, where)
        except SteeringError as error:
            errors.append(error)
        found, vectors, gates = self._resolver.problems(request, where, {_member(problem.path) for problem in broken})
        errors += found
        # Vectors that are not known to be in order may be what a gate attenuates.
        reached = None
        if len(vectors) == len(request.vectors):
            inherited = [vector for group in _unlocked(default) for vector in group.vectors]
            reached = [*inherited, *(vector for vector in vectors.values() if vector.scale != 0.0)]
        if self.config.gates:
            errors += self._gate_problems(len(request.gates), gates, reached, default, where)
        return errors

    def _inherited(self, request: SteeringRequest, where: ParamWriter) -> InstalledDefault | None:
        if self.default is None or request.inherit_default:
            return self.default
        if self.default.locked:
            raise _locked(where(("inherit_default",)))
        return None

    def _compose(
        self,
        request: SteeringRequest,
        vectors: list[PlannedVector],
        gates: list[PlannedGate],
        default: InstalledDefault | None,
        where: ParamWriter,
    ) -> tuple[Plan, list[PlannedGate]]:
        """The plan of a request's own vectors and gates on top of the default, and the gates that are not run."""
        reached = [*(vector for group in _unlocked(default) for vector in group.vectors), *vectors]
        for error in self._gate_problems(len(gates), dict(enumerate(gates)), reached, default, where):
            raise error
        own = (VectorGroup(vectors=tuple(vectors), conflict=request.conflict),) if vectors else ()
        if default is None:
            return Plan(groups=own, gates=tuple(gates)), []
        ignored = bool(default.gates) and default.client_gates == "ignore"
        plan = Plan(
            groups=(*_unlocked(default), *own),
            locked=default.groups if default.locked else (),
            gates=(*default.gates, *(() if ignored else gates)),
            operator_gates=len(default.gates),
            operator_locked=default.locked,
        )
        return plan, gates if ignored else []

    def _gate_problems(
        self,
        count: int,
        gates: Mapping[int, PlannedGate],
        reached: Sequence[PlannedVector] | None,
        default: InstalledDefault | None,
        where: ParamWriter,
    ) -> Iterator[SteeringError]:
        """What is wrong with a client's gates as a whole, and with what they attenuate.

        count: how many there are; gates: those that are in order, by index; reached: what they can attenuate, None
        where that is not known.
        """
        if default is not None and default.gates and count:
            if default.client_gates == "reject":
                yield SteeringError(
                    "gates_overridden",
                    "This server runs gates of its own and takes none from clients. Leave `gates` out.",
                    where(("gates",)),
                )
            if default.client_gates != "allow":
                return
        taken, limit = len(default.gates) if default is not None else 0, self.config.max_gates
        if count > limit - taken:
            theirs = f", of which the server default takes {taken}" if taken else ""
            yield SteeringError(
                "too_many_gates",
                f"{count} gates were given; this server runs at most {limit} for a request{theirs}.",
                where(("gates",)),
            )
        if reached is None:
            return
        for index, gate in gates.items():
            if gate.apply == "attenuate" and not any(reaches(gate, vector) for vector in reached):
                yield SteeringError(
                    "nothing_to_attenuate",
                    "There is no static steering, the request's own or inherited, that this gate could reach. Add "
                    "vectors, or drop the gate.",
                    where(("gates", index, "apply")),
                )

    # The prompt -------------------------------------------------------------------------------------------------

    def admit_prompt(self, admitted: Admitted, prompt: Sequence[int], max_length: int) -> None:
        """What only the prompt's tokens can tell: whether each clause selects anything, and what meets on a row.

        max_length: the most rows that the request can have. Raises SteeringError.
        """
        plan = admitted.plan
        selections = plan.select(prompt, max_length)
        for number, place in enumerate(admitted.numbers):
            vector = plan.vectors[number]
            if place is None or has_generation_part(vector.where):
                continue
            if not (selections[0].prompt >> number & 1).any():
                raise SteeringError(
                    "selects_nothing",
                    f"The clause selects none of the prompt's {len(prompt)} rows, and no generated row.",
                    admitted.where(("vectors", place, "where")),
                )
        masks = [
            self._checked_sets(stack, selection, admitted)
            for stack, selection in zip(plan.stacks, selections, strict=True)
        ]
        demand = demand_of(plan, masks, in_graph=self.config.graph_mode == "in_graph")
        problem = shortage(len(demand.slots), rows_by_component(demand.rows), self.facts.capacity)
        if problem is not None:
            raise SteeringError("over_capacity", f"The request can never fit: {problem}.", admitted.where(()))

    def _checked_sets(self, stack: Stack, selection: Selection, admitted: Admitted) -> list[int]:
        """What meets on a row: not too many different sets of vectors, each of which the graph can take."""
        try:
            # Before anything is worked out for each of them.
            masks = selection.distinct(self.facts.capacity.slots_per_request)
        except TooManySetsError as error:
            raise SteeringError("over_capacity", f"The request can never fit: {error}.", admitted.where(())) from None
        for mask in masks if self.config.graph_mode == "in_graph" else ():
            # Most sites have the very same vectors, which are looked at once, at the first of them.
            seen: set[int] = set()
            for site, vectors in stack.at_sites(mask).items():
                if id(vectors) in seen:
                    continue
                seen.add(id(vectors))
                problem = lowering_problem(vectors, self.config.graph_max_rank)
                if problem is not None:
                    raise SteeringError(
                        "not_lowerable",
                        f"At {site_name(*site)}, {problem}. This server runs in graph; --steer-graph-mode split takes "
                        "it.",
                        _path_of(vectors[-1], admitted),
                    )
        return masks

    def release(self, digests: Sequence[str]) -> None:
        """Give the payloads of a request back."""
        for digest in digests:
            self.names.release(digest)

    def _hold(self, digests: Sequence[str], held: list[str]) -> None:
        for digest in digests:
            self.names.hold(digest)
            held.append(digest)

    # The registry and the server default ------------------------------------------------------------------------

    def check_registered(self, payload: Payload, prefix: Path) -> None:
        """Check a payload's sites and widths against the model; raise SteeringError, `param` from the body's root.

        prefix: path of the payload in the body.
        """
        self._resolver.check_registered(payload, prefix)

    def set_default(self, body: ServerDefault) -> ServerDefault:
        """Put a server default in force, for requests from now on; return it with digests in place of inline numbers.

        Names are resolved now: what they point to later makes no difference. Raises SteeringError, `param` from the
        body's root; the default that is in force stays then.
        """
        installed = install(body, self._resolver, self.names, self.config.max_gates)
        previous, self.default = self.default, installed
        if previous is not None:
            self.release(previous.digests)
        return installed.definition

    def clear_default(self) -> None:
        """Take the server default out of force, for requests from now on."""
        previous, self.default = self.default, None
        if previous is not None:
            self.release(previous.digests)


def _unlocked(default: InstalledDefault | None) -> tuple[VectorGroup, ...]:
    """The static groups of a default that come before a request's own."""
    return () if default is None or default.locked else default.groups


def _member(path: Path) -> tuple[str, int]:
    """The vector or gate that a path leads into, as (`vectors` or `gates`, index)."""
    name, index = path[:2]
    assert isinstance(name, str)
    assert isinstance(index, int)
    return name, index


def _for_this_request(gate: PlannedGate) -> PlannedGate:
    """An operator's gate where the request is no turn of a conversation: it lasts as long as the request."""
    return replace(gate, scope="rest_of_request") if gate.scope == CONVERSATION_SCOPE else gate


def _locked(param: str | None) -> SteeringError:
    return SteeringError(
        "default_locked", "This server's default steering is locked, so it cannot be turned off. Leave this out.", param
    )


def _path_of(vector: PlannedVector, admitted: Admitted) -> str:
    """Where a vector stands in the request; the request as a whole for one of the server default's."""
    for number, place in enumerate(admitted.numbers):
        if admitted.plan.vectors[number] is vector and place is not None:
            return admitted.where(("vectors", place))
    return admitted.where(())
