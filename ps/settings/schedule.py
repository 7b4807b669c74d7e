"""Learning-rate schedules: the factor on --lr as a function of the number of the update."""

from __future__ import annotations

import math
from collections.abc import Callable

from ps.settings.errors import ConfigError

FORMS = "constant, linear, cosine or step:UPDATES:FACTOR"


def schedule_factor(spec: str) -> Callable[[int, int], float]:
    """Read a schedule as it is typed, and return factor(update, total_updates).

    update counts from 0. `linear` and `cosine` go from 1 towards 0 over the whole job;
    `step:UPDATES:FACTOR` multiplies by FACTOR after every UPDATES updates.

    Raises:
        ConfigError: the text has none of the forms.
    """
    name, *rest = spec.split(":")
    if name == "constant" and not rest:
        return lambda update, total: 1.0
    if name == "linear" and not rest:
        return lambda update, total: 1.0 - update / total
    if name == "cosine" and not rest:
        return lambda update, total: 0.5 * (1.0 + math.cos(math.pi * update / total))
    if name == "step" and len(rest) == 2:
        return _step(spec, *rest)
    raise ConfigError(f"--lr-schedule must be {FORMS}, got {spec!r}")


def _step(spec: str, every_text: str, factor_text: str) -> Callable[[int, int], float]:
    try:
        every, factor = int(every_text), float(factor_text)
    except ValueError:
        every, factor = 0, 0.0
    if every < 1 or not 0.0 < factor <= 1.0:
        raise ConfigError(
            f"--lr-schedule step:UPDATES:FACTOR needs UPDATES of 1 or more and FACTOR "
            f"above 0 and at most 1, got {spec!r}"
        )
    return lambda update, total: factor ** (update // every)


def factor_by_version(spec: str, total_updates: Callable[[], int]) -> Callable[[int], float] | None:
    """The factor for the update that the version counts up to; None where it is always 1.

    total_updates is asked each time, as it changes when a run goes on.

    Raises:
        ConfigError: as schedule_factor().
    """
    if spec == "constant":
        return None
    factor = schedule_factor(spec)

    def by_version(version: int) -> float:
        total = total_updates()
        # Rounds without a trainer that left make more updates than planned.
        return factor(min(version, total), total)

    return by_version
