"""One log format: role and rank on every line, warnings on stderr, the rest on stdout."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ps.settings.log import configure, log


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


def test_a_line_carries_role_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure("trainer", 2)
    log.info("used %.1f of %.1f GiB", 3.14, 4)
    assert tuple(capsys.readouterr()) == ("trainer rank 2 | used 3.1 of 4.0 GiB\n", "")


@pytest.mark.parametrize("level", ["warning", "error"])
def test_warnings_and_errors_go_to_stderr_under_their_name(
    capsys: pytest.CaptureFixture[str], level: str
) -> None:
    configure("server", 0)
    getattr(log, level)("no space")
    assert tuple(capsys.readouterr()) == ("", f"server rank 0 | {level}: no space\n")


def test_every_line_of_a_message_carries_role_and_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("server", 0)
    log.error("first\nsecond")
    assert capsys.readouterr().err == "server rank 0 | error: first\nserver rank 0 | second\n"


@pytest.mark.parametrize(
    ("level", "printed"),
    [("debug", ["d", "i", "w"]), ("info", ["i", "w"]), ("warning", ["w"])],
)
def test_only_what_is_severe_enough_is_printed(
    capsys: pytest.CaptureFixture[str], level: str, printed: list[str]
) -> None:
    configure("server", 0, level)
    log.debug("d")
    log.info("i")
    log.warning("w")
    out, err = capsys.readouterr()
    assert [line[-1] for line in (out + err).splitlines()] == printed


def test_configuring_again_replaces_what_was(capsys: pytest.CaptureFixture[str]) -> None:
    configure("server", 0, "warning")
    configure("trainer", 1)
    log.info("hello")
    assert capsys.readouterr().out == "trainer rank 1 | hello\n"


def test_nothing_reaches_the_root_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        configure("server", 0)
        log.info("hello")
    assert caplog.messages == []
