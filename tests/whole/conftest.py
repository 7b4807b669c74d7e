"""Jobs that leave nothing behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, Ranks, Running
from tests.leftovers import MARK, Leftovers

StartRanks = Callable[..., Ranks]
StartJob = Callable[..., Job]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Running]]:
    """Those of a test: each is killed at the end, and leaves nothing but its run directory."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = Leftovers(mark, temporary)
    started: list[Running] = []
    yield started
    for job in started:
        job.kill()
    assert before.found() == []


@pytest.fixture
def start(tmp_path: Path, jobs: list[Running]) -> StartRanks:
    """Starts the ranks of a job, without torchrun."""

    def start(*args: str, **options: Any) -> Ranks:
        job = Ranks(tmp_path, *args, **options)
        jobs.append(job)
        return job

    return start


@pytest.fixture
def torchrun(tmp_path: Path, jobs: list[Running]) -> StartJob:
    """Starts a job under torchrun."""

    def start(*args: str, **options: Any) -> Job:
        job = Job(tmp_path, *args, **options)
        jobs.append(job)
        return job

    return start
