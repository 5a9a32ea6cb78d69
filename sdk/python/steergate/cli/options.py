"""Options that commands share, and what they become."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..client import SteeringClient

__all__ = ["ApiKeyFile", "BaseUrl", "Kind", "Output", "SteeringKeyFile", "connect", "layer_list"]

Kind = Literal["steer", "probe"]

BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="The server's address. Else STEERGATE_BASE_URL, else http://localhost:8000.",
    ),
]

ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="FILE", help="File that holds the server's API key. Else STEERGATE_API_KEY."
    ),
]

SteeringKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--steering-api-key-file",
        metavar="FILE",
        help="File that holds the steering key. Else STEERGATE_STEERING_API_KEY.",
    ),
]

Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How results are printed on stdout.")]


def connect(
    base_url: str | None, api_key_file: Path | None, steering_api_key_file: Path | None = None
) -> SteeringClient:
    """Make the client that a command talks through."""
    from ..client import SteeringClient

    return SteeringClient(base_url, api_key=_key(api_key_file), steering_api_key=_key(steering_api_key_file))


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    key = file.read_text().strip()
    if not key:
        raise typer.BadParameter(f"{file} is empty; it should hold a key.")
    return key


def layer_list(text: str | None) -> list[int] | None:
    """Read layers as people write them: `10-25,30`, both ends included.

    Raises:
        BadParameter: It is written in another way.
    """
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            raise typer.BadParameter(f"{part.strip()!r} names no layers. Write them like 10-25,30.")
        layers += range(first, last + 1)
    if len(set(layers)) < len(layers):
        raise typer.BadParameter(f"{text!r} names a layer twice.")
    return layers
