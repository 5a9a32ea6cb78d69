"""The architecture in one test: which room may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server" / "steergate_server"
SDK = ROOT / "sdk" / "python" / "steergate"

OURS = {
    "schema": set(),
    "capabilities": {"schema"},
    "algorithms": {"schema", "capabilities"},
    "graph": {"schema", "capabilities", "algorithms"},
    "registry": {"schema"},
    "runtime": {"schema", "capabilities", "algorithms", "graph", "registry"},
    "vllm_plugin": {"schema", "capabilities", "algorithms", "graph", "registry", "runtime"},
    "demo": set(),
}
"""Room -> rooms that it may import, besides itself."""

OUTSIDE = {
    "schema": {"msgspec"},
    "capabilities": {"msgspec"},
    "algorithms": {"torch"},
    "graph": {"torch", "triton"},
    "registry": {"msgspec", "numpy", "safetensors"},
    "runtime": {"msgspec", "numpy", "torch"},
    "vllm_plugin": {"fastapi", "msgspec", "numpy", "packaging", "prometheus_client", "torch", "vllm"},
    "demo": {"httpx", "steergate"},
}
"""Room -> packages that it may import, besides the standard library."""


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in it."""
    package = path.relative_to(SERVER.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield ".".join((*package[: -node.level], *filter(None, [node.module])))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _room(path: Path) -> str:
    return path.relative_to(SERVER).parts[0].removesuffix(".py")


def _files() -> list[Path]:
    return sorted(path for path in SERVER.rglob("*.py") if path != SERVER / "__init__.py")


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SERVER)))
def test_server_imports_follow_the_arrows(path: Path) -> None:
    import sys

    room = _room(path)
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "steergate_server":
            target = rest.partition(".")[0]
            assert not target or target == room or target in OURS[room], f"{room} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in OUTSIDE[room], f"{room} must not import {name}"


def test_every_room_is_known() -> None:
    assert {_room(path) for path in _files()} == set(OURS)


def test_the_sdk_imports_nothing_of_the_server() -> None:
    files = list(SDK.rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "steergate_server" for name in names), path
