"""The run directory: one run at a time writes to it, and what it left is read back."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from ps.job.rundir import (
    RunDirectory,
    checkpoints_in,
    generated,
    has_checkpoints,
    is_begun,
    is_done,
    job_of,
    options_of,
    sequence_of,
)
from ps.settings.errors import CheckpointUnusable, ConfigError
from tests.jobs import ROOT

CHECKPOINT = "000001-update-1-0123456789abcdef.pt"
ERROR_FILE = "torchrun/none_ab12/attempt_0/0/error.json"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def create(path: Path | str, error_file: str | None = None) -> RunDirectory:
    return RunDirectory.create(Path(path), error_file)


def names_in(folder: Path | str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def refused(path: Path | str, error_file: str | None = None) -> str:
    """Nothing is made or changed by it."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as caught:
        create(path, error_file)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"--run-dir {path} ")
    assert sorted(Path().rglob("*")) == before
    return str(caught.value)


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def put_checkpoints(folder: str, *names: str) -> None:
    Path(folder, "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in names:
        Path(folder, "checkpoints", name).touch()


# Made


def test_a_new_one_is_private_and_an_empty_folder_is_used_as_it_is() -> None:
    assert create("a/b/run").path == Path("a/b/run")
    assert (mode_of("a/b/run"), names_in("a/b/run")) == (0o700, [])
    Path("run").mkdir(mode=0o750)
    assert create("run").path == Path("run")
    assert (mode_of("run"), names_in("run")) == (0o750, [])


def test_without_a_path_it_lies_in_runs_under_time_and_id() -> None:
    first, second = create(generated(None)), create(generated(None))
    for run_dir in (first, second):
        assert re.fullmatch(r"runs/\d{8}-\d{6}-[0-9a-f]{6}", str(run_dir.path))
    assert first.path != second.path


def test_a_folder_that_is_not_empty_is_refused_with_an_entry_by_name() -> None:
    Path("run").mkdir()
    for name in ("report.json", "zebra"):
        Path("run", name).touch()
    assert "report.json" in refused("run")
    Path("other").mkdir()
    Path("other/.probe.partial").touch()  # of somebody else
    assert ".probe.partial" in refused("other")


def test_what_is_in_the_way_is_refused_and_stays() -> None:
    Path("file").write_text("mine")
    Path("link").symlink_to("nowhere")
    for path, reason in (
        *(("file", "File exists"), ("link", "File exists"), ("file/run", "Not a directory")),
        (f"new/{'x' * 300}", "File name too long"),
    ):
        assert reason in refused(path)
    assert Path("file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_and_what_was_made_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def temporary_file(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    with pytest.raises(ConfigError, match=r"--resume run .*No such file"):
        RunDirectory.reopen(Path("run"))
    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    assert "Read-only file system" in refused("a/run")
    Path("run").mkdir()
    with pytest.raises(ConfigError, match=r"--resume run .*Read-only"):
        RunDirectory.reopen(Path("run"))
    if Path("/proc/self").exists():
        refused("/proc/x")


def test_torchruns_own_log_of_this_run_may_lie_in_it_and_nothing_beside(
    in_an_empty_folder: Path,
) -> None:
    log = Path("run", ERROR_FILE).absolute()
    log.parent.mkdir(parents=True)
    Path("linked").symlink_to(in_an_empty_folder)
    for path in ("run", "linked/run"):
        run_dir = create(path, str(log))
        assert (run_dir.path, names_in("run")) == (Path(path), ["torchrun"])
        run_dir.close()
    assert "torchrun" in refused("run", str(Path("elsewhere", ERROR_FILE).absolute()))
    Path("run/torchrun2").mkdir()
    assert "torchrun2" in refused("run", str(log))


@pytest.mark.parametrize("path", ["there/a/run", "there", "runs/20200101-000000-abcdef"])
def test_discarding_removes_exactly_what_was_made(path: str) -> None:
    Path("there").mkdir()
    create(path).discard()
    assert names_in(".") == ["there"]
    assert names_in("there") == []


def test_discarding_keeps_what_has_been_written_and_what_was_there_before() -> None:
    put_checkpoints("run", CHECKPOINT)
    RunDirectory.reopen(Path("run")).discard()
    assert names_in("run") == ["checkpoints"]
    run_dir = create("a/run")
    run_dir.write_report({"status": "done"})
    run_dir.discard()
    assert names_in("a/run") == ["report.json"]


# Published


def test_publishing_points_latest_to_the_newest_of_runs(in_an_empty_folder: Path) -> None:
    for path in (generated(None), in_an_empty_folder / "runs" / "mine"):
        create(path).publish()
        assert os.readlink("runs/latest") == path.name
    assert len(names_in("runs")) == 3


@pytest.mark.parametrize("path", ["run", "elsewhere/run", "runs/deeper/run"])
def test_publishing_one_that_lies_elsewhere_makes_no_link(path: str) -> None:
    create(path).publish()
    assert names_in(Path(path).parent) == ["run"]
    assert not Path("runs/latest").is_symlink()


def test_a_latest_that_is_no_link_stays_and_is_said(warnings: pytest.LogCaptureFixture) -> None:
    Path("runs/latest").mkdir(parents=True)
    create("runs/mine").publish()
    assert names_in("runs") == ["latest", "mine"]
    assert not Path("runs/latest").is_symlink()
    [line] = warnings.messages
    assert "runs/latest" in line
    assert "Is a directory" in line


# Written and read back


def test_the_report_is_json_and_a_later_one_takes_its_place() -> None:
    run_dir = create("run")
    run_dir.write_report({"status": "running"})
    report = {"status": "done", "cause": None, "test_accuracy": 0.75, "history": [{"epoch": 1}]}
    path = run_dir.write_report(report)
    assert path == Path("run/report.json")
    assert json.loads(path.read_text()) == report
    assert path.read_text().endswith("}\n")
    for number in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            run_dir.write_report({"status": "failed", "history": [{"test_loss": number}]})
    assert json.loads(path.read_text()) == report
    assert names_in("run") == ["report.json"]


def test_the_options_and_the_job_of_a_run_are_read_back() -> None:
    run_dir = create("run")
    options = {"epochs": 3, "lr": None, "data_dir": "/mnist", "channels_last": True}
    run_dir.write_options(options, "8e98bd")
    assert (options_of(Path("run")), job_of(Path("run"))) == (options, "8e98bd")
    run_dir.write_options({"epochs": 4}, None)
    assert (options_of(Path("run")), job_of(Path("run"))) == ({"epochs": 4}, None)
    assert names_in("run") == ["config.json"]


def test_options_and_report_are_on_the_disk_before_they_have_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a checkpoint is, which is of no use without the options."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((name.suffix, names_in("run") == ["config.json"]))
        fsync(handle)

    run_dir = create("run")
    monkeypatch.setattr(os, "fsync", watched)
    run_dir.write_options({"epochs": 3}, None)
    assert synced == [(".partial", False), ("", True)]


def test_a_run_whose_folder_somebody_removed_writes_all_the_same() -> None:
    run_dir = create("a/run")
    Path("a/run").rmdir()
    Path("a").rmdir()
    run_dir.write_options({}, None)
    run_dir.write_report({"status": "done"})
    assert names_in("a/run") == ["config.json", "report.json"]


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"{", b"[]", b"3", b'"text"', b"null", b"{}", b"\xff\xfe"),
        *(b'{"options": []}', b'{"options": null}', b'{"options": "text"}'),
    ],
)
def test_damaged_or_missing_options_are_an_error_with_the_code_of_unusable_checkpoints(
    content: bytes | None,
) -> None:
    Path("run").mkdir()
    if content is not None:
        Path("run/config.json").write_bytes(content)
    with pytest.raises(CheckpointUnusable, match=r"run/config\.json") as caught:
        options_of(Path("run"))
    assert caught.value.exit_code == 7
    assert ("damaged" in str(caught.value)) == (content is not None)
    assert job_of(Path("run")) is None


