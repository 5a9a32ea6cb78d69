"""The scheduler: vLLM's own, with steering's book-keeping around it.

It gives each steered request its cache identity before any block is looked up, decides which firings are real, ends
requests whose steering failed, and attaches reports. Nothing of ours may raise here: it would end the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from steergate_server.algorithms.extensions import load_extensions
from steergate_server.registry.spool import Spool
from steergate_server.runtime.capacity import Capacity, Demand, Ledger, demand_of
from steergate_server.runtime.config import SPOOL_ENVIRONMENT, engine_config
from steergate_server.runtime.controller import Evidence
from steergate_server.runtime.conversations import Conversations, Latching
from steergate_server.runtime.engine_status import EngineStatus, store_status
from steergate_server.runtime.identity import Epochs, cache_identity, first_changed_row
from steergate_server.runtime.latches import Latches
from steergate_server.runtime.plan import Plan, decode_plan, encode_plan
from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin.carrier import (
    HISTORY_ATTRIBUTE,
    PLAN_KEY,
    STEP_ATTRIBUTE,
    StepResult,
    failure,
    plan_bytes,
    with_plan,
)
from steergate_server.vllm_plugin.steered import Steered, mix_identity

logger = init_logger(__name__)

Failure = dict[str, Any]


class SteeringSchedulerMixin:
    """Mixed into Scheduler and AsyncScheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steered: dict[str, Steered] = {}
        self._steering_failures: dict[str, Failure] = {}
        self._epochs = Epochs()
        self._steering_step = 0
        load_extensions()
        config = engine_config(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        self._steering_in_graph = config is not None and config.graph_mode == "in_graph"
        self._ledger = Ledger()
        # Not known before a worker has told; until then steered requests start one at a time.
        self._capacity: Capacity | None = None
        self._tentative: list[str] = []
        self._holding_back = False
        self._spool = Path(os.environ[SPOOL_ENVIRONMENT])
        self._conversations = Conversations(Latches(Spool(self._spool)))
        self._pool_used = 0
        self._status = EngineStatus()

    # Admission --------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Give a steered request its cache identity, then queue it."""
        encoded = plan_bytes(request.sampling_params)
        if encoded is not None and request.request_id not in self._steered:
            try:
                self._admit(request, decode_plan(encoded))
            except SteeringError as error:
                self._refuse(request, error)
            except Exception:
                logger.exception("SteerGate: request %s could not be admitted", request.request_id)
                self._refuse(
                    request,
                    SteeringError(
                        "algorithm_failed", "The steering of this request failed to install. The server's log says why."
                    ),
                )
        super().add_request(request)  # type: ignore[misc]

    def _admit(self, request: Request, declared: Plan) -> None:
        turn = self._conversations.open_turn(request.request_id, declared)
        plan = turn.plan
        if plan is not declared:
            # What the worker gets is what the turn comes to.
            request.sampling_params = with_plan(request.sampling_params, encode_plan(plan) if plan.acts else None)
        if not plan.acts and plan.report == "none":
            return
        longest = self.max_model_len  # type: ignore[attr-defined]
        selections = plan.select(request.prompt_token_ids or (), longest)
        demand = demand_of(plan, [one.distinct() for one in selections], in_graph=self._steering_in_graph)
        row = first_changed_row(plan, selections, request.num_prompt_tokens)
        first_block = None if row is None else row // self.hash_block_size  # type: ignore[attr-defined]
        steered = Steered(request, turn, demand, first_block)
        self._steered[request.request_id] = steered
        self._identify(steered)

    def _refuse(self, request: Request, error: SteeringError) -> None:
        self._steering_failures[request.request_id] = failure(error)
        # Whatever it computes until it is ended is not what its plan says.
        mix_identity(request, request._block_hasher, 0, request.request_id.encode())

    def _identify(self, steered: Steered) -> None:
        """Key a request's blocks by what its plan does."""
        identity = cache_identity(steered.plan, steered.request.num_prompt_tokens)
        steered.identity = self._epochs.current(identity)
        if steered.first_block is not None:
            mix_identity(steered.request, steered.plain, steered.first_block, steered.identity)

    # A step -----------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own schedule; requests that resume take the history of their gates along."""
        self._tentative, self._holding_back = [], False
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._steering_step += 1
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            steered = self._steered.get(new.req_id)
            if steered is not None and steered.started is None:
                steered.started = steered.looked_up = self._steering_step
            elif steered is not None:
                # The V2 runner gets a request that resumes as a new one.
                resumed.add(new.req_id)
        for request_id in self._tentative:
            # Asked for, but not started: for lack of KV cache, say.
            if request_id not in output.num_scheduled_tokens:
                self._ledger.release(request_id)
        for request_id in resumed & self._steered.keys():
            self._steered[request_id].looked_up = self._steering_step
        history = {
            request_id: steered.book.history(steered.request.num_tokens - 1)
            for request_id in resumed
            if (steered := self._steered.get(request_id)) is not None and steered.book is not None
        }
        if history:
            setattr(output, HISTORY_ATTRIBUTE, history)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may start. A steered one waits, without blocking others, until its slots and rows
        are free; a reservation lasts through preemption. Oldest first: while one waits, younger ones that need new
        rows wait too."""
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        steered = self._steered.get(request.request_id)
        if steered is None or self._ledger.holds(request.request_id):
            return True
        if not self._has_room(steered.demand):
            self._holding_back = True
            return False
        self._ledger.reserve(request.request_id, steered.demand)
        self._tentative.append(request.request_id)
        return True

    def _has_room(self, demand: Demand) -> bool:
        if self._capacity is None:
            return self._ledger.empty
        if self._holding_back and self._ledger.needs_new(demand):
            return False
        # A demand that could never fit was refused at the front; here it starts alone and is refused by the worker.
        return self._ledger.fits(demand, self._capacity) or self._ledger.empty

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own update, then our books: accepted firings, failures, reports."""
        before = {
            request_id: self._steered[request_id].request.num_output_tokens
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in self._steered
        }
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        try:
            self._keep_books(outputs, before, getattr(model_runner_output, STEP_ATTRIBUTE, None))
        except Exception:
            logger.exception("SteerGate: book-keeping failed; ending the steered requests of this step")
            for request_id in before:
                self._fail(
                    request_id,
                    "algorithm_failed",
                    "The book-keeping of this request failed. The server's log says why.",
                )
        self._end_failed(outputs)
        self._forget_finished(before)
        self._tell_status()
        return outputs

    def _keep_books(
        self, outputs: dict[int, EngineCoreOutputs], before: dict[str, int], result: StepResult | None
    ) -> None:
        if result is not None:
            self._capacity, self._pool_used = result.capacity, result.pool_used
            if result.failures:
                self._steering_failures.update(result.failures)
                # Before anything counts: a token that nobody is given is no accepted row of a failed request.
                self._quarantine()
        evidence = {} if result is None else result.evidence
        for request_id, tokens in before.items():
            steered = self._steered.get(request_id)
            accepted = 0 if steered is None else steered.request.num_output_tokens - tokens
            if steered is None or not accepted or request_id in self._steering_failures:
                continue
            # The rows of rejected drafts come behind those that count.
            seen = evidence.get(request_id, [])[:accepted]
            if steered.book is not None:
                for row in seen:
                    steered.book.accept(row)
            if steered.latching is not None:
                self._latch(request_id, steered.latching, seen)
        if not self._steered:
            return
        for batch in outputs.values():
            for output in batch.outputs:
                steered = self._steered.get(output.request_id)
                if steered is None or steered.book is None:
                    continue
                if output.finish_reason is not None and not steered.reports:
                    self._attach(output, {"fired": steered.book.fired})
                elif steered.reports:
                    # Every output may be the last that the client's side takes: a stop string is found over there.
                    last = output.finish_reason is not None or bool(steered.request.sampling_params.stop)
                    ours = steered.book.snapshot(last=last) | {"fired": steered.book.fired}
                    if steered.bridge:
                        ours |= {"ran": list(steered.ran), "bridge": msgspec.to_builtins(steered.bridge)}
                    self._attach(output, ours)

    @staticmethod
    def _attach(output: EngineCoreOutput, ours: dict[str, Any]) -> None:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), PLAN_KEY: ours}

    def _tell_status(self) -> None:
        status = EngineStatus(latches=len(self._conversations.latches), pool_used=self._pool_used)
        if status == self._status:
            return
        self._status = status
        try:
            store_status(self._spool, status)
        except OSError:
            logger.exception("SteerGate: the engine's status could not be told")

    def _latch(self, request_id: str, latching: Latching, seen: Sequence[Evidence]) -> None:
        try:
            self._conversations.see(latching, seen)
        except Exception:
            logger.exception("SteerGate: a gate of request %s could not be latched", request_id)
            self._fail(
                request_id,
                "algorithm_failed",
                "A gate fired but could not be kept for later turns. The server's log says why.",
            )

    # Failures ---------------------------------------------------------------------------------------------------

    def _fail(self, request_id: str, code: str, message: str) -> None:
        self._steering_failures[request_id] = failure(SteeringError(code, message))

    def _end_failed(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End every failed request with its own error, whatever the step produced for it."""
        if not self._steering_failures:
            return
        self._quarantine()
        failures, self._steering_failures = self._steering_failures, {}
        for batch in outputs.values():
            batch.outputs = [output for output in batch.outputs if output.request_id not in failures]
        clients = {request_id: self._client_of(request_id) for request_id in failures}
        self.finish_requests(list(failures), RequestStatus.FINISHED_ERROR)
        for request_id, problem in failures.items():
            client = clients[request_id]
            if client is None:
                continue
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    kv_transfer_params={PLAN_KEY: {"error": problem}},
                )
            )

    def _quarantine(self) -> None:
        """See to it that nobody reads the blocks of failed requests: they may hold KV that their plans did not make.

        Later requests are keyed anew, and so are those that wait. One that has the same key and started or resumed no
        earlier may have read them already, so it fails, too.
        """
        since: dict[bytes, int] = {}
        for request_id in self._steering_failures:
            steered = self._steered.get(request_id)
            if steered is not None:
                started = self._steering_step if steered.started is None else steered.started
                since[steered.identity] = min(started, since.get(steered.identity, started))
        self._epochs.advance(since)
        for request_id, steered in self._steered.items():
            if steered.started is None:
                self._identify(steered)
            elif steered.looked_up >= since.get(steered.identity, self._steering_step + 1):
                self._steering_failures.setdefault(request_id, next(iter(self._steering_failures.values())))

    def _client_of(self, request_id: str) -> int | None:
        steered = self._steered.get(request_id)
        if steered is not None:
            return steered.client_index
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        return None if request is None else request.client_index

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """vLLM's own end of requests from outside (abort, error); ours forget them too.

        Among the ids may be a message of the API server about a conversation: it travels this way so that it arrives
        between the requests that were sent before it and those sent after.
        """
        if finished_status is RequestStatus.FINISHED_ABORTED and request_ids is not None:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            request_ids = [name for name in names if not self._conversations.take_message(name)]
            if len(request_ids) < len(names):
                self._tell_status()  # an engine at rest has no step that would
        ended: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._drop(request.request_id)
        return ended

    def _forget_finished(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            steered = self._steered.get(request_id)
            if steered is not None and steered.request.is_finished():
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._steered.pop(request_id, None)
        self._ledger.release(request_id)
        self._conversations.close_turn(request_id)


class _SteeringSyncScheduler(SteeringSchedulerMixin, Scheduler):
    pass


class _SteeringAsyncScheduler(SteeringSchedulerMixin, AsyncScheduler):
    pass


class SteeringScheduler:
    """What `--scheduler-cls` names: picks the base that the configuration asks for."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """A scheduler of ours, synchronous or asynchronous as vLLM's own would be."""
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = _SteeringAsyncScheduler if asynchronous else _SteeringSyncScheduler
        return chosen(vllm_config, *args, **kwargs)
