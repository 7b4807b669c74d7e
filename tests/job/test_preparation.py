"""What rank 0 decides before torch is loaded, and that a mistake in it leaves nothing."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps.host.gate import Gate
from ps.job import preparation
from ps.job.preparation import Facts, Prepared, Start, decide, prepare, ready_timeout_s
from ps.settings.config import Config, parse_args
from ps.settings.errors import CheckpointUnusable, ConfigError
from ps.settings.topology import Topology
from ps.workloads import catalogue

ALONE = Topology(rank=0, world_size=1, master_addr="127.0.0.1", master_port=29500)

# The decision

OWN, ASKED, LATEST = Path("runs/own"), Path("/here/runs/asked"), Path("/here/runs/newest")
NOTHING = Facts(
    resume=None,
    is_later_attempt=False,
    own=OWN,
    own_is_typed=False,
    own_resolved=Path("/here/runs/own"),
    own_has_checkpoints=False,
    own_is_begun=False,
    own_is_in_runs=True,
    asked=ASKED,
    asked_has_checkpoints=True,
    latest=LATEST,
    latest_is_unfinished=True,
)
TYPED: dict[str, Any] = {"own_is_typed": True}
LATER: dict[str, Any] = {"is_later_attempt": True}
SAVED: dict[str, Any] = {"own_has_checkpoints": True}
BEGUN: dict[str, Any] = {"own_is_begun": True}
ELSEWHERE: dict[str, Any] = {"own_is_in_runs": False}
DONE: dict[str, Any] = {"latest_is_unfinished": False}
AUTO: dict[str, Any] = {"resume": "auto"}
ASK: dict[str, Any] = {"resume": "asked"}
SAME: dict[str, Any] = {"own_resolved": ASKED}


@pytest.mark.parametrize(
    ("facts", "source", "run_dir", "reopens", "is_said"),
    [
        ({}, None, OWN, False, False),
        (TYPED | SAVED | BEGUN, None, OWN, False, False),  # which is refused then
        (LATER, None, OWN, True, True),
        (LATER | SAVED, OWN, OWN, True, False),
        (LATER | SAVED | TYPED, OWN, OWN, True, False),
        (ASK, ASKED, ASKED, True, False),
        (ASK | TYPED, ASKED, OWN, False, False),
        (ASK | TYPED | BEGUN, ASKED, OWN, False, False),
        (ASK | TYPED | SAME, ASKED, OWN, True, False),
        (ASK | TYPED | LATER, ASKED, OWN, True, False),
        (ASK | TYPED | LATER | SAVED, OWN, OWN, True, False),
        (ASK | LATER, ASKED, ASKED, True, False),
        (AUTO, LATEST, LATEST, True, False),
        (AUTO | TYPED, LATEST, OWN, False, False),
        (AUTO | TYPED | BEGUN, LATEST, OWN, True, False),
        (AUTO | TYPED | SAVED, OWN, OWN, True, False),
        (AUTO | TYPED | SAVED | ELSEWHERE | DONE, OWN, OWN, True, False),
        (AUTO | TYPED | ELSEWHERE, None, OWN, False, True),
        (AUTO | TYPED | ELSEWHERE | BEGUN, None, OWN, True, True),
        (AUTO | DONE, None, OWN, False, True),
        (AUTO | DONE | LATER, None, OWN, True, True),
        (AUTO | LATER, LATEST, LATEST, True, False),
        (AUTO | LATER | SAVED, OWN, OWN, True, False),
    ],
)
def test_where_a_run_goes_on_is_decided_by_facts(
    facts: dict[str, Any], source: Path | None, run_dir: Path, reopens: bool, is_said: bool
) -> None:
    start = decide(replace(NOTHING, **facts))
    assert replace(start, message=None) == Start(source=source, run_dir=run_dir, reopens=reopens)
    assert (start.message is not None) == is_said


@pytest.mark.parametrize("facts", [{}, TYPED, TYPED | SAVED, LATER])
def test_a_folder_that_was_asked_for_must_have_checkpoints(facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--resume asked .*runs/latest"):
        decide(replace(NOTHING, **(facts | ASK), asked_has_checkpoints=False))


# On a real disk


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


def prepared(*argv: str, attempt: int = 0, torchrun: bool = True) -> Prepared:
    """By a process that has ended since, but left its folder as it was."""
    topology = replace(ALONE, restart_count=attempt, run_id=uuid.uuid4().hex if torchrun else None)
    made = prepare(topology, parse_args(argv), argv)
    made.run_dir.close()
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


def own_attempt(*argv: str, checkpoints: int) -> Prepared:
    """The first attempt of this job has begun, and was killed."""
    made = prepared(*argv)
    assert made.job is not None
    made.run_dir.write_options(made.config.to_json(inherited_only=True), made.job)
    put_checkpoints(made.run_dir.path, checkpoints)
    return made


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


def test_the_run_directory_is_made_beside_torchruns_log_and_the_workload_is_named() -> None:
    error_file = Path("a/run/torchrun/none_ab12/attempt_0/0/error.json")
    error_file.parent.mkdir(parents=True)
    topology = replace(ALONE, error_file=str(error_file.absolute()))
    made = prepare(topology, Config(workload="digits", run_dir=Path("a/run")))
    assert (made.run_dir.path, made.config.workload) == (Path("a/run"), "digits")


@pytest.mark.parametrize("error", [ConfigError("no data"), KeyboardInterrupt()])
def test_without_the_data_the_run_directory_is_removed_again(
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
    with pytest.raises(ConfigError, match="--run-dir run "):
        prepare(ALONE, Config(workload="mnist", run_dir=Path("run")))


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
    left("--run-dir", "run", "--epochs", "5", "--lr", "0.5", "--start-timeout", "900")
    config = prepared("--resume", "run", "--epochs", "7", "--threads", "2").config
    assert (config.workload, config.epochs, config.lr, config.threads) == ("digits", 7, 0.5, 2)
    assert config.start_timeout == 900


def test_other_ranks_wait_for_as_long_as_rank_0_may_fetch_and_start() -> None:
    assert ready_timeout_s(Config(start_timeout=900.0)) == catalogue.FETCH_TIMEOUT_S + 900


def test_a_run_can_go_on_in_a_folder_of_its_own() -> None:
    left("--run-dir", "first", "--epochs", "5")
    made = prepared("--resume", "first", "--run-dir", "second")
    assert (made.run_dir.path, made.config.epochs) == (Path("second"), 5)
    assert same(made.resume_from, "first")
    assert list(Path("second").iterdir()) == []
    put_checkpoints(Path("second"), 1)
    assert "--run-dir second " in refused("--resume", "first", "--run-dir", "second")


@pytest.mark.parametrize("typed", ["runs/mine", "./runs/mine", "runs/latest", "runs/../runs/mine"])
def test_its_own_folder_may_be_typed_twice(typed: str) -> None:
    left("--run-dir", "runs/mine")
    for where in (typed, str(Path(typed).absolute())):
        for asked in ("runs/mine", where, "auto"):
            made = prepared("--resume", asked, "--run-dir", where)
            assert same(made.run_dir.path, "runs/mine")
            assert same(made.resume_from, "runs/mine")


@pytest.mark.parametrize("there", ["nothing", "no checkpoints", "other files", "a file"])
def test_a_folder_without_checkpoints_is_refused_as_one_to_go_on_from(there: str) -> None:
    if there in ("no checkpoints", "other files"):
        left("--run-dir", "run", checkpoints=0)
    if there == "other files":
        Path("run/checkpoints").mkdir()
        Path("run/checkpoints/best.pt").touch()
    if there == "a file":
        Path("run").touch()
    assert refused("--resume", "run").startswith("--resume run ")


def test_without_options_that_can_be_read_a_run_cannot_go_on() -> None:
    left("--run-dir", "run")
    Path("run/config.json").write_text("{")
    with pytest.raises(CheckpointUnusable, match=r"run/config\.json") as caught:
        prepared("--resume", "run", "--run-dir", "other")
    assert caught.value.exit_code == 7
    assert not Path("other").exists()


def test_an_option_that_cannot_change_is_refused_and_nothing_is_made() -> None:
    left("--run-dir", "run")
    assert refused("--resume", "run", "--seed", "1", "--run-dir", "other").startswith("--seed 1 ")


def test_what_an_earlier_run_left_stays_if_the_data_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left("--run-dir", "run")

    def resolve(config: Config) -> str:
        raise ConfigError("no data")

    monkeypatch.setattr(catalogue, "resolve", resolve)
    assert refused("--resume", "run") == "no data"
    assert refused("--resume", "run", "--run-dir", "new/run") == "no data"


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
    assert len(said) == 1
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


@pytest.mark.parametrize(
    ("where", "source", "epochs"),
    [("runs/mine", "runs/mine", 5), ("runs/other", "runs/newer", 7), ("elsewhere/x", None, 1)],
)
def test_auto_prefers_the_folder_that_is_typed_and_else_looks_into_runs_for_one_of_runs(
    where: str, source: str | None, epochs: int
) -> None:
    left("--run-dir", "runs/mine", "--epochs", "5", status="done")
    left("--run-dir", "runs/newer", "--epochs", "7")
    made = prepared("--workload", "digits", "--resume", "auto", "--run-dir", where)
    assert same(made.run_dir.path, where)
    assert made.resume_from is None if source is None else same(made.resume_from, source)
    assert made.config.epochs == epochs


@pytest.mark.parametrize("status", ["running", "failed", None])
def test_auto_starts_anew_in_its_folder_if_that_run_was_killed_before_its_first_checkpoint(
    status: str | None,
) -> None:
    """So that one and the same command may be typed again and again."""
    argv = ("--workload", "digits", "--resume", "auto", "--run-dir", "elsewhere/mine")
    left(*argv, "--epochs", "5", checkpoints=0, status=status)
    made = prepared(*argv)
    assert (made.run_dir.path, made.resume_from) == (Path("elsewhere/mine"), None)
    assert made.config.epochs == 1
    Path("elsewhere/mine/config.json").unlink()
    Path("elsewhere/mine/precious").touch()
    assert "--run-dir elsewhere/mine " in refused(*argv)  # no run has begun there


# Later attempts


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("where", [(), ("--run-dir", "mine")], ids=["generated", "typed"])
def test_a_later_attempt_goes_on_in_the_same_folder_from_a_checkpoint_if_there_is_one(
    where: tuple[str, ...], checkpoints: int, said: list[str]
) -> None:
    argv = ("--workload", "digits", "--epochs", "5", *where)
    first = own_attempt(*argv, checkpoints=checkpoints)
    left("--run-dir", "runs/newer")
    second = prepared(*argv, attempt=1)
    assert second.run_dir.path == first.run_dir.path
    assert second.resume_from == (first.run_dir.path if checkpoints else None)
    assert len(said) == 1 - checkpoints
    assert (second.job, second.config) == (first.job, first.config)
    assert (second.run_dir.path / "config.json").exists()


def test_a_later_attempt_whose_first_one_left_nothing_is_as_a_first_one() -> None:
    made = prepared("--workload", "digits", "--run-dir", "mine", attempt=1)
    assert (made.run_dir.path, made.resume_from) == (Path("mine"), None)


def test_no_attempt_touches_the_folder_of_another_job_and_a_first_one_no_folder_in_use() -> None:
    left("--run-dir", "theirs")
    own_attempt("--workload", "digits", "--run-dir", "mine", checkpoints=1)
    for where, attempt in (("theirs", 0), ("theirs", 1), ("mine", 0)):
        message = refused("--workload", "digits", "--run-dir", where, attempt=attempt)
        assert message.startswith(f"--run-dir {where} ")


def test_without_torchrun_no_job_is_known() -> None:
    assert prepared("--workload", "digits", attempt=1, torchrun=False).job is None


@pytest.mark.parametrize("asked", ["runs/mine", "runs/latest", "auto"])
def test_a_later_attempt_of_one_that_went_on_in_place_does_so_again(asked: str) -> None:
    """Also if another job has begun meanwhile."""
    left("--run-dir", "runs/mine", "--epochs", "5")
    own_attempt("--resume", asked, checkpoints=2)
    left("--run-dir", "runs/newer", "--epochs", "7")
    made = prepared("--resume", asked, attempt=1)
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
