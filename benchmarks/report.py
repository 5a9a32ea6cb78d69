"""The tables on stdout, and the JSON with every sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.calls import Timing
from benchmarks.op import OpTiming
from benchmarks.options import Shape
from benchmarks.serving import Comparison
from benchmarks.spread import Pair, Spread, ratios, spread


class Group(NamedTuple):
    """Comparisons of one load under one mode; `rounds` that counted, and whether all that were wanted were made."""

    mode: str
    shape: Shape
    rounds: int
    complete: bool
    comparisons: Sequence[Comparison]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in plain text: the first column to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def serving_table(groups: Sequence[Group]) -> str:
    """Times of the reference and of the other, and their ratio, for each comparison and phase."""
    head = ["serving", "mode", "batch", "phase", "stock ms", "steered ms", "ratio", "quartiles", "pairs", "aim"]
    rows = []
    for group in groups:
        for one in group.comparisons:
            for phase in ("decode", "prefill"):
                pairs, unit = _pairs(one, group.shape, phase)
                times, ratio = _both(pairs, unit), spread(ratios(pairs))
                rows.append(
                    [
                        one.scenario.name,
                        group.mode,
                        str(group.shape.batch),
                        f"{phase}, {'step' if phase == 'decode' else 'token'}",
                        f"{times[0].median:.3f}",
                        f"{times[1].median:.3f}",
                        f"{ratio.median:.3f}",
                        f"{ratio.low:.3f}-{ratio.high:.3f}",
                        str(ratio.samples),
                        _verdict(ratio.median, one.scenario.aim, "{:.2f}") if phase == "decode" else "",
                    ]
                )
    return table(head, rows)


def hooks_table(groups: Sequence[Group]) -> str:
    """Time of a token on either side, and how many times faster than hooks that is."""
    head = ["against hooks", "their batch", "our batch", "phase", "hooks ms", "our ms", "speed-up", "quartiles", "aim"]
    rows = []
    for group in groups:
        for one in group.comparisons:
            aim = 20.0 if one.other.batch > one.reference.batch else 1.5
            aimed = one.other.engine.kind == "steered"
            for phase in ("decode", "prefill"):
                each = 1 if phase == "decode" else group.shape.prompt
                pairs = [
                    (reference / one.reference.batch / each, other / one.other.batch / each)
                    for reference, other in _pairs(one, group.shape, phase)[0]
                ]
                times = _both(pairs, 1e3)
                gain = spread([reference / other for reference, other in pairs])
                rows.append(
                    [
                        f"{one.scenario.name}, {group.mode}",
                        str(one.reference.batch),
                        str(one.other.batch),
                        f"{phase}, token",
                        f"{times[0].median:.2f}",
                        f"{times[1].median:.2f}",
                        f"{gain.median:.2f}",
                        f"{gain.low:.2f}-{gain.high:.2f}",
                        f">= {aim:g} {'met' if gain.median >= aim else 'missed'}"
                        if aimed and phase == "decode"
                        else "",
                    ]
                )
    return table(head, rows)


def timing_table(title: str, timings: Sequence[Timing]) -> str:
    """Times of small functions in microseconds, or of processes in milliseconds."""
    slow = max(spread(timing.samples).median for timing in timings) > 0.02
    factor, unit = (1e3, "ms") if slow else (1e6, "us")
    rows = []
    for timing in timings:
        found = spread([sample * factor for sample in timing.samples])
        aim = None if timing.aim is None else timing.aim * factor
        rows.append(
            [
                timing.name,
                f"{found.median:.1f}",
                f"{found.low:.1f}-{found.high:.1f}",
                str(found.samples),
                _verdict(found.median, aim, "{:g}"),
            ]
        )
    return table([title, unit, "quartiles", "rounds", "aim"], rows)


def op_table(timings: Sequence[OpTiming]) -> str:
    """Time of the op, and the share of the memory's bandwidth that it reaches."""
    rows = []
    for timing in timings:
        found = spread([sample * 1e6 for sample in timing.samples])
        moved, share = f"{timing.bytes / 1e6:.2f}", f"{timing.share:.0%}"
        rows.append([timing.name, f"{found.median:.1f}", f"{found.low:.1f}-{found.high:.1f}", moved, share])
    limit = f"of {timings[0].limit / 1e9:.1f} GB/s"
    return table(["op of a site, width 4096", "us", "quartiles", "MB to move", limit], rows)


def prefix_table(length: int, shares: Mapping[str, float]) -> str:
    """Shares of a long prompt that were found in the prefix cache."""
    plain = next(iter(shares.values()))
    assert plain > 0, "the prefix cache is off"
    rows = [[name, f"{share:.4f}", "met" if share == plain else "missed"] for name, share in shares.items()]
    return table([f"prefix cache, {length} tokens shared", "share found", "as stock vLLM"], rows)


def _pairs(one: Comparison, shape: Shape, phase: str) -> tuple[list[Pair], float]:
    """Pairs of a phase, and what turns seconds into the unit that is shown: ms a step, or ms a prompt token."""
    if phase == "decode":
        return one.reading.decode, 1e3
    return one.reading.prefill, 1e3 / (one.other.batch * shape.prompt)


def _both(pairs: Sequence[Pair], unit: float) -> tuple[Spread, Spread]:
    return spread([pair[0] * unit for pair in pairs]), spread([pair[1] * unit for pair in pairs])


def _verdict(value: float, aim: float | None, form: str) -> str:
    if aim is None:
        return ""
    return f"<= {form.format(aim)} {'met' if value <= aim else 'missed'}"


def as_json(group: Group) -> list[dict[str, Any]]:
    """A group's comparisons with every sample, in seconds."""
    return [
        {
            "scenario": one.scenario.name,
            "aim": one.scenario.aim,
            "mode": group.mode,
            "prompt_tokens": group.shape.prompt,
            "rounds": group.rounds,
            "complete": group.complete,
            "reference": {"engine": one.reference.engine.kind, "batch": one.reference.batch},
            "other": {"engine": one.other.engine.kind, "batch": one.other.batch},
            "answers_changed": one.reading.changed,
            **{
                phase: {
                    "unit": "seconds of one step" if phase == "decode" else "seconds of the whole batch",
                    "pairs": pairs,
                    "ratio": spread(ratios(pairs))._asdict(),
                }
                for phase in ("decode", "prefill")
                for pairs in [_pairs(one, group.shape, phase)[0]]
            },
            "steps": {"reference": one.reading.steps[0], "other": one.reading.steps[1]},
        }
        for one in group.comparisons
    ]
