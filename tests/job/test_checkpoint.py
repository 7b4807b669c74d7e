"""Checkpoints on a real disk: complete or not there, whatever happens to the writer."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ps.job import rundir
from ps.job.checkpoint import Checkpointer, Checkpoints, expired, name_after, read
from ps.server.state import Content, Snapshot
from ps.settings.errors import CheckpointUnusable, TrainingFailed
from tests.helpers import end_processes, next_line, run_threads, server_of, start, train_all, until
from tests.plugins import perceptron

TIMEOUT_S = 10.0
NOBODY = 65534


def state_of(version: int, *, num_weights: int = 100) -> dict[str, Any]:
    return {"version": version, "weights": torch.full((num_weights,), float(version))}


def written(folder: Path, *versions: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for version in versions:
        checkpoints.write(state_of(version), version)
    return checkpoints


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / rundir.CHECKPOINTS).iterdir()}


def versions(checkpoints: Checkpoints) -> list[int]:
    return [read(path)["version"] for path in checkpoints.paths()]


def newest_version(checkpoints: Checkpoints) -> int | None:
    found: list[Content] = []
    checkpoints.newest(found.append)
    return found[0]["version"] if found else None


def as_named(folder: Path, content: bytes, sequence: int = 1) -> Path:
    """A file with any content, under the name that fits it."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / rundir.CHECKPOINTS / f"{sequence:06}-update-1-{digest}.pt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    state: dict[str, Any] = {
        "model": {"weight": weight, "tied": weight, "steps": torch.tensor(7), "none": None},
        "half": torch.randn(3).to(torch.bfloat16),
        "counts": {0: [1.5, 2], 3: [float("inf"), -1]},
    }
    back = read(Checkpoints(tmp_path).write(state, 7))
    assert back["counts"] == state["counts"]
    assert torch.equal(back["half"], state["half"])
    assert torch.equal(back["model"]["weight"], weight)
    assert back["model"]["weight"].stride() == weight.stride()
    assert back["model"]["tied"].data_ptr() == back["model"]["weight"].data_ptr()
    assert (back["model"]["steps"].dtype, back["model"]["none"]) == (torch.int64, None)


@pytest.mark.parametrize(
    ("there", "number"),
    [([], "000001"), (["000001", "000007"], "000008"), (["999999"], "1000000")],
)
def test_the_next_number_is_one_more_than_that_of_the_newest(there: list[str], number: str) -> None:
    older = [Path(f"{sequence}-update-9-{'0' * 16}.pt") for sequence in there]
    assert name_after(older, 5, "a" * 16) == f"{number}-update-5-{'a' * 16}.pt"


@pytest.mark.parametrize(
    ("there", "keep", "gone"),
    [(0, 1, 0), (1, 1, 1), (3, 1, 3), (3, 3, 1), (3, 4, 0), (3, 9, 0), (7, 5, 3)],
)
def test_the_oldest_expire_when_there_are_more_than_are_kept(
    there: int, keep: int, gone: int
) -> None:
    older = [Path(str(number)) for number in range(there)]
    assert expired(older, keep) == older[:gone]


def test_a_name_has_the_number_the_update_and_the_start_of_the_checksum(tmp_path: Path) -> None:
    written(tmp_path, 250)
    checkpoints = written(tmp_path, 500)  # by another process
    for path, name in zip(
        checkpoints.paths(), ("000001-update-250", "000002-update-500"), strict=True
    ):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path == tmp_path / "checkpoints" / f"{name}-{digest[:16]}.pt"
    assert stat.S_IMODE(checkpoints.folder.stat().st_mode) == 0o700


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    assert versions(written(tmp_path, *range(1, 5), keep=2)) == [3, 4]
    assert len(contents(tmp_path)) == 2
    assert versions(written(tmp_path, 8, keep=1)) == [8]


def test_the_newest_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    """Not the one of the latest update: a run may have gone on from an earlier one."""
    checkpoints = written(tmp_path, 900, 20)
    assert newest_version(checkpoints) == 20
    newest = checkpoints.paths()[-1]
    newest.rename(newest.with_name(newest.name.replace("000002", "999999")))
    written(tmp_path, 3)
    assert versions(checkpoints) == [900, 20, 3]


