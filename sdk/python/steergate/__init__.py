"""Client SDK for SteerGate: typed activation steering over HTTP.

Everything below is imported when it is first used: `import steergate` loads neither an HTTP client nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import payloads, vectors, wire
    from .body import Plan, assert_applied, steering_body
    from .builders import Steering, When, Where
    from .client import Reply, SteeringClient
    from .errors import (
        APIConnectionError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        ConflictError,
        ContractMismatchError,
        ConventionRequired,
        InternalServerError,
        InvalidAnswerError,
        InvalidSteering,
        InvalidVectors,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
        SteerGateError,
        SteeringNotAppliedError,
        SteeringOverriddenWarning,
        UnprocessableEntityError,
    )
    from .vectors import VectorSet
    from .wire import SteeringGate, SteeringReport, SteeringRequest

    __version__: str

__all__ = [
    "APIConnectionError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "ConflictError",
    "ContractMismatchError",
    "ConventionRequired",
    "InternalServerError",
    "InvalidAnswerError",
    "InvalidSteering",
    "InvalidVectors",
    "NotFoundError",
    "PermissionDeniedError",
    "Plan",
    "RateLimitError",
    "Reply",
    "SteerGateError",
    "Steering",
    "SteeringClient",
    "SteeringGate",
    "SteeringNotAppliedError",
    "SteeringOverriddenWarning",
    "SteeringReport",
    "SteeringRequest",
    "UnprocessableEntityError",
    "VectorSet",
    "When",
    "Where",
    "__version__",
    "assert_applied",
    "payloads",
    "steering_body",
    "vectors",
    "wire",
]

_MODULES = ("payloads", "vectors", "wire")
_HOMES = {
    "Plan": "body",
    "assert_applied": "body",
    "steering_body": "body",
    "Steering": "builders",
    "When": "builders",
    "Where": "builders",
    "Reply": "client",
    "SteeringClient": "client",
    "VectorSet": "vectors",
    "SteeringGate": "wire",
    "SteeringReport": "wire",
    "SteeringRequest": "wire",
}
"""The module of each name; the others are errors."""


if not TYPE_CHECKING:  # or every misspelt name would pass a type checker

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("steergate")
        elif name in _MODULES:
            value = import_module(f".{name}", __name__)
        elif name in __all__:
            value = getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
