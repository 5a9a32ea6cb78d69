"""Everything that the SDK raises: one tree under `SteerGateError`."""

from __future__ import annotations

from typing import Any

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
    "RateLimitError",
    "SteerGateError",
    "SteeringNotAppliedError",
    "SteeringOverriddenWarning",
    "UnprocessableEntityError",
]


class SteerGateError(Exception):
    """Base of all errors of the SDK.

    Examples:
        >>> from steergate import InvalidSteering, SteerGateError
        >>> issubclass(InvalidSteering, SteerGateError)
        True
    """


# What is wrong before anything is sent


class InvalidSteering(ValueError, SteerGateError):  # noqa: N818 (it names what is wrong, as ValueError does)
    """Steering that no server would accept, found on this machine, in the server's own words.

    Attributes:
        code: One of the contract's error codes, such as `probe_not_single_site`.
        message: What was given, what is allowed, what to do.
        param: Path of the culprit: inside the gate where a gate is built, from the plan's root where it is added to
            one, and as sent (`steering.gates[0].when.threshold`) where it is about to be sent.

    Examples:
        >>> from steergate import InvalidSteering, When
        >>> try:
        ...     When.probe("refusal", threshold=float("nan")).scope("this_token").observe()
        ... except InvalidSteering as error:
        ...     print(error.code, error.param)
        not_finite when.threshold
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message


class InvalidVectors(ValueError, SteerGateError):  # noqa: N818
    """Numbers that make no set of vectors: an unknown tensor in a file, a repeated layer, another width.

    Attributes:
        code: The contract's error code that comes nearest, such as `shape_mismatch`.

    Examples:
        >>> from steergate import InvalidVectors
        >>> from steergate.vectors import VectorSet
        >>> try:
        ...     VectorSet.from_rows({3: [1.0, 2.0], 4: [1.0]})
        ... except InvalidVectors as error:
        ...     print(error)
        4:post_block is 1 wide, 3:post_block is 2. All rows at one hook must be equally wide.
    """

    def __init__(self, message: str, code: str = "shape_mismatch") -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ConventionRequired(InvalidVectors):
    """A stack of rows whose layers nobody can know: say `convention=` or `model_layers=`."""


# What goes wrong on the way


class APIConnectionError(SteerGateError):
    """The server was not reached, or the connection broke."""


class APITimeoutError(APIConnectionError):
    """The server did not answer in time."""


class InvalidAnswerError(SteerGateError):
    """The server answered with something that is not what the contract says."""


class ContractMismatchError(SteerGateError):
    """The server speaks another major version of the contract.

    Attributes:
        client: Contract version of this SDK.
        server: Contract version of the server.
    """

    def __init__(self, client: str, server: str) -> None:
        super().__init__(client, server)
        self.client = client
        self.server = server

    def __str__(self) -> str:
        newer = "server" if _major(self.server) > _major(self.client) else "SDK"
        older = "SDK" if newer == "server" else "server"
        return (
            f"The server speaks steering contract {self.server}, this SDK speaks {self.client}; the {newer} is newer. "
            f"Update the {older}, or install the steergate release that speaks {self.server}."
        )


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else 0


class SteeringNotAppliedError(SteerGateError):
    """A steered request came back without `X-Steering-Applied`: whoever answered did not steer."""


class SteeringOverriddenWarning(UserWarning):
    """The server ran the request without something that it asked for; `X-Steering-Overridden` says what."""


# What the server refuses


class APIStatusError(SteerGateError):
    """The server answered with an error status.

    Attributes:
        status_code: HTTP status.
        code: The contract's error code, or the server's own; None if it gave none.
        param: Path of the culprit in the request as sent, or None.
        type: OpenAI's error type, or None.
        message: What was given, what is allowed, what to do.
        request_id: The server's id of the request, or None.
        body: The decoded body, or its text where it is no JSON.

    Examples:
        >>> from steergate import NotFoundError, SteeringClient
        >>> with SteeringClient("http://localhost:8000") as client:  # doctest: +SKIP
        ...     try:
        ...         client.vectors.unregister("calm", kind="steer")
        ...     except NotFoundError as error:
        ...         print(error.code)
        unknown_vector
    """

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,  # noqa: A002 (OpenAI's name)
        request_id: str | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.code = code
        self.param = param
        self.type = type
        self.request_id = request_id
        self.body = body

    def __str__(self) -> str:
        code = f" {self.code}" if self.code else ""
        where = f" at {self.param}" if self.param else ""
        return f"{self.status_code}{code}{where}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling knows positional arguments only.
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(kind: type[APIStatusError], attributes: dict[str, Any]) -> APIStatusError:
    return kind(**attributes)


class BadRequestError(APIStatusError):
    """400: the request is not valid; `code` and `param` say what and where."""


class AuthenticationError(APIStatusError):
    """401: a key is missing or wrong."""


class PermissionDeniedError(APIStatusError):
    """403: the server's configuration does not allow it."""


class NotFoundError(APIStatusError):
    """404: no such vector, model or route."""


class ConflictError(APIStatusError):
    """409: a vector of that name exists with other content, or the registry is full."""


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed, and refused."""


class RateLimitError(APIStatusError):
    """429: too many requests."""


class InternalServerError(APIStatusError):
    """500 and above: the server failed."""
