"""The examples in docstrings and in the README run."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import steergate
from steergate import body, builders, client, errors, payloads, vectors

MODULES = ["_gates", "_messages", "_where", "body", "builders", "client", "errors", "payloads", "vectors"]
README = Path(steergate.__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(f"steergate.{name}")
    public = {each: getattr(steergate, each) for each in steergate.__all__}
    result = doctest.testmod(module, extraglobs=public)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_runs() -> None:
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


def documented() -> list[Any]:
    """Every public class and function, and their public methods and properties."""
    found: list[Any] = []
    for module in (body, builders, client, errors, payloads, vectors):
        symbols = [getattr(module, name) for name in module.__all__ if name != "header"]
        for symbol in symbols:
            if inspect.isclass(symbol) and symbol.__module__.startswith("steergate"):
                found += [member for name, member in vars(symbol).items() if is_ours(name, member)]
            if inspect.isclass(symbol) or inspect.isfunction(symbol):
                found.append(symbol)
    return found


def is_ours(name: str, member: Any) -> bool:
    """Tell whether a member is a public method or property."""
    return not name.startswith("_") and isinstance(member, property | classmethod | type(is_ours))


@pytest.mark.parametrize("symbol", documented(), ids=lambda symbol: getattr(symbol, "__qualname__", "property"))
def test_every_public_symbol_is_documented(symbol: Any) -> None:
    assert "." in (symbol.__doc__ or "")
