"""Run the benchmarks: `python -m benchmarks [--quick] [--json FILE] [--profile] [--only PARTS]`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks import environment
from benchmarks.clock import clock
from benchmarks.options import LIMIT_MINUTES, Options, Shape, modes, parse, shapes


class Run:
    """One run: says what it does on stderr, prints tables on stdout, and keeps everything for the JSON."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.threads = 1 if options.cpu_time else options.threads or environment.cores()
        self.started = time.monotonic()
        self.found: dict[str, Any] = {
            "format": 1,
            "quick": options.quick,
            "clock": "cpu" if options.cpu_time else "wall",
            "environment": environment.facts(options.dtype, self.threads),
        }
        # For every process, before it loads PyTorch.
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        self.settings: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Tell progress."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def measure(self) -> None:
        """Measure what was asked for."""
        heavy = {"serving", "hooks", "prefix"} & set(self.options.only)
        if heavy or self.options.profile:
            from benchmarks import model

            self.say("the model: a random Llama of 12 layers and width 1024")
            self.settings = {
                "model": str(model.build()),
                "dtype": self.options.dtype,
                "cpu_time": self.options.cpu_time,
            }
        if self.options.profile:
            self.profile()
            return
        # Small things first: they should not meet the ends of large processes.
        for part in (self.imports, self.front, self.op, self.serving, self.hooks, self.prefix):
            if part.__name__ in self.options.only:
                part()
        self.found["environment"]["load_average_after"] = list(os.getloadavg())
        self.found["minutes"] = (time.monotonic() - self.started) / 60

    def serving(self) -> None:
        """Stock vLLM against ours, at every load and in every mode."""
        from benchmarks import report
        from benchmarks.processes import engines
        from benchmarks.scenarios import CONTROL, STOCK, served
        from benchmarks.serving import Side, comparison, measure

        groups = []
        chosen = shapes(self.options)
        for at, mode in enumerate(modes(self.options)):
            self.say(f"serving, {mode}: starting stock vLLM twice and SteerGate once")
            # Each mode has its share of the time; what one leaves over is the next one's.
            deadline = self.started + 60 * LIMIT_MINUTES[self.options.quick] * (at + 1) / len(modes(self.options))
            with engines("stock", "control", "steered", mode=mode, **self.settings) as (stock, control, steered):
                for shape in chosen:
                    comparisons = [
                        comparison(
                            scenario,
                            Side(stock, STOCK.name, shape.batch),
                            Side(control if scenario is CONTROL else steered, scenario.name, shape.batch),
                        )
                        for scenario in served(shape.batch, quick=self.options.quick)
                    ]
                    rounds, complete = measure(comparisons, shape, deadline, self._teller(f"serving, {mode}", shape))
                    groups.append(report.Group(mode, shape, rounds, complete, comparisons))
        self._show("serving", groups, report.serving_table(groups))

    def hooks(self) -> None:
        """Hugging Face with hooks against ours: at equal batch, and where each request is steered differently."""
        from benchmarks import report
        from benchmarks.processes import engines
        from benchmarks.scenarios import ALL_LAYERS, EACH_ITS_OWN, STOCK
        from benchmarks.serving import Side, comparison, measure

        groups = []
        mode = modes(self.options)[-1]
        self.say(f"against hooks, {mode}: starting Hugging Face, stock vLLM and SteerGate")
        with engines("hooks", "stock", "steered", mode=mode, **self.settings) as (hooked, stock, steered):
            rounds = 2 if self.options.quick else 5
            for shape in (Shape(8, 32, rounds, 2, 6), Shape(32, 16, rounds, 2, 6)):
                wanted = [(STOCK, stock, shape.batch), (ALL_LAYERS, steered, shape.batch)]
                if shape.batch == 32:
                    wanted += [(STOCK, stock, 1), (EACH_ITS_OWN, steered, 1)]
                comparisons = [
                    comparison(scenario, Side(hooked, STOCK.name, theirs), Side(engine, scenario.name, shape.batch))
                    for scenario, engine, theirs in wanted
                ]
                made, complete = measure(comparisons, shape, float("inf"), self._teller("against hooks", shape))
                groups.append(report.Group(mode, shape, made, complete, comparisons))
        self._show("hooks", groups, report.hooks_table(groups))

    def front(self) -> None:
        """Admission and SDK."""
        from benchmarks import front, report

        rounds = 7 if self.options.quick else 15
        for title, measured in (("admission", front.admission), ("SDK", front.sdk)):
            self.say(title)
            timings = measured(clock(cpu_time=self.options.cpu_time), rounds)
            self.found[title.lower()] = [timing._asdict() for timing in timings]
            print(f"\n{report.timing_table(title, timings)}", flush=True)

    def op(self) -> None:
        """The op of a site by itself."""
        from benchmarks import op, report

        self.say("the op of a site")
        timings = op.op(clock(cpu_time=self.options.cpu_time), 7 if self.options.quick else 15, self.options.dtype)
        self.found["op"] = [{**timing._asdict(), "share": timing.share} for timing in timings]
        print(f"\n{report.op_table(timings)}", flush=True)

    def prefix(self) -> None:
        """What is found in the prefix cache of a long prompt that several requests share."""
        from benchmarks import report
        from benchmarks.processes import engines
        from benchmarks.scenarios import DECODE_ONLY, IDLE, STOCK

        mode, length, batch = modes(self.options)[-1], 1500, 8
        self.say(f"prefix cache, {mode}: starting stock vLLM and SteerGate")
        with engines("stock", "steered", mode=mode, **self.settings) as (stock, steered):
            shares = {
                f"{scenario.name}, {engine.kind}": engine.call("prefix_hits", scenario.name, length, batch, seed)
                for seed, (scenario, engine) in enumerate([(STOCK, stock), (IDLE, steered), (DECODE_ONLY, steered)])
            }
        self.found["prefix"] = {"prompt_tokens": length, "requests": batch, "shares": shares}
        print(f"\n{report.prefix_table(length, shares)}", flush=True)

    def imports(self) -> None:
        """Import time."""
        from benchmarks import imports, report

        self.say("imports")
        timings = imports.imports(7 if self.options.quick else 15, cpu_time=self.options.cpu_time)
        self.found["imports"] = [timing._asdict() for timing in timings]
        print(f"\n{report.timing_table('imports', timings)}", flush=True)

    def profile(self) -> None:
        """Where the time of a step goes."""
        from benchmarks.engines import Load
        from benchmarks.processes import engines
        from benchmarks.profiling import describe
        from benchmarks.scenarios import CONTROL, SERVED

        names = [one.name for one in SERVED if one is not CONTROL]
        self.found["profile"] = []
        for mode in modes(self.options):
            self.say(f"profile, {mode}: starting SteerGate")
            with engines("steered", mode=mode, **self.settings) as (steered,):
                for batch, steps in ((8, 40),) if self.options.quick else ((8, 40), (32, 20)):
                    for name in names:
                        self.say(f"profile, {mode}, batch {batch}: {name}")
                        found = steered.call("profile", Load(name, batch, 16, 1 + 4 * steps, batch), steps)
                        self.found["profile"].append({"mode": mode, "batch": batch, "scenario": name, **found})
                        print(f"\n{describe(f'{name}, {mode}, batch {batch}', found)}", flush=True)

    def _teller(self, what: str, shape: Shape) -> Any:
        return lambda text: self.say(f"{what}, batch {shape.batch}: {text}")

    def _show(self, part: str, groups: list[Any], text: str) -> None:
        from benchmarks import report

        self.found[part] = [entry for group in groups for entry in report.as_json(group)]
        print(f"\n{text}", flush=True)
        for group in groups:
            if not group.complete:
                print(f"Cut short: {group.mode}, batch {group.shape.batch} has {group.rounds} rounds.", flush=True)


def main() -> None:
    """Measure, print, write."""
    run = Run(parse())
    what = run.found["environment"]
    print(
        f"{what['processor']}, {what['cores']} cores, {run.threads} threads, {what['dtype']}, "
        f"{run.found['clock']} time; "
        + ", ".join(f"{name} {number}" for name, number in what["versions"].items())
        + f"; load average {what['load_average_before'][0]:.2f}",
        flush=True,
    )
    run.measure()
    if run.options.json is not None:
        run.options.json.write_text(json.dumps(run.found, indent=1) + "\n")
        run.say(f"wrote {run.options.json}")


if __name__ == "__main__":
    main()
