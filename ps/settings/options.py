"""How an option is declared, checked, read from a command line, and written as JSON.

Generic over a frozen dataclass whose fields are made by option(). ps.settings.config holds the one
that this program uses.
"""

from __future__ import annotations

import argparse  # noqa: TID251
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ps.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is declared of an option besides its name, its type and its default."""

    help: str
    group: str
    """The heading in --help under which it stands."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    zero: str | None = None
    """What 0 means, for an option that may also be 0 although `least` is more."""
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    """A regular expression that the whole text must match."""
    wanted: str = ""
    """What `pattern` asks for, in words that follow "must be"."""
    metavar: str | None = None
    resume: Literal["inherited", "fixed", "own"] = "inherited"
    """In a run that continues another: taken from that run unless it is typed ("inherited"),
    the same as there ("fixed"), or of each run alone ("own")."""
    earlier_name: str | None = None
    """A former name of the field, still read from command lines and from JSON."""


def option(default: Any, help: str, **rules: Any) -> Any:
    """A dataclass field that is also a command-line option. rules are the fields of Rules."""
    return field(default=default, metadata={"rules": Rules(help=help, **rules)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One field of the dataclass, with what was declared of it."""

    name: str
    kind: type
    """str, int, float, bool, Path, or tuple for an option that may be typed several times."""
    may_be_none: bool
    default: Any
    rules: Rules

    @property
    def flag(self) -> str:
        return flag(self.name)

    def check(self, value: Any) -> None:
        """Raises ConfigError, with the option and the value, if the rules do not allow it."""
        if value is None:
            return
        wanted = self._unmet_text(value) if isinstance(value, str) else self._unmet_limit(value)
        if wanted:
            raise ConfigError(f"{self.flag} must be {wanted}, got {value!r}")

    def _unmet_text(self, text: str) -> str:
        rules = self.rules
        if rules.choices and text not in rules.choices:
            return " or ".join(rules.choices)
        if rules.pattern is not None and not re.fullmatch(rules.pattern, text):
            return rules.wanted
        return ""

    def _unmet_limit(self, value: Any) -> str:
        rules = self.rules
        if isinstance(value, float) and not math.isfinite(value):
            return "finite"
        if rules.zero is not None and value == 0:
            return ""
        if rules.least is not None and value < rules.least:
            zero = f"0 for {rules.zero}, or " if rules.zero else ""
            return f"{zero}{rules.least} or more"
        if rules.above is not None and value <= rules.above:
            return f"above {rules.above}"
        if rules.most is not None and value > rules.most:
            return f"{rules.most} or less"
        return ""

    def value_from_json(self, value: Any) -> Any:
        """Raises ConfigError if the value is of another type than the option."""
        if value is None and self.may_be_none:
            return None
        in_json: Any = {Path: str, tuple: list, float: (float, int)}.get(self.kind, self.kind)
        if not isinstance(value, in_json) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.flag} cannot be {value!r}")
        return self.kind(value)

    def add_to(self, group: Any) -> None:
        """Add it, and its earlier name without a line in --help, to a group of argparse."""
        group.add_argument(self.flag, dest=self.name, help=self._help(), **self._argument())
        if self.rules.earlier_name:
            group.add_argument(
                flag(self.rules.earlier_name),
                dest=self.name,
                help=argparse.SUPPRESS,
                **self._argument(),
            )

    def _argument(self) -> dict[str, Any]:
        if self.kind is bool:
            return {"action": argparse.BooleanOptionalAction}
        if self.kind is tuple:
            return {"action": "append", "metavar": self.rules.metavar}
        by_kind = {int: "N", float: "X"}.get(self.kind, "TEXT")
        metavar = self.rules.metavar or "|".join(self.rules.choices) or by_kind
        return {"type": _converter(self.kind), "metavar": metavar}

    def _help(self) -> str:
        rules = self.rules
        notes = [] if self.default in (None, ()) else [f"default: {self.default}"]
        if rules.least is not None:
            zero = f"0 for {rules.zero}, else " if rules.zero else ""
            notes.append(f"{zero}at least {rules.least}")
        if rules.above is not None:
            notes.append(f"above {rules.above}")
        if rules.most is not None:
            notes.append(f"at most {rules.most}")
        if rules.earlier_name:
            notes.append(f"earlier name: {flag(rules.earlier_name)}")
        text = f"{rules.help} ({'; '.join(notes)})" if notes else rules.help
        return text.replace("%", "%%")


def flag(name: str) -> str:
    """The option as it is typed, from the name of its field."""
    return "--" + name.replace("_", "-")


def options_of(cls: type) -> Mapping[str, Option]:
    """The options that a dataclass declares, by the names of their fields, in their order."""
    types = get_type_hints(cls)
    return {
        spec.name: Option(
            name=spec.name,
            kind=_kind(types[spec.name]),
            may_be_none=NoneType in get_args(types[spec.name]),
            default=spec.default,
            rules=spec.metadata["rules"],
        )
        for spec in fields(cls)
    }


def check(options: object) -> None:
    """Check every field of an instance. Raises ConfigError for the first that is not allowed."""
    for name, declared in options_of(type(options)).items():
        declared.check(getattr(options, name))


def to_json(options: object, *, inherited_only: bool = False) -> dict[str, Any]:
    """The fields of an instance as JSON can hold them.

    inherited_only leaves out those that a run which continues this one does not take over.
    """
    return {
        name: _plain(getattr(options, name))
        for name, declared in options_of(type(options)).items()
        if not (inherited_only and declared.rules.resume == "own")
    }


def values_from_json(cls: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields, from what to_json() gave, in this or an earlier version.

    Raises:
        ConfigError: an option is unknown, or a value has the wrong type.
    """
    options = options_of(cls)
    names = {declared.rules.earlier_name or name: name for name, declared in options.items()}
    values = {}
    for stored_name, value in stored.items():
        name = names.get(stored_name, stored_name)
        if name not in options:
            raise ConfigError(f"{flag(stored_name)} is not an option of this version")
        values[name] = options[name].value_from_json(value)
    return values


def continued(cls: type, typed: Mapping[str, Any], inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run that continues another: those that are typed, else those of that run.

    Raises:
        ConfigError: an option that must stay the same is typed with another value.
    """
    for name, declared in options_of(cls).items():
        before = inherited.get(name, declared.default)
        if declared.rules.resume == "fixed" and typed.get(name, before) != before:
            raise ConfigError(
                f"{declared.flag} {typed[name]} is not possible: the run that is continued has "
                f"{before}; omit {declared.flag}, or omit --resume"
            )
    return {**inherited, **typed}


def read_command_line(cls: type, argv: Sequence[str], **texts: Any) -> dict[str, Any]:
    """The values that are typed, by the names of their fields, and nothing for other options.

    texts go to argparse: prog, usage, description, epilog. `--help` prints and raises
    SystemExit(0).

    Raises:
        ConfigError: an option is unknown, or a value has the wrong type.
    """
    parser = _Parser(
        **texts,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for declared in options_of(cls).values():
        name = declared.rules.group
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        declared.add_to(groups[name])
    typed = vars(parser.parse_args(argv))
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see: python {self.prog} --help")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _kind(annotation: Any) -> type:
    """The type of the values other than None, such as tuple for tuple[str, ...]."""
    if isinstance(annotation, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    kind: type = get_origin(annotation) or annotation
    return kind


def _converter(kind: type) -> Any:
    """A function from text, with the name that argparse shows when a value does not fit."""

    def convert(text: str) -> Any:
        if not text:
            raise ValueError("empty")
        return kind(text)

    words = {int: "whole number", float: "number", Path: "folder", str: "text"}
    convert.__name__ = words[kind]
    return convert
