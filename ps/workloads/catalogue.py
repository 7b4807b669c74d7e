"""A workload by its name, and the choice that --workload auto makes. Only load() loads torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.settings.log import log
from ps.workloads.mirror import Mirror
from ps.workloads.mnist_files import fetch_if_needed

if TYPE_CHECKING:
    from ps.workload import Workload

FETCH_TIMEOUT_S = 600.0
AUTO_FETCH_TIMEOUT_S = 20.0


def resolve(config: Config, *, fetch: Callable[..., None] = fetch_if_needed) -> str:
    """Fetch the data if it is needed and missing, and return the name that load() takes.

    Only one process of the host may call it. Blocks for FETCH_TIMEOUT_S at most.

    Raises:
        ConfigError: the data that was asked for cannot be fetched.
    """
    if config.workload not in ("auto", "mnist"):
        return config.workload
    timeout_s = AUTO_FETCH_TIMEOUT_S if config.workload == "auto" else FETCH_TIMEOUT_S
    try:
        fetch(config.data_dir, Mirror(config.data_mirror), timeout_s=timeout_s)
    except ConfigError as error:
        if config.workload == "mnist":
            raise
        log.warning("NOT MNIST, training on generated digits instead: %s", error)
        return "digits"
    return "mnist"


def load(name: str, config: Config) -> Workload:
    """Make the workload, from data that is already there.

    Raises:
        ConfigError: the plug-in or the data is unusable.
    """
    from ps.workloads.checks import check, load_plug_in

    if name == "mnist":
        from ps.workloads.mnist import build
    elif name == "digits":
        from ps.workloads.digits import build
    else:
        return load_plug_in(name, config)
    workload = build(config)
    check(workload, f"--workload {name}")
    return workload
