"""The documentation says what the code does: its code runs, its tables and flags are those of the code."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
import typer.main

import steergate
import steergate.errors
import steergate_server.algorithms  # noqa: F401 - registers the built-in algorithms
from benchmarks.options import build_parser
from steergate.cli.app import app
from steergate.cli.failures import EXIT_CODES
from steergate_server.algorithms.registry import get_algorithm
from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.graph.families import FAMILIES
from steergate_server.runtime.front_config import FrontConfig
from steergate_server.schema.errors import ERROR_CODES
from steergate_server.schema.hooks import GATE_STEERED_HOOKS, HOOK_COMPONENTS, PROBED_HOOKS
from steergate_server.schema.version import CONTRACT_VERSION
from steergate_server.vllm_plugin import serve
from steergate_server.vllm_plugin.dialects import CARRYING_ROUTES
from steergate_server.vllm_plugin.middleware import MiddlewareState
from steergate_server.vllm_plugin.routes import Routes
from unit.docs.pages import PAGES, README, ROOT, Block, blocks, flags, sections, table

DOCS = ROOT / "docs"
SERVER = ROOT / "server" / "steergate_server"

EVERY_PAGE = [README, *PAGES]

VLLM_FLAGS = {
    *serve._REFUSED,
    *serve.DEMO_DEFAULTS,
    "--api-key",
    "--enable-dbo",
    "--ubatch-size",
    "--kv-sharing-fast-prefill",
    "--port",
    "--kv-transfer-config",
    "--max-num-batched-tokens",
    "--nnodes",
    "--tensor-parallel-size",
}
"""vLLM's own flags that the pages speak of."""

BENCH_FLAGS = {option for action in build_parser()._actions for option in action.option_strings}

OTHER_FLAGS = {"--help", "--json"}
"""Help, and the demo's `ARGS=--json`."""


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and references resolve. Not with `--quiet`, under which `--strict` sees no warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    pages = "".join(page.read_text() for page in (tmp_path / "site").glob("*.html"))
    assert re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', pages) == [], "an asset from the network"