def test_a_run_is_done_when_its_report_says_so() -> None:
    assert not is_done(Path("run"))
    run_dir = create("run")
    assert not is_begun(Path("run"))
    run_dir.write_options({}, None)
    for status, done in (("running", False), ("done", True), ("failed", False)):
        run_dir.write_report({"status": status})
        assert (is_done(Path("run")), is_begun(Path("run"))) == (done, not done)
    for damaged in ("", "{", "[]", "{}", "3", '"done"'):
        Path("run/report.json").write_text(damaged)
        assert not is_done(Path("run"))


def test_the_checkpoints_of_a_run_are_listed_oldest_first() -> None:
    names = [f"{number}-update-1-0123456789abcdef.pt" for number in ("000009", "999999", "1000000")]
    put_checkpoints("run", *names[::-1])
    assert [path.name for path in checkpoints_in(Path("run"))] == names
    assert [sequence_of(path) for path in checkpoints_in(Path("run"))] == [9, 999_999, 1_000_000]
    assert has_checkpoints(Path("run"))


def test_what_is_not_named_as_a_checkpoint_is_none() -> None:
    """With a run that holds nothing else, there is nothing to go on from."""
    put_checkpoints(
        "run",
        *("best.pt", "model.pt", ".checkpoint.7-0123abcd.partial", f"{CHECKPOINT}~"),
        *("000001-update-1-0123456789abcde.pt", "000001-update-1-0123456789ABCDEF.pt"),
        *(f"x{CHECKPOINT}", "\u0661-update-1-0123456789abcdef.pt"),
    )
    put_checkpoints("empty")
    Path("file").mkdir()
    Path("file/checkpoints").touch()
    for folder in map(Path, ("run", "empty", "file", "none")):
        assert (checkpoints_in(folder), has_checkpoints(folder)) == ([], False)


