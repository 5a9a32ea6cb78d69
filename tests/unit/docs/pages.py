"""The pages of the documentation, taken apart: code blocks, tables, sections, flags."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"

NEEDS_A_SERVER = "<!-- needs a server -->"

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"(?<!\\)\|")


class Block(NamedTuple):
    """One fenced block. `before`: the line above it, where marks stand."""

    page: Path
    line: int
    language: str
    title: str | None
    before: str
    code: str

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs_a_server(self) -> bool:
        """Whether it is marked so. The README carries no marks: there, a client tells."""
        return self.before == NEEDS_A_SERVER or (self.page == README and "SteeringClient(" in self.code)


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, of one language or of all."""
    text = page.read_text()
    return [block for block in _blocks(page, text) if language in (None, block.language)]


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        above = text[: found.start()].rstrip("\n").rpartition("\n")[2].strip()
        title = re.search(r'title="([^"]+)"', found["head"])
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["head"].split(" ")[0],
            title=title[1] if title else None,
            before=above,
            code=textwrap.dedent(found["code"]),
        )


def table(page: Path, after: str) -> list[list[str]]:
    """The rows, without the head, of the first table behind a piece of text. Cells are stripped of backticks."""
    text = page.read_text()
    assert text.count(after) == 1, f"{page.name} has {text.count(after)} times {after!r}"
    lines = text.partition(after)[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in _CELL.split(line)[1:-1]])
    return rows[2:]


def sections(page: Path) -> dict[str, str]:
    """The second-level headings of a page and what stands below each."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flags(text: str) -> set[str]:
    """Everything that looks like a long flag."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", re.sub(r"<!--.*?-->", "", text)))
