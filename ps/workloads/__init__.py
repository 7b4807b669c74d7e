"""The built-in workloads, and the choice that --workload auto makes."""

from __future__ import annotations

from dataclasses import replace

from ps.config import Config
from ps.errors import ConfigError
from ps.log import log
from ps.workload import Workload, check, load_plug_in
from ps.workloads import digits, mnist

FETCH_BOUND_S = 600.0
AUTO_FETCH_BOUND_S = 20.0


def prepare(config: Config) -> tuple[str, Workload]:
    """Get the data, fetching it where needed, and return the resolved name with the workload.

    For one process per host; the others then load() that name. May block for FETCH_BOUND_S.

    Raises:
        ConfigError: the data cannot be had, or the plug-in is unusable.
    """
    if config.workload == "auto":
        return _prepare_auto(config)
    if config.workload == "mnist":
        mnist.fetch_if_needed(config.data_dir, config.data_mirror, bound_s=FETCH_BOUND_S)
    return config.workload, load(config.workload, config)


def load(name: str, config: Config) -> Workload:
    """Make a workload from data that is there.

    Raises:
        ConfigError: as prepare().
    """
    if name not in ("mnist", "digits"):
        return load_plug_in(name, replace(config, workload=name))
    workload = mnist.build(config) if name == "mnist" else digits.build(config)
    check(workload, f"--workload {name}")
    return workload


def _prepare_auto(config: Config) -> tuple[str, Workload]:
    try:
        mnist.fetch_if_needed(config.data_dir, config.data_mirror, bound_s=AUTO_FETCH_BOUND_S)
        return "mnist", load("mnist", config)
    except ConfigError as error:
        log.warning("NOT MNIST: training on generated digits, because %s", error)
        return "digits", load("digits", config)
