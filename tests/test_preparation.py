"""What rank 0 settles before torch is loaded, and that a mistake in it leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.config import Config
from ps.errors import ConfigError
from ps.preparation import prepare
from ps.topology import Topology
from ps.workloads import catalogue

ALONE = Topology(rank=0, world_size=1, master_addr="127.0.0.1", master_port=29500)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
