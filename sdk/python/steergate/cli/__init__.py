"""`steerctl`: registered vectors and the server, from the command line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of `steerctl`."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich"):
            raise
        sys.stderr.write("steerctl needs more than the SDK alone. Install it: pip install 'steergate[cli]'\n")
        raise SystemExit(1) from None
    raise SystemExit(run(sys.argv[1:]))
