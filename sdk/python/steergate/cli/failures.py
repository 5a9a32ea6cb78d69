"""What a failed command says, and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["EXIT_CODES", "report_failure", "wants_json"]

EXIT_CODES = (
    "0 ok, 1 failure, 2 usage, 3 invalid input, 4 not allowed, 5 not found, 6 conflict, 7 unreachable, 130 interrupted"
)

_BY_STATUS = {400: 3, 413: 3, 422: 3, 401: 4, 403: 4, 404: 5, 409: 6}


def wants_json(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON, also one that cannot be parsed."""
    joined = " ".join(arguments)
    return any(spelled in joined for spelled in ("-o json", "-ojson", "--output json", "--output=json"))


def report_failure(error: Exception, *, as_json: bool) -> int:
    """Say on stderr what went wrong, and return the exit code.

    Raises:
        Exception: The error itself, where it is none that a user could have caused.
    """
    code, said = _described(error)
    if said is None:
        raise error
    if as_json:
        sys.stderr.write(json.dumps({"error": said}) + "\n")
    else:
        where = f"{said['param']}: " if said.get("param") else ""
        is_help = said["message"].startswith("Usage:")
        sys.stderr.write(f"{'' if is_help else 'error: '}{where}{said['message']}\n")
        if said.get("request_id"):
            sys.stderr.write(f"request id: {said['request_id']}\n")
    return code


def _described(error: Exception) -> tuple[int, dict[str, Any] | None]:
    from .. import errors

    if isinstance(error, typer.TyperException):
        # The base class of what typer raises at a command line that it cannot read.
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        return getattr(error, "exit_code", 2), _members("usage", said)
    if isinstance(error, errors.APIStatusError):
        exit_code = _BY_STATUS.get(error.status_code, 1)
        code = error.code or f"http_{error.status_code}"
        return exit_code, _members(code, error.message, error.param, error.request_id)
    if isinstance(error, errors.APIConnectionError):
        return 7, _members("unreachable", str(error))
    if isinstance(error, errors.InvalidSteering):
        return 3, _members(error.code, error.message, error.param)
    if isinstance(error, errors.InvalidVectors):
        return 3, _members(error.code, str(error))
    if isinstance(error, errors.SteerGateError):
        return 1, _members("failure", str(error))
    if isinstance(error, OSError):
        return 3, _members("unreadable", f"{error.filename}: {error.strerror}" if error.filename else str(error))
    if isinstance(error, ImportError):
        hint = "Install what reads it: pip install 'steergate[vectors]'"
        return 1, _members("missing_package", f"The package `{error.name}` is not installed. {hint}")
    if isinstance(error, ValueError):
        return 3, _members("invalid_value", str(error))
    return 1, None


def _members(code: str, message: str, param: str | None = None, request_id: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "request_id": request_id}
