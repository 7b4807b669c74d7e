"""A workload by its name, and the choice that --workload auto makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workloads import catalogue
from ps.workloads.mirror import Mirror


class Fetch:
    """Stands for the fetch; keeps what it was asked for."""

    def __init__(self, *, works: bool) -> None:
        self._works = works
        self.asked: list[tuple[Path, str, float]] = []

    def __call__(self, data_dir: Path, mirror: Mirror, *, timeout_s: float) -> None:
        self.asked.append((data_dir, mirror.url, timeout_s))
        if not self._works:
            raise ConfigError("the mirror is gone")


@pytest.mark.parametrize(("workload", "timeout_s"), [("auto", 20.0), ("mnist", 600.0)])
def test_mnist_is_taken_when_it_can_be_fetched_in_time(workload: str, timeout_s: float) -> None:
    config = Config(workload=workload, data_dir=Path("some/data"), data_mirror="http://mirror")
    fetch = Fetch(works=True)
    assert catalogue.resolve(config, fetch=fetch) == "mnist"
    assert fetch.asked == [(Path("some/data"), "http://mirror", timeout_s)]


def test_auto_falls_back_to_digits_and_says_so_with_the_reason(
    warnings: pytest.LogCaptureFixture,
) -> None:
    assert catalogue.resolve(Config(workload="auto"), fetch=Fetch(works=False)) == "digits"
    [warning] = warnings.messages
    assert "NOT MNIST" in warning
    assert "the mirror is gone" in warning


def test_an_explicit_mnist_that_cannot_be_fetched_is_an_error(
    warnings: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=r"^the mirror is gone$"):
        catalogue.resolve(Config(workload="mnist"), fetch=Fetch(works=False))
    assert warnings.messages == []


@pytest.mark.parametrize("workload", ["digits", "mine:build"])
def test_other_workloads_fetch_nothing(workload: str) -> None:
    fetch = Fetch(works=False)
    assert catalogue.resolve(Config(workload=workload), fetch=fetch) == workload
    assert fetch.asked == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mnist", "train-images-idx3-ubyte"), ("no_such_plug_in:build", "No module named")],
)
def test_what_cannot_be_loaded_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        catalogue.load(name, Config(workload="auto", data_dir=tmp_path))
