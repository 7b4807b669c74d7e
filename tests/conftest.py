"""What holds for every test: torchrun's variables are not there, and nothing is left running."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

from ps.settings.log import log

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN_VARIABLES, *(n for n in os.environ if n.startswith("TORCHELASTIC_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are in sessions of their own and may outlive torchrun: a mark in the environment
    finds them wherever they are."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PS_TEST", mark)
    before = set(psutil.pids())
    yield
    strays = [pid for pid in set(psutil.pids()) - before if _carries(pid, mark)]
    for stray in strays:
        psutil.Process(stray).kill()
    assert not strays, f"the test left processes behind: {strays}"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings and errors that our log is given during the test."""
    log.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, logger="ps"):
        yield caplog
    log.removeHandler(caplog.handler)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines that our log is given during the test, information too. Grows."""
    listening = _Lines()
    log.addHandler(listening)
    with caplog.at_level(logging.INFO, logger="ps"):
        yield listening.lines
    log.removeHandler(listening)


def _carries(pid: int, mark: str) -> bool:
    try:
        return psutil.Process(pid).environ().get("PS_TEST") == mark
    except psutil.Error:
        return False
