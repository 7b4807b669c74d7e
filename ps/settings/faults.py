"""The faults that --inject can name. What a fault then does to a process is in ps.job.injection."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ps.settings.errors import ConfigError

FORMS = (
    "kill|stop|raise|nan|hang|deadlock|exit0:RANK@UPDATE, slow:RANKxFACTOR with 1 or more, or "
    "leak:RANK@MIB_PER_S; only in the first attempt, not after a restart"
)
AT_UPDATE = ("kill", "stop", "raise", "nan", "hang", "deadlock", "exit0")
_NUMBER = "[0-9]{1,9}"
_FACTOR = r"[1-9][0-9]{0,8}(?:\.[0-9]{1,9})?"
_PATTERN = re.compile(
    rf"({'|'.join(AT_UPDATE)}|leak):({_NUMBER})@({_NUMBER})|(slow):({_NUMBER})x({_FACTOR})"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one rank."""

    kind: str
    rank: int
    amount: float
    """The update at which it happens; the MiB per second of a leak; how many times slower."""

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.kind}:{self.rank}{'x' if self.kind == 'slow' else '@'}{self.amount:g}"


def parse_fault(text: str) -> Fault:
    """Read a fault as it is typed.

    Raises:
        ConfigError: the text has none of the forms.
    """
    found = _PATTERN.fullmatch(text.replace(" ", ""))
    if not found:
        raise ConfigError(f"--inject must be {FORMS}, got {text!r}")
    kind, rank, amount = (part for part in found.groups() if part is not None)
    return Fault(kind, int(rank), float(amount))
