"""How options are declared, checked, read from a command line and from JSON, whatever they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ps.settings import options
from ps.settings.errors import ConfigError
from ps.settings.options import option


@dataclass(frozen=True, kw_only=True)
class Trip:
    """One option of every kind."""

    seats: int = option(2, "seats", group="car", least=1, most=5, resume="fixed")
    speed: float | None = option(None, "km/h", group="car", above=0, earlier_name="pace")
    pause_s: float = option(60.0, "50% of the time", group="stops", least=10, zero="no pause")
    fuel: str = option("gas", "fuel", group="car", choices=("gas", "power"))
    plate: str = option("", "plate", group="car", pattern="[A-Z]*", wanted="capitals")
    folder: Path = option(Path("maps"), "maps", group="stops", metavar="DIR")
    over: tuple[str, ...] = option((), "towns", group="stops", metavar="TOWN", resume="own")
    top_down: bool | None = option(None, "open", group="car")


def typed(*argv: str) -> dict[str, Any]:
    return options.read_command_line(Trip, argv, prog="trip")


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options.check(Trip(**typed(*argv)))
    return str(caught.value)


def test_only_what_is_typed_is_given_in_the_type_of_its_field() -> None:
    assert typed() == {}
    text = "--seats=3 --speed 50 --fuel power --plate AB --folder m --over Rome --over Bonn"
    assert typed(*text.split(), "--no-top-down") == {
        "seats": 3,
        "speed": 50.0,
        "fuel": "power",
        "plate": "AB",
        "folder": Path("m"),
        "over": ("Rome", "Bonn"),
        "top_down": False,
    }
    assert typed("--seats", "3", "--seats", "4") == {"seats": 4}
    assert typed("--no-top-down", "--top-down") == {"top_down": True}


def test_an_earlier_name_is_read_and_the_last_one_typed_wins() -> None:
    assert typed("--pace", "9") == typed("--pace=9") == {"speed": 9.0}
    assert typed("--pace", "9", "--speed", "8") == {"speed": 8.0}
    assert typed("--speed", "8", "--pace", "9") == {"speed": 9.0}
    assert options.values_from_json(Trip, {"pace": 9}) == {"speed": 9.0}


def test_help_shows_defaults_and_limits_and_an_earlier_name_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        typed("--help")
    assert caught.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "--seats N seats (default: 2; at least 1; at most 5)",
        "--speed X km/h (above 0; earlier name: --pace)",
        "--pause-s X 50% of the time (default: 60.0; 0 for no pause, else at least 10)",
        "--fuel gas|power fuel (default: gas)",
        "--folder DIR maps (default: maps)",
        "--over TOWN towns",
        "--top-down, --no-top-down",
    ):
        assert line in lines
    assert sum("--pace" in line for line in lines if not line.startswith("usage")) == 1


@pytest.mark.parametrize(
    "argv", ["--bogus", "--bogus 3", "there", "--seat=1", "--pause_s 60", "--over"]
)
def test_unknown_abbreviated_and_incomplete_options_are_named(argv: str) -> None:
    message = refused(*argv.split())
    assert argv in message
    assert "trip --help" in message


@pytest.mark.parametrize(
    ("flag", "texts"),
    [
        ("--seats", ("three", "1.5", "1e3", "", "nan", "9" * 5000)),
        ("--speed", ("fast", "0,1", "", "1.5s", "nan", "inf", "1e999")),
        ("--pause-s", ("-1", "0.1", "9.9")),
        ("--seats", ("0", "-1", "6")),
        ("--speed", ("0", "-1")),
        ("--fuel", ("", "Gas", "wood")),
        ("--plate", ("", "ab", "A B", "A\n")),
        ("--folder", ("",)),
        ("--top-down", ("yes",)),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_the_option(
    flag: str, texts: tuple[str, ...]
) -> None:
    for text in texts:
        assert flag in refused(f"{flag}={text}")


@pytest.mark.parametrize("argv", ["--seats=1", "--seats=5", "--pause-s=0", "--pause-s=10"])
def test_a_value_at_its_limit_is_allowed(argv: str) -> None:
    options.check(Trip(**typed(argv)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seats": 0}, ("--seats", "1 or more", "0")),
        ({"seats": 6}, ("--seats", "5 or less", "6")),
        ({"speed": 0.0}, ("--speed", "above 0", "0.0")),
        ({"speed": float("nan")}, ("--speed", "finite", "nan")),
        ({"pause_s": 9.5}, ("--pause-s", "0 for no pause, or 10 or more", "9.5")),
        ({"fuel": "wood"}, ("--fuel", "gas or power", "'wood'")),
        ({"plate": "ab"}, ("--plate", "capitals", "'ab'")),
    ],
)
def test_what_is_refused_is_told_with_what_to_type(
    changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        options.check(Trip(**changed))
    assert all(word in str(caught.value) for word in words)


def test_options_stay_what_they_are_through_json() -> None:
    for trip in (Trip(), Trip(speed=5.0, folder=Path("m"), over=("Rome",), top_down=True)):
        stored = json.loads(json.dumps(options.to_json(trip)))
        assert Trip(**options.values_from_json(Trip, stored)) == trip
    assert "over" not in options.to_json(Trip(over=("Rome",)), inherited_only=True)
    number = options.values_from_json(Trip, {"speed": 1})["speed"]
    assert (number, type(number)) == (1.0, float)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bogus", 3), ("seats", "2"), ("seats", 2.5), ("seats", True), ("seats", None)),
        *(("speed", "fast"), ("top_down", 1), ("fuel", 500), ("over", "Rome")),
        *(("folder", None), ("folder", 3)),
    ],
)
def test_an_unknown_option_or_another_type_in_json_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        options.values_from_json(Trip, {name: value})


def test_a_run_that_continues_has_the_earlier_values_unless_others_are_typed() -> None:
    before = {"seats": 3, "speed": 5.0}
    assert options.continued(Trip, {}, before) == before
    assert options.continued(Trip, {"speed": 9.0, "seats": 3}, before) == {"speed": 9.0, "seats": 3}
    for inherited in (before, {}):  # 2 is the default
        with pytest.raises(ConfigError, match=r"--seats 4.*--resume"):
            options.continued(Trip, {"seats": 4}, inherited)
