"""The run directory: made for this run alone, taken back, published, and its report."""

from __future__ import annotations

import fcntl
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


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def names_in(folder: Path | str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def refused(path: Path, error_file: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(path, error_file)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_new_one_is_made_with_its_parents_private_and_empty() -> None:
    run_dir = RunDirectory.create(Path("a/b/run"), None)
    assert run_dir.path == Path("a/b/run")
    assert stat.S_IMODE(os.stat("a/b/run").st_mode) == 0o700
    assert names_in("a/b/run") == []


def test_without_a_path_it_lies_in_runs_under_time_and_id() -> None:
    first, second = (
        RunDirectory.create(generated(None), None),
        RunDirectory.create(generated(None), None),
    )
    for run_dir in (first, second):
        assert re.fullmatch(r"runs/\d{8}-\d{6}-[0-9a-f]{6}", str(run_dir.path))
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    assert first.path != second.path


def test_an_existing_empty_folder_is_used_as_it_is() -> None:
    Path("run").mkdir(mode=0o750)
    assert RunDirectory.create(Path("run"), None).path == Path("run")
    assert stat.S_IMODE(os.stat("run").st_mode) == 0o750
    assert names_in("run") == []


def test_a_folder_that_is_not_empty_is_refused_with_an_entry_by_name() -> None:
    Path("run").mkdir()
    Path("run/report.json").write_text("of another run")
    Path("run/zebra").touch()
    assert refused(Path("run")) == (
        "--run-dir run is not empty (it holds report.json); give a new one, or omit "
        "--run-dir; --resume goes on from an earlier run"
    )
    assert names_in("run") == ["report.json", "zebra"]
    assert Path("run/report.json").read_text() == "of another run"


def test_no_file_of_somebody_else_is_touched() -> None:
    Path("run").mkdir()
    Path("run/.probe").write_text("mine")
    assert "(it holds .probe)" in refused(Path("run"))
    assert names_in("run") == [".probe"]
    assert Path("run/.probe").read_text() == "mine"


def test_a_file_in_the_way_is_refused_and_stays() -> None:
    Path("run").write_text("mine")
    assert refused(Path("run")) == (
        "--run-dir run cannot be used: File exists; give one that can be written"
    )
    assert Path("run").read_text() == "mine"


def test_a_link_to_nowhere_is_refused_and_stays() -> None:
    Path("run").symlink_to("nowhere")
    assert refused(Path("run")) == (
        "--run-dir run cannot be used: File exists; give one that can be written"
    )
    assert names_in(".") == ["run"]


def test_a_parent_that_is_a_file_is_refused() -> None:
    Path("file").write_text("mine")
    assert refused(Path("file/run")) == (
        "--run-dir file/run cannot be used: Not a directory; give one that can be written"
    )
    assert names_in(".") == ["file"]


def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    message = refused(Path("/proc/x"))
    assert message.startswith("--run-dir /proc/x cannot be used: ")
    assert message.endswith("; give one that can be written")


def test_a_name_too_long_is_refused_and_its_parents_are_not_made() -> None:
    path = Path("new") / ("x" * 300)
    assert refused(path) == (
        f"--run-dir {path} cannot be used: File name too long; give one that can be written"
    )
    assert names_in(".") == []


def test_a_folder_that_cannot_be_written_is_refused_and_what_was_made_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def temporary_file(dir: Path) -> None:
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    assert refused(Path("a/run")) == (
        "--run-dir a/run cannot be used: Read-only file system; give one that can be written"
    )
    assert names_in(".") == []


def test_torchruns_own_log_of_this_run_may_lie_in_it() -> None:
    error_file = Path("run/torchrun/none_ab12/attempt_0/0/error.json")
    error_file.parent.mkdir(parents=True)
    run_dir = RunDirectory.create(Path("run"), str(error_file.absolute()))
    assert run_dir.path == Path("run")
    assert names_in("run") == ["torchrun"]


def test_torchruns_log_is_known_through_a_link_too(in_an_empty_folder: Path) -> None:
    error_file = Path("run/torchrun/none_ab12/attempt_0/0/error.json")
    error_file.parent.mkdir(parents=True)
    Path("linked").symlink_to(in_an_empty_folder)
    run_dir = RunDirectory.create(Path("linked/run"), str(error_file.absolute()))
    assert run_dir.path == Path("linked/run")


def test_what_lies_beside_torchruns_log_is_refused() -> None:
    error_file = Path("run/torchrun/none_ab12/attempt_0/0/error.json")
    error_file.parent.mkdir(parents=True)
    Path("run/torchrun2").mkdir()
    assert "(it holds torchrun2)" in refused(Path("run"), str(error_file.absolute()))


def test_torchruns_log_of_another_run_is_refused() -> None:
    Path("run/torchrun").mkdir(parents=True)
    error_file = Path("elsewhere/torchrun/none_ab12/attempt_0/0/error.json")
    assert "(it holds torchrun)" in refused(Path("run"), str(error_file.absolute()))


def test_discarding_removes_exactly_what_was_made() -> None:
    Path("there").mkdir()
    RunDirectory.create(Path("there/a/run"), None).discard()
    assert names_in(".") == ["there"]
    assert names_in("there") == []


def test_discarding_keeps_a_folder_that_was_there() -> None:
    Path("run").mkdir()
    RunDirectory.create(Path("run"), None).discard()
    assert names_in(".") == ["run"]


def test_discarding_the_first_run_takes_back_runs_too() -> None:
    RunDirectory.create(generated(None), None).discard()
    assert names_in(".") == []


def test_discarding_keeps_what_has_been_written() -> None:
    run_dir = RunDirectory.create(Path("a/run"), None)
    run_dir.write_report({"status": "done"})
    run_dir.discard()
    assert names_in("a/run") == ["report.json"]


def test_publishing_points_latest_to_the_newest_of_runs() -> None:
    for _ in range(2):
        run_dir = RunDirectory.create(generated(None), None)
        run_dir.publish()
        assert os.readlink("runs/latest") == run_dir.path.name
    assert len(names_in("runs")) == 3


def test_publishing_a_named_one_of_runs_counts(in_an_empty_folder: Path) -> None:
    RunDirectory.create(in_an_empty_folder / "runs" / "mine", None).publish()
    assert os.readlink("runs/latest") == "mine"


@pytest.mark.parametrize("path", ["run", "elsewhere/run", "runs/deeper/run"])
def test_publishing_one_that_lies_elsewhere_makes_no_link(path: str) -> None:
    run_dir = RunDirectory.create(Path(path), None)
    run_dir.publish()
    assert names_in(Path(path).parent) == ["run"]
    assert not Path("runs/latest").is_symlink()


def test_a_latest_that_is_no_link_stays_and_is_said(warnings: pytest.LogCaptureFixture) -> None:
    Path("runs/latest").mkdir(parents=True)
    run_dir = RunDirectory.create(Path("runs/mine"), None)
    run_dir.publish()
    assert names_in("runs") == ["latest", "mine"]
    assert not Path("runs/latest").is_symlink()
    assert warnings.messages == ["runs/latest does not point to this run: Is a directory"]


def test_the_report_is_json_in_the_run_directory() -> None:
    run_dir = RunDirectory.create(Path("run"), None)
    report = {"status": "done", "cause": None, "test_accuracy": 0.75, "history": [{"epoch": 1}]}
    path = run_dir.write_report(report)
    assert path == Path("run/report.json")
    assert json.loads(path.read_text()) == report
    assert path.read_text().endswith("}\n")
    assert names_in("run") == ["report.json"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_report_that_would_be_no_json_leaves_the_old_one(number: float) -> None:
    run_dir = RunDirectory.create(Path("run"), None)
    path = run_dir.write_report({"status": "done"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_dir.write_report({"status": "failed", "history": [{"test_loss": number}]})
    assert json.loads(path.read_text()) == {"status": "done"}
    assert names_in("run") == ["report.json"]


def test_a_second_report_takes_the_place_of_the_first() -> None:
    run_dir = RunDirectory.create(Path("run"), None)
    run_dir.write_report({"status": "failed"})
    path = run_dir.write_report({"status": "done"})
    assert json.loads(path.read_text()) == {"status": "done"}


def test_the_options_and_the_job_of_a_run_are_read_back() -> None:
    run_dir = RunDirectory.create(Path("run"), None)
    options = {"epochs": 3, "lr": None, "data_dir": "/mnist", "channels_last": True}
    run_dir.write_options(options, "8e98bd")
    assert (options_of(Path("run")), job_of(Path("run"))) == (options, "8e98bd")
    assert names_in("run") == ["config.json"]
    run_dir.write_options({"epochs": 4}, None)
    assert (options_of(Path("run")), job_of(Path("run"))) == ({"epochs": 4}, None)


def test_options_and_report_are_on_the_disk_before_they_have_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a checkpoint is, which is of no use without the options."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    synced: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        synced.append((name.endswith(".partial"), names_in("run") == ["config.json"]))
        fsync(handle)

    run_dir = RunDirectory.create(Path("run"), None)
    monkeypatch.setattr(os, "fsync", watched)
    run_dir.write_options({"epochs": 3}, None)
    assert synced == [(True, False), (False, True)]


def test_a_run_whose_folder_somebody_removed_writes_all_the_same() -> None:
    run_dir = RunDirectory.create(Path("a/run"), None)
    Path("a/run").rmdir()
    Path("a").rmdir()
    run_dir.write_options({}, None)
    run_dir.write_report({"status": "done"})
    assert names_in("a/run") == ["config.json", "report.json"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"3", b'"text"', b"null", b"{}", b'{"job": "8e98bd"}', b"\xff\xfe"),
        *(b'{"options": [], "job": 3}', b'{"options": null}', b'{"options": "text"}'),
    ],
)
def test_damaged_options_are_an_error_with_the_code_of_unusable_checkpoints(
    content: bytes,
) -> None:
    Path("run").mkdir()
    Path("run/config.json").write_bytes(content)
    with pytest.raises(CheckpointUnusable) as caught:
        options_of(Path("run"))
    assert str(caught.value) == "run/config.json cannot be read: it is damaged"
    assert caught.value.exit_code == 7


def test_options_that_are_not_there_are_an_error_that_says_so() -> None:
    with pytest.raises(CheckpointUnusable) as caught:
        options_of(Path("run"))
    assert str(caught.value) == "run/config.json cannot be read: No such file or directory"


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "{}", '{"options": {}}'])
def test_a_job_that_is_not_known_is_none(content: str | None) -> None:
    Path("run").mkdir()
    if content is not None:
        Path("run/config.json").write_text(content)
    assert job_of(Path("run")) is None


def test_a_run_is_done_when_its_report_says_so() -> None:
    assert not is_done(Path("run"))
    run_dir = RunDirectory.create(Path("run"), None)
    assert not is_done(Path("run"))
    assert not is_begun(Path("run"))
    run_dir.write_options({}, None)
    for status, done in (("running", False), ("done", True), ("failed", False)):
        run_dir.write_report({"status": status})
        assert (is_done(Path("run")), is_begun(Path("run"))) == (done, not done)
    for damaged in ("", "{", "[]", "{}", "3", '"done"'):
        Path("run/report.json").write_text(damaged)
        assert not is_done(Path("run"))


def put_checkpoints(folder: str, *names: str) -> None:
    Path(folder, "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in names:
        Path(folder, "checkpoints", name).touch()


def test_the_checkpoints_of_a_run_are_listed_oldest_first() -> None:
    names = [f"{number}-update-1-0123456789abcdef.pt" for number in ("000009", "999999", "1000000")]
    put_checkpoints("run", *names[::-1])
    assert [path.name for path in checkpoints_in(Path("run"))] == names
    assert [sequence_of(path) for path in checkpoints_in(Path("run"))] == [9, 999_999, 1_000_000]
    assert has_checkpoints(Path("run"))


def test_what_is_not_named_as_a_checkpoint_is_none() -> None:
    """With a run that holds nothing else, there is nothing to go on from."""
    assert (checkpoints_in(Path("run")), has_checkpoints(Path("run"))) == ([], False)
    put_checkpoints("run")
    assert not has_checkpoints(Path("run"))
    put_checkpoints(
        "run",
        *("best.pt", "model.pt", ".checkpoint.partial", "000001-update-1-0123456789abcdef.pt~"),
        *("000001-update-1-0123456789abcde.pt", "000001-update-1-0123456789ABCDEF.pt"),
        *("x000001-update-1-0123456789abcdef.pt", "\u0661-update-1-0123456789abcdef.pt"),
    )
    assert (checkpoints_in(Path("run")), has_checkpoints(Path("run"))) == ([], False)


def test_a_file_in_the_place_of_the_checkpoints_is_none() -> None:
    Path("run").mkdir()
    Path("run/checkpoints").touch()
    assert (checkpoints_in(Path("run")), has_checkpoints(Path("run"))) == ([], False)


def test_all_attempts_of_a_job_have_one_folder_and_other_jobs_others() -> None:
    first = generated("8e98bd")
    assert re.fullmatch(r"runs/\d{8}-\d{6}-8e98bd", str(first))
    RunDirectory.create(first, None)
    RunDirectory.create(Path("runs/20200101-000000-1e98bd"), None)
    RunDirectory.create(Path("runs/99990101-000000-mine"), None)
    assert generated("8e98bd", again=True) == first
    assert generated("1e98bd", again=True) == Path("runs/20200101-000000-1e98bd")
    assert generated("aaaaaa", again=True).name.endswith("-aaaaaa")
    assert generated("1e98bd") != Path("runs/20200101-000000-1e98bd")  # a job of its own
    assert generated(None) != generated(None)


def test_the_newest_folder_of_a_job_counts_if_there_are_several() -> None:
    for day in ("20300102", "20300101"):
        RunDirectory.create(Path(f"runs/{day}-000000-8e98bd"), None)
    assert generated("8e98bd", again=True) == Path("runs/20300102-000000-8e98bd")


def test_a_folder_with_an_earlier_run_is_reopened_as_it_is() -> None:
    put_checkpoints("run", "000001-update-1-0123456789abcdef.pt")
    Path("run/report.json").write_text("{}")
    run_dir = RunDirectory.reopen(Path("run"))
    assert run_dir.path == Path("run")
    run_dir.discard()
    assert names_in("run") == ["checkpoints", "report.json"]


def test_a_folder_that_is_not_there_or_cannot_be_written_is_not_reopened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunDirectory.reopen(Path("run"))
    assert str(caught.value) == (
        "--resume run cannot be used: No such file or directory; give one that can be written"
    )
    assert names_in(".") == []
    Path("run").mkdir()

    def temporary_file(dir: Path) -> None:
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    with pytest.raises(ConfigError, match=r"^--resume run cannot be used: Read-only file system; "):
        RunDirectory.reopen(Path("run"))


@pytest.mark.parametrize("is_new", [True, False])
def test_who_owns_a_folder_removes_what_killed_writers_left_in_it(is_new: bool) -> None:
    """The first attempt may have been killed while it wrote the options, before all else."""
    put_checkpoints("run", *([] if is_new else ["000001-update-1-0123456789abcdef.pt"]))
    left = [".config.json.77-0123abcd.partial", "checkpoints/.checkpoint.77-0123abcd.partial"]
    if is_new:
        Path("run/checkpoints").rmdir()
        del left[1]
    for name in left:
        Path("run", name).write_text("{")
    RunDirectory.create(Path("run"), None) if is_new else RunDirectory.reopen(Path("run"))
    assert names_in("run") == ([] if is_new else ["checkpoints"])
    assert is_new or len(names_in("run/checkpoints")) == 1


HOLD = (
    "import sys; from pathlib import Path; from ps.job.rundir import RunDirectory; "
    "run_dir = RunDirectory.{how}; print('held', flush=True); sys.stdin.read()"
)


def holding(path: Path, how: str) -> subprocess.Popen[str]:
    """Another process that writes to it, until it is killed."""
    code = HOLD.format(how=how.format(f"Path({str(path.absolute())!r})"))
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("how", ["create({}, None)", "reopen({})"])
def test_a_folder_that_another_process_writes_to_is_refused_until_that_ends(how: str) -> None:
    path = Path("run")
    path.mkdir()
    other = holding(path, how)
    try:
        for use in (RunDirectory.reopen, lambda path: RunDirectory.create(path, None)):
            with pytest.raises(ConfigError) as caught:
                use(path)
            assert str(caught.value) == (
                "another run is writing to run; wait for its end, or give another --run-dir"
            )
    finally:
        other.kill()
        other.communicate()
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


def test_where_there_are_no_locks_a_run_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    RunDirectory.create(Path("run"), None).write_report({"status": "done"})
    assert names_in("run") == ["report.json"]
