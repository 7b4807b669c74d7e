"""Checkpoints on a real disk: whole or not there, whatever happens to the writer."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ps.job import checkpoint, rundir
from ps.job.checkpoint import Checkpointer, Checkpoints, State, read
from ps.protocol import Train
from ps.settings.errors import CheckpointUnusable, TrainingFailed
from tests.helpers import end_processes, next_line, run_threads, server_of, start, until
from tests.plugins import perceptron

BOUND_S = 10.0
NOBODY = 65534


def state_of(version: int, *, todo: int = 0, num_weights: int = 100) -> dict[str, Any]:
    """As a server's, in small."""
    weights = torch.full((num_weights,), float(version))
    return {"store": {"version": version, "weights": weights}, "orders": {"todo": todo}}


def written(folder: Path, *versions: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for version in versions:
        checkpoints.write(state_of(version), version)
    return checkpoints


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / rundir.CHECKPOINTS).iterdir()}


def versions(checkpoints: Checkpoints) -> list[int]:
    return [read(path)["store"]["version"] for path in checkpoints.paths()]


def newest_version(checkpoints: Checkpoints) -> int | None:
    found: list[State] = []
    checkpoints.newest(found.append)
    return found[0]["store"]["version"] if found else None


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


def test_the_name_tells_the_number_the_update_and_the_start_of_the_checksum(
    tmp_path: Path,
) -> None:
    first, second = written(tmp_path, 250, 500).paths()
    for path, name in ((first, "000001-update-250"), (second, "000002-update-500")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path == tmp_path / "checkpoints" / f"{name}-{digest[:16]}.pt"


def test_the_folder_is_private(tmp_path: Path) -> None:
    assert stat.S_IMODE(written(tmp_path / "run", 1).folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(("keep", "left"), [(1, [7]), (2, [6, 7]), (5, [3, 4, 5, 6, 7])])
def test_the_newest_stay_and_older_ones_go(tmp_path: Path, keep: int, left: list[int]) -> None:
    checkpoints = written(tmp_path, *range(1, 8), keep=keep)
    assert versions(checkpoints) == left
    assert len(contents(tmp_path)) == keep


def test_fewer_to_keep_than_there_are_takes_effect_with_the_next(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, 4, 5)
    assert versions(written(tmp_path, 6, keep=2)) == [5, 6]


def test_the_newest_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    """Not the one of the latest update: a run may have gone on from an earlier one."""
    checkpoints = written(tmp_path, 900, 20)
    assert newest_version(checkpoints) == 20
    for path in checkpoints.paths():
        path.rename(path.with_name(path.name.replace("00000", "99999")))
    written(tmp_path, *range(1, 9))
    numbers = [path.name.split("-")[0] for path in checkpoints.paths()]
    assert numbers == [str(number) for number in range(999_992, 1_000_001)]
    assert newest_version(checkpoints) == 8


def test_numbers_go_on_where_a_writer_of_an_earlier_process_ended(tmp_path: Path) -> None:
    written(tmp_path, 10, 20, keep=1)
    [path] = written(tmp_path, 30, keep=1).paths()
    assert path.name.startswith("000003-update-30-")


def test_files_with_other_names_are_neither_read_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    others = ["best.pt", "000001-update-1-0123456789abcdef.pt.bak", "1-update-1-0123.pt", "x.tmp"]
    for name in others:
        (folder / name).write_text("mine")
    checkpoints = written(tmp_path, 1, 2, 3, keep=1)
    assert (newest_version(checkpoints), len(checkpoints.paths())) == (3, 1)
    assert sorted(contents(tmp_path)) == sorted([*others, checkpoints.paths()[0].name])


def test_where_there_is_none_nothing_is_restored(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("mine")
    for folder in (tmp_path, tmp_path / "none"):
        assert Checkpoints(folder).newest(lambda state: pytest.fail("restored")) is None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(place: float) -> Callable[[Path], None]:
    def flip_a_bit(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip_a_bit


DAMAGES = {
    "truncated": (truncate, "it is damaged: its content does not fit its name"),
    "half": (cut_in_half, "it is damaged: its content does not fit its name"),
    "empty": (empty, "it is damaged: its content does not fit its name"),
    "first bit": (flip(0.0), "it is damaged: its content does not fit its name"),
    "a weight": (flip(0.5), "it is damaged: its content does not fit its name"),
    "last bit": (flip(1.0), "it is damaged: its content does not fit its name"),
    "folder": (put_a_folder_there, "IsADirectoryError: [Errno 21] Is a directory: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, damage: str
) -> None:
    checkpoints = written(tmp_path, 10, 20)
    good, bad = checkpoints.paths()
    spoil, reason = DAMAGES[damage]
    spoil(bad)
    restored: list[State] = []
    assert checkpoints.newest(restored.append) == good
    assert [state["store"]["version"] for state in restored] == [10]
    [message] = warnings.messages
    assert message.startswith(f"checkpoint {bad} is not used: {reason}")
    assert len(message.splitlines()) == 1


def test_the_newest_that_can_be_used_is_and_older_ones_are_not_looked_at(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 10, 20, 30, 40)
    for path in (checkpoints.paths()[place] for place in (0, 2, 3)):
        truncate(path)
    assert newest_version(checkpoints) == 20
    named = [message.split()[1] for message in warnings.messages]
    assert named == [str(path) for path in reversed(checkpoints.paths()[2:])]


def test_one_of_another_job_is_named_and_the_one_before_is_used(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 10, 20)

    def restore(state: Mapping[str, Any]) -> None:
        if state["store"]["version"] == 20:
            raise CheckpointUnusable("it is of another job: seed is 1 there and 0 here")

    good, foreign = checkpoints.paths()
    assert checkpoints.newest(restore) == good
    assert warnings.messages == [
        f"checkpoint {foreign} is not used: it is of another job: seed is 1 there and 0 here"
    ]


def test_if_none_can_be_used_it_is_an_error_with_its_own_exit_code(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 10, 20)
    for path in checkpoints.paths():
        truncate(path)
    with pytest.raises(CheckpointUnusable) as caught:
        checkpoints.newest(lambda state: pytest.fail("restored"))
    assert caught.value.exit_code == 7
    assert str(caught.value) == (
        f"none of the 2 checkpoints in {tmp_path / 'checkpoints'} can be used; to start from "
        "scratch, omit --resume or remove them"
    )
    assert len(warnings.messages) == 2


def test_an_error_of_restoring_that_is_no_fault_of_the_file_is_not_swallowed(
    tmp_path: Path,
) -> None:
    def restore(state: State) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        written(tmp_path, 10, 20).newest(restore)


@pytest.mark.parametrize(
    "state",
    [{"format": 2, "store": {}}, {"store": {}}, {"format": None}, [1, 2], torch.zeros(2)],
    ids=["newer", "none", "null", "list", "tensor"],
)
def test_one_of_another_format_is_unusable(tmp_path: Path, state: object) -> None:
    path = as_named(tmp_path, saved(state))
    with pytest.raises(CheckpointUnusable, match=r"^it is not of format 1$"):
        read(path)


class Harmful:
    """What unpickling it would call."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (os.environ["HARM"],)


def pickled(state: object) -> bytes:
    return pickle.dumps(state, protocol=2)


@pytest.mark.parametrize("make", [saved, pickled])
def test_code_in_a_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[object], bytes]
) -> None:
    harm = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(harm))
    path = as_named(tmp_path, make({"format": 1, "store": Harmful()}))
    with pytest.raises(CheckpointUnusable) as caught:
        read(path)
    assert str(caught.value).startswith("UnpicklingError: Weights only load failed")
    assert len(str(caught.value).splitlines()) == 1
    assert not harm.exists()


def test_what_is_no_file_of_torch_is_unusable_in_one_line(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"PK\x03\x04" + bytes(100)):
        with pytest.raises(CheckpointUnusable, match=r"^\w+: .*$"):
            read(as_named(tmp_path, content))
    with pytest.raises(CheckpointUnusable, match=r"^FileNotFoundError: "):
        read(tmp_path / "none.pt")


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
@pytest.mark.parametrize("keep", [1, 2])
def test_a_write_that_fails_half_way_leaves_the_others_and_nothing_else(
    tmp_path: Path, num_bytes: int, keep: int
) -> None:
    checkpoints = written(tmp_path, 10, 20, keep=keep)
    before = contents(tmp_path)
    with largest_file(num_bytes), pytest.raises(OSError, match="File too large"):
        checkpoints.write(state_of(30, num_weights=100_000), 30)
    assert contents(tmp_path) == before
    checkpoints.write(state_of(40), 40)
    assert newest_version(checkpoints) == 40


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("num_weights", [1, 100_000])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_the_others(
    tmp_path: Path, num_weights: int
) -> None:
    checkpoints = written(tmp_path, 10)
    before = contents(tmp_path)
    (checkpoints.folder / checkpoint.PARTIAL).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.write(state_of(20, num_weights=num_weights), 20)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_of_a_write_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    checkpoints = written(tmp_path, 10, keep=1)
    before = contents(tmp_path)

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(os, failing, fail)
        checkpoints.write(state_of(20), 20)
    assert contents(tmp_path) == before


def test_content_and_name_are_on_the_disk_before_an_older_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = written(tmp_path, 10, keep=1)
    synced: list[tuple[str, list[int]]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        there = [int(path.name.split("-")[2]) for path in checkpoints.paths()]
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, there))
        fsync(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr(os, "fsync", watched)
    checkpoints.write(state_of(20), 20)
    assert synced == [(checkpoint.PARTIAL, [10]), (rundir.CHECKPOINTS, [10, 20])]
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


def test_a_folder_that_cannot_be_written_any_more_is_an_error_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    checkpoints = written(Path("."), 10, 20)
    before = contents(tmp_path)
    checkpoints.folder.chmod(0o555)
    with as_somebody(), pytest.raises(PermissionError):
        checkpoints.write(state_of(30), 30)
    checkpoints.folder.chmod(0o755)
    assert contents(tmp_path) == before
    checkpoints.write(state_of(40), 40)
    assert newest_version(checkpoints) == 40


def test_a_file_that_cannot_be_read_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    checkpoints = written(Path("."), 10, 20)
    checkpoints.folder.chmod(0o755)
    for path, mode in zip(checkpoints.paths(), (0o644, 0o000), strict=True):
        path.chmod(mode)
    with as_somebody():
        assert newest_version(checkpoints) == 10
    assert "Permission denied" in warnings.text


def test_a_folder_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    checkpoints = written(tmp_path / "run", 10)
    [path] = checkpoints.paths()
    path.unlink()
    checkpoints.folder.rmdir()
    (tmp_path / "run").rmdir()
    assert checkpoints.paths() == []
    checkpoints.write(state_of(20), 20)
    assert versions(checkpoints) == [20]


def test_what_a_killed_writer_left_half_written_does_not_count_and_is_written_over(
    tmp_path: Path,
) -> None:
    checkpoints = written(tmp_path, 10)
    (checkpoints.folder / checkpoint.PARTIAL).write_bytes(bytes(100_000))
    assert newest_version(checkpoints) == 10
    path = checkpoints.write(state_of(20), 20)
    assert path.stat().st_size < 50_000
    assert newest_version(checkpoints) == 20
    assert len(contents(tmp_path)) == 2


def test_what_cannot_be_saved_is_an_error_of_its_own_and_leaves_the_others(
    tmp_path: Path,
) -> None:
    checkpoints = written(tmp_path, 10)
    before = contents(tmp_path)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        checkpoints.write({"store": threading.Lock()}, 20)
    assert contents(tmp_path) == before


KILLS = 30


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
    """By SIGKILL at random moments; every file that is there is whole, too."""
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
            half_written += (checkpoints.folder / checkpoint.PARTIAL).exists()
            there = versions(checkpoints)
            assert there == sorted(there)
            assert max(there, default=0) >= announced
    finally:
        end_processes(program)
    assert announced > KILLS
    assert half_written > KILLS / 4


class Recorded(Checkpoints):
    """Holds up or fails each write as it is told."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, keep=99)
        self.error: Exception | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()
        self.versions: list[int] = []

    def write(self, state: State, version: int) -> Path:
        self.writing.set()
        assert self.may_write.wait(BOUND_S)
        self.writing.clear()
        if self.error is not None:
            raise self.error
        path = super().write(state, version)
        self.versions.append(version)
        return path


class Training:
    """What a checkpointer sees of a job."""

    def __init__(self) -> None:
        self.version = 0
        self.todo = 9
        self.error: Exception | None = None
        self.num_states = 0

    def state(self) -> State:
        self.num_states += 1
        if self.error is not None:
            raise self.error
        return state_of(self.version, todo=self.todo)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def checkpointer(checkpoints: Recorded, training: Training) -> Iterator[Checkpointer]:
    """One that has started, and saves when it is told."""
    checkpointer = Checkpointer(checkpoints, training.state)
    checkpointer.start()
    yield checkpointer
    checkpoints.may_write.set()
    checkpointer.close(BOUND_S)


def test_it_saves_soon_after_it_is_told_and_not_before(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    for version in (1, 2):
        training.version = version
        time.sleep(0.05)
        assert len(checkpoints.versions) == version - 1
        checkpointer.due()
        until(lambda: len(checkpoints.versions) == version, BOUND_S)  # noqa: B023
    assert checkpoints.versions == [1, 2]
    assert checkpointer.last == checkpoints.paths()[-1]


def test_it_saves_once_every_interval(checkpoints: Recorded, training: Training) -> None:
    checkpointer = Checkpointer(checkpoints, training.state, interval_s=0.1)
    checkpointer.start()
    for version in (1, 2, 3):
        training.version = version
        took_s = until(lambda: version in checkpoints.versions, BOUND_S)  # noqa: B023
        assert took_s > 0.02 or version == 1
    assert checkpointer.close(BOUND_S)
    assert checkpoints.versions == [1, 2, 3]


def test_what_has_not_changed_is_not_saved_again(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    for looks in (1, 2, 3):
        checkpointer.due()
        until(lambda: training.num_states == looks, BOUND_S)  # noqa: B023
    assert checkpointer.close(BOUND_S)
    assert training.num_states == 4
    assert checkpoints.versions == [0]


def test_progress_of_an_evaluation_is_saved_although_no_update_came(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    checkpointer.due()
    until(lambda: checkpoints.versions == [0], BOUND_S)
    training.todo -= 1
    checkpointer.due()
    until(lambda: checkpoints.versions == [0, 0], BOUND_S)


def test_closing_saves_the_state_as_it_is_then(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    training.version = 5
    assert checkpointer.close(BOUND_S)
    assert checkpoints.versions == [5]
    assert checkpointer.last == checkpoints.paths()[0]


def test_closing_while_one_is_written_saves_what_came_since(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    checkpoints.may_write.clear()
    training.version = 1
    checkpointer.due()
    assert checkpoints.writing.wait(BOUND_S)
    training.version = 2
    closing = threading.Timer(0.05, checkpoints.may_write.set)
    closing.start()
    assert checkpointer.close(BOUND_S)
    closing.join()
    assert checkpoints.versions == [1, 2]


def test_told_several_times_during_a_save_it_makes_one_more(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training
) -> None:
    checkpoints.may_write.clear()
    checkpointer.due()
    assert checkpoints.writing.wait(BOUND_S)
    for version in (1, 2, 3):
        training.version = version
        checkpointer.due()
    checkpoints.may_write.set()
    until(lambda: checkpoints.versions == [0, 3], BOUND_S)
    assert checkpointer.close(BOUND_S)
    assert checkpoints.versions == [0, 3]


def test_closing_gives_up_after_its_bound_and_says_so(
    checkpointer: Checkpointer, checkpoints: Recorded
) -> None:
    checkpoints.may_write.clear()
    start = time.monotonic()
    assert not checkpointer.close(0.1)
    assert 0.1 <= time.monotonic() - start < 5


def test_one_that_was_never_started_can_be_closed(
    checkpoints: Recorded, training: Training
) -> None:
    Checkpointer(checkpoints, training.state).close(BOUND_S)
    assert checkpoints.versions == []


def test_a_save_that_fails_is_said_once_and_so_is_that_it_works_again(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training, said: list[str]
) -> None:
    checkpoints.error = OSError(28, "No space left on device")
    for looks in (1, 2, 3):
        training.version = looks
        checkpointer.due()
        until(lambda: training.num_states == looks, BOUND_S)  # noqa: B023
    checkpointer.due()
    until(lambda: training.num_states == 4, BOUND_S)
    assert said == ["no checkpoint could be saved: [Errno 28] No space left on device"]
    checkpoints.error = None
    checkpointer.due()
    until(lambda: len(said) == 2, BOUND_S)
    assert said[1:] == ["checkpoints are saved again"]
    assert checkpoints.versions == [3]
    assert checkpointer.close(BOUND_S)
    assert len(said) == 2


def test_closing_tells_that_the_last_state_could_not_be_saved(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training, said: list[str]
) -> None:
    checkpointer.due()
    until(lambda: checkpoints.versions == [0], BOUND_S)
    checkpoints.error = OSError(28, "No space left on device")
    training.version = 1
    assert not checkpointer.close(BOUND_S)
    assert len(said) == 1
    assert checkpointer.last == checkpoints.paths()[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TrainingFailed("broken off"), "broken off"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("not enough memory\nin a function of torch"), "not enough memory"),
    ],
    ids=["ours", "without words", "of torch"],
)
def test_without_a_state_nothing_is_saved_and_the_thread_lives_on(
    checkpointer: Checkpointer,
    checkpoints: Recorded,
    training: Training,
    said: list[str],
    error: Exception,
    reason: str,
) -> None:
    training.error = error
    checkpointer.due()
    until(lambda: len(said) == 1, BOUND_S)
    assert said == [f"no checkpoint could be saved: {reason}"]
    training.error, training.version = None, 3
    checkpointer.due()
    until(lambda: checkpoints.versions == [3], BOUND_S)


def test_a_state_that_is_there_again_and_saved_already_is_no_failure(
    checkpointer: Checkpointer, checkpoints: Recorded, training: Training, said: list[str]
) -> None:
    checkpointer.due()
    until(lambda: checkpoints.versions == [0], BOUND_S)
    training.error = MemoryError("copying")
    checkpointer.due()
    until(lambda: len(said) == 1, BOUND_S)
    training.error = None
    assert checkpointer.close(BOUND_S)
    assert checkpoints.versions == [0]


def test_being_told_does_not_wait_for_a_state_or_a_disk(
    checkpoints: Recorded, training: Training
) -> None:
    may_look = threading.Event()

    def state() -> State:
        assert may_look.wait(BOUND_S)
        return training.state()

    checkpointer = Checkpointer(checkpoints, state)
    checkpointer.start()
    run_threads(lambda number: checkpointer.due(), range(3))
    may_look.set()
    assert checkpointer.close(BOUND_S)


def test_training_goes_on_while_a_file_is_written(checkpoints: Recorded) -> None:
    """The file then holds the state as it was when its writing began."""
    parts = server_of(perceptron())
    checkpoints.may_write.clear()
    checkpointer = Checkpointer(checkpoints, parts.server.state)
    checkpointer.start()
    checkpointer.due()
    assert checkpoints.writing.wait(BOUND_S)

    def train_three_batches(trainer: int) -> None:
        worker, result = parts.worker(trainer), None
        for _ in range(4):
            order = parts.server.next_order(trainer, result).wait()
            assert isinstance(order, Train)
            result = worker.do(order)

    run_threads(train_three_batches, [1])
    assert parts.store.version == 3
    assert checkpoints.versions == []
    checkpoints.may_write.set()
    assert checkpointer.close(BOUND_S)
    assert versions(checkpoints) == [0, 3]


def test_its_thread_has_a_name_and_ends_with_the_process(
    checkpoints: Recorded, training: Training
) -> None:
    checkpointer = Checkpointer(checkpoints, training.state)
    checkpointer.start()
    [thread] = [t for t in threading.enumerate() if t.name == "checkpoint"]
    assert thread.daemon
    assert checkpointer.close(BOUND_S)
    assert not thread.is_alive()


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file would have the number of an older one."""

    def refuse(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr("ps.job.checkpoint.os.listdir", refuse)
        Checkpoints(tmp_path).write({"store": {"version": 1}}, 1)
