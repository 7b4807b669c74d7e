"""What a server and a trainer cost while there is nothing to do for them.

    python -m benchmarks.idle [--seconds 10] [options of launch.py]

One of two trainers sleeps in its first batch; the other may not go on, and the server waits.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.jobs import Job

BATCH_SIZE = 100
LAG = 10
SLEEP_S = 30.0
ROLES = {0: "server", 2: "waiting trainer", 1: "sleeping trainer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    args, options = parser.parse_known_args()
    for role, share in measure(args.seconds, *options).items():
        print(f"{role:16} {100 * share:5.2f} % of a core (at most 2)")


def measure(seconds: float, *options: str) -> dict[str, float]:
    """CPU time of each role over that many seconds, at most 25, as a share of one core."""
    workload = [
        *("--workload", "benchmarks.plugins:sleeping", "--batch-size", str(BATCH_SIZE)),
        *("--max-lag", str(LAG)),  # so that the other trainer cannot do it all alone
    ]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), *workload, *options)
        try:
            job.wait_for(f"updates {LAG + 1}/")
            used = busy_fractions(job.ranks(), seconds)
            job.send(signal.SIGTERM)
            job.wait()
        finally:
            job.kill()
    return {role: used[rank] for rank, role in ROLES.items()}


def busy_fractions(ranks: Mapping[int, psutil.Process], seconds: float) -> dict[int, float]:
    """CPU time of each process over the next seconds, as a share of one core. Blocks."""

    def cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = {rank: cpu_s(process) for rank, process in ranks.items()}
    start = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - start
    return {rank: (cpu_s(process) - before[rank]) / elapsed_s for rank, process in ranks.items()}


if __name__ == "__main__":
    main()
