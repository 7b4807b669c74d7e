"""Our rate side by side with that of everything else one could train with on this host.

    python -m benchmarks.bench [--quick] [--rounds 5] [--only TEXT] [--out runs]

In each round a contender is measured once, in an order that moves on from round to round; a figure
is the median over the rounds of the share within a round. (Some are not in every round: contenders
says why.) Prints tables, writes bench.json into the folder --out, and ends with 1 if something
could not be measured. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import calls, idle
from benchmarks.contenders import (
    BASE,
    CONTENDERS,
    FIGURES,
    IN_FIGURES,
    NOTES,
    OUR_JOB,
    OUR_NAME,
    SMALL,
    Contender,
    due,
)
from benchmarks.figures import figures_table, median, outcomes, rates_table
from benchmarks.peers.ray_server import HINT
from ps.host import resources

FULL_ROUNDS, QUICK_ROUNDS = 5, 1
ROUNDS_BOUND_S = 400.0  # so that all ends within ten minutes
QUICK_SCALE = 0.4
NUMBERS, QUICK_NUMBERS = (1, 2, 3, 4, 5, 6), (2, 4)
SHORT_SCALE = 0.5  # of what is measured once, for the picture


@dataclass
class Bench:
    """What has been measured so far."""

    scale: float
    """Length of each measurement, as a share of the usual one."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What somebody else must know to compare."""
    rates: dict[str, list[float | None]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """What to say about a contender in the table."""
    failures: dict[str, str] = field(default_factory=dict)
    """By contender or section: why it could not be measured."""
    sections: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def run_rounds(
        self, contenders: Mapping[str, Contender], rounds: int, bound_s: float = math.inf
    ) -> None:
        """Measure each contender once in each round in which it is due.

        One that fails is not tried again. No round starts after bound_s.
        """
        self.rates = {name: [] for name in contenders}
        self.notes = {name: note for name, note in NOTES.items() if name in contenders}
        for number in range(rounds):
            if self.elapsed_s > bound_s:
                self.say(f"only {number} of {rounds} rounds, the time is over")
                break
            for name in rotated(list(contenders), number):
                self.rates[name].append(self._rate_of(name, contenders[name], number))

    def _rate_of(self, name: str, contender: Contender, number: int) -> float | None:
        if name in self.failures or not due(name, number):
            return None
        try:
            rate = contender.measure(self.scale)
        except Exception as error:  # one that fails must not cost the others their figures
            self.fail(name, error)
            self.notes[name] = f"failed: {self.failures[name].splitlines()[0]}"
            return None
        if rate is None:
            self.notes[name] = f"skipped: not installed; {HINT}"
        else:
            self.say(f"round {number + 1}  {name:32} {rate:8.0f} samples/s")
        return rate

    def run_section(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure what is no contender; measure returns what goes into the file."""
        try:
            self.sections[name] = measure()
        except Exception as error:
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        self.failures[name] = str(error) or type(error).__name__
        self.say(f"{name} failed: {self.failures[name]}")

    def say(self, text: str) -> None:
        print(f"{self.elapsed_s:5.0f} s  {text}", flush=True)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names from the one with that number on, and then those before it."""
    first = number % len(names) if names else 0
    return [*names[first:], *names[:first]]


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleans up, as Ctrl-C
    bench = Bench(scale=QUICK_SCALE if args.quick else 1.0, machine=machine_facts())
    if args.rounds is None:
        bench.run_rounds(_chosen(args), QUICK_ROUNDS if args.quick else FULL_ROUNDS, ROUNDS_BOUND_S)
    else:
        bench.run_rounds(_chosen(args), args.rounds)
    if args.only is None:
        numbers = QUICK_NUMBERS if args.quick else NUMBERS
        bench.run_section("trainers", lambda: _rates_by_trainers(bench, numbers))
        bench.run_section("idle", lambda: _idle_cost(bench, args.quick))
        bench.run_section("calls", lambda: _calls(bench, args.quick))
    _print(bench)
    _write(bench, args)
    print(f"\n{bench.elapsed_s:.0f} s; all numbers are in {args.out / 'bench.json'}")
    return 1 if bench.failures else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round, figures only")
    parser.add_argument("--rounds", type=int, help=f"{FULL_ROUNDS}, or {QUICK_ROUNDS} if quick")
    parser.add_argument("--only", metavar="TEXT", help="contenders with this in their name")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for bench.json")
    return parser.parse_args(argv)


def _chosen(args: argparse.Namespace) -> dict[str, Contender]:
    return {
        name: contender
        for name, contender in CONTENDERS.items()
        if (name in IN_FIGURES or not args.quick) and (args.only is None or args.only in name)
    }


def _rates_by_trainers(bench: Bench, numbers: Sequence[int]) -> list[dict[str, float]]:
    """Trainer mode with these numbers of trainers, each measured once, if not in the rounds."""
    known = {OUR_JOB.world_size - 1: median(bench.rates.get(OUR_NAME, ()))}
    rows = []
    for trainers in numbers:
        rate = known.get(trainers)
        if rate is None:
            job = replace(OUR_JOB, world_size=trainers + 1)
            rate = job.measure(min(bench.scale, SHORT_SCALE))
        bench.say(f"{trainers} trainers  {rate:8.0f} samples/s")
        rows.append({"trainers": trainers, "samples_per_s": rate})
    return rows


def _idle_cost(bench: Bench, quick: bool) -> dict[str, dict[str, float]]:
    """CPU time while there is nothing to do, as a share of a core, by mode and role."""
    modes = ["trainer"] if quick else ["trainer", "server"]
    cost = {}
    for mode in modes:
        cost[mode] = idle.measure(3.0 if quick else 4.0, "--compute", mode)
        text = ", ".join(f"{role} {100 * share:.2f} %" for role, share in cost[mode].items())
        bench.say(f"idle in {mode} mode: {text} of a core")
    return cost


def _calls(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = calls.measure(quick)
    for row in rows:
        bench.say(
            f"{row['link']:8} {row['parameters']:9} parameters: empty call "
            f"{row['empty_call_ms']:.3f} ms, push and refresh {row['push_refresh_ms']:.3f} ms"
        )
    return rows


def _print(bench: Bench) -> None:
    if bench.rates:
        print(f"\n{rates_table(bench.rates, BASE, bench.notes, SMALL)}")
        print(f"\n{figures_table(outcomes(bench.rates, FIGURES))}")


def _write(bench: Bench, args: argparse.Namespace) -> None:
    content = {
        "machine": bench.machine,
        "quick": args.quick,
        "elapsed_s": bench.elapsed_s,
        "rates": bench.rates,
        "medians": {name: median(values) for name, values in bench.rates.items()},
        "figures": [outcome.to_json() for outcome in outcomes(bench.rates, FIGURES)],
        "sections": bench.sections,
        "notes": bench.notes,
        "failures": bench.failures,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(json.dumps(content, indent=1) + "\n")


def machine_facts() -> dict[str, Any]:
    """Of now: the load average is to be read before anything runs."""
    return {
        "usable_cores": resources.usable_cores(),
        "load_average_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