def test_files_with_other_names_are_neither_read_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    others = ["best.pt", "000001-update-1-0123456789abcdef.pt.bak", "1-update-1-0123.pt", "x.tmp"]
    for name in others:
        (folder / name).write_text("mine")
    for there in (tmp_path, tmp_path / "none"):
        assert Checkpoints(there).newest(lambda state: pytest.fail("restored")) is None
    checkpoints = written(tmp_path, 1, 2, 3, keep=1)
    assert (newest_version(checkpoints), len(checkpoints.paths())) == (3, 1)
    assert sorted(contents(tmp_path)) == sorted([*others, checkpoints.paths()[0].name])


def cut_off(part: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(part * (len(content) - 1))])

    return cut


def flip(place: float) -> Callable[[Path], None]:
    def flip_a_bit(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip_a_bit


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    **{f"cut at {part}": (cut_off(part), "damaged") for part in (0.0, 0.5, 1.0)},
    **{f"bit at {place}": (flip(place), "damaged") for place in (0.0, 0.5, 1.0)},
    "folder": (put_a_folder_there, "IsADirectoryError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ones_are_named_and_the_newest_before_them_is_used(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, damage: str
) -> None:
    checkpoints = written(tmp_path, 10, 20, 30, 40)
    spoil, reason = DAMAGES[damage]
    oldest, good, *bad = checkpoints.paths()
    for path in (oldest, *bad):
        spoil(path)
    restored: list[Content] = []
    assert checkpoints.newest(restored.append) == good
    assert [state["version"] for state in restored] == [20]
    for message, path in zip(warnings.messages, reversed(bad), strict=True):
        assert message.startswith(f"checkpoint {path} ")
        assert reason in message
        assert len(message.splitlines()) == 1


def test_one_of_another_job_is_named_and_an_error_that_is_no_fault_of_the_file_is_raised(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 10, 20)
    error: Exception = CheckpointUnusable("seed is 1 there")

    def restore(state: Content) -> None:
        if state["version"] == 20:
            raise error

    good, foreign = checkpoints.paths()
    assert checkpoints.newest(restore) == good
    [message] = warnings.messages
    assert str(foreign) in message
    assert message.endswith("seed is 1 there")
    error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        checkpoints.newest(restore)


def test_if_none_can_be_used_it_is_an_error_with_its_own_exit_code(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 10, 20)
    for path in checkpoints.paths():
        cut_off(0.5)(path)
    with pytest.raises(CheckpointUnusable, match=r"2 checkpoints .*--resume") as caught:
        checkpoints.newest(lambda state: pytest.fail("restored"))
    assert caught.value.exit_code == 7
    assert str(checkpoints.folder) in str(caught.value)


class Harmful:
    """What unpickling it would call."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (os.environ["HARM"],)


NOT_FORMAT_1 = [{"format": 2, "store": {}}, {"store": {}}, {"format": None}, [1], torch.zeros(2)]
HARMFUL = {"format": 1, "store": Harmful()}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((lambda state=state: saved(state), "format 1") for state in NOT_FORMAT_1),
        (lambda: saved(HARMFUL), "UnpicklingError"),
        (lambda: pickle.dumps(HARMFUL, protocol=2), "UnpicklingError"),
        *((lambda content=content: content, "Error") for content in (b"", b"hello", b"PK\x03\x04")),
    ],
)
def test_what_is_no_checkpoint_is_unusable_for_a_reason_of_one_line_and_no_code_in_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Callable[[], bytes], reason: str
) -> None:
    harm = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(harm))
    with pytest.raises(CheckpointUnusable, match=rf"\A.*{reason}.*\Z"):
        read(as_named(tmp_path, content()))
    with pytest.raises(CheckpointUnusable, match="FileNotFoundError"):
        read(tmp_path / "none.pt")
    assert not harm.exists()


# Writing that fails


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to write beyond it, as on a disk that is full by then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [1, 70, 100_000, 399_000])
def test_a_write_that_fails_half_way_leaves_the_others_and_nothing_else(
    tmp_path: Path, num_bytes: int
) -> None:
    checkpoints = written(tmp_path, 10, 20, keep=1)
    before = contents(tmp_path)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        checkpoints.write({"store": threading.Lock()}, 30)
    with largest_file(num_bytes), pytest.raises(OSError) as caught:
        checkpoints.write(state_of(30, num_weights=100_000), 30)
    assert caught.value.errno == errno.EFBIG
    assert contents(tmp_path) == before
    checkpoints.write(state_of(40), 40)
    assert newest_version(checkpoints) == 40


@pytest.mark.parametrize("failing", ["fsync", "replace", "listdir"])
def test_a_disk_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A folder that cannot be listed is no empty one: the file would have the number of another."""
    checkpoints = written(tmp_path, 10, keep=1)
    before = contents(tmp_path)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, failing, fail)
        checkpoints.write(state_of(20), 20)
    assert caught.value.errno == errno.EIO
    assert contents(tmp_path) == before


