"""Rate of the server mode as a share of unconnected single-process loops, interleaved.

    python -m benchmarks.rate [--rounds 5] [--world-size 3]

Prints a table and writes rate.json into the folder given by --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import run_job
from benchmarks.loops import rate_of_loops

UPDATES = 400  # one epoch of the digits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    steps = UPDATES // args.loops
    contenders: dict[str, Callable[[], float]] = {
        "plain loops": lambda: rate_of_loops(args.loops, steps, tuned=False),
        "tuned loops": lambda: rate_of_loops(args.loops, steps, tuned=True),
        "server mode": lambda: _rate_of_job(args.world_size),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, measure in contenders.items():
            rates[name].append(measure())
            print(f"round {number + 1}  {name}  {rates[name][-1]:.0f} samples/s", flush=True)
    _report(rates, args)


def _rate_of_job(world_size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(Path(folder), "--workload", "digits", world_size=world_size)
        assert done.exit_code == 0, done.text
        return float(done.report["samples_per_s"])


def _report(rates: dict[str, list[float]], args: argparse.Namespace) -> None:
    rows = {}
    print(f"\n{'':14}{'median':>10}{'of plain':>10}{'of tuned':>10}   samples/s, median share")
    for name, values in rates.items():
        shares = {
            base: statistics.median(a / b for a, b in zip(values, rates[base], strict=True))
            for base in ("plain loops", "tuned loops")
        }
        rows[name] = {"rates": values, "median": statistics.median(values), "shares": shares}
        print(
            f"{name:14}{rows[name]['median']:10.0f}"
            f"{shares['plain loops']:10.2f}{shares['tuned loops']:10.2f}"
        )
    args.out.mkdir(exist_ok=True)
    (args.out / "rate.json").write_text(json.dumps({**vars(args), "out": None, "rows": rows}))


if __name__ == "__main__":
    main()
