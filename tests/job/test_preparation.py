"""What rank 0 settles before torch is loaded, and that a mistake in it leaves nothing."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ps.host.gate import Gate
from ps.job import preparation
from ps.job.preparation import Prepared, prepare
from ps.settings.config import Config, parse_args
from ps.settings.errors import CheckpointUnusable, ConfigError
from ps.settings.topology import Topology
from ps.workloads import catalogue

ALONE = Topology(rank=0, world_size=1, master_addr="127.0.0.1", master_port=29500)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_gate_stays_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gates: list[Gate] = []

    def gate(topology: Topology) -> Gate:
        gates.append(Gate(topology))
        return gates[-1]

    monkeypatch.setattr(preparation, "Gate", gate)
    yield
    for closed in gates:
        closed.open()


def test_the_run_directory_is_made_and_the_workload_is_named() -> None:
    prepared = prepare(ALONE, Config(workload="digits", run_dir=Path("a/run")))
    assert (prepared.run_dir.path, prepared.config.workload) == (Path("a/run"), "digits")
    assert Path("a/run").is_dir()


def test_torchruns_log_in_the_run_directory_is_known_by_the_topology() -> None:
    error_file = Path("run/torchrun/none_ab12/attempt_0/0/error.json")
    error_file.parent.mkdir(parents=True)
    topology = Topology(
        rank=0,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=29500,
        error_file=str(error_file.absolute()),
    )
    prepared = prepare(topology, Config(workload="digits", run_dir=Path("run")))
    assert prepared.run_dir.path == Path("run")


@pytest.mark.parametrize("error", [ConfigError("no data"), KeyboardInterrupt()])
def test_without_the_data_the_run_directory_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def resolve(config: Config) -> str:
        assert Path("a/run").is_dir()
        raise error

    monkeypatch.setattr(catalogue, "resolve", resolve)
    with pytest.raises(type(error)) as caught:
        prepare(ALONE, Config(workload="mnist", run_dir=Path("a/run")))
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_no_data_is_fetched_for_a_run_directory_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("run").write_text("mine")
    monkeypatch.setattr(catalogue, "resolve", lambda config: pytest.fail("it was fetched"))
    with pytest.raises(ConfigError, match=r"^--run-dir run cannot be used: File exists; "):
        prepare(ALONE, Config(workload="mnist", run_dir=Path("run")))


def prepared(*argv: str, attempt: int = 0, torchrun: bool = True) -> Prepared:
    """By a process that has ended since, but left its folder as it was."""
    topology = replace(ALONE, restart_count=attempt, run_id=uuid.uuid4().hex if torchrun else None)
    made = prepare(topology, parse_args(argv), argv)
    assert made.run_dir._lock is not None
    os.close(made.run_dir._lock)
    return made


def left(*argv: str, status: str | None = "interrupted", checkpoints: int = 1) -> Path:
    """What a run leaves; gives its folder. Without a status it was killed."""
    where = () if "--run-dir" in argv else ("--run-dir", "runs/earlier")
    made = prepared("--workload", "digits", *where, *argv)
    made.run_dir.write_options(made.config.to_json(inherited_only=True), "another job")
    made.run_dir.publish()
    put_checkpoints(made.run_dir.path, checkpoints)
    if status:
        made.run_dir.write_report({"status": status})
    return made.run_dir.path


def put_checkpoints(run_dir: Path, count: int) -> None:
    for number in range(count):
        path = run_dir / "checkpoints" / f"{number + 1:06}-update-1-0123456789abcdef.pt"
        path.parent.mkdir(exist_ok=True)
        path.touch()


def same(path: Path | None, other: Path | str) -> bool:
    return path is not None and path.resolve() == Path(other).resolve()


def refused(*argv: str, attempt: int = 0) -> str:
    """Nothing is made or changed by it."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as caught:
        prepared(*argv, attempt=attempt)
    assert sorted(Path().rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize("asked", ["a/run", "runs/latest", "link"])
def test_a_run_goes_on_where_it_was_with_its_options(asked: str) -> None:
    folder = "runs/mine" if asked == "runs/latest" else "a/run"
    left("--run-dir", folder, "--epochs", "5", "--seed", "3", "--log-level", "debug")
    Path("link").symlink_to("a/run")
    made = prepared("--resume", asked)
    assert same(made.run_dir.path, folder)
    assert same(made.resume_from, folder)
    assert made.config == Config(workload="digits", epochs=5, seed=3, resume=asked)


def test_what_is_typed_wins_when_a_run_goes_on() -> None:
    left("--run-dir", "run", "--epochs", "5", "--lr", "0.5")
    config = prepared("--resume", "run", "--epochs", "7", "--threads", "2").config
    assert (config.workload, config.epochs, config.lr, config.threads) == ("digits", 7, 0.5, 2)


def test_a_run_can_go_on_in_a_folder_of_its_own() -> None:
    left("--run-dir", "first", "--epochs", "5")
    made = prepared("--resume", "first", "--run-dir", "second")
    assert (made.run_dir.path, made.config.epochs) == (Path("second"), 5)
    assert same(made.resume_from, "first")
    assert list(Path("second").iterdir()) == []


@pytest.mark.parametrize("typed", ["runs/mine", "./runs/mine", "runs/latest", "runs/../runs/mine"])
@pytest.mark.parametrize("absolute", [False, True])
def test_its_own_folder_may_be_typed_twice(typed: str, absolute: bool) -> None:
    left("--run-dir", "runs/mine")
    typed = str(Path(typed).absolute()) if absolute else typed
    for asked in ("runs/mine", typed, "auto"):
        made = prepared("--resume", asked, "--run-dir", typed)
        assert same(made.run_dir.path, "runs/mine")
        assert same(made.resume_from, "runs/mine")


def test_a_folder_in_use_is_refused_as_the_place_to_go_on() -> None:
    left("--run-dir", "first")
    left("--run-dir", "second")
    message = refused("--resume", "first", "--run-dir", "second")
    assert message.startswith("--run-dir second is not empty (it holds checkpoints); ")


@pytest.mark.parametrize("there", ["nothing", "no checkpoints", "other files", "a file"])
def test_a_folder_without_checkpoints_is_refused_as_one_to_go_on_from(there: str) -> None:
    if there in ("no checkpoints", "other files"):
        left("--run-dir", "run", checkpoints=0)
    if there == "other files":
        Path("run/checkpoints").mkdir()
        Path("run/checkpoints/best.pt").touch()
    if there == "a file":
        Path("run").touch()
    assert refused("--resume", "run") == (
        "--resume run has no checkpoints; give the run directory of an earlier run, such as "
        "runs/latest"
    )


def test_without_options_that_can_be_read_a_run_cannot_go_on() -> None:
    left("--run-dir", "run")
    Path("run/config.json").write_text("{")
    with pytest.raises(CheckpointUnusable) as caught:
        prepared("--resume", "run", "--run-dir", "other")
    assert caught.value.exit_code == 7
    assert str(caught.value) == f"{Path('run/config.json').resolve()} cannot be read: it is damaged"
    assert not Path("other").exists()


def test_an_option_that_cannot_change_is_refused_and_nothing_is_made() -> None:
    left("--run-dir", "run")
    assert "--seed 1" in refused("--resume", "run", "--seed", "1", "--run-dir", "other")


def test_what_an_earlier_run_left_stays_if_the_data_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left("--run-dir", "run")

    def resolve(config: Config) -> str:
        raise ConfigError("no data")

    monkeypatch.setattr(catalogue, "resolve", resolve)
    assert refused("--resume", "run") == "no data"
    assert refused("--resume", "run", "--run-dir", "new/run") == "no data"


STARTING_ANEW = "--resume auto: there is no unfinished run with a checkpoint, starting from scratch"


@pytest.mark.parametrize("there", ["nothing", "done", "no checkpoint", "no folder", "no link"])
def test_auto_starts_anew_where_there_is_nothing_to_go_on_from(there: str, said: list[str]) -> None:
    if there == "done":
        left("--epochs", "5", status="done")
    elif there == "no checkpoint":
        left("--epochs", "5", checkpoints=0)
    elif there == "no folder":
        shutil.rmtree(left("--epochs", "5"))
    elif there == "no link":
        left("--epochs", "5")
        Path("runs/latest").unlink()
    made = prepared("--workload", "digits", "--resume", "auto")
    assert said == [STARTING_ANEW]
    assert made.resume_from is None
    assert list(made.run_dir.path.iterdir()) == []
    assert made.config == Config(workload="digits", resume="auto")


@pytest.mark.parametrize("status", ["interrupted", "failed", "running", None])
def test_auto_goes_on_from_the_latest_run_that_is_not_done(
    status: str | None, said: list[str]
) -> None:
    left("--run-dir", "runs/older")
    latest = left("--run-dir", "runs/newer", "--epochs", "5", status=status)
    left("--run-dir", "elsewhere/newest")
    made = prepared("--resume", "auto")
    assert said == []
    assert same(made.run_dir.path, latest)
    assert same(made.resume_from, latest)
    assert made.config.epochs == 5


def test_auto_prefers_the_folder_that_is_typed() -> None:
    left("--run-dir", "runs/mine", "--epochs", "5")
    left("--run-dir", "runs/newer")
    made = prepared("--resume", "auto", "--run-dir", "runs/mine")
    assert same(made.run_dir.path, "runs/mine")
    assert same(made.resume_from, "runs/mine")


def test_auto_goes_on_from_the_latest_run_in_a_new_folder_of_runs() -> None:
    """As make does, which always types one."""
    left("--run-dir", "runs/mine", "--epochs", "5")
    made = prepared("--resume", "auto", "--run-dir", "runs/new")
    assert made.run_dir.path == Path("runs/new")
    assert same(made.resume_from, "runs/mine")
    assert made.config.epochs == 5


def test_auto_with_a_folder_elsewhere_does_not_look_into_runs() -> None:
    left("--run-dir", "runs/mine")
    made = prepared("--workload", "digits", "--resume", "auto", "--run-dir", "elsewhere/run")
    assert (made.run_dir.path, made.resume_from) == (Path("elsewhere/run"), None)


@pytest.mark.parametrize("where", ["runs/mine", "elsewhere/mine"])
@pytest.mark.parametrize("status", ["running", "failed", None])
def test_auto_starts_anew_in_its_folder_if_that_run_was_killed_before_its_first_checkpoint(
    where: str, status: str | None, said: list[str]
) -> None:
    """So that one and the same command may be typed again and again."""
    argv = ("--workload", "digits", "--resume", "auto", "--run-dir", where)
    left(*argv, "--epochs", "5", checkpoints=0, status=status)
    said.clear()
    made = prepared(*argv)
    assert said == [STARTING_ANEW]
    assert (made.run_dir.path, made.resume_from) == (Path(where), None)
    assert made.config.epochs == 1


def test_auto_leaves_a_folder_alone_in_which_no_run_has_begun() -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/precious").touch()
    message = refused("--resume", "auto", "--run-dir", "elsewhere")
    assert message.startswith("--run-dir elsewhere is not empty (it holds precious); ")


def test_auto_goes_on_in_the_folder_that_is_typed_also_if_that_run_is_done() -> None:
    """The command of a job that a scheduler starts again is done at once."""
    left("--run-dir", "elsewhere/run", "--epochs", "5", status="done")
    made = prepared("--resume", "auto", "--run-dir", "elsewhere/run")
    assert same(made.run_dir.path, "elsewhere/run")
    assert same(made.resume_from, "elsewhere/run")
    assert made.config.epochs == 5


def own_attempt(*argv: str, checkpoints: int) -> Prepared:
    """The first attempt of this job has begun, and was killed."""
    made = prepared(*argv)
    assert made.job is not None
    made.run_dir.write_options(made.config.to_json(inherited_only=True), made.job)
    put_checkpoints(made.run_dir.path, checkpoints)
    return made


@pytest.mark.parametrize("where", [(), ("--run-dir", "mine")], ids=["generated", "typed"])
def test_a_later_attempt_goes_on_from_the_checkpoint_of_the_one_before(
    where: tuple[str, ...],
) -> None:
    argv = ("--workload", "digits", "--epochs", "5", *where)
    first = own_attempt(*argv, checkpoints=1)
    left("--run-dir", "runs/newer")
    second = prepared(*argv, attempt=1)
    assert second.run_dir.path == first.run_dir.path
    assert second.resume_from == first.run_dir.path
    assert (second.job, second.config) == (first.job, first.config)


@pytest.mark.parametrize("where", [(), ("--run-dir", "mine")], ids=["generated", "typed"])
def test_a_later_attempt_without_a_checkpoint_starts_anew_in_the_same_folder(
    where: tuple[str, ...], said: list[str]
) -> None:
    argv = ("--workload", "digits", *where)
    first = own_attempt(*argv, checkpoints=0)
    second = prepared(*argv, attempt=1)
    assert said == ["there is no checkpoint yet: starting from scratch"]
    assert second.run_dir.path == first.run_dir.path
    assert second.resume_from is None
    assert (second.run_dir.path / "config.json").exists()


def test_a_later_attempt_whose_first_one_left_nothing_is_as_a_first_one() -> None:
    made = prepared("--workload", "digits", "--run-dir", "mine", attempt=1)
    assert (made.run_dir.path, made.resume_from) == (Path("mine"), None)


@pytest.mark.parametrize("attempt", [0, 1])
def test_no_attempt_touches_the_folder_of_another_job(attempt: int) -> None:
    left("--run-dir", "theirs")
    message = refused("--workload", "digits", "--run-dir", "theirs", attempt=attempt)
    assert message.startswith("--run-dir theirs is not empty (it holds checkpoints); ")


def test_only_a_later_attempt_goes_on_by_itself() -> None:
    own_attempt("--workload", "digits", "--run-dir", "mine", checkpoints=1)
    message = refused("--workload", "digits", "--run-dir", "mine", attempt=0)
    assert message.startswith("--run-dir mine is not empty (it holds checkpoints); ")


def test_without_torchrun_no_job_is_known() -> None:
    assert prepared("--workload", "digits", attempt=1, torchrun=False).job is None


@pytest.mark.parametrize(("checkpoints", "source"), [(0, "theirs"), (1, "mine")])
def test_a_later_attempt_prefers_its_own_checkpoint_to_what_was_asked_for(
    checkpoints: int, source: str
) -> None:
    left("--run-dir", "theirs", "--epochs", "5")
    argv = ("--resume", "theirs", "--run-dir", "mine")
    own_attempt(*argv, checkpoints=checkpoints)
    made = prepared(*argv, attempt=1)
    assert same(made.run_dir.path, "mine")
    assert same(made.resume_from, source)
    assert made.config.epochs == 5


@pytest.mark.parametrize("asked", ["runs/mine", "runs/latest", "auto"])
def test_a_later_attempt_of_one_that_went_on_in_place_does_so_again(asked: str) -> None:
    left("--run-dir", "runs/mine", "--epochs", "5")
    own_attempt("--resume", asked, checkpoints=2)
    made = prepared("--resume", asked, attempt=1)
    assert same(made.run_dir.path, "runs/mine")
    assert same(made.resume_from, "runs/mine")
    assert sorted(Path("runs").iterdir()) == [Path("runs/latest"), Path("runs/mine")]


def test_a_later_attempt_does_not_go_on_with_what_another_job_began_meanwhile() -> None:
    left("--run-dir", "runs/mine", "--epochs", "5")
    own_attempt("--resume", "auto", checkpoints=2)
    left("--run-dir", "runs/newer", "--epochs", "7")
    made = prepared("--resume", "auto", attempt=1)
    assert same(made.run_dir.path, "runs/mine")
    assert same(made.resume_from, "runs/mine")
    assert made.config.epochs == 5


def test_a_later_attempt_trains_the_workload_that_auto_stood_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ("--workload", "auto", "--run-dir", "mine")
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "resolve", lambda config: "digits")
        own_attempt(*argv, checkpoints=1)
    assert prepared(*argv, attempt=1).config.workload == "digits"
