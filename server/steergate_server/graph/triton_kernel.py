"""What the op of a site does, as one Triton kernel: the device side of `triton_op`, and the same as `kernels`.

One program is one row of the step, held in registers whole. Every decision is read from the tensors, never from the
host, so that a captured graph does the right thing at each replay. No program reads what another one writes. What a
program writes of its own lanes it may have read before, or be reading still in another warp; the write is such that
this makes no difference (see `_weight`).

Triton must be set to interpret, if at all, before this module is imported.
"""

import triton
import triton.language as tl

from steergate_server.graph import lanes as _bits

_SOFT, _LASTING = tl.constexpr(_bits.SOFT), tl.constexpr(_bits.LASTING)
_BELOW, _COSINE = tl.constexpr(_bits.BELOW), tl.constexpr(_bits.COSINE)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def steer_rows(
    hidden,
    residual,
    count,
    lanes,
    gates,
    probes,
    touches,
    tables,
    locked,
    fault,
    site,
    local,
    width,
    slots,
    hidden_stride,
    hidden_step,
    residual_stride,
    residual_step,
    probe_stride,
    limit,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steer one row of `hidden` in place; the arguments are `triton_op`'s.

    GATES: gate lanes; LANES, RANKS, BLOCK: 1 + GATES, RANK and width, each rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count):
        # Entry 0 of `touches` is slot 0 and False, at every site.
        touched = touches + site.to(tl.int64) * slots
        lane = tl.arange(0, LANES)
        slot = tl.load(lanes.slot + row * (1 + GATES) + lane, mask=lane <= GATES, other=0)
        here = tl.load(touched + slot).to(tl.int32)
        acts = tl.max(here) > 0
        if locked is not None:
            last_slot = tl.load(locked + row)
            acts = acts | (tl.load(touched + last_slot) != 0)
        used = 0
        probed = False
        if GATES > 0:
            request = tl.load(lanes.request + row).to(tl.int64)
            gate = (lane >= 1) & (lane <= GATES)
            looks = tl.load(lanes.look + row * GATES + lane - 1, mask=gate, other=0) != 0
            at = request * GATES + lane - 1
            looks = looks & (tl.load(gates.site + at, mask=gate, other=-1) == site)
            damps = tl.load(gates.damp + at, mask=gate, other=0.0) != 0
            probed = tl.max(looks.to(tl.int32)) > 0
            used = tl.max(tl.where(looks | damps | ((here != 0) & gate), lane, 0))
        if acts | probed:
            column = tl.arange(0, BLOCK)
            inside = column < width
            place = hidden + row * hidden_stride + column * hidden_step
            before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            value = before
            if residual is not None:
                other = tl.load(residual + row * residual_stride + column * residual_step, mask=inside, other=0.0)
                value = before + other.to(tl.float32)
            change = tl.zeros([BLOCK], tl.float32)
            kept = tl.full([], 1.0, tl.float32)
            if GATES > 0:
                for number in range(0, used):
                    weight = _weight(
                        value, row, number, request, lanes, gates, probes, site, probe_stride, column, inside, GATES
                    )
                    kept = kept * (1.0 - tl.load(gates.damp + request * GATES + number) * weight)
                    adds = tl.load(lanes.slot + row * (1 + GATES) + 1 + number)
                    entry = tl.load(tables.bias + local * slots + adds)
                    change = change + weight * _pool_row(tables, entry, width, column)
            if acts:
                first_slot = tl.load(lanes.slot + row * (1 + GATES))
                if tl.load(touched + first_slot) != 0:
                    static = _static_change(value, first_slot, tables, local, slots, width, column, RANK, RANKS)
                    change = static * kept + change
                if locked is not None:
                    if tl.load(touched + last_slot) != 0:
                        change = change + _static_change(
                            value + change, last_slot, tables, local, slots, width, column, RANK, RANKS
                        )
                after = (before + change).to(hidden.dtype.element_ty)
                spoiled = _in_range(before, limit) & (not _in_range(after.to(tl.float32), limit))
                tl.store(place, after, mask=column < tl.where(spoiled, 0, width))
                if spoiled:
                    tl.store(fault + slot, 1, mask=slot != 0)
                    if locked is not None:
                        if tl.max(slot) == 0:
                            tl.store(fault + last_slot, 1)


