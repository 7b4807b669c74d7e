"""The processes of a peer: started together, released together, and gone afterwards.

    python -m benchmarks.peers.processes MODULE TASK

is one of them: it runs part(task, gate) of the module. It says on stdout when it is ready, waits
for a line on stdin, and says its rate. Plain pipes: multiprocessing would leave a process of its
own behind in the one that measures.
"""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from benchmarks.peers.task import Task
from tests.jobs import ROOT

Gate = Callable[[], None]
"""Blocks until every process of the peer is ready."""

READY, RATE = "bench ready", "bench rate"
START_BOUND_S = 90.0
TRAIN_BOUND_S = 180.0
END_BOUND_S = 30.0
POLL_INTERVAL_S = 0.5
SHOWN_LINES = 15


class MeasurementError(RuntimeError):
    """Something could not be measured; the text says why."""


def total_rate(module: str, tasks: Sequence[Task]) -> float:
    """Samples per second of one process for each task, summed.

    module is the full name of the peer's module. Blocks until all processes have ended.

    Raises:
        MeasurementError: a process failed, or took longer than the bounds above.
    """
    with _Crew(module, tasks) as crew:
        crew.expect(READY, START_BOUND_S)
        crew.release()
        rates = crew.expect(RATE, TRAIN_BOUND_S)
        crew.expect_end()
    return sum(float(rate) for rate in rates)


class _Crew:
    """All processes of one measurement. Leaving the context kills what is left of them."""

    def __init__(self, module: str, tasks: Sequence[Task]) -> None:
        self._module = module
        self._tasks = tasks
        self._processes: list[_Process] = []
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self._shown: deque[str] = deque(maxlen=SHOWN_LINES)

    def __enter__(self) -> _Crew:
        try:
            for number, task in enumerate(self._tasks):
                self._processes.append(_Process(self._module, task, number, self._lines))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def expect(self, word: str, bound_s: float) -> list[str]:
        """What each process says after the word, in the order of the tasks."""
        said: dict[int, str] = {}
        until = time.monotonic() + bound_s
        while len(said) < len(self._processes):
            gone = [number for number, process in enumerate(self._processes) if process.code]
            try:
                number, line = self._lines.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                if gone:
                    code = self._processes[gone[0]].code
                    raise self._error(f"process {gone[0]} ended with {code}") from None
                if time.monotonic() > until:
                    raise self._error(f"no '{word}' within {bound_s:.0f} s") from None
                continue
            if line.startswith(word):
                said[number] = line.removeprefix(word)
            self._shown.append(line)
        return [said[number] for number in sorted(said)]

    def release(self) -> None:
        for process in self._processes:
            process.release()

    def expect_end(self) -> None:
        """Training is done; what happens from here on costs no figure, but must be clean."""
        for number, process in enumerate(self._processes):
            code = process.wait(END_BOUND_S)
            if code != 0:
                raise self._error(f"process {number} ended with {code} after its last step")

    def _error(self, what: str) -> MeasurementError:
        return MeasurementError("\n".join([f"{self._module}: {what}", *self._shown]))


class _Process:
    """One process, and whatever it starts: all in a session of their own, to be ended with it."""

    def __init__(
        self, module: str, task: Task, number: int, lines: queue.Queue[tuple[int, str]]
    ) -> None:
        """Each line of stdout and stderr is put into lines, with the number."""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.processes", module, task.to_text()],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._number = number
        self._lines = lines
        self._reader = threading.Thread(target=self._read, daemon=True, name="bench output")
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self._popen.poll()

    def release(self) -> None:
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.write("go\n")
            self._popen.stdin.flush()

    def wait(self, bound_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(bound_s)
        return None

    def kill(self) -> None:
        """End it and what it has started; does nothing to what has ended."""
        left = [process for process in psutil.process_iter() if self._has_started(process)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()
        psutil.wait_procs(left, END_BOUND_S)
        self._reader.join(END_BOUND_S)
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _has_started(self, process: psutil.Process) -> bool:
        """Whether it is in the session; some of Ray's processes leave the process group."""
        try:
            return os.getsid(process.pid) == self._popen.pid
        except (ProcessLookupError, PermissionError):
            return False

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put((self._number, line.rstrip("\n")))


def _environment() -> dict[str, str]:
    """One thread, as under torchrun, and nothing but loopback."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
    }


def _gate() -> None:
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit("the benchmark has ended")


def main(module: str, task: str) -> None:
    part: Callable[[Task, Gate], float] = importlib.import_module(module).part
    print(RATE, part(Task.from_text(task), _gate), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
