"""The wrapper of the engine client's `generate`: attaches the plan to the engine request, reads what comes back.

It is an attribute of the one engine-client object that vLLM hands to `init_state`; no module of vLLM is patched.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from msgspec.structs import replace
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from steergate_server.runtime.admission import Admission
from steergate_server.runtime.conversations import CONVERSATION_SCOPE, settle_message
from steergate_server.runtime.plan import Plan, encode_plan
from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin import metrics
from steergate_server.vllm_plugin.call import SteeredCall, current_call, decided
from steergate_server.vllm_plugin.carrier import PLAN_KEY, with_plan

Generate = Callable[..., AsyncGenerator[Any, None]]
SendMessage = Callable[[str], Awaitable[None]]


def wrap_generate(engine_client: Any, admission: Admission, send: SendMessage) -> None:
    """Wrap `engine_client.generate` on this object. send: sends the scheduler a message about a conversation."""
    longest = engine_client.model_config.max_model_len

    def admit_prompt(call: SteeredCall, prompt: Any) -> None:
        admission.admit_prompt(call.admitted, prompt["prompt_token_ids"], longest)

    def text_of(token: int) -> str:
        tokenizer = engine_client.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    engine_client.generate = steered_generate(
        engine_client.generate, admit_prompt, text_of, send, lambda: admission.default is not None
    )


def steered_generate(
    generate: Generate,
    admit_prompt: Callable[[SteeredCall, Any], None],
    text_of: Callable[[int], str],
    send: SendMessage,
    inherits: Callable[[], bool],
) -> Generate:
    """A `generate` with the same signature that carries the plan of the HTTP request it is called for.

    admit_prompt: decides what only the prompt's tokens can tell; raises SteeringError. text_of: the text of a token.
    inherits: whether a server default is in force.
    """

    def wrapper(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(sampling_params, "extra_args", None)
        if extra and PLAN_KEY in extra:
            raise VLLMValidationError(
                f"The argument `{PLAN_KEY}` is the server's own. Send steering in the member `steering`.",
                parameter=PLAN_KEY,
            )
        call = current_call.get()
        if call is None:
            if inherits() and not decided.get():
                raise VLLMValidationError(
                    "This server has default steering, which this way of generating does not carry.", parameter=None
                )
            return generate(prompt, sampling_params, request_id, *args, **kwargs)
        try:
            _check(prompt, sampling_params, call)
            admit_prompt(call, prompt)
        except SteeringError as error:
            raise _failed(call, error) from None
        call.text_of = text_of
        plan, settlement = _with_settlement(call.admitted.plan, sampling_params)
        if plan.acts or plan.conversation is not None:
            sampling_params = with_plan(sampling_params, encode_plan(plan))
        count = sampling_params.n or 1
        first = call.open_choices(count)
        if count == 1 or not call.wants_report:
            outputs = generate(prompt, sampling_params, request_id, *args, **kwargs)
            return _observed(outputs, call, first, send, settlement)
        # vLLM puts the outputs of several choices together and keeps the scheduler's dict of one of them. So each
        # choice is an engine request of its own, with the parameters that vLLM would give it. None has a settlement:
        # what may latch a gate has one choice.
        choices = [
            _observed(
                generate(prompt, _of_choice(sampling_params, index), f"{index}_{request_id}", *args, **kwargs),
                call,
                first + index,
                send,
                "",
            )
            for index in range(count)
        ]
        return _merged(choices, whole=sampling_params.output_kind == RequestOutputKind.FINAL_ONLY)

    return wrapper


def _may_latch(plan: Plan) -> bool:
    """Whether any gate of the plan may come to act in later turns."""
    return any(gate.scope == CONVERSATION_SCOPE for gate in plan.gates)


def _with_settlement(plan: Plan, sampling_params: Any) -> tuple[Plan, str]:
    """A plan that may latch gates, where stop strings end the answer: they are found on this side of the engine."""
    if plan.conversation is None or not sampling_params.stop or not _may_latch(plan):
        return plan, ""
    name = uuid.uuid4().hex
    return replace(plan, conversation=replace(plan.conversation, settlement=name)), name


def _check(prompt: Any, sampling_params: Any, call: SteeredCall) -> None:
    """Refuse what cannot be steered exactly; raises SteeringError."""
    if not isinstance(sampling_params, SamplingParams):
        raise SteeringError("steering_not_supported_here", "Only text generation can be steered.", "steering")
    if hasattr(prompt, "__anext__"):
        raise SteeringError("steering_not_supported_here", "Streaming input cannot be steered.", "steering")
    if not isinstance(prompt, dict) or not prompt.get("prompt_token_ids") or "prompt_embeds" in prompt:
        raise SteeringError(
            "steering_not_supported_here", "Only prompts of tokens can be steered, not prompt embeddings.", "steering"
        )
    if _may_latch(call.admitted.plan) and ((sampling_params.n or 1) > 1 or call.reached_engine):
        raise SteeringError(
            "conversation_single_choice",
            "A gate of scope `rest_of_conversation` needs one answer to go on from. Send one prompt, with n = 1.",
            "n" if (sampling_params.n or 1) > 1 else "prompt",
        )
    if call.one_engine_request and call.reached_engine and (call.admitted.plan.gates or call.wants_report):
        raise SteeringError(
            "steering_not_supported_here",
            "This answer needs the engine a second time, and gates and reports speak of one engine request.",
            "steering",
        )


def _of_choice(sampling_params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several choices, as vLLM derives them."""
    params = copy.copy(sampling_params)
    params.n = 1
    if params.seed is not None:
        params.seed += index
    return params


