"""Files and folders that are whole or not there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ps.host.files import make_directories, remove_empty, replacing, sync_directory


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_was_written_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["report.json"]


def test_a_file_that_was_not_there_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with replacing(path) as partial:
        partial.write_text("new")
        assert not path.exists()
        assert partial.parent == tmp_path
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["report.json"]


def test_a_writer_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match=r"^disk full$"), replacing(path) as partial:
        partial.write_text("half")
        raise RuntimeError("disk full")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["report.json"]


def test_a_writer_that_raises_before_it_wrote_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "report.json"):
        raise KeyboardInterrupt
    assert names_in(tmp_path) == []


def test_a_writer_that_wrote_nothing_is_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_a_partial_file_of_a_killed_writer_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with replacing(path) as partial:
        name = partial
        partial.write_text("new")
    name.write_text("left by a writer that was killed")
    with replacing(path) as partial:
        partial.write_text("newer")
    assert path.read_text() == "newer"
    assert names_in(tmp_path) == ["report.json"]


def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "report.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError), replacing(tmp_path / "report.json") as partial:
        partial.write_text("new")
    assert names_in(tmp_path) == ["report.json"]
    assert names_in(tmp_path / "report.json") == ["inside"]


def test_the_folders_made_are_told_innermost_first(tmp_path: Path) -> None:
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


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        make_directories(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_directories(tmp_path / "file" / "a")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_was_made_is_taken_back_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    created = make_directories(tmp_path / "there" / "a" / "b")
    remove_empty(created)
    assert names_in(tmp_path) == ["there"]
    assert names_in(tmp_path / "there") == []


def test_a_folder_that_somebody_used_in_the_meantime_stays(tmp_path: Path) -> None:
    created = make_directories(tmp_path / "a" / "b")
    (tmp_path / "a" / "theirs").write_text("x")
    remove_empty(created)
    assert names_in(tmp_path / "a") == ["theirs"]


def test_taking_back_twice_is_harmless(tmp_path: Path) -> None:
    created = make_directories(tmp_path / "a" / "b")
    remove_empty(created)
    remove_empty(created)
    assert names_in(tmp_path) == []


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
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "none")
