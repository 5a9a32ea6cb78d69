"""What importing costs, what it loads, and what the package says about itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import steergate

HEAVY = ("httpx", "numpy", "torch", "safetensors", "openai", "typer", "rich", "click", "jsonschema", "pydantic")


def loaded_after(program: str) -> list[str]:
    """The heavy packages that a program loads."""
    listing = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", f"{program}\n{listing}"], capture_output=True, text=True, check=True, timeout=60
    )
    return result.stdout.split()


def test_importing_loads_nothing_heavy():
    assert loaded_after("import steergate") == []


def test_building_a_plan_loads_nothing_heavy():
    program = """
from steergate import Steering, VectorSet, When, Where, payloads, steering_body
gate = When.probe([1.0, 2.0], layer=3, threshold=1).scope("this_token").observe()
plan = Steering().vector(VectorSet.from_rows({3: [1.0]}), where=Where.answer()).gate(gate)
steering_body(plan)
"""
    assert loaded_after(program) == []


def test_a_client_loads_httpx_alone():
    assert set(loaded_after("from steergate import SteeringClient")) <= {"httpx", "rich", "click"}  # httpx's own extras


def test_safetensors_are_read_without_numpy(tmp_path: Path):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"layer.3": np.ones(4, "f4")}, tmp_path / "v.safetensors")
    program = f"""
from steergate import VectorSet
VectorSet.load({str(tmp_path / "v.safetensors")!r}).packed()
"""
    assert "numpy" not in loaded_after(program)


def test_importing_is_quick():
    """The aim is 60 ms; a shared machine is given much more, and the figure is printed."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import steergate"], check=True, timeout=60)
        times.append(time.perf_counter() - start)
    sys.stdout.write(f"import steergate: {min(times) * 1000:.0f} ms, interpreter included\n")
    assert min(times) < 1.0


@pytest.mark.parametrize("name", steergate.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(steergate, name)
    assert name in dir(steergate)
    if name not in ("Plan", "__version__"):
        assert value.__doc__
    assert getattr(steergate, name) is value


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'Steerring'"):
        _ = steergate.Steerring
    assert steergate.__version__ == "0.1.0"
    assert (Path(steergate.__file__).parent / "py.typed").exists()
