"""The exact learning-rate factors of every form of --lr-schedule, and the forms refused."""

from __future__ import annotations

import math

import pytest

from ps.settings.errors import ConfigError
from ps.settings.schedule import FORMS, schedule_factor


@pytest.mark.parametrize(
    ("spec", "total", "factors"),
    [
        ("constant", 100, {0: 1.0, 1: 1.0, 50: 1.0, 99: 1.0}),
        ("linear", 4, {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25}),
        (
            "cosine",
            6,
            {0: 1.0, 1: 0.5 + math.sqrt(3) / 4, 2: 0.75, 3: 0.5, 4: 0.25, 6: 0.0},
        ),
        ("step:3:0.5", 100, {0: 1.0, 2: 1.0, 3: 0.5, 5: 0.5, 6: 0.25, 9: 0.125}),
        ("step:3:0.1", 5, {4: 0.1}),
        ("step:3:0.1", 5000, {4: 0.1}),
        ("step:1:1", 10, {0: 1.0, 7: 1.0}),
    ],
)
def test_the_factor_of_an_update(spec: str, total: int, factors: dict[int, float]) -> None:
    factor = schedule_factor(spec)
    got = {update: factor(update, total) for update in factors}
    assert got == pytest.approx(factors, abs=1e-12)


@pytest.mark.parametrize("spec", ["linear", "cosine"])
def test_the_last_update_of_a_falling_schedule_still_moves(spec: str) -> None:
    assert 0.0 < schedule_factor(spec)(99, 100) < 0.011


@pytest.mark.parametrize("spec", ["constant", "linear", "cosine", "step:1:0.5"])
def test_a_job_of_one_update_makes_it_at_the_full_rate(spec: str) -> None:
    assert schedule_factor(spec)(0, 1) == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        *("", "Constant", " linear", "exponential", "constant:1", "linear:0.5", "cosine:"),
        *("step", "step:10", "step:10:0.5:2"),
    ],
)
def test_a_form_that_is_none_is_refused_with_all_that_are(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_factor(spec)
    assert str(caught.value).startswith(f"--lr-schedule must be {FORMS}")
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        *("step:0:0.5", "step:-3:0.5", "step:1.5:0.5", "step:ten:0.5", "step::0.5", "step:10:"),
        *("step:10:half", "step:10:0", "step:10:-0.5", "step:10:1.001", "step:10:nan"),
        "step:10:inf",
    ],
)
def test_a_step_with_unusable_numbers_is_refused_with_its_form(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_factor(spec)
    assert str(caught.value).startswith("--lr-schedule step:UPDATES:FACTOR ")
    assert repr(spec) in str(caught.value)
