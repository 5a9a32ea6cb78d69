"""The op for CUDA: one launch for each site, whatever the step holds, and no question put to the host.

`steer` is handed the same persistent tensors at every call, so it can be captured in a CUDA graph; a replay sees what
the host, or an earlier kernel, has put into them since. The PyTorch op (`kernels`) branches on flags of the host
instead, and would be captured idle.

Needs Triton, so import it only where it is used.

What a launch must move, for measuring it. With n rows of the step, of which a are active or looked at and c active, G
gate lanes, width W, e bytes to a number of the model's dtype, and r = 1 where the stream comes in two parts, else 0:

    n (14 G + 9)       slots, touches, looks, probe sites, dampings, the request: all that an idle row reads
    a W e (1 + r)      the rows themselves
    c W e              written back
    u W e + 4 p W      u different pool rows and p different probes; read again, they come from the L2 cache

bytes: a W e (2 + r) and little else in a large batch. Not run on a device yet. Its results were compared under Triton's
interpreter, and it was compiled for sm_80 and sm_90: no spilled registers at W = 4,096, 160 bytes a thread at 8,192 and
816 at 16,384 with 16 warps, five gates, rank 32 and a locked slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from steergate_server.graph.kernels import range_limit
from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.router_op import steer_router
from steergate_server.graph.tables import RouterTables, SiteTables
from steergate_server.graph.triton_kernel import steer_rows


class _LaneTensors(NamedTuple):
    """What the kernel takes of `Lanes`."""

    slot: torch.Tensor
    weight: torch.Tensor
    request: torch.Tensor
    look: torch.Tensor
    score: torch.Tensor
    fired: torch.Tensor
    forced: torch.Tensor


class _GateTensors(NamedTuple):
    """What the kernel takes of `GateTable`."""

    site: torch.Tensor
    probe: torch.Tensor
    threshold: torch.Tensor
    sharpness: torch.Tensor
    mode: torch.Tensor
    damp: torch.Tensor


class _TableTensors(NamedTuple):
    """What the kernel takes of `SiteTables`; None for families that no declared algorithm needs."""

    pool: torch.Tensor
    bias: torch.Tensor
    forget: torch.Tensor | None
    reads: torch.Tensor | None
    writes: torch.Tensor | None
    clamp: torch.Tensor | None
    bounds: torch.Tensor | None
    normalize: torch.Tensor


class TritonOp:
    """Steers the sites of one engine process; `places`: by site number, its tables and its number in them.

    touches [sites, slots] bool: what each slot does anything at. probes [entries, >= width] float32. locked [rows]
    int32, or None where there is no such thing: one more slot for each row, whose change comes last and is not
    attenuated. `count` [1] int32: rows of the step; the op leaves rows beyond it alone, and all of them between steps.
    `fault` [slots] int32: 1 for the slots of a row that would have left the range and was left as it was.
    """

    def __init__(
        self,
        places: Sequence[tuple[SiteTables | RouterTables, int]],
        touches: torch.Tensor,
        lanes: Lanes,
        gates: GateTable,
        probes: torch.Tensor,
        locked: torch.Tensor | None = None,
    ) -> None:
        device = touches.device
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.fault = torch.zeros(touches.shape[1], dtype=torch.int32, device=device)
        self._places = list(places)
        self._touches, self._lanes, self._gates, self._probes, self._locked = touches, lanes, gates, probes, locked
        self._lane_tensors = _LaneTensors(*(getattr(lanes, name) for name in _LaneTensors._fields))
        self._gate_tensors = _GateTensors(*(getattr(gates, name) for name in _GateTensors._fields))
        self._table_tensors = {
            id(tables): _tensors_of(tables) for tables, _ in places if isinstance(tables, SiteTables)
        }

    def open(self, rows: int) -> None:
        """A step of so many rows begins; 0: it is over, and every site is the identity."""
        self.count.fill_(rows)

    def take_faults(self) -> list[int]:
        """Slots that met a fault since the last call. Waits for the device."""
        found: list[int] = self.fault.cpu().nonzero().flatten().tolist()
        if found:
            self.fault.zero_()
        return found

    def steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """Steer `hidden` [>= rows, width] in place at a site; `residual` is the stream's other summand, if any."""
        rows, width = hidden.shape
        if not rows:
            return
        tables, local = self._places[site]
        if isinstance(tables, RouterTables):
            steer_router(
                hidden,
                self.count,
                self._lanes,
                self._gates,
                self._touches[site],
                tables,
                local,
                self._locked,
                self.fault,
            )
            return
        gates, block = self._lanes.look.shape[1], _power_of_two(width)
        steer_rows[(rows,)](
            hidden,
            residual,
            self.count,
            self._lane_tensors,
            self._gate_tensors,
            self._probes,
            self._touches,
            self._table_tensors[id(tables)],
            self._locked,
            self.fault,
            site,
            local,
            width,
            self._touches.shape[1],
            *hidden.stride(),
            *(residual.stride() if residual is not None else (0, 0)),
            self._probes.stride(0),
            range_limit(hidden.dtype),
            GATES=gates,
            LANES=_power_of_two(1 + gates),
            RANK=tables.max_rank,
            RANKS=_power_of_two(max(1, tables.max_rank)),
            BLOCK=block,
            num_warps=min(max(1, block // 256), 16),
            enable_fp_fusion=False,
        )


def _tensors_of(tables: SiteTables) -> _TableTensors:
    named = {name: getattr(tables, name) for name in _TableTensors._fields if name != "pool"}
    return _TableTensors(pool=tables.pool.rows, **named)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()
