"""What a run would find on this machine: the checks of every start, and thorough ones.

Loads torch only in all_checks().
"""

from __future__ import annotations

import shutil
import socket  # noqa: TID251
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ps.host import resources
from ps.host.processes import list_processes
from ps.host.timeouts import call_with_timeout
from ps.job.footprint import Footprint, disk_bytes, measure, memory_bytes
from ps.job.leftovers import leftover_files, leftover_processes
from ps.job.preflight import (
    CHECK_TIMEOUT_S,
    Check,
    CheckResult,
    Judgement,
    available_memory,
    count,
    make,
    memory,
    preflight_checks,
    run_disk,
    size,
)
from ps.settings.config import Config
from ps.settings.errors import ConfigError, LaunchError
from ps.workloads import mnist_files
from ps.workloads.catalogue import AUTO_FETCH_TIMEOUT_S

THOROUGH_TIMEOUT_S = 60.0
HOST_NAME_TIMEOUT_S = 2.0


def all_checks(
    config: Config, world_size: int, timeout_s: float = THOROUGH_TIMEOUT_S
) -> list[CheckResult]:
    """Takes seconds: loads torch and the workload. Each check that hangs takes timeout_s."""
    footprints: list[Footprint] = []
    results = [
        *preflight_checks(config, world_size),
        *make(_thorough(config, world_size, footprints), timeout_s),
    ]
    for footprint in footprints:
        results += make(_sized(config, world_size, footprint), CHECK_TIMEOUT_S)
    return list({result.name: result for result in results}.values())  # later ones replace


def _thorough(config: Config, world_size: int, footprints: list[Footprint]) -> Mapping[str, Check]:
    """Checks that do not depend on each other. The one of the workload adds its footprint."""

    def workload() -> Judgement:
        name = name_to_measure(config)
        footprints.append(measure(name, config))
        return sizes(name if config.workload == "auto" else config.workload, footprints[0], config)

    return {
        "host name": lambda: host_name(socket.gethostname(), resolve),
        "cores": lambda: cores(resources.usable_cores(), config, world_size),
        "/dev/shm": lambda: dev_shm(Path("/dev/shm")),
        "torch": torch_build,
        "rpc": lambda: rpc(rpc_fault(), config.link, sys.platform),
        "gpus": lambda: gpus(config),
        "data": lambda: data(config, mnist_fault(config)),
        "workload": workload,
        "leftover processes": lambda: leftover_processes(list_processes()),
        "leftover files": lambda: leftover_files(config, time.time()),
    }


def _sized(config: Config, world_size: int, footprint: Footprint) -> Mapping[str, Check]:
    """Checks that replace those of the preflight once the size of the model is known."""
    needed = memory_bytes(footprint, config, world_size)
    model = "the model on the GPU and" if config.num_gpus else "model, optimizer and"
    ranks = f"{count(world_size, 'rank')} with {model} a checkpoint, without activations and data"
    files = f"{count(config.keep + 1, 'checkpoint')} and model.pt"
    limit = config.memory_limit_bytes
    return {
        "memory": lambda: memory(needed, available_memory(), limit, ranks),
        "disk": lambda: run_disk(config, disk_bytes(footprint, config.keep), files),
    }


def host_name(name: str, resolve: Callable[[str], str]) -> Judgement:
    """resolve gives an address, or raises OSError or UnicodeError.

    A bad name is no fault: the ranks meet on 127.0.0.1.
    """
    try:
        return "ok", f"{name} is {resolve(name)}"
    except (OSError, UnicodeError):
        return "ok", (
            f"{name} does not resolve; a run does not need it, but torchrun may wait for it: "
            "type make train, or give torchrun --local-addr=127.0.0.1"
        )


def resolve(name: str, timeout_s: float = HOST_NAME_TIMEOUT_S) -> str:
    """The first address of a host. Blocks for timeout_s at most.

    Raises:
        OSError: there is none, or no answer in time.
    """
    found = call_with_timeout(timeout_s, lambda: socket.getaddrinfo(name, None), "check")
    return str(found[0][4][0])


