"""Time from torchrun to the first update, against a bare RPC program of the same world size.

python -m benchmarks.start [--rounds 5] [--world-size 4]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
from pathlib import Path

from tests.jobs import BARE, Job, mnist_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=4)
    args = parser.parse_args()
    rounds = [
        (bare_s(args.world_size), first_update_s(args.world_size)) for _ in range(args.rounds)
    ]
    for number, (bare, first) in enumerate(rounds, start=1):
        print(f"round {number}  bare program {bare:.2f} s  first update after {first:.2f} s")
    ratio = statistics.median(first / bare for bare, first in rounds)
    print(f"world size {args.world_size}: median ratio {ratio:.2f} (at most 1.40)")


def bare_s(world_size: int) -> float:
    """From the start of torchrun to its end."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), world_size=world_size, program=BARE)
        done = job.wait()
    assert done.exit_code == 0, done.text
    return done.duration_s


def first_update_s(world_size: int) -> float:
    """From the start of torchrun to the line that reports the first update."""
    data_dir = mnist_folder()
    workload = ["--workload", "digits"]
    if data_dir is not None:
        workload = ["--workload", "mnist", "--data-dir", str(data_dir)]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), *workload, world_size=world_size)
        job.wait_for("updates 1/")
        job.send(signal.SIGTERM)
        return job.wait().time_of("updates 1/")


if __name__ == "__main__":
    main()