def test_content_and_name_are_on_the_disk_before_an_older_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = written(tmp_path, 10, keep=1)
    synced: list[tuple[str, list[int]]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        there = [int(path.name.split("-")[2]) for path in checkpoints.paths()]
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).suffix, there))
        fsync(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr(os, "fsync", watched)
    checkpoints.write(state_of(20), 20)
    assert synced == [(".partial", [10]), ("", [10, 20])]
    assert versions(checkpoints) == [20]


@contextmanager
def as_somebody() -> Iterator[None]:
    """Permissions count, also where root runs the tests."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_or_a_file_without_permission_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    checkpoints = written(Path("."), 10, 20)
    before = contents(tmp_path)
    checkpoints.folder.chmod(0o555)
    for path, mode in zip(checkpoints.paths(), (0o644, 0o000), strict=True):
        path.chmod(mode)
    with as_somebody():
        with pytest.raises(PermissionError):
            checkpoints.write(state_of(30), 30)
        assert newest_version(checkpoints) == 10
    assert "Permission denied" in warnings.text
    checkpoints.folder.chmod(0o755)
    checkpoints.paths()[-1].chmod(0o644)
    assert contents(tmp_path) == before
    checkpoints.write(state_of(40), 40)
    assert newest_version(checkpoints) == 40


def test_what_killed_writers_left_half_written_does_not_count_and_goes(tmp_path: Path) -> None:
    """Nor is a folder missed that somebody has removed."""
    checkpoints = written(tmp_path, 5)
    shutil.rmtree(tmp_path / "checkpoints")
    assert checkpoints.paths() == []
    checkpoints.write(state_of(10), 10)
    for name in (".checkpoint.partial", ".checkpoint.7-0123abcd.partial"):
        (checkpoints.folder / name).write_bytes(bytes(100))
    assert newest_version(checkpoints) == 10
    checkpoints.write(state_of(20), 20)
    assert newest_version(checkpoints) == 20
    assert len(contents(tmp_path)) == 2


KILLS = 15


def write_until_killed(folder: str) -> None:
    """One writer after another; each says its pid first, then the versions that are written."""
    checkpoints, version = Checkpoints(Path(folder), keep=2), 0
    torch.save({}, io.BytesIO())  # what it loads late is loaded once
    for _ in range(KILLS):
        if writer := os.fork():
            os.waitpid(writer, 0)
            print("killed", flush=True)
            version += 1_000_000
            continue
        print(os.getpid(), flush=True)
        while True:
            version += 1
            checkpoints.write(state_of(version, num_weights=1_000_000), version)
            print(version, flush=True)


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_had_announced(tmp_path: Path) -> None:
    """By SIGKILL at random moments; every file that is there is complete, too."""
    checkpoints, draw = Checkpoints(tmp_path), random.Random(0)
    program = start(write_until_killed, str(tmp_path))
    announced = half_written = 0
    try:
        for _ in range(KILLS):
            writer = int(next_line(program))
            time.sleep(draw.uniform(0.0, 0.2))
            os.kill(writer, signal.SIGKILL)
            while (line := next_line(program)) != "killed":
                announced = int(line)
            partials = list(checkpoints.folder.glob(".*.partial"))
            half_written += len(partials)
            assert len(partials) <= 1
            there = versions(checkpoints)
            assert there == sorted(there)
            assert max(there, default=0) >= announced
    finally:
        end_processes(program)
    assert announced > KILLS
    assert half_written > KILLS / 4


# In the background


class Recorded(Checkpoints):
    """Waits or fails in each write as it is told to."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, keep=99)
        self.error: Exception | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()
        self.versions: list[int] = []

    def write(self, state: Content, version: int) -> Path:
        self.writing.set()
        assert self.may_write.wait(TIMEOUT_S)
        self.writing.clear()
        if self.error is not None:
            raise self.error
        path = super().write(state, version)
        self.versions.append(version)
        return path


class Job:
    """One with a checkpointer, as that sees it."""

    def __init__(self, run_dir: Path) -> None:
        self.version = 0
        self.todo = 9
        self.error: Exception | None = None
        self.may_look = threading.Event()
        self.may_look.set()
        self.copies: list[bool] = []
        """Of each snapshot, whether it was a copy."""
        self.disk = Recorded(run_dir)
        self.checkpointer = Checkpointer(self.disk, self.take_snapshot)

    def take_snapshot(self, *, copy: bool) -> Snapshot:
        assert self.may_look.wait(TIMEOUT_S)
        self.copies.append(copy)
        if self.error is not None:
            raise self.error
        return Snapshot(self.version, (self.version, self.todo), state_of(self.version))

    def ask(self, version: int | None = None) -> None:
        """And wait until it has looked."""
        self.version = self.version if version is None else version
        before = len(self.copies)
        self.checkpointer.due()
        until(lambda: len(self.copies) > before, TIMEOUT_S)

    def has_saved(self, *versions: int) -> bool:
        return self.disk.versions == list(versions)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def running(job: Job) -> Iterator[Job]:
    """Its checkpointer has started, and saves when asked."""
    job.checkpointer.start()
    yield job
    job.disk.may_write.set()
    job.checkpointer.close(TIMEOUT_S)


def test_it_saves_soon_after_it_is_asked_and_not_before(running: Job) -> None:
    assert running.checkpointer.newest is None
    for versions in ([1], [1, 2]):
        running.version = versions[-1]
        time.sleep(0.05)
        assert running.has_saved(*versions[:-1])
        running.checkpointer.due()
        until(lambda: running.has_saved(*versions), TIMEOUT_S)  # noqa: B023
    until(lambda: running.checkpointer.newest == running.disk.paths()[-1], TIMEOUT_S)


def test_it_saves_once_every_interval(job: Job) -> None:
    checkpointer = Checkpointer(job.disk, job.take_snapshot, interval_s=0.1)
    checkpointer.start()
    for version in (1, 2, 3):
        job.version = version
        took_s = until(lambda: version in job.disk.versions, TIMEOUT_S)  # noqa: B023
        assert took_s > 0.02 or version == 1
    assert checkpointer.close(TIMEOUT_S)
    assert job.has_saved(1, 2, 3)


def test_what_has_the_same_mark_is_not_saved_again(running: Job) -> None:
    for _ in range(3):
        running.ask()
    until(lambda: running.has_saved(0), TIMEOUT_S)
    running.todo -= 1  # an evaluation, without an update
    assert running.checkpointer.close(TIMEOUT_S)
    assert running.has_saved(0, 0)


def test_closing_while_one_is_written_saves_the_end_and_that_alone_without_a_copy(
    running: Job,
) -> None:
    running.disk.may_write.clear()
    running.ask(1)
    assert running.disk.writing.wait(TIMEOUT_S)
    running.version = 2
    closing = threading.Timer(0.05, running.disk.may_write.set)
    closing.start()
    assert running.checkpointer.close(TIMEOUT_S)
    closing.join()
    assert running.has_saved(1, 2)
    assert running.checkpointer.newest == running.disk.paths()[1]
    assert running.copies == [True, False]


def test_asked_several_times_during_a_save_it_makes_one_more(running: Job) -> None:
    running.disk.may_write.clear()
    running.checkpointer.due()
    assert running.disk.writing.wait(TIMEOUT_S)
    for version in (1, 2, 3):
        running.version = version
        running.checkpointer.due()
    running.disk.may_write.set()
    until(lambda: running.has_saved(0, 3), TIMEOUT_S)
    assert running.checkpointer.close(TIMEOUT_S)
    assert running.has_saved(0, 3)


def test_closing_gives_up_after_its_timeout_and_says_so(running: Job) -> None:
    running.disk.may_write.clear()
    start = time.monotonic()
    assert not running.checkpointer.close(0.1)
    assert 0.1 <= time.monotonic() - start < 5


def test_the_newest_is_known_from_the_start_and_one_never_started_can_be_closed(job: Job) -> None:
    there = job.disk.write(state_of(1), 1)
    checkpointer = Checkpointer(job.disk, job.take_snapshot, newest=there)
    assert checkpointer.close(TIMEOUT_S)
    assert checkpointer.newest == there
    assert job.has_saved(1)


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("of_disk", "of_job", "reason"),
    [
        (NO_SPACE, None, "No space left on device"),
        (None, TrainingFailed("broken off"), "broken off"),
        (None, MemoryError(), "MemoryError"),
        (None, RuntimeError("not enough memory\nin a function of torch"), "not enough memory"),
    ],
    ids=["disk", "ours", "without words", "of torch"],
)
def test_saves_that_fail_are_said_once_and_so_is_that_they_work_again(
    running: Job, said: list[str], of_disk: Exception, of_job: Exception, reason: str
) -> None:
    running.ask()
    until(lambda: running.has_saved(0), TIMEOUT_S)
    running.disk.error, running.error = of_disk, of_job
    for version in (1, 2):
        running.ask(version)
    until(lambda: len(said) == 1, TIMEOUT_S)
    assert said[0].endswith(reason)
    assert not running.checkpointer.close(TIMEOUT_S)
    assert running.checkpointer.newest == running.disk.paths()[0]
    running.disk.error = running.error = None
    running.checkpointer.save()
    assert len(said) == 2
    assert running.has_saved(0, 2)