def cores(usable: int, config: Config, world_size: int) -> Judgement:
    num_trainers = max(1, world_size - 1)
    threads = config.threads or resources.threads_per_pass(usable, num_trainers)
    seen = f"{usable} usable; {_budget(threads, num_trainers, config, world_size)}"
    if num_trainers * threads <= usable:
        return "ok", seen
    advice = "lower --threads" if config.threads else f"type --nproc_per_node={usable + 1}"
    return "warning", f"{seen}, which is more threads than cores; {advice}"


def _budget(threads: int, num_trainers: int, config: Config, world_size: int) -> str:
    several, trainers = count(threads, "thread"), count(num_trainers, "trainer")
    if world_size == 1:
        return f"the one process computes with {several}"
    if config.compute == "server":
        return f"server: {several} for each of {trainers}, trainer: 1 thread"
    return f"trainer: {several} for each of {trainers}, server: {several}"


def dev_shm(folder: Path) -> Judgement:
    why = "it is not used: the memory that ranks share has no name in a file system"
    if not folder.exists():
        return "ok", f"not there; {why}"
    usage = shutil.disk_usage(folder)
    return "ok", f"{size(usage.total)}, {size(usage.used)} taken; {why}"


def torch_build() -> Judgement:
    try:
        import torch
    except Exception as error:
        return "failed", f"cannot be loaded: {type(error).__name__}: {error}; type: make setup"
    return "ok", f"torch {torch.__version__}"


def rpc(fault: str | None, link: str, system_name: str) -> Judgement:
    """fault is what is wrong with RPC in this build of torch; link is --link."""
    if fault is None:
        return "ok", "this build of torch has it"
    if link == "local":
        return "ok", "this build of torch has none, and --link local does without"
    if link == "auto" and system_name == "linux":
        return "warning", f"{fault}; --link auto does without, if there is memory to share"
    return "failed", fault


def rpc_fault() -> str | None:
    """What is wrong with RPC in this build of torch."""
    from ps.links.rpc import check_rpc

    try:
        check_rpc()
    except LaunchError as error:
        return str(error)
    return None


def gpus(config: Config) -> Judgement:
    """Raises:
    ConfigError: there are fewer than --num-gpus.
    """
    import torch

    from ps.model.devices import choose_devices

    seen = torch.cuda.device_count()
    choose_devices(config.num_gpus, seen)
    return "ok", f"{seen} seen, {config.num_gpus} asked for with --num-gpus"


def data(config: Config, mnist_fault: str | None) -> Judgement:
    """mnist_fault is what is wrong with the files of MNIST."""
    name = config.workload
    if name == "digits":
        return "ok", "digits are generated"
    if name not in ("auto", "mnist"):
        return "ok", f"what {name} reads is not known here"
    if mnist_fault is None:
        chosen = ", so auto takes mnist" if name == "auto" else ""
        return "ok", f"the files of MNIST in {config.data_dir} are complete{chosen}"
    how = f"a run will fetch them from {config.data_mirror}"
    if name == "auto":
        how += f" within {AUTO_FETCH_TIMEOUT_S:.0f} s, or take digits"
    return "warning", f"{mnist_fault}; put the four files of MNIST there, or {how}"


def mnist_fault(config: Config) -> str | None:
    """What is wrong with the files of MNIST, if the workload may need them."""
    if config.workload not in ("auto", "mnist"):
        return None
    try:
        for name in mnist_files.SHA256:
            mnist_files.read(config.data_dir, name)
    except ConfigError as error:
        return str(error)
    return None


def name_to_measure(config: Config) -> str:
    """The built-in workloads have the same net, and digits needs no files."""
    if config.workload not in ("auto", "mnist"):
        return config.workload
    return "digits" if mnist_fault(config) else "mnist"


def sizes(name: str, footprint: Footprint, config: Config) -> Judgement:
    return "ok", (
        f"{name} can be made: weights {size(footprint.weights)}, "
        f"{config.optimizer} holds {size(footprint.optimizer)}"
    )
