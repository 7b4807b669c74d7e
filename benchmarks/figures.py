"""What rates mean: medians, shares, and whether a figure is as good as claimed. Pure.

Rates come as one list per contender with one entry per round; None where it was not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Rates = Mapping[str, Sequence[float | None]]

TARGET, BOUND, MISSED, NOT_MEASURED = "target reached", "ok", "MISSED", "not measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """What is claimed: the rate of `ours` as a share of that of `peer`."""

    ours: str
    peer: str
    least: float
    target: float

    @property
    def name(self) -> str:
        return f"{self.ours} / {self.peer}"

    def verdict(self, share: float | None) -> str:
        if share is None:
            return NOT_MEASURED
        if share >= self.target:
            return TARGET
        return BOUND if share >= self.least else MISSED


@dataclass(frozen=True, slots=True)
class Outcome:
    """A figure as it was measured."""

    figure: Figure
    rounds: tuple[float, ...]
    """The share in each round in which both were measured."""

    @property
    def share(self) -> float | None:
        return median(self.rounds)

    @property
    def verdict(self) -> str:
        return self.figure.verdict(self.share)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.figure.name,
            **asdict(self.figure),
            "share": self.share,
            "rounds": list(self.rounds),
            "verdict": self.verdict,
        }


def median(values: Sequence[float | None]) -> float | None:
    """The median of those that were measured."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def shares(ours: Sequence[float | None], peer: Sequence[float | None]) -> tuple[float, ...]:
    """ours / peer in each round in which both were measured.

    The machine may be slower in one round than in the next; within a round it is much the same.
    """
    pairs = zip(ours, peer, strict=True)
    return tuple(a / b for a, b in pairs if a is not None and b is not None)


def outcomes(rates: Rates, figures: Sequence[Figure]) -> list[Outcome]:
    """Each figure with what was measured for it."""
    results = []
    for figure in figures:
        both = figure.ours in rates and figure.peer in rates
        rounds = shares(rates[figure.ours], rates[figure.peer]) if both else ()
        results.append(Outcome(figure, rounds))
    return results


def rates_table(
    rates: Rates, base: str, notes: Mapping[str, str], incomparable: Collection[str] = ()
) -> str:
    """A line per contender: median, slowest and fastest round, share of the base, and its note.

    The incomparable ones train something else than the base, so that a share would mean nothing.
    """
    rows = [("samples/s", "median", "least", "most", f"of {base}", "")]
    for name, values in rates.items():
        measured = [value for value in values if value is not None]
        with_share = base in rates and name not in incomparable
        share = median(shares(values, rates[base])) if with_share else None
        numbers = ["-"] * 3
        if measured:
            numbers = [f"{of(measured):.0f}" for of in (statistics.median, min, max)]
        text = "-" if share is None else f"{share:.3f}"
        rows.append((name, numbers[0], numbers[1], numbers[2], text, notes.get(name, "")))
    return _aligned(rows)


def figures_table(results: Sequence[Outcome]) -> str:
    """A line per figure: its share, what it must be at least, its target, and the verdict."""
    rows = [("median of the shares", "share", "at least", "target", "")]
    for result in results:
        figure = result.figure
        share = "-" if result.share is None else f"{result.share:.3f}"
        rows.append(
            (figure.name, share, f"{figure.least:.2f}", f"{figure.target:.2f}", result.verdict)
        )
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """The first and the last column to the left, those between to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [f"{text:>{width}}" for text, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{first:{widths[0]}}", *cells, last]).rstrip())
    return "\n".join(lines)
