"""Mutation testing of the pure parts: what their fast tests do not notice.

    python -m tests.mutants [PART ...]

A part is a line of PARTS, such as server.pacing; all are tested without one. Mutants that survive
are shown. Ends with 1 if fewer than LEAST of all were killed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from tests.jobs import ROOT

LEAST = 0.9
FOLDER = ROOT / "mutants"
PARTS = {
    "server.orders": "*",
    "server.pacing": "*",
    "server.metrics": "*",
    "server.roll": "*",
    "server.rounds": "*",
    "host.health": "*",
    "settings.topology": "*",
    "job.preparation": "x_decide__* x__source__*",
    "job.checkpoint": "*Checkpointsǁwrite__*",
}
"""Modules of ps, and which of their functions, as mutmut names them."""
MUTMUT = (sys.executable, "-m", "mutmut")
KILLED = ("killed", "timeout", "caught by type check")


def main(*chosen: str) -> None:
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    patterns = patterns_of(chosen or tuple(PARTS))
    shutil.rmtree(FOLDER, ignore_errors=True)
    run = subprocess.run([*MUTMUT, "run", *patterns], cwd=ROOT, check=False)
    if run.returncode:
        sys.exit(run.returncode)
    statuses = {
        name: status
        for name, status in read_results(mutmut("results", "--all", "true")).items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    survivors = [name for name, status in statuses.items() if status not in KILLED]
    for name in survivors:
        print(f"--- {statuses[name]}: {name}\n{mutmut('show', name)}")
    print(table(statuses))
    if len(statuses) - len(survivors) < LEAST * len(statuses):
        sys.exit(f"fewer than {LEAST:.0%} were killed")


def patterns_of(parts: tuple[str, ...]) -> list[str]:
    """Of the modules that are there."""
    return [
        f"ps.{part}.{functions}"
        for part in parts
        if Path(ROOT, "ps", *part.split(".")).with_suffix(".py").exists()
        for functions in PARTS[part].split()
    ]


def mutmut(*args: str) -> str:
    done = subprocess.run([*MUTMUT, *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def read_results(text: str) -> dict[str, str]:
    """The status of each mutant, from lines such as `    ps.a.x_b__mutmut_1: survived`."""
    pairs = (line.strip().rpartition(": ") for line in text.splitlines())
    return {name: status for name, _, status in pairs if name}


def table(statuses: Mapping[str, str]) -> str:
    """A line for each module and one for all."""
    total: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    for name, status in statuses.items():
        for row in (".".join(name.split(".")[:3]), "all"):
            total[row] += 1
            killed[row] += status in KILLED
    rows = [*sorted(set(total) - {"all"}), "all"]
    return "\n".join(
        f"{row:20} {killed[row]:5} of {total[row]:5} killed  {killed[row] / total[row]:6.1%}"
        for row in rows
        if total[row]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
