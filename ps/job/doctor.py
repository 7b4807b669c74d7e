"""What a run would find on this machine: one finding a check, with what to type if it is bad.

The checks judge readings that are handed to them. Nothing is started, fetched, ended or removed.
Loads torch only in all_checks().
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket  # noqa: TID251
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ps.host import resources
from ps.host.processes import Process, list_processes
from ps.host.timeouts import within
from ps.job.footprint import RANK_BYTES, Footprint, disk_bytes, measure, memory_bytes
from ps.job.rundir import PARENT
from ps.settings.config import Config
from ps.settings.errors import ConfigError, LaunchError, PsError
from ps.workloads import mnist_files
from ps.workloads.catalogue import AUTO_FETCH_TIMEOUT_S, FETCH_TIMEOUT_S

CHEAP_BOUND_S = 5.0
BOUND_S = 60.0
HOST_NAME_BOUND_S = 2.0

OPEN_FILES = 64
OPEN_FILES_PER_RANK = 16
LEAST_DISK_BYTES = 16 << 20
TIGHT_FRACTION = 0.8
MAX_NAMED = 5

Status = Literal["ok", "warning", "failed"]
Judgement = tuple[Status, str]
Check = Callable[[], Judgement]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    text: str
    """One line: what was seen and, if that is not ok, what to do."""


def cheap_checks(config: Config, world_size: int) -> list[Finding]:
    """Those that every start can afford: milliseconds, but CHEAP_BOUND_S for one that hangs."""
    return [_look(name, check, CHEAP_BOUND_S) for name, check in _cheap(config, world_size).items()]


def all_checks(config: Config, world_size: int) -> list[Finding]:
    """Takes seconds: loads torch and the workload. A check that hangs takes BOUND_S."""
    found = {finding.name: finding for finding in cheap_checks(config, world_size)}
    footprints: list[Footprint] = []
    for name, check in _thorough(config, world_size, footprints).items():
        found[name] = _look(name, check, BOUND_S)
    for footprint in footprints:
        for name, check in _sized(config, world_size, footprint).items():
            found[name] = _look(name, check, CHEAP_BOUND_S)
    return list(found.values())


def require(findings: Iterable[Finding]) -> None:
    """Let a run start only where nothing has failed.

    Raises:
        LaunchError: something has; names the first.
    """
    for finding in findings:
        if finding.status == "failed":
            raise LaunchError(f"{finding.name}: {finding.text}")


def worst(findings: Iterable[Finding]) -> Status:
    statuses: Sequence[Status] = ("ok", "warning", "failed")
    return max((finding.status for finding in findings), key=statuses.index, default="ok")


def _cheap(config: Config, world_size: int) -> Mapping[str, Check]:
    ranks = f"{_count(world_size, 'rank')} without model and data"
    return {
        "platform": lambda: system(sys.platform),
        "loopback": loopback,
        "open files": lambda: open_files(*_open_file_limits(), world_size),
        "memory": lambda: memory(world_size * RANK_BYTES, _available_memory(), ranks),
        "disk": lambda: _run_disk(config, LEAST_DISK_BYTES, "what a run leaves at least"),
    }


def _thorough(config: Config, world_size: int, footprints: list[Footprint]) -> Mapping[str, Check]:
    """Checks whose results do not depend on each other, but for the footprint that one adds."""

    def workload() -> Judgement:
        name = _name_to_measure(config)
        footprints.append(measure(name, config))
        return sizes(name if config.workload == "auto" else config.workload, footprints[0], config)

    return {
        "host name": lambda: host_name(socket.gethostname(), _resolve),
        "cores": lambda: cores(resources.usable_cores(), config, world_size),
        "/dev/shm": lambda: dev_shm(Path("/dev/shm")),
        "torch": torch_build,
        "rpc": lambda: rpc(_rpc_fault(), config.link, sys.platform),
        "gpus": lambda: _gpus(config),
        "data": lambda: data(config, _mnist_fault(config)),
        "workload": workload,
        "leftover processes": lambda: leftover_processes(list_processes()),
        "leftover files": lambda: leftover_files(config, time.time()),
    }


def _sized(config: Config, world_size: int, footprint: Footprint) -> Mapping[str, Check]:
    """Checks that replace cheap ones once the size of the model is known."""
    needed = memory_bytes(footprint, config, world_size)
    model = "the model on the GPU and" if config.num_gpus else "model, optimizer and"
    ranks = f"{_count(world_size, 'rank')} with {model} a checkpoint, without activations and data"
    files = f"{_count(config.keep + 1, 'checkpoint')} and model.pt"
    return {
        "memory": lambda: memory(needed, _available_memory(), ranks),
        "disk": lambda: _run_disk(config, disk_bytes(footprint, config.keep), files),
    }


def _look(name: str, check: Check, bound_s: float) -> Finding:
    status: Status = "failed"
    try:
        status, text = within(bound_s, check, "check")
    except PsError as error:
        text = str(error)
    except (Exception, SystemExit) as error:
        text = f"could not be checked: {type(error).__name__}: {error}"
    return Finding(name, status, _in_one_line(text))


def system(name: str) -> Judgement:
    """name is as sys.platform has it."""
    if name in ("linux", "darwin"):
        return "ok", f"{name}, Python {platform.python_version()}"
    return "failed", f"torch has no RPC on {name}; use Linux or macOS (on Windows: WSL)"


def loopback(address: str = "127.0.0.1") -> Judgement:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            reason = f"{address} cannot be bound ({error.strerror})"
            return "failed", f"{reason}, and all ranks meet there; type: ip link set lo up"
    return "ok", f"{address} can be bound"


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


def _resolve(name: str) -> str:
    found = within(HOST_NAME_BOUND_S, lambda: socket.getaddrinfo(name, None), "check")
    return str(found[0][4][0])


def open_files(soft: int | None, hard: int | None, world_size: int) -> Judgement:
    """The limits of one process; None is no limit."""
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * world_size
    if soft is None or soft >= needed:
        return "ok", f"{'any number' if soft is None else soft} allowed, about {needed} needed"
    seen = f"{soft} allowed, about {needed} needed for {_count(world_size, 'rank')}"
    if hard is None or hard >= needed:
        return "failed", f"{seen}; type: ulimit -n {needed}"
    return "failed", (
        f"{seen}, and the hard limit is {hard}; have it raised "
        f"(in a container: docker run --ulimit nofile={needed})"
    )


def _open_file_limits() -> tuple[int | None, int | None]:
    import resource  # not everywhere

    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def memory(needed: int, available: int | None, ranks: str) -> Judgement:
    """In bytes; None is not known. ranks tells what the memory is for."""
    seen = f"an estimated {_size(needed)} for {ranks}"
    if available is None:
        return "warning", f"{seen}; how much is free cannot be read on this system"
    advice = "start fewer ranks or free some (in a container: docker run --memory)"
    return _fits(needed, available, f"{seen}; {_size(available)} available", advice)


def _available_memory() -> int | None:
    try:
        return resources.available_memory_bytes()
    except OSError:
        return None


def disk(needed: int, free: int, files: str, folder: Path) -> Judgement:
    """In bytes. files tells what they are for."""
    seen = f"{_size(needed)} for {files}; {_size(free)} free in {folder}"
    return _fits(needed, free, seen, "free some, or give --run-dir on another disk")


def _run_disk(config: Config, needed: int, files: str) -> Judgement:
    folder = config.run_dir or PARENT
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return "failed", f"{place} cannot be written; give another --run-dir"
    return disk(needed, shutil.disk_usage(place).free, files, place)


def _fits(needed: int, available: int, seen: str, advice: str) -> Judgement:
    if needed > available:
        return "failed", f"{seen}; {advice}"
    if needed > TIGHT_FRACTION * available:
        return "warning", f"{seen}, which is tight; {advice}"
    return "ok", seen


def cores(usable: int, config: Config, world_size: int) -> Judgement:
    num_trainers = max(1, world_size - 1)
    threads = config.threads or resources.threads_per_pass(usable, num_trainers)
    seen = f"{usable} usable; {_budget(threads, num_trainers, config, world_size)}"
    if num_trainers * threads <= usable:
        return "ok", seen
    advice = "lower --threads" if config.threads else f"type --nproc_per_node={usable + 1}"
    return "warning", f"{seen}, which is more threads than cores; {advice}"


def _budget(threads: int, num_trainers: int, config: Config, world_size: int) -> str:
    several, trainers = _count(threads, "thread"), _count(num_trainers, "trainer")
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
    return "ok", f"{_size(usage.total)}, {_size(usage.used)} taken; {why}"


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


def _rpc_fault() -> str | None:
    from ps.links.rpc import check_rpc

    try:
        check_rpc()
    except LaunchError as error:
        return str(error)
    return None


def _gpus(config: Config) -> Judgement:
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
        return "ok", f"the files of MNIST in {config.data_dir} are whole{chosen}"
    how = f"a run will fetch them from {config.data_mirror}"
    if name == "auto":
        how += f" within {AUTO_FETCH_TIMEOUT_S:.0f} s, or take digits"
    return "warning", f"{mnist_fault}; put the four files of MNIST there, or {how}"


def _mnist_fault(config: Config) -> str | None:
    if config.workload not in ("auto", "mnist"):
        return None
    try:
        for name in mnist_files.SHA256:
            mnist_files.read(config.data_dir, name)
    except ConfigError as error:
        return str(error)
    return None


def _name_to_measure(config: Config) -> str:
    """The built-in workloads have the same net, and digits needs no files."""
    if config.workload not in ("auto", "mnist"):
        return config.workload
    return "digits" if _mnist_fault(config) else "mnist"


def sizes(name: str, footprint: Footprint, config: Config) -> Judgement:
    return "ok", (
        f"{name} can be made: weights {_size(footprint.weights)}, "
        f"{config.optimizer} holds {_size(footprint.optimizer)}"
    )


def leftover_processes(processes: Sequence[Process]) -> Judgement:
    """processes are all of this host, whoever they belong to."""
    by_pid = {process.pid: process for process in processes}
    left = [
        process
        for process in processes
        if process.is_own and _runs_launch(process) and _is_orphan(process, by_pid)
    ]
    if not left:
        return "ok", "none"
    named = ", ".join(
        f"pid {process.pid} since {process.age_s / 60:.0f} min" for process in left[:MAX_NAMED]
    )
    pids = " ".join(str(process.pid) for process in left)
    return "warning", (
        f"{_count(len(left), 'rank')} whose torchrun is gone ({named}"
        f"{', ...' if len(left) > MAX_NAMED else ''}); to end them: kill {pids}"
    )


def _runs_launch(process: Process) -> bool:
    """Whether it is a rank: torchrun itself has launch.py among its arguments too."""
    script = next((word for word in process.command[1:] if not word.startswith("-")), "")
    return Path(script).name == "launch.py"


def _is_orphan(process: Process, by_pid: Mapping[int, Process]) -> bool:
    """Whether its parent has ended, so that pid 1 or the user's systemd has become its parent."""
    if process.parent == 0:
        return False
    parent = by_pid.get(process.parent)
    if parent is None:
        return True
    words = [Path(word).name for word in parent.command]
    if any(word.startswith(("torchrun", "torch.distributed")) for word in words):
        return False  # in a container it may be pid 1
    return parent.pid == 1 or words[:1] == ["systemd"]


def leftover_files(config: Config, now: float) -> Judgement:
    """now is of the clock of the files. What was touched lately may be in use, and is no leftover:
    nothing takes longer than a fetch."""
    run_dirs = {path.resolve() for path in (*PARENT.glob("*"), config.run_dir or PARENT)}
    found = [
        *(path for folder in run_dirs for path in folder.glob(".*.partial")),
        *(path for folder in run_dirs for path in folder.glob("*/.*.partial")),
        *(config.data_dir.resolve() / "MNIST" / "raw").glob(".fetch-*"),
    ]
    left = sorted(path for path in found if _age_s(path, now) > FETCH_TIMEOUT_S)
    if not left:
        return "ok", "none"
    names = shlex.join(str(path) for path in left[:MAX_NAMED])
    more = f" (and {len(left) - MAX_NAMED} more)" if len(left) > MAX_NAMED else ""
    return "warning", (
        f"{_count(len(left), 'half-written file')} of a run that was killed; "
        f"to remove them: rm -r {names}{more}"
    )


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:  # it is gone by now
        return 0.0


def _size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.1f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _in_one_line(text: str) -> str:
    """And without the parts of file names that cannot be printed."""
    return " ".join(text.split()).encode(errors="backslashreplace").decode()