@triton.jit
def _weight(value, row, number, request, lanes, gates, probes, site, probe_stride, column, inside, GATES: tl.constexpr):
    """The weight of a row's gate at this site; where the gate looks here, it is scored first.

    Rows are served by several warps. A slow one may read the weight after a fast one has written it: under SOFT the
    old weight is not used, under LASTING a second firing changes nothing, and otherwise the weight is not changed.
    """
    at = request * GATES + number
    weight = tl.load(lanes.weight + row * (1 + GATES) + 1 + number)
    looked = tl.load(lanes.look + row * GATES + number) != 0
    if looked & (tl.load(gates.site + at) == site):
        entry = tl.load(gates.probe + at).to(tl.int64)
        probe = tl.load(probes + entry * probe_stride + column, mask=inside, other=0.0)
        mode = tl.load(gates.mode + at)
        score = _score(value, probe, (mode & _COSINE) != 0)
        # Compared in float64: the threshold keeps the value that the client wrote.
        margin = score.to(tl.float64) - tl.load(gates.threshold + at)
        margin = tl.where((mode & _BELOW) != 0, -margin, margin)
        margin = tl.where(margin == margin, margin, float("-inf"))
        fired = (margin > 0) | (tl.load(lanes.forced + row * GATES + number) != 0)
        margin = tl.minimum(tl.maximum(margin, -_FLOAT_MAX), _FLOAT_MAX)
        soft = tl.sigmoid(tl.load(gates.sharpness + at) * margin.to(tl.float32))
        weight = tl.where((mode & _SOFT) != 0, soft, weight)
        weight = tl.where(((mode & _LASTING) != 0) & fired, 1.0, weight)
        tl.store(lanes.weight + row * (1 + GATES) + 1 + number, weight)
        tl.store(lanes.score + row * GATES + number, score)
        tl.store(lanes.fired + row * GATES + number, fired)
    return weight


@triton.jit
def _score(value, probe, cosine):
    """The dot product in float32; as a cosine, divided by both norms in float64, 0 for a row of zeros."""
    score = tl.sum(value * probe)
    if cosine:
        wide, other = value.to(tl.float64), probe.to(tl.float64)
        norms = tl.sqrt(tl.sum(wide * wide)) * tl.sqrt(tl.sum(other * other))
        exact = tl.sum(wide * other) / tl.maximum(norms, 1e-300)
        score = tl.where(norms > 0, exact, 0.0).to(tl.float32)
    return score


@triton.jit
def _pool_row(tables, entry, width, column):
    """A row of the pool in float32. Entry 0 is zeros, and nothing is loaded for it."""
    start = tables.pool + entry.to(tl.int64) * width
    return tl.load(start + column, mask=column < tl.where(entry != 0, width, 0), other=0.0).to(tl.float32)


@triton.jit
def _static_change(value, slot, tables, local, slots, width, column, RANK: tl.constexpr, RANKS: tl.constexpr):
    """T(x) - x of a slot at the site, from its tables, as `kernels.table_change`."""
    at = local.to(tl.int64) * slots + slot
    change = _pool_row(tables, tl.load(tables.bias + at), width, column)
    if tables.forget is not None:
        forget = tl.load(tables.forget + at)
        if forget != 0:
            change = change - forget * value
    if RANK > 0:
        term = tl.arange(0, RANKS)
        reads = tl.load(tables.reads + at * RANK + term, mask=term < RANK, other=0)
        rank = tl.max(tl.where(reads != 0, term + 1, 0))
        for pair in range(0, rank):
            read = _pool_row(tables, tl.load(tables.reads + at * RANK + pair), width, column)
            write = _pool_row(tables, tl.load(tables.writes + at * RANK + pair), width, column)
            change = change + tl.sum(value * read) * write
    if tables.clamp is not None:
        entry = tl.load(tables.clamp + at)
        if entry != 0:
            direction = _pool_row(tables, entry, width, column)
            component = tl.sum((value + change) * direction)
            low, high = tl.load(tables.bounds + at * 3), tl.load(tables.bounds + at * 3 + 1)
            excess = tl.minimum(tl.maximum(component, low), high) - component
            change = change + tl.load(tables.bounds + at * 3 + 2) * excess * direction
    if tl.load(tables.normalize + at) != 0:
        change = _renormalized(value, value + change) - value
    return change


@triton.jit
def _renormalized(value, result):
    """`result` at the norm of `value`; each is divided by its largest magnitude first, so that nothing overflows."""
    value_peak, result_peak = tl.max(tl.abs(value)), tl.max(tl.abs(result))
    value_unit = value / tl.where(value_peak > 0, value_peak, 1.0)
    unit = result / tl.where(result_peak > 0, result_peak, 1.0)
    norm = tl.sqrt(tl.sum(unit * unit))
    return unit / tl.where(norm > 0, norm, 1.0) * tl.sqrt(tl.sum(value_unit * value_unit)) * value_peak


@triton.jit
def _in_range(row, limit):
    """Whether all of a row's numbers are within the limit; NaN is not."""
    return tl.min((tl.abs(row) <= limit).to(tl.int32)) > 0
