"""Whole jobs, for the tests and for the benchmarks: under torchrun, or without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
BARE = "benchmarks/bare.py"
MNIST_FOLDERS = (ROOT / "data", ROOT.parent / "shared" / "mnist")
SUPERVISE_INTERVAL_S = 0.02


def mnist_folder() -> Path | None:
    """Where the real MNIST lies, if it does."""
    return next((folder for folder in MNIST_FOLDERS if (folder / "MNIST" / "raw").exists()), None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of a job."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | dict(extra or {})


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun gives a rank, where rank 0 is to serve the store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{port}",
    }


@dataclass
class Done:
    """A job that has ended."""

    exit_code: int
    """Of torchrun; without it, of the rank that failed first."""
    output: list[tuple[float, str]]
    """Every line of stdout and stderr, with the seconds since the start."""
    duration_s: float
    run_dir: Path
    codes: dict[int, int] = field(default_factory=dict)
    """The exit code of each rank, in the order in which they ended. Empty under torchrun."""

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

    @property
    def root_cause(self) -> int | None:
        """The rank that failed first, which torchrun names. None if none has failed."""
        if self.codes:
            return next((rank for rank, code in self.codes.items() if code), None)
        _, found, after = self.text.partition("Root Cause")
        return int(after.partition("rank      : ")[2].split(None, 1)[0]) if found else None

    def lines_of_ranks(self) -> list[str]:
        """What our processes printed, without torchrun's own lines."""
        return [line for _, line in self.output if line.startswith(("server rank", "trainer rank"))]

    def time_of(self, part: str) -> float:
        """Seconds from the start to the first line that holds `part`."""
        return next(time_s for time_s, line in self.output if part in line)


class Running(ABC):
    """A job that has been started, and its output."""

    def __init__(self, folder: Path) -> None:
        """The run directory is in that folder."""
        self.run_dir = folder / "run"
        self.started_at = time.monotonic()
        self._output: list[tuple[float, str]] = []
        self._seen = threading.Condition()
        self._readers: list[threading.Thread] = []

    @abstractmethod
    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Send it to torchrun; without it, to all ranks, as torchrun would."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all that still runs of it."""

    @abstractmethod
    def wait(self, bound_s: float = 100.0) -> Done:
        """Until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not within bound_s; it is killed then.
        """

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

    def _start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._readers.append(reader)
        reader.start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._seen:
                self._output.append((self.now(), line.rstrip("\n")))
                self._seen.notify_all()
        process.stdout.close()

    def _done(self, exit_code: int, codes: Mapping[int, int]) -> Done:
        for reader in self._readers:
            reader.join(5)
        return Done(exit_code, self._output, self.now(), self.run_dir, dict(codes))


class Job(Running):
    """A job under torchrun, started when made."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        world_size: int = 3,
        env: Mapping[str, str] | None = None,
        program: str = "launch.py",
        restarts: int = 0,
        wrap: Sequence[str] = (),
        before: Callable[[], None] | None = None,
    ) -> None:
        """restarts is how often torchrun starts all ranks again after a failure.

        A bare program gets the args alone, without --run-dir. wrap is a command that starts
        another; before is called in the new process.
        """
        super().__init__(folder)
        options = [] if program == BARE else ["--run-dir", str(self.run_dir)]
        command = [
            *wrap,
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", f"--nproc_per_node={world_size}"),
            *(f"--max-restarts={restarts}", f"--log-dir={self.run_dir / 'torchrun'}"),
            *(program, *options, *args),
        ]
        self.process = self._start(command, env=environment(env), preexec_fn=before)

    def ranks(self) -> dict[int, psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return {int(child.environ()["RANK"]): child for child in children}

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, bound_s: float = 100.0) -> Done:
        try:
            exit_code = self.process.wait(bound_s)
        finally:
            self.kill()
        return self._done(exit_code, {})

    def kill(self) -> None:
        """Its ranks too, which are in sessions of their own."""
        if self.process.poll() is not None:
            return
        torchrun = psutil.Process(self.process.pid)
        for process in [*torchrun.children(recursive=True), torchrun]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class Ranks(Running):
    """A job without torchrun, started when made: the ranks and what torchrun tells them.

    It costs less than half of the time of one under torchrun. Here too, all ranks get SIGTERM
    when one has failed.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        world_size: int = 3,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        port = free_port()
        command = [sys.executable, "launch.py", "--run-dir", str(self.run_dir), *args]
        self._processes = {
            rank: self._start(
                command, env=environment(env) | rank_variables(rank, world_size, port)
            )
            for rank in range(world_size)
        }
        self._ranks = {rank: psutil.Process(it.pid) for rank, it in self._processes.items()}
        self._codes: dict[int, int] = {}
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    def ranks(self) -> dict[int, psutil.Process]:
        """Those that were there when it was made: psutil knows a pid that was given again."""
        return dict(self._ranks)

    @property
    def is_running(self) -> bool:
        """Whether any rank is."""
        return self._supervisor.is_alive()

    def send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def wait(self, bound_s: float = 100.0) -> Done:
        self._supervisor.join(bound_s)
        if self._supervisor.is_alive():
            self.kill()
            text = "\n".join(line for _, line in self._output)
            raise subprocess.TimeoutExpired("launch.py", bound_s, output=text)
        exit_code = next((code for code in self._codes.values() if code), 0)
        return self._done(exit_code, self._codes)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._supervisor.join()

    def _supervise(self) -> None:
        while running := set(self._processes) - set(self._codes):
            before = any(self._codes.values())
            for rank in running:
                if (code := self._processes[rank].poll()) is not None:
                    self._codes[rank] = code
            if any(self._codes.values()) and not before:
                self.send(signal.SIGTERM)
            time.sleep(SUPERVISE_INTERVAL_S)


def run_job(
    folder: Path, *args: str, world_size: int = 3, env: Mapping[str, str] | None = None
) -> Done:
    """Under torchrun, to its end."""
    return Job(folder, *args, world_size=world_size, env=env).wait()


def run_ranks(
    folder: Path, *args: str, world_size: int = 3, env: Mapping[str, str] | None = None
) -> Done:
    """Without torchrun, to its end."""
    return Ranks(folder, *args, world_size=world_size, env=env).wait()