# Code blocks


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_python_runs(page: Path) -> None:
    """Blocks of a page run in order, in one namespace; of those that need a server, the imports."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        code = compile(block.code, block.where, "exec")
        if block.title is not None:
            continue  # a file of the worked example
        if block.needs_a_server:
            import_what_it_imports(block, names)
        else:
            exec(code, names)


def import_what_it_imports(block: Block, names: dict[str, Any]) -> None:
    """Run a block's imports; check that what they bring has the attributes that the block asks them for."""
    tree = ast.parse(block.code)
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), block.where, "exec"), found)
    names.update(found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in found:
            assert hasattr(found[node.value.id], node.attr), f"{block.where}: {ast.unparse(node)}"


def test_the_pages_have_code() -> None:
    every = [block for page in EVERY_PAGE for block in blocks(page, "python")]
    assert sum(block.needs_a_server for block in every) >= 5
    assert sum(not block.needs_a_server for block in every) >= 15


def test_the_worked_example_works(tmp_path: Path) -> None:
    """Its files as a package under a fresh name, found by the entry point, in a process of its own."""
    fresh = f"unit_add_{uuid.uuid4().hex[:8]}"
    files = {
        block.title.replace("unit_add", fresh): block.code.replace("unit_add", fresh)
        for block in blocks(DOCS / "writing-an-algorithm.md")
        if block.title is not None
    }
    assert set(files) == {f"steergate_{fresh}.py", f"test_{fresh}.py", "pyproject.toml"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    install(tmp_path, tomllib.loads(files["pyproject.toml"])["project"])

    command = [sys.executable, "-c", RUN_THE_EXAMPLE, fresh, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b8 passed\b", result.stdout), result.stdout


RUN_THE_EXAMPLE = """
import sys
import pytest
from steergate_server.vllm_plugin import serve

name, folder = sys.argv[1:]
assert name in serve._algorithms(), "the server's command does not find it"
assert serve._graph_mode("auto", ("direct", name)) == ("in_graph", None)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", folder, f"test_{name}.py"]))
"""


def install(folder: Path, project: dict[str, Any]) -> None:
    """What an installer leaves behind: the metadata that entry points are read from."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


# Tables of algorithms, hooks, families and errors


def built_in() -> dict[str, Any]:
    """The table of capabilities without what other tests or packages may have added."""
    return {
        name: can
        for name, can in ALGORITHM_CAPABILITIES.items()
        if get_algorithm(name).__module__.startswith("steergate_server.")
    }


def test_the_capability_table() -> None:
    expected = [
        [
            name,
            can.payload_kind or "none",
            can.source,
            "yes" if can.normalize else "",
            ", ".join(can.params),
            can.target_component,
            get_algorithm(name).graph_family or "none",
        ]
        for name, can in built_in().items()
    ]
    assert table(DOCS / "algorithms.md", "<!-- capability table: checked against the code -->") == expected


def test_every_algorithm_has_a_formula() -> None:
    rows = table(DOCS / "algorithms.md", "## Formulas")
    assert [name for name, _ in rows] == list(built_in())


def test_the_family_table() -> None:
    expected = [
        [family, key, ", ".join(entry.shape), entry.meaning]
        for family, tables in FAMILIES.items()
        for key, entry in tables.items()
    ]
    page = DOCS / "writing-an-algorithm.md"
    assert table(page, "<!-- family table: checked against the code -->") == expected


def test_the_hooks_table() -> None:
    rows = table(DOCS / "concepts.md", "## Sites and hooks")
    assert PROBED_HOOKS == GATE_STEERED_HOOKS
    assert {hook: component for hook, _, component, _ in rows} == HOOK_COMPONENTS
    assert [hook for hook, *_ in rows] == list(HOOK_COMPONENTS)
    assert {hook for hook, _, _, gates in rows if gates == "yes"} == PROBED_HOOKS


def error_rows() -> list[tuple[str, str, str, str]]:
    """(ring, code, status, when) of the page of errors."""
    page = DOCS / "errors.md"
    rings = [heading for heading in sections(page) if table(page, f"## {heading}")]
    return [(ring.partition(":")[0].lower(), *row) for ring in rings for row in table(page, f"## {ring}")]  # type: ignore[misc]


def test_the_error_codes() -> None:
    found = [(code, ring, int(status)) for ring, code, status, _ in error_rows()]
    assert found == [(code, known.ring, known.status) for code, known in ERROR_CODES.items()]


def test_codes_that_nothing_raises_are_marked_as_reserved() -> None:
    sources = "\n".join(path.read_text() for path in SERVER.rglob("*.py") if path != SERVER / "schema" / "errors.py")
    unused = {code for code in ERROR_CODES if f'"{code}"' not in sources}
    assert {code for _, code, _, when in error_rows() if "*reserved*" in when} == unused


def test_codes_named_in_the_gates_page_exist() -> None:
    rows = table(DOCS / "gates.md", "## Rules and their error codes")
    assert len(rows) == len({code for code, _ in rows})
    assert {code for code, _ in rows} <= set(ERROR_CODES)


# Command lines


def parser_flags(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


SERVE_FLAGS = parser_flags(serve.build_parser())


def cli_commands() -> dict[str, set[str]]:
    """`steerctl`'s commands by their words, with their long flags."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: str) -> None:
        inner = getattr(command, "commands", None)
        for name, child in (inner or {}).items():
            walk(child, f"{words} {name}".strip())
        if inner is None:
            options = {option for parameter in command.params for option in parameter.opts}
            found[words] = {option for option in options if option.startswith("--")} | {"--help"}

    walk(typer.main.get_command(app), "")
    return found


CLI = cli_commands()
CLI_FLAGS = set().union(*CLI.values())


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_every_flag_exists(page: Path) -> None:
    assert flags(page.read_text()) <= SERVE_FLAGS | CLI_FLAGS | VLLM_FLAGS | BENCH_FLAGS | OTHER_FLAGS


def test_flags_stand_on_the_page_of_their_command() -> None:
    assert flags((DOCS / "cli.md").read_text()) == CLI_FLAGS
    assert flags((DOCS / "server.md").read_text()) <= SERVE_FLAGS | VLLM_FLAGS


def test_command_lines_use_the_flags_of_their_command() -> None:
    seen = set()
    for page in EVERY_PAGE:
        for block in blocks(page, "console"):
            for line in block.code.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").split()
                if not line.startswith("$ ") or not words:
                    continue
                if words[0] == "steerctl":
                    name = " ".join(words[1:3])
                    assert flags(line) <= CLI[name], block.where
                    seen.add(name)
                elif any("steergate-serve" in word for word in words):
                    assert flags(line) <= SERVE_FLAGS, block.where
                    seen.add("steergate-serve")
    assert {"steergate-serve", "vectors register", "vectors list"} <= seen


def test_the_flags_of_the_benchmarks() -> None:
    rows = table(DOCS / "benchmarks.md", "<!-- flags of the benchmarks: checked against the code -->")
    assert [row[0].split()[0] for row in rows] == [
        action.option_strings[-1] for action in build_parser()._actions if not isinstance(action, argparse._HelpAction)
    ]


def test_the_commands_of_steerctl() -> None:
    rows = table(DOCS / "cli.md", "each command list the flags.")
    documented = {" ".join(row[0].removeprefix("steerctl ").split()[:2]) for row in rows}
    assert documented == set(CLI)


def test_the_exit_codes() -> None:
    rows = table(DOCS / "cli.md", "<!-- exit codes: checked against the code -->")
    assert ", ".join(f"{code} {meaning}" for code, meaning in rows) == EXIT_CODES


def test_the_flags_of_the_server() -> None:
    """Every steering flag with its default, in the parser's order."""
    spelled = {16 * 2**20: "16 MiB", True: "on", False: "off", None: "STEERGATE_STEERING_API_KEY"}
    expected = []
    for action in serve.build_parser()._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        default = ",".join(action.default) if isinstance(action.default, tuple) else action.default
        if action.dest == "max_steering_slots":
            default = "4 x max_num_seqs"
        if action.dest == "steering_default":
            default = "none"
        is_switch = default is None or isinstance(default, bool) or default == 16 * 2**20
        expected.append([", ".join(action.option_strings), str(spelled[default] if is_switch else default)])
    rows = table(DOCS / "server.md", "<!-- flags of steergate-serve: checked against the code -->")
    assert [row[:2] for row in rows] == expected


def test_the_routes_of_the_server() -> None:
    state = MiddlewareState(FrontConfig(), CONTRACT_VERSION)
    router: Any = Routes(state).router()
    expected = {f"{method} {route.path}" for route in router.routes for method in route.methods}
    rows = table(DOCS / "server.md", "<!-- routes: checked against the code -->")
    assert {route for route, *_ in rows} == expected
    assert {route.partition(" ")[2] for route, key, _ in rows if key == "steering"} == {
        "/v1/steering/vectors/register",
        "/v1/steering/vectors/unregister",
        "/v1/steering/default",
        "/v1/steering/status",
    }


def test_the_routes_that_carry_steering() -> None:
    rows = table(DOCS / "server.md", "<!-- carrying routes: checked against the code -->")
    assert [route for route, *_ in rows] == [f"POST {path}" for path in CARRYING_ROUTES]


# What is refused at start. compat.py imports vLLM, which takes seconds: it is read, not imported.

COMPAT = ast.parse((SERVER / "vllm_plugin" / "compat.py").read_text())


def assigned(name: str) -> ast.expr:
    """The value that a name gets in compat.py."""
    values = [
        node.value
        for node in ast.walk(COMPAT)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    assert len(values) == 1
    return values[0]


def test_refused_configurations() -> None:
    refused = assigned("refused")
    assert isinstance(refused, ast.Dict)
    expected = [key.value for key in refused.keys if isinstance(key, ast.Constant)]
    rows = table(DOCS / "compatibility.md", "<!-- refused configurations: checked against the code -->")
    assert [name for name, _ in rows] == expected


def test_refused_flags() -> None:
    rows = table(DOCS / "compatibility.md", "<!-- refused flags: checked against the code -->")
    assert [flag for flag, _ in rows] == list(serve._REFUSED)


def test_the_vllm_window() -> None:
    window = assigned("SUPPORTED_VLLM")
    assert isinstance(window, ast.Call)
    assert isinstance(window.args[0], ast.Constant)
    assert f"`{window.args[0].value}`" in (DOCS / "compatibility.md").read_text()


# The SDK


def test_every_public_name_of_the_sdk_is_on_its_page() -> None:
    text = (DOCS / "sdk.md").read_text()
    missing = {
        name
        for name in steergate.__all__
        if not re.search(rf"\b{name}\b", text) and not hasattr(steergate.errors, name)
    }
    assert missing == set()
    assert "::: steergate.errors" in text
