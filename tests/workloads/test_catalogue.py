"""A workload by its name, and the choice that --workload auto makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workloads import catalogue, digits, mnist_files

DATA_DIR = Path("some/data")
REASON = "the mirror is gone"


def fetching(monkeypatch: pytest.MonkeyPatch, *, works: bool) -> list[tuple[Path, str, float]]:
    """Replaces the fetch; returns what it was asked for."""
    asked: list[tuple[Path, str, float]] = []

    def fetch(data_dir: Path, mirror: str, *, bound_s: float) -> None:
        asked.append((data_dir, mirror, bound_s))
        if not works:
            raise ConfigError(REASON)

    monkeypatch.setattr(mnist_files, "fetch_if_needed", fetch)
    return asked


@pytest.mark.parametrize(("workload", "bound_s"), [("auto", 20.0), ("mnist", 600.0)])
def test_mnist_is_taken_when_it_can_be_had_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, workload: str, bound_s: float
) -> None:
    asked = fetching(monkeypatch, works=True)
    config = Config(workload=workload, data_dir=DATA_DIR, data_mirror="http://mirror")
    assert catalogue.resolve(config) == "mnist"
    assert asked == [(DATA_DIR, "http://mirror", bound_s)]


def test_auto_falls_back_to_digits_and_says_so_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    fetching(monkeypatch, works=False)
    assert catalogue.resolve(Config(workload="auto")) == "digits"
    assert warnings.messages == [
        f"NOT MNIST, training on generated digits instead: {REASON}",
    ]


def test_an_explicit_mnist_that_cannot_be_had_is_an_error(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    fetching(monkeypatch, works=False)
    with pytest.raises(ConfigError, match=rf"^{REASON}$"):
        catalogue.resolve(Config(workload="mnist"))
    assert warnings.messages == []


@pytest.mark.parametrize("workload", ["digits", "mine:build"])
def test_other_workloads_fetch_nothing(monkeypatch: pytest.MonkeyPatch, workload: str) -> None:
    asked = fetching(monkeypatch, works=False)
    assert catalogue.resolve(Config(workload=workload)) == workload
    assert asked == []


def test_the_digits_are_loaded_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "NUM_TRAIN", 30)
    monkeypatch.setattr(digits, "NUM_TEST", 20)
    workload = catalogue.load("digits", Config(workload="auto"))
    assert (workload.name, len(workload.train), len(workload.test)) == ("digits", 30, 20)


def test_mnist_that_is_not_there_is_refused_by_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.load("mnist", Config(workload="auto", data_dir=tmp_path))
    assert str(caught.value) == f"train-images-idx3-ubyte is not in {tmp_path}/MNIST/raw"


def test_any_other_name_is_a_plug_in() -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.load("no_such_plug_in:build", Config(workload="no_such_plug_in:build"))
    assert str(caught.value) == (
        "--workload no_such_plug_in:build: ModuleNotFoundError: No module named 'no_such_plug_in'"
    )
