"""What is measured against what: our jobs, the peers, and the figures that are claimed.

Steps and updates are chosen for about three seconds of training on two cores.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.figures import Figure
from benchmarks.peers import ddp, hogwild, loops, ray_server, tutorial
from benchmarks.peers.processes import MeasurementError
from benchmarks.peers.task import Task
from benchmarks.plugins import UPDATES_VARIABLE
from tests.jobs import Done, run_job

SHOWN_LINES = 40
BATCH_SIZE = 32


class Contender(Protocol):
    def measure(self, scale: float) -> float | None:
        """Samples per second; scale times the usual length. None if it is not installed here.

        Raises:
            MeasurementError: it failed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class OurJob:
    """A whole job of launch.py under torchrun.

    Its rate is that from its first progress line to its last, as the peers' rates also leave out
    their first steps, which are slow.
    """

    options: tuple[str, ...]
    updates: int
    """In one epoch."""
    workload: str = "some_digits"
    epochs: int = 1
    world_size: int = 3

    def measure(self, scale: float) -> float:
        arguments = [
            *("--workload", f"benchmarks.plugins:{self.workload}"),
            *("--epochs", str(max(1, round(self.epochs * scale)))),
            *self.options,
        ]
        updates = self.updates if self.epochs > 1 else max(1, round(self.updates * scale))
        with tempfile.TemporaryDirectory() as folder:
            done = run_job(
                Path(folder),
                *arguments,
                world_size=self.world_size,
                env={UPDATES_VARIABLE: str(updates)},
            )
            if done.exit_code != 0:
                raise MeasurementError(_why(done))
            return steady_rate(done.output)


def steady_rate(output: Sequence[tuple[float, str]]) -> float:
    """Samples per second by the progress lines of a job, each with the seconds since its start.

    Raises:
        MeasurementError: there are not two of them.
    """
    found = [(time_s, re.search(r"  updates (\d+)/", line)) for time_s, line in output]
    points = [(time_s, int(match[1])) for time_s, match in found if match]
    if len(points) < 2:
        raise MeasurementError("the job printed fewer than two progress lines")
    (start_s, first), *_, (end_s, last) = points
    return BATCH_SIZE * (last - first) / (end_s - start_s)


@dataclass(frozen=True, slots=True)
class Peer:
    rate: Callable[[Task], float | None]
    task: Task

    def measure(self, scale: float) -> float | None:
        return self.rate(self.task.scaled(scale))


OUR_NAME, OUR_JOB = "trainer mode", OurJob(options=("--compute", "trainer"), updates=200)
OURS: dict[str, Contender] = {
    OUR_NAME: OUR_JOB,
    "server mode": OurJob(options=("--compute", "server"), updates=160),
    "bfloat16 trainer mode": OurJob(
        options=("--compute", "trainer", "--channels-last", "--precision", "bfloat16"), updates=300
    ),
    "small trainer mode": OurJob(
        options=("--compute", "trainer"), workload="small_perceptron", updates=400, epochs=20
    ),
    "trainer mode, not channels_last": OurJob(
        options=("--compute", "trainer", "--no-channels-last"), updates=180
    ),
    "trainer mode over RPC": OurJob(options=("--compute", "trainer", "--link", "rpc"), updates=180),
}
PEERS: dict[str, Contender] = {
    "plain loops": Peer(loops.rate, Task(steps=110)),
    "limit": Peer(loops.rate, Task(steps=140, tuned=True, channels_last=True)),
    "DDP": Peer(ddp.rate, Task(steps=90)),
    "Ray": Peer(ray_server.rate, Task(steps=80)),
    "tutorial": Peer(tutorial.rate, Task(steps=40, num_processes=1)),
    "small DDP": Peer(ddp.rate, Task(steps=1800, net="small", warm_up=50)),
    "tuned loops": Peer(loops.rate, Task(steps=140, tuned=True)),
    "Hogwild": Peer(hogwild.rate, Task(steps=120)),
    "small loops": Peer(loops.rate, Task(steps=8000, net="small", warm_up=50)),
    "small Hogwild": Peer(hogwild.rate, Task(steps=5000, net="small", warm_up=50)),
}
CONTENDERS = OURS | PEERS
BASE = "plain loops"
SMALL = {name for name in CONTENDERS if name.startswith("small")}
NOTES = {
    "limit": "(loops with our allocator settings and channels_last)",
    "tuned loops": "(loops with our allocator settings)",
}
FIGURES = (
    Figure("trainer mode", "plain loops", 1.08, 1.15),
    Figure("trainer mode", "limit", 0.93, 0.97),
    Figure("bfloat16 trainer mode", "plain loops", 1.6, 2.0),
    Figure("trainer mode", "DDP", 1.35, 1.5),
    Figure("trainer mode", "Ray", 1.5, 1.7),
    Figure("trainer mode", "tutorial", 2.9, 3.2),
    Figure("server mode", "plain loops", 0.85, 0.95),
    Figure("small trainer mode", "small DDP", 2.5, 4.0),
)
IN_FIGURES = {name for figure in FIGURES for name in (figure.ours, figure.peer)}
# Starting a contender takes longer than measuring it. So those that are far from their bounds are
# measured in fewer rounds, and those that no figure needs in the first one.
EVERY = dict.fromkeys(("small trainer mode", "small DDP", "tutorial", "Ray"), 2)


def due(name: str, number: int) -> bool:
    """Whether the contender is measured in the round of that number, from 0."""
    if name not in IN_FIGURES:
        return number == 0
    return number % EVERY.get(name, 1) == 0


def _why(done: Done) -> str:
    """What a job that failed said: first the errors of its ranks in short."""
    errors = [line for line in done.lines_of_ranks() if " | error: " in line]
    return "\n".join(
        [
            f"the job ended with {done.exit_code}",
            *errors,
            *("its last lines:", *done.text.splitlines()[-SHOWN_LINES:]),
        ]
    )
