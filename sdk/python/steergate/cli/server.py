"""`steerctl server`: what a server can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .options import ApiKeyFile, BaseUrl, Output, connect

if TYPE_CHECKING:
    from ..wire import CapabilitiesAnswer

__all__ = ["app"]

app = typer.Typer(help="The server.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """The server."""


@app.command()
def capabilities(output: Output = "table", base_url: BaseUrl = None, api_key_file: ApiKeyFile = None) -> None:
    """Show what the server and its model can do."""
    from .printing import print_json

    with connect(base_url, api_key_file) as client:
        answer = client.capabilities()
    if output == "json":
        print_json(answer)
    else:
        _print(answer)


def _print(answer: CapabilitiesAnswer) -> None:
    from ..vectors import ranges
    from .printing import print_table

    gates = f"up to {answer.limits.gates}" if answer.gates else f"off {answer.gates_reason or ''}".strip()
    facts = {
        "model": answer.model,
        "layers": str(answer.layers),
        "hidden width": str(answer.hidden_width),
        "gates": gates,
        "vectors": f"up to {answer.limits.vectors}",
        "sources": ", ".join(answer.sources),
        "inline bytes": str(answer.limits.inline_bytes),
        "graph mode": answer.graph_mode,
        "contract": answer.contract,
    }
    print_table(["SERVER", ""], list(facts.items()))
    hooks = [
        [info.hook, info.component, str(info.width), ranges(info.layers), "yes" if info.steerable else "no"]
        for info in answer.hooks
    ]
    print_table(["HOOK", "COMPONENT", "WIDTH", "LAYERS", "STEERABLE"], hooks)
    algorithms = [
        [name, info.payload_kind or "", ", ".join(info.params), info.graph_mode or "", "yes" if info.enabled else "no"]
        for name, info in answer.algorithms.items()
    ]
    print_table(["ALGORITHM", "PAYLOAD", "PARAMS", "GRAPH MODE", "ENABLED"], algorithms)
