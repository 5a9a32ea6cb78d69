"""The Triton kernel compiled for devices that are not there: what the interpreter would let pass fails here.

`test_triton_op` runs this file in a process of its own, in which Triton does not interpret.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from steergate_server.graph import triton_op
from steergate_server.graph.triton_kernel import steer_rows
from steergate_server.graph.triton_op import TritonOp
from unit.graph.triton.scene import SITE, scene

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.bool: "*i1",
}  # fmt: skip


def signature_of(value):
    """The type of an argument, or "constexpr" for one that is compiled in."""
    if isinstance(value, tuple):
        parts = [signature_of(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return {float: "fp32", int: "i32"}.get(type(value), "constexpr")


def holes(value, path):
    """The places of None within an argument."""
    if isinstance(value, tuple):
        return [at for number, part in enumerate(value) for at in holes(part, (*path, number))]
    return [path] if value is None else []


@pytest.mark.parametrize(
    ("dtype", "width", "gates", "rank", "locked", "split", "capability"),
    [
        (torch.bfloat16, 4096, 5, 32, True, True, 90),
        (torch.float16, 1000, 0, 3, False, True, 80),
        (torch.float32, 60, 2, 0, True, False, 90),
    ],
)
def test_the_kernel_compiles(monkeypatch, dtype, width, gates, rank, locked, split, capability):
    made = scene(np.random.default_rng(1), width, dtype, gates, rank, locked)
    launches = []
    monkeypatch.setattr(triton_op, "steer_rows", {(2,): lambda *args, **options: launches.append((args, options))})
    hidden = torch.zeros(2, width, dtype=dtype)
    op = TritonOp(made.places, made.touches, made.lanes, made.gates, made.probes, made.locked)
    op.steer(hidden, hidden.clone() if split else None, SITE)
    [(args, options)] = launches
    names = steer_rows.arg_names
    shapes = {name: value for name, value in options.items() if name in names}
    signature = dict(zip(names, map(signature_of, args), strict=False)) | dict.fromkeys(shapes, "constexpr")
    fixed = {(names.index(name),): value for name, value in shapes.items()}
    fixed |= dict.fromkeys([at for number, value in enumerate(args) for at in holes(value, (number,))])
    built = triton.compile(
        ASTSource(steer_rows, signature, fixed),
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if name not in names},
    )
    assert len(built.asm["cubin"]) > 0
    assert f".target sm_{capability}" in built.asm["ptx"]
