"""What holds for every test: torchrun's variables are not there, and nothing is left running."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN_VARIABLES, *(n for n in os.environ if n.startswith("TORCHELASTIC_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    strays = set(me.children(recursive=True)) - before
    assert not strays, f"the test left processes behind: {strays}"