def test_what_is_saved_already_is_no_failure_after_one(job: Job) -> None:
    for error, is_saved in ((None, True), (MemoryError("copying"), False), (None, True)):
        job.error = error
        job.checkpointer.save()
        assert job.checkpointer.close(TIMEOUT_S) == is_saved
    assert job.has_saved(0)


def test_asking_does_not_wait_for_a_snapshot(running: Job) -> None:
    running.may_look.clear()
    run_threads(lambda number: running.checkpointer.due(), range(3))
    running.may_look.set()
    assert running.checkpointer.close(TIMEOUT_S)


def test_training_goes_on_while_a_file_is_written(job: Job) -> None:
    """The file then holds the state as it was when its writing began."""
    parts = server_of(perceptron(num_train=16))
    job.disk.may_write.clear()

    def take_snapshot(*, copy: bool) -> Snapshot:
        snapshot = parts.state.snapshot(copy=copy)
        return replace(snapshot, content={**snapshot.content, "version": snapshot.version})

    checkpointer = Checkpointer(job.disk, take_snapshot)
    checkpointer.start()
    [thread] = [t for t in threading.enumerate() if t.name == "checkpoint"]
    assert thread.daemon
    checkpointer.due()
    assert job.disk.writing.wait(TIMEOUT_S)
    train_all(parts)
    assert parts.store.version == 2
    assert job.has_saved()
    job.disk.may_write.set()
    assert checkpointer.close(TIMEOUT_S)
    assert versions(job.disk) == [0, 2]
    assert not thread.is_alive()
