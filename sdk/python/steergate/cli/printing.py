"""Printing: data goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["note", "print_json", "print_table"]

_ANY_WIDTH = 10_000


def print_json(value: Any) -> None:
    """Print a struct, or a list of them, as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(f"{text}\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without frames; nothing is cut off where the output is no terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def note(text: str) -> None:
    """Say something that is no result."""
    sys.stderr.write(f"{text}\n")
