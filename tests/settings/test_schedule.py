"""The exact learning-rate factors of every form of --lr-schedule, and the forms refused."""

from __future__ import annotations

import math

import pytest

from ps.settings.errors import ConfigError
from ps.settings.schedule import FORMS, schedule_factor


def factors(spec: str, updates: list[int], total: int) -> list[float]:
    factor = schedule_factor(spec)
    return [factor(update, total) for update in updates]


def test_constant_is_one_throughout() -> None:
    assert factors("constant", [0, 1, 50, 99], 100) == [1.0, 1.0, 1.0, 1.0]


def test_linear_falls_from_one_by_the_same_amount_each_update() -> None:
    assert factors("linear", [0, 1, 2, 3], 4) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_a_wave_from_one_towards_zero() -> None:
    got = factors("cosine", [0, 1, 2, 3, 4, 6], 6)
    wanted = [1.0, 0.5 + math.sqrt(3) / 4, 0.75, 0.5, 0.25, 0.0]
    assert got == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("spec", ["linear", "cosine"])
def test_the_last_update_of_a_falling_schedule_still_moves(spec: str) -> None:
    assert 0.0 < schedule_factor(spec)(99, 100) < 0.011


@pytest.mark.parametrize("spec", ["constant", "linear", "cosine", "step:1:0.5"])
def test_a_job_of_one_update_makes_it_at_the_full_rate(spec: str) -> None:
    assert schedule_factor(spec)(0, 1) == 1.0


def test_step_multiplies_after_every_so_many_updates() -> None:
    got = factors("step:3:0.5", [0, 2, 3, 5, 6, 9], 100)
    assert got == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


def test_step_does_not_depend_on_the_length_of_the_job() -> None:
    assert factors("step:3:0.1", [4], 5) == factors("step:3:0.1", [4], 5000) == [0.1]


def test_a_step_factor_of_one_is_allowed() -> None:
    assert factors("step:1:1", [0, 7], 10) == [1.0, 1.0]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "Constant",
        " linear",
        "exponential",
        "constant:1",
        "linear:0.5",
        "cosine:",
        "step",
        "step:10",
        "step:10:0.5:2",
    ],
)
def test_a_form_that_is_none_is_refused_with_all_that_are(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_factor(spec)
    assert str(caught.value) == f"--lr-schedule must be {FORMS}, got {spec!r}"
    assert FORMS == "constant, linear, cosine or step:UPDATES:FACTOR"


@pytest.mark.parametrize(
    "spec",
    [
        "step:0:0.5",
        "step:-3:0.5",
        "step:1.5:0.5",
        "step:ten:0.5",
        "step::0.5",
        "step:10:",
        "step:10:half",
        "step:10:0",
        "step:10:-0.5",
        "step:10:1.001",
        "step:10:nan",
        "step:10:inf",
    ],
)
def test_a_step_with_unusable_numbers_is_refused_with_its_limits(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_factor(spec)
    assert str(caught.value) == (
        "--lr-schedule step:UPDATES:FACTOR needs UPDATES of 1 or more and FACTOR "
        f"above 0 and at most 1, got {spec!r}"
    )
