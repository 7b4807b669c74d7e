"""Where findings go: to the server, and into a file of the run directory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ps.host.health import Finding, Look

HEALTH_FILE = "health.jsonl"


class Reporter:
    """Reports findings from a thread of its own.

    Who stands still may hold the server's lock, and the thread that watches must go on looking.
    A finding that could not be reported meanwhile comes again with the next look.
    """

    def __init__(self, report: Callable[[Finding], None], timeout_s: float) -> None:
        """timeout_s is how long report() waits for that thread."""
        self._report = report
        self._timeout_s = timeout_s
        self._reported: set[tuple[int, int]] = set()
        self._thread = threading.Thread()
        self._since = 0.0

    def has_reported(self, finding: Finding) -> bool:
        """Whether the server knows of this, or of another with that rank and exit code."""
        return (finding.rank, finding.exit_code) in self._reported

    def report(self, findings: Sequence[Finding]) -> float:
        """Returns for how many seconds the server has not taken one; 0 if it has taken all."""
        if findings and not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, args=(findings,), name="findings", daemon=True
            )
            self._since = time.monotonic()
            self._thread.start()
        if not self._thread.is_alive():
            return 0.0
        self._thread.join(self._timeout_s)
        return time.monotonic() - self._since if self._thread.is_alive() else 0.0

    def _run(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._report(finding)
            if finding.exit_code:
                self._reported.add((finding.rank, finding.exit_code))


class Recorder:
    """Appends what was seen to a file, a line of JSON for each record. Errors are ignored."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self._recorded_at = float("-inf")

    def record(self, look: Look, findings: Iterable[Finding]) -> None:
        """At most once an interval, but always with a finding."""
        texts = [f"rank {finding.rank}: {finding.text}" for finding in findings]
        if not texts and look.at - self._recorded_at < self._interval_s:
            return
        self._recorded_at = look.at
        memory = look.memory
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": {str(rank): reading.facts() for rank, reading in look.readings.items()},
            "memory": {"used_bytes": memory.used, "free_bytes": memory.free} if memory else None,
            "findings": texts,
        }
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
