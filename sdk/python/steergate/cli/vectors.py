"""`steerctl vectors`: register, list, unregister."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import ApiKeyFile, BaseUrl, Kind, Output, SteeringKeyFile, connect, layer_list

if TYPE_CHECKING:
    from ..client import SteeringClient
    from ..vectors import VectorSet

__all__ = ["app"]

app = typer.Typer(help="Registered vectors.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The vector's name.", show_default=False)]
RequiredKind = Annotated[Kind, typer.Option("--kind", help="The namespace: vectors that steer, or probes of gates.")]


@app.command()
def register(
    name: Name,
    file: Annotated[Path, typer.Option("--file", "-f", help="A .safetensors, .npz or .npy file.", show_default=False)],
    kind: RequiredKind = "steer",
    hook: Annotated[str | None, typer.Option(help="Where the rows belong. Else post_block.")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="10-25,30", help="Only these layers; for a single vector, its layer.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiply every row.")] = 1.0,
    convention: Annotated[
        Literal["blocks", "hidden_states"] | None,
        typer.Option(help="What row i of a stack means. Else inferred from the served model's layers."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace other content of that name.")] = False,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Leave other content of that name alone.")] = False,
    output: Output = "table",
    base_url: BaseUrl = None,
    api_key_file: ApiKeyFile = None,
    steering_api_key_file: SteeringKeyFile = None,
) -> None:
    """Register a file of vectors under a name.

    The same content again is "unchanged". Other content under the name is a conflict (exit code 6), unless --replace
    or --if-absent says what to do.
    """
    if replace and if_absent:
        raise typer.BadParameter("--replace and --if-absent exclude each other.")
    from .printing import note

    wanted = layer_list(layers)
    with connect(base_url, api_key_file, steering_api_key_file) as client:
        found = _load(client, file, hook, wanted, convention)
        if output != "json":  # under -o json, stderr holds one object or nothing
            for origin in found.mapping:
                note(str(origin))
        _print_registered(_register(client, name, found.scaled(scale), kind, replace, if_absent), output)


def _load(client: SteeringClient, file: Path, hook: str | None, layers: list[int] | None, convention: Any) -> VectorSet:
    from ..errors import ConventionRequired
    from ..vectors import VectorSet

    try:
        return VectorSet.load(file, hook=hook, layers=layers, convention=convention)
    except ConventionRequired:
        count = client.capabilities().layers
        return VectorSet.load(file, hook=hook, layers=layers, model_layers=count)


def _register(
    client: SteeringClient, name: str, vectors: VectorSet, kind: Kind, replace: bool, if_absent: bool
) -> dict[str, str]:
    from ..errors import ConflictError

    try:
        answer = client.vectors.register(name, vectors, kind=kind, replace=replace)
    except ConflictError as conflict:
        if not if_absent or conflict.code != "name_conflict":
            raise
        present = client.vectors.show(kind, name)
        return {"status": "present", "name": present.name, "kind": present.kind, "digest": present.digest}
    return {"status": answer.status, "name": answer.name, "kind": answer.kind, "digest": answer.digest}


def _print_registered(answer: dict[str, str], output: str) -> None:
    from .printing import print_json, print_table

    if output == "json":
        print_json(answer)
    else:
        print_table(["STATUS", "NAME", "KIND", "DIGEST"], [list(answer.values())])


@app.command("list")
def list_vectors(
    kind: Annotated[Kind | None, typer.Option("--kind", help="Only this namespace.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only this name.")] = None,
    output: Output = "table",
    base_url: BaseUrl = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """List what is registered."""
    from ..vectors import ranges
    from .printing import print_json, print_table

    with connect(base_url, api_key_file) as client:
        vectors = client.vectors.list(kind, name)
    if output == "json":
        print_json(vectors)
        return
    rows = [
        [info.name, info.kind, ", ".join(info.hooks), ranges(info.layers), str(info.width or ""), info.digest[:12]]
        for info in vectors
    ]
    print_table(["NAME", "KIND", "HOOKS", "LAYERS", "WIDTH", "DIGEST"], rows)


@app.command()
def unregister(
    name: Name,
    kind: RequiredKind,
    output: Output = "table",
    base_url: BaseUrl = None,
    api_key_file: ApiKeyFile = None,
    steering_api_key_file: SteeringKeyFile = None,
) -> None:
    """Forget a name. Requests that run keep their numbers."""
    from .printing import print_json, print_table

    with connect(base_url, api_key_file, steering_api_key_file) as client:
        answer = client.vectors.unregister(name, kind)
    if output == "json":
        print_json(answer)
    else:
        print_table(["STATUS", "NAME", "KIND"], [[answer.status, answer.name, answer.kind]])
