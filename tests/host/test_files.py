"""Files and folders that are complete or not there, however many write them at once."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps.host.files import (
    is_partial,
    lock,
    make_directories,
    remove_empty,
    remove_partials,
    replacing,
    sync_directory,
    try_lock,
    update_file,
    write_file,
)
from tests.helpers import run_threads


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file that holds "old"."""
    path = tmp_path / "report.json"
    path.write_text("old")
    return path


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_was_written_takes_the_place_of_the_old_file_in_one_step(
    path: Path, is_there: bool
) -> None:
    if not is_there:
        path.unlink()
    with replacing(path) as partial:
        partial.write_text("new")
        assert partial.parent == path.parent
        assert path.exists() == is_there
        assert not is_there or path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(path.parent) == ["report.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("half", ["half", None])
def test_a_writer_that_raises_leaves_the_old_file_and_nothing_else(
    path: Path, error: type[BaseException], half: str | None
) -> None:
    with pytest.raises(error), replacing(path) as partial:
        if half:
            partial.write_text(half)
        raise error
    assert path.read_text() == "old"
    assert names_in(path.parent) == ["report.json"]


def test_a_writer_that_wrote_nothing_is_an_error_and_the_old_file_stays(path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "report.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_file(tmp_path / "report.json", b"new")
    assert names_in(tmp_path) == ["report.json"]
    assert names_in(tmp_path / "report.json") == ["inside"]


def test_two_writers_of_one_file_do_not_share_a_partial(path: Path) -> None:
    with replacing(path) as first:
        with replacing(path) as second:
            first.write_text("of the first")
            second.write_text("of the second")
            assert first.name.startswith(".")
            assert is_partial(first)
        assert path.read_text() == "of the second"
    assert path.read_text() == "of the first"
    assert names_in(path.parent) == ["report.json"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    others = [".hidden", "notes.partial", "report.json"]
    for name in [".checkpoint.partial", ".report.json.77-0123abcd.partial", *others]:
        (tmp_path / name).touch()
    remove_partials(tmp_path)
    assert names_in(tmp_path) == others
    remove_partials(tmp_path / "none")


@pytest.mark.parametrize("name", ["report.json", ".x.partial", ".x.7-0123abcg.partial"])
def test_a_file_of_somebody_else_is_no_partial_of_ours(name: str) -> None:
    assert not is_partial(Path(name))


# Folders


def test_the_folders_made_are_given_innermost_first(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c"
    (tmp_path / "a").mkdir()
    assert make_directories(path) == [path, path.parent]
    assert path.is_dir()


def test_a_folder_that_is_there_is_not_made(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o750)
    assert make_directories(tmp_path, mode=0o700) == []
    assert mode_of(tmp_path) == 0o750


@pytest.mark.usefixtures("usual_umask")
def test_the_mode_is_that_of_the_innermost_folder_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    make_directories(path, mode=0o700)
    assert (mode_of(path), mode_of(path.parent)) == (0o700, 0o755)


def test_a_file_in_the_way_of_a_folder_is_an_error(path: Path) -> None:
    with pytest.raises(FileExistsError):
        make_directories(path)
    with pytest.raises(NotADirectoryError):
        make_directories(path / "a")
    assert path.read_text() == "old"


def test_what_was_made_is_removed_and_nothing_else_and_twice_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    created = make_directories(tmp_path / "there" / "a" / "b")
    for _ in range(2):
        remove_empty(created)
        assert names_in(tmp_path) == ["there"]
        assert names_in(tmp_path / "there") == []


def test_a_folder_that_somebody_used_in_the_meantime_stays(tmp_path: Path) -> None:
    created = make_directories(tmp_path / "a" / "b")
    (tmp_path / "a" / "theirs").write_text("x")
    remove_empty(created)
    assert names_in(tmp_path / "a") == ["theirs"]


def failing_with(number: int) -> Callable[[int], None]:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


def test_a_folder_is_synced_where_its_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_directory(tmp_path)
    for number in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, "fsync", failing_with(number))
        sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", failing_with(errno.EIO))
    with pytest.raises(OSError) as caught:
        sync_directory(tmp_path)
    assert caught.value.errno == errno.EIO
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "none")


# Locks


@contextmanager
def opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    yield handle
    os.close(handle)


def test_one_handle_has_the_lock_until_it_is_closed(path: Path) -> None:
    with opened(path) as second:
        with opened(path) as first:
            assert try_lock(first)
            assert not try_lock(second)
            start = time.monotonic()
            assert not lock(second, 0.05)
            assert 0.05 <= time.monotonic() - start < 1
        assert lock(second, 0.0)


def test_where_there_are_no_locks_everybody_has_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with opened(path) as first, opened(path) as second:
        assert try_lock(first)
        assert try_lock(second)
    assert update_file(path, lambda content: b"new", timeout_s=0.0)
    assert path.read_text() == "new"


# Several writers of one file


def test_a_file_is_changed_by_what_it_holds(path: Path) -> None:
    assert update_file(path, lambda content: b"new and " + (content or b""), timeout_s=0.0)
    assert path.read_text() == "new and old"
    assert not update_file(path, lambda content: None, timeout_s=0.0)
    assert path.read_text() == "new and old"
    path.unlink()
    assert update_file(path, lambda content: str(content).encode(), timeout_s=0.0)
    assert path.read_text() == "None"
    assert names_in(path.parent) == ["report.json"]


@pytest.mark.parametrize("is_there", [True, False])
def test_no_change_of_many_is_lost(path: Path, is_there: bool) -> None:
    path.write_text("")
    if not is_there:
        path.unlink()

    def add(number: int) -> None:
        update_file(path, lambda content: (content or b"") + b"%d " % number, timeout_s=20.0)

    run_threads(add, range(20))
    assert sorted(int(word) for word in path.read_text().split()) == list(range(20))
    assert names_in(path.parent) == ["report.json"]


def test_a_writer_that_holds_the_lock_for_long_is_not_waited_for(path: Path) -> None:
    with opened(path) as other:
        assert try_lock(other)
        with pytest.raises(TimeoutError):
            update_file(path, lambda content: b"new", timeout_s=0.02)
        assert path.read_text() == "old"
        assert update_file(path, lambda content: b"forced", timeout_s=0.02, must_write=True)
    assert path.read_text() == "forced"
    assert names_in(path.parent) == ["report.json"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_writer_that_was_stopped_while_it_wrote_finds_that_it_came_too_late(
    path: Path, is_there: bool
) -> None:
    if not is_there:
        path.unlink()
    seen: list[bytes | None] = []

    def change(content: bytes | None) -> bytes | None:
        seen.append(content)
        if len(seen) == 1:
            write_file(path, b"forced")
        return b"late" if len(seen) == 1 else None

    assert not update_file(path, change, timeout_s=0.0)
    assert seen == [b"old" if is_there else None, b"forced"]
    assert path.read_text() == "forced"
    assert names_in(path.parent) == ["report.json"]


def test_the_lock_is_given_back_though_a_forked_process_has_a_copy_of_the_handle(
    path: Path,
) -> None:
    copies: list[int] = []

    def change(content: bytes | None) -> None:
        """As a fork at this moment would: a copy that shares the lock."""
        [handle] = handles_of(path)
        copies.append(os.dup(handle))

    assert not update_file(path, change, timeout_s=0.0)
    with opened(path) as other:
        assert try_lock(other)
    os.close(copies[0])


def handles_of(path: Path) -> list[int]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    links = Path("/proc/self/fd").iterdir()
    return [int(link.name) for link in links if os.path.realpath(link) == str(path.resolve())]
