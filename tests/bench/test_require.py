from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.require import main


@pytest.mark.parametrize(("got", "good"), [(0.9, True), (0.95, True), (0.89, False), (None, False)])
def test_a_figure_below_what_is_required_fails(
    tmp_path: Path, got: float | None, good: bool
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"test_accuracy": got}))
    if good:
        main("test_accuracy", "0.90", str(report))
        return
    with pytest.raises(SystemExit) as caught:
        main("test_accuracy", "0.90", str(report))
    assert str(caught.value) == f"test_accuracy must be 0.90 or more, got {got}; see {report}"
