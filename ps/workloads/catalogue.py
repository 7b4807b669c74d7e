"""A workload by its name, and the choice that --workload auto makes. Loads torch only in load()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.settings.log import log
from ps.workloads import mnist_files

if TYPE_CHECKING:
    from ps.workload import Workload

FETCH_BOUND_S = 600.0
AUTO_FETCH_BOUND_S = 20.0


def resolve(config: Config) -> str:
    """Get the data where it needs getting, and return the name that load() takes.

    For one process per host. Blocks for FETCH_BOUND_S at most.

    Raises:
        ConfigError: the data that was asked for cannot be had.
    """
    if config.workload not in ("auto", "mnist"):
        return config.workload
    bound_s = AUTO_FETCH_BOUND_S if config.workload == "auto" else FETCH_BOUND_S
    try:
        mnist_files.fetch_if_needed(config.data_dir, config.data_mirror, bound_s=bound_s)
    except ConfigError as error:
        if config.workload == "mnist":
            raise
        log.warning("NOT MNIST, training on generated digits instead: %s", error)
        return "digits"
    return "mnist"


def load(name: str, config: Config) -> Workload:
    """Make the workload, from data that is there.

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