def test_all_attempts_of_a_job_have_one_folder_the_newest_and_other_jobs_others() -> None:
    first = generated("8e98bd")
    assert re.fullmatch(r"runs/\d{8}-\d{6}-8e98bd", str(first))
    for path in (first, "runs/20200101-000000-1e98bd", "runs/99990101-000000-mine"):
        create(path)
    assert generated("8e98bd", again=True) == first
    assert generated("1e98bd", again=True) == Path("runs/20200101-000000-1e98bd")
    assert generated("aaaaaa", again=True).name.endswith("-aaaaaa")
    assert generated("1e98bd") != Path("runs/20200101-000000-1e98bd")  # a job of its own
    assert generated(None) != generated(None)
    create("runs/99990101-000000-8e98bd")
    assert generated("8e98bd", again=True) == Path("runs/99990101-000000-8e98bd")
    create("runs/of-another-name").write_options({}, "8e98bd")
    assert generated("8e98bd", again=True) == Path("runs/of-another-name")


# One run at a time


def test_who_owns_a_folder_removes_what_killed_writers_left_in_it() -> None:
    """The first attempt may have been killed while it wrote the options, before all else."""
    for folder in ("new", "old"):
        put_checkpoints(folder, ".checkpoint.77-0123abcd.partial", CHECKPOINT)
        Path(folder, ".config.json.77-0123abcd.partial").touch()
    for entry in Path("new/checkpoints").iterdir():
        entry.unlink()
    Path("new/checkpoints").rmdir()
    create("new")
    RunDirectory.reopen(Path("old"))
    assert names_in("new") == []
    assert (names_in("old"), names_in("old/checkpoints")) == (["checkpoints"], [CHECKPOINT])


def test_a_folder_is_free_once_it_is_closed() -> None:
    run_dir = create("run")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunDirectory.reopen(Path("run"))
    for _ in range(2):
        run_dir.close()
    RunDirectory.reopen(Path("run"))


HOLD = (
    "import sys; from pathlib import Path; from ps.job.rundir import RunDirectory; "
    "run_dir = RunDirectory.{how}; print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["create({}, None)", "reopen({})"])
def test_a_folder_that_another_process_writes_to_is_refused_until_that_ends(how: str) -> None:
    path = Path("run")
    path.mkdir()
    code = HOLD.format(how=how.format(f"Path({str(path.absolute())!r})"))
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for use in (RunDirectory.reopen, create):
            with pytest.raises(ConfigError, match="another run is writing to run"):
                use(path)
        other.kill()
    assert names_in("run") == []
    RunDirectory.reopen(path).write_report({"status": "done"})
    assert names_in("run") == ["report.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave_behind",
    [
        "print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)",
        "pid = os.fork(); pid or os.close(1); pid or time.sleep(60); print(pid)",
    ],
    ids=["started", "forked"],
)
def test_a_process_that_outlives_its_rank_does_not_hold_the_folder(leave_behind: str) -> None:
    code = (
        "import os, subprocess, time; from pathlib import Path; "
        "from ps.job.rundir import RunDirectory; "
        f"run_dir = RunDirectory.create(Path({str(Path('other').absolute())!r}), None); "
    )
    done = subprocess.run(
        [sys.executable, "-c", code + leave_behind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    outliving = psutil.Process(int(done.stdout))
    try:
        RunDirectory.reopen(Path("other"))
    finally:
        outliving.kill()
        outliving.wait(10)
