"""The command tree. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from .failures import EXIT_CODES, report_failure, wants_json

__all__ = ["app", "run"]

_EPILOG = f"Exit codes: {EXIT_CODES}."

app = typer.Typer(
    name="steerctl",
    help="Manage the registered vectors of a SteerGate server, and ask what it can do.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _commands() -> None:
    from . import server, vectors

    app.add_typer(vectors.app, name="vectors")
    app.add_typer(server.app, name="server")


_commands()


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        result: Any = app(args=list(arguments), prog_name="steerctl", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        return report_failure(error, as_json=wants_json(arguments))