async def _merged(choices: list[AsyncGenerator[Any, None]], *, whole: bool) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of several choices as vLLM gives those of one request; whole: all at once, at the end."""
    finished: dict[int, RequestOutput] = {}
    outputs = merge_async_iterators(*choices)
    try:
        async for index, output in outputs:
            output.outputs[0].index = index
            if output.finished:
                finished[index] = output
            output.finished = len(finished) == len(choices)
            if not whole:
                yield output
        if whole:
            merged = finished[0]
            merged.outputs = [finished[index].outputs[0] for index in range(len(choices))]
            merged.finished = True
            yield merged
    finally:
        await outputs.aclose()


async def _observed(
    outputs: AsyncGenerator[Any, None], call: SteeredCall, index: int, send: SendMessage, settlement: str
) -> AsyncGenerator[Any, None]:
    """Pass outputs on; take our dict off them. Raises what vLLM's handlers turn into a refusal if steering failed.

    settlement: the name under which the scheduler waits to hear which rows count; empty for none.
    """

    async def settle() -> None:
        nonlocal settlement
        if settlement:
            name, settlement = settlement, ""
            await send(settle_message(name, call.last_row(index)))

    try:
        async for output in outputs:
            ours = _take(output)
            if "error" in ours:
                error = ours["error"]
                raise _failed(call, SteeringError(error["code"], error["message"], error["param"] or "steering"))
            # Streams bring the new tokens only, other requests all of them at the end.
            tokens = [token for choice in output.outputs for token in choice.token_ids]
            metrics.fired(ours.get("fired", 0) if output.finished else 0)
            call.observe(index, output.prompt_token_ids or (), tokens, ours)
            if output.finished:
                # Before the client hears of the end: its next turn must find what this one latched.
                await settle()
            yield output
    finally:
        await outputs.aclose()
        await settle()


def _take(output: Any) -> dict[str, Any]:
    params = output.kv_transfer_params
    if not params or PLAN_KEY not in params:
        return {}
    rest = {key: value for key, value in params.items() if key != PLAN_KEY}
    output.kv_transfer_params = rest or None
    ours: dict[str, Any] = params[PLAN_KEY]
    return ours


def _failed(call: SteeredCall, error: SteeringError) -> Exception:
    """Note the refusal, which the middleware sends, and end vLLM's handler in a way that it knows."""
    call.failure = error
    metrics.refused(error)
    return VLLMValidationError(error.message, parameter=error.param)
