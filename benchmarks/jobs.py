"""Whole jobs under a real torchrun, for the benchmarks and for the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
BARE = "benchmarks/bare.py"
MNIST_FOLDERS = (ROOT / "data", ROOT.parent / "shared" / "mnist")


def mnist_folder() -> Path | None:
    """Where the real MNIST lies, if it does."""
    return next((folder for folder in MNIST_FOLDERS if (folder / "MNIST" / "raw").exists()), None)


@dataclass
class Done:
    """A job that has ended."""

    exit_code: int
    output: list[tuple[float, str]]
    """Every line of stdout and stderr, with the seconds since the start."""
    duration_s: float
    run_dir: Path

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.output)

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "report.json").read_text())
        return loaded

    @property
    def model(self) -> dict[str, torch.Tensor]:
        import torch  # late: processes that only start jobs do without it

        loaded: dict[str, torch.Tensor] = torch.load(self.run_dir / "model.pt", weights_only=True)
        return loaded

    def lines_of_ranks(self) -> list[str]:
        """What our processes printed, without torchrun's own lines."""
        return [line for _, line in self.output if line.startswith(("server rank", "trainer rank"))]

    def time_of(self, part: str) -> float:
        """Seconds from the start to the first line that holds `part`."""
        return next(time_s for time_s, line in self.output if part in line)


class Job:
    """A real job under torchrun, started when made."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        world_size: int = 3,
        env: dict[str, str] | None = None,
        program: str = "launch.py",
        restarts: int = 0,
        wrap: Sequence[str] = (),
        before: Callable[[], None] | None = None,
    ) -> None:
        """restarts is how often torchrun starts all ranks again after a failure.

        A bare program gets the args alone, without --run-dir. wrap is a command that starts
        another; before is called in the new process.
        """
        self.run_dir = folder / "run"
        options = [] if program == BARE else ["--run-dir", str(self.run_dir)]
        command = [
            *wrap,
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", f"--nproc_per_node={world_size}"),
            *(f"--max-restarts={restarts}", f"--log-dir={self.run_dir / 'torchrun'}"),
            *(program, *options, *args),
        ]
        environment = (
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            | (env or {})
        )
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=before,
        )
        self._output: list[tuple[float, str]] = []
        self._seen = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        children = psutil.Process(self.process.pid).children()
        return {int(child.environ()["RANK"]): child for child in children}

    def now(self) -> float:
        """Seconds since the start, as those of the lines."""
        return time.monotonic() - self.started_at

    def wait_for(
        self, part: str, bound_s: float = 60.0, *, count: int = 1, after_s: float = 0.0
    ) -> None:
        """Block until `count` lines that came later than after_s hold `part`."""
        with self._seen:
            found = self._seen.wait_for(
                lambda: len(self._times_of(part, after_s)) >= count, timeout=bound_s
            )
        if not found:
            self.kill()
        assert found, f"no line with {part!r}:\n" + "\n".join(line for _, line in self._output)

    def time_of(self, part: str, after_s: float = 0.0) -> float:
        """When the first line that holds `part` came, of those later than after_s."""
        with self._seen:
            return self._times_of(part, after_s)[0]

    def _times_of(self, part: str, after_s: float) -> list[float]:
        return [time_s for time_s, line in self._output if part in line and time_s > after_s]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, bound_s: float = 100.0) -> Done:
        try:
            exit_code = self.process.wait(bound_s)
        finally:
            self.kill()
        self._reader.join(5)
        duration_s = time.monotonic() - self.started_at
        return Done(exit_code, self._output, duration_s, self.run_dir)

    def kill(self) -> None:
        """Kill torchrun, if it still runs, and its ranks, which are in sessions of their own."""
        if self.process.poll() is not None:
            return
        torchrun = psutil.Process(self.process.pid)
        for process in [*torchrun.children(recursive=True), torchrun]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self._output.append((time.monotonic() - self.started_at, line.rstrip("\n")))
                self._seen.notify_all()
        self.process.stdout.close()


def run_job(
    folder: Path, *args: str, world_size: int = 3, env: dict[str, str] | None = None
) -> Done:
    return Job(folder, *args, world_size=world_size, env=env).wait()
