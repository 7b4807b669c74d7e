"""What --inject says."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.settings.config import parse_args
from ps.settings.errors import ConfigError
from ps.settings.faults import FORMS, Fault, parse_fault

NUMBERS = st.integers(0, 999_999_999)
KINDS = ("kill", "stop", "raise", "nan", "hang", "deadlock", "exit0")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *((f"{kind}:2@50", Fault(kind, 2, 50)) for kind in KINDS),
        ("kill:0@0", Fault("kill", 0, 0)),
        ("leak:1@25", Fault("leak", 1, 25)),
        ("slow:1x3", Fault("slow", 1, 3)),
        ("slow:1x1", Fault("slow", 1, 1)),
        ("slow:12x1.25", Fault("slow", 12, 1.25)),
        ("slow:1x10", Fault("slow", 1, 10)),
        ("kill:002@0050", Fault("kill", 2, 50)),
        (" kill : 2 @ 50 ", Fault("kill", 2, 50)),
    ],
)
def test_each_form_is_a_fault(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@given(st.sampled_from([*KINDS, "leak"]), NUMBERS, NUMBERS)
def test_a_fault_at_an_update_is_read_as_it_is_written(kind: str, rank: int, amount: int) -> None:
    assert parse_fault(f"{kind}:{rank}@{amount}") == Fault(kind, rank, amount)


@given(NUMBERS, st.decimals(1, 999_999_999, allow_nan=False, places=9))
def test_a_slow_rank_is_read_as_it_is_written(rank: int, factor: object) -> None:
    assert parse_fault(f"slow:{rank}x{factor}") == Fault("slow", rank, float(str(factor)))


@settings(max_examples=30)
@given(st.text() | st.from_regex(r"\A(kill|leak|slow):\d{0,20}[@x][\d.]{0,20}\Z"))
def test_any_text_is_a_fault_or_refused(text: str) -> None:
    with suppress(ConfigError):
        fault = parse_fault(text)
        assert fault.rank >= 0 and 0 <= fault.amount < 1e9


@pytest.mark.parametrize(
    "text",
    [
        *("", "kill", "kill:", "kill:2", "kill:@50", "kill:2@", "kill:2x50", "2@50", ":2@50"),
        *("Kill:2@50", "die:2@50", "kill:2@50,stop:1@3", "kill:2@50 stop:1@3"),
        *("kill:-1@50", "kill:2@-50", "kill:2@5.5", "kill:a@50", "kill:2@b", "kill:2@1e3"),
        *("slow:2@3", "slow:2x", "slow:2x.5", "slow:2x3.", "slow:2xinf", "slow:2xnan"),
        *("slow:1x0.5", "slow:1x0", "slow:1x0.99"),  # nobody gets faster
        *("leak:2x3", "leak:2@1.5"),
        *("kill:\u0663@50", "kill:2@\u0665\u0660"),  # digits of another script
        *("kill:2@" + "9" * 5000, "kill:" + "9" * 5000 + "@2", "slow:1x" + "9" * 400),
        "kill:2@50\n",
    ],
)
def test_any_other_text_is_refused_with_the_forms_and_what_was_typed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert str(caught.value).startswith(f"--inject must be {FORMS}")
    assert repr(text) in str(caught.value)


def test_several_faults_may_be_typed() -> None:
    config = parse_args(["--inject", "kill:2@50", "--inject", "slow:1x3"])
    assert config.faults == (Fault("kill", 2, 50), Fault("slow", 1, 3))


@pytest.mark.parametrize("typed", ["kill:2@60", "slow:1x1.5", "leak:0@250"])
def test_a_fault_is_shown_as_it_was_typed(typed: str) -> None:
    assert str(parse_fault(typed)) == typed
