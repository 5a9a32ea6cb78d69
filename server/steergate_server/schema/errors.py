"""The closed list of error codes, and the one exception that carries them."""

import json
import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

__all__ = ["ERROR_CODES", "ErrorCode", "ErrorType", "PathPart", "Problem", "Ring", "SteeringError", "format_path"]

Ring = Literal["shape", "rules", "model", "registry", "auth", "late"]
"""Where a code comes from: decoding, the pure rules, the model, the registry, keys, or a running request."""

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "conflict_error"
]
"""OpenAI's error types, as far as we use them."""

PathPart = str | int
"""A member name or a list index."""


class ErrorCode(NamedTuple):
    """What belongs to one error code."""

    status: int
    """HTTP status."""
    type: ErrorType
    ring: Ring


class Problem(NamedTuple):
    """One thing that is wrong with a request."""

    code: str
    message: str
    path: tuple[PathPart, ...]
    """Members and indices that lead to the culprit, from the checked struct down."""


_TYPE_BY_STATUS: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
}

_CODES_BY_RING: dict[Ring, str] = {
    "shape": """
        invalid_json unknown_field missing_field invalid_type unknown_kind out_of_range not_finite invalid_name
        invalid_base64 shape_mismatch duplicate_layer too_many_vectors payload_too_large
    """,
    "rules": """
        empty_selection exclude_without_phase invalid_window invalid_position vector_conflict probe_not_single_site
        steer_before_probe inline_conversation_steer conversation_id_required payload_kind unknown_param
        normalize_not_supported layers_required hook_not_allowed observe_scope zero_vector
    """,
    "model": """
        too_many_gates unknown_vector unknown_algorithm algorithm_not_enabled unknown_layer layer_not_in_payload
        unknown_hook hook_not_steerable width_mismatch rank_too_large not_lowerable gates_unavailable
        nothing_to_attenuate selects_nothing inline_not_allowed default_locked gates_overridden
        steering_not_supported_here reserved_field conversation_single_choice over_capacity not_implemented
    """,
    "registry": "name_conflict digest_mismatch registry_full invalid_metadata",
    "auth": "unauthorized steering_key_required",
    "late": "algorithm_failed gate_state_lost",
}

_STATUS = {
    "payload_too_large": 413,
    "inline_not_allowed": 403,
    "default_locked": 403,
    "gates_overridden": 403,
    "name_conflict": 409,
    "registry_full": 409,
    "unauthorized": 401,
    "steering_key_required": 403,
}


def _error_type(status: int) -> ErrorType:
    return _TYPE_BY_STATUS.get(status, "invalid_request_error")


ERROR_CODES: dict[str, ErrorCode] = {
    code: ErrorCode(_STATUS.get(code, 400), _error_type(_STATUS.get(code, 400)), ring)
    for ring, codes in _CODES_BY_RING.items()
    for code in codes.split()
}
"""Every code with its usual status, type and ring. `unknown_vector` is 404 where the registry's routes raise it."""


class SteeringError(Exception):
    """A refusal, in OpenAI's terms.

    Args:
        code: One of `ERROR_CODES`.
        message: What was given, what is allowed, what to do next.
        param: Path of the culprit in the request as sent, such as `steering.gates[0].when.threshold`.
        status: HTTP status where it differs from the code's usual one.
    """

    def __init__(self, code: str, message: str, param: str | None = None, *, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        usual = ERROR_CODES[code]
        self.status = usual.status if status is None else status
        self.type: ErrorType = usual.type if status is None else _error_type(status)

    def body(self) -> dict[str, Any]:
        """Return the answer's body: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders between the front and the engine; Exception's own pickling knows one argument.
        return _rebuild, (self.code, self.message, self.param, self.status)


def _rebuild(code: str, message: str, param: str | None, status: int) -> SteeringError:
    return SteeringError(code, message, param, status=status)


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?![\s\S])")


def format_path(parts: Iterable[PathPart], prefix: str = "") -> str:
    """Write a path the way `param` shows it: `gates[0].when.threshold`, `layers["3"].mode`.

    `prefix` is put in front as it stands: `steering` gives `steering.gates[0]`, and `steering[0]` for an index.
    """
    text = prefix
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _IDENTIFIER.match(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text
