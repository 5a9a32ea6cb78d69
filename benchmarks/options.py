"""The command line, and how much is measured under it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PARTS = ("serving", "hooks", "prefix", "op", "front", "imports")
"""What is measured, in order; `--only` picks some."""


class Options(NamedTuple):
    """What the command line asks for."""

    quick: bool
    json: Path | None
    profile: bool
    only: tuple[str, ...]
    dtype: str
    threads: int | None
    cpu_time: bool


class Shape(NamedTuple):
    """One load: requests at once, tokens of each prompt, and how often it is measured.

    A round is one prefill and `turns` turns of `steps` decode steps, on either side. The first round is warm-up and is
    thrown away, beside the `rounds` that count.
    """

    batch: int
    prompt: int
    rounds: int
    turns: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens that each request generates, at most: one by the prefill, the rest by the turns."""
        return 1 + self.turns * self.steps


QUICK = (Shape(8, 32, 4, 2, 8), Shape(32, 16, 2, 2, 5))
FULL = (Shape(1, 128, 4, 2, 12), Shape(8, 32, 5, 2, 12), Shape(32, 16, 4, 2, 8), Shape(256, 4, 3, 1, 6))
"""The prompts of a batch fit one step, so a prefill is one forward."""

LIMIT_MINUTES = {True: 4.0, False: 26.0}
"""By `quick`: after this long no further round is started; what is there is reported, and that it was cut short."""


def shapes(options: Options) -> tuple[Shape, ...]:
    """The loads that are measured."""
    return QUICK if options.quick else FULL


def modes(options: Options) -> tuple[str, ...]:
    """How vLLM runs the model."""
    return ("eager",) if options.quick else ("eager", "compiled")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what steering costs.")
    parser.add_argument("--quick", action="store_true", help="eager only, few rounds: about five minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the environment to FILE")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes, and stop")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--threads", type=int, help="threads of every process; all cores if left out")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time of one thread, not wall time: for a machine that others use",
    )
    return parser


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read a command line; ends the process with a usage error where it is wrong."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    only = tuple(part for part in PARTS if part in given.only.split(","))
    unknown = sorted(set(given.only.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"--only takes some of {','.join(PARTS)}; there is no {', '.join(unknown)}")
    if given.threads is not None and given.threads < 1:
        parser.error(f"--threads takes a number from 1 on; {given.threads} was given")
    if given.cpu_time and given.threads not in (None, 1):
        parser.error("--cpu-time takes one thread: threads that wait for each other use processor time, too")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json: the folder of {given.json} does not exist")
    return Options(given.quick, given.json, given.profile, only, given.dtype, given.threads, given.cpu_time)
