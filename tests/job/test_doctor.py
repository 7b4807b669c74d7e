"""python -m ps doctor: what each check says of good and bad readings, and the command itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from ps import __main__ as command
from ps.host import resources, signals
from ps.host.processes import Process, list_processes
from ps.job import doctor
from ps.job.doctor import Finding
from ps.settings.config import Config
from ps.settings.errors import LaunchError
from ps.workloads import mnist_files
from tests.jobs import ROOT

MIB, GIB = 1 << 20, 1 << 30
NOT_OF_THIS_HOST = "192.0.2.1"  # reserved for documentation
CHEAP = ["platform", "loopback", "open files", "memory", "disk"]
PYTHON, TORCHRUN = "/usr/bin/python3", ("/usr/bin/python3", "/usr/bin/torchrun", "launch.py")


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# Each check on readings


@pytest.mark.parametrize("name", ["linux", "darwin"])
def test_systems_that_have_rpc_are_ok(name: str) -> None:
    assert doctor.system(name)[0] == "ok"


def test_a_system_without_rpc_is_told_what_to_use() -> None:
    assert doctor.system("win32") == (
        "failed",
        "torch has no RPC on win32; use Linux or macOS (on Windows: WSL)",
    )


def test_the_loopback_of_this_host_can_be_bound() -> None:
    assert doctor.loopback() == ("ok", "127.0.0.1 can be bound")


def test_an_address_that_cannot_be_bound_is_named_with_the_reason() -> None:
    status, text = doctor.loopback(NOT_OF_THIS_HOST)
    assert status == "failed"
    assert text.startswith(f"{NOT_OF_THIS_HOST} cannot be bound (Cannot assign")
    assert "ip link set lo up" in text


@pytest.mark.parametrize(
    ("soft", "hard", "world_size", "status", "end"),
    [
        (None, None, 3, "ok", "any number allowed, about 112 needed"),
        (112, 112, 3, "ok", "112 allowed, about 112 needed"),
        (111, None, 3, "failed", "needed for 3 ranks; type: ulimit -n 112"),
        (111, 4096, 3, "failed", "needed for 3 ranks; type: ulimit -n 112"),
        (64, 100, 3, "failed", "(in a container: docker run --ulimit nofile=112)"),
        (1024, 1024, 100, "failed", "(in a container: docker run --ulimit nofile=1664)"),
    ],
)
def test_open_files_must_do_for_every_rank(
    soft: int | None, hard: int | None, world_size: int, status: str, end: str
) -> None:
    seen, text = doctor.open_files(soft, hard, world_size)
    assert seen == status
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("needed", "available", "status"),
    [
        (80 * MIB, 100 * MIB, "ok"),
        (81 * MIB, 100 * MIB, "warning"),
        (100 * MIB, 100 * MIB, "warning"),
        (101 * MIB, 100 * MIB, "failed"),
        (MIB, 0, "failed"),
    ],
)
def test_memory_and_disk_warn_when_it_gets_tight_and_fail_when_it_is_not_enough(
    needed: int, available: int, status: str
) -> None:
    checked = [
        doctor.memory(needed, available, "3 ranks"),
        doctor.disk(needed, available, "files", Path("runs")),
    ]
    for (seen, text), advice in zip(checked, ("docker run --memory", "--run-dir"), strict=True):
        assert seen == status
        assert (advice in text) == (status != "ok")
        assert ("which is tight" in text) == (status == "warning")


def test_memory_and_disk_are_told_in_units_for_people() -> None:
    assert doctor.memory(750 * MIB, 3 * GIB // 2, "3 ranks")[1] == (
        "an estimated 750.0 MiB for 3 ranks; 1.5 GiB available"
    )
    assert doctor.disk(2 * GIB, 5 * GIB, "3 checkpoints", Path("runs"))[1] == (
        "2.0 GiB for 3 checkpoints; 5.0 GiB free in runs"
    )


def test_memory_that_cannot_be_read_is_a_warning() -> None:
    status, text = doctor.memory(750 * MIB, None, "3 ranks")
    assert status == "warning"
    assert "cannot be read on this system" in text


@pytest.mark.parametrize("error", [OSError("no"), socket.gaierror(-2, "no"), UnicodeError("no")])
def test_a_host_name_that_does_not_resolve_is_no_fault_but_is_told(error: Exception) -> None:
    def fail(name: str) -> NoReturn:
        raise error

    status, text = doctor.host_name("box", fail)
    assert status == "ok"
    assert text.startswith("box does not resolve; a run does not need it")
    assert "--local-addr=127.0.0.1" in text
    assert doctor.host_name("box", lambda name: "10.0.0.7") == ("ok", "box is 10.0.0.7")


def test_a_name_server_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "HOST_NAME_BOUND_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: time.sleep(3))
    started_at = time.monotonic()
    status, text = doctor.host_name("box", doctor._resolve)
    assert time.monotonic() - started_at < 1
    assert (status, text[:20]) == ("ok", "box does not resolve")


@pytest.mark.parametrize(
    ("usable", "options", "world_size", "status", "text"),
    [
        (8, {}, 3, "ok", "8 usable; server: 4 threads for each of 2 trainers, trainer: 1 thread"),
        (2, {}, 1, "ok", "2 usable; the one process computes with 2 threads"),
        (
            *(4, {"compute": "trainer"}, 5, "ok"),
            "4 usable; trainer: 1 thread for each of 4 trainers, server: 1 thread",
        ),
        (
            *(2, {}, 5, "warning"),
            "2 usable; server: 1 thread for each of 4 trainers, trainer: 1 thread, which is more "
            "threads than cores; type --nproc_per_node=3",
        ),
        (
            *(4, {"threads": 3}, 3, "warning"),
            "4 usable; server: 3 threads for each of 2 trainers, trainer: 1 thread, which is more "
            "threads than cores; lower --threads",
        ),
    ],
)
def test_the_thread_budget_is_told_by_role_and_more_threads_than_cores_are_a_warning(
    usable: int, options: dict[str, Any], world_size: int, status: str, text: str
) -> None:
    assert doctor.cores(usable, Config(**options), world_size) == (status, text)


def test_shared_memory_of_the_system_may_be_small_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = doctor.dev_shm(tmp_path / "absent")
    assert status == "ok"
    assert text.startswith("not there; it is not used")
    usage = type(shutil.disk_usage(tmp_path))(64 * MIB, 60 * MIB, 4 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    status, text = doctor.dev_shm(tmp_path)
    assert status == "ok"
    assert text.startswith("64.0 MiB, 60.0 MiB taken; it is not used")


@pytest.mark.parametrize(
    ("fault", "link", "system", "status"),
    [
        (None, "rpc", "linux", "ok"),
        ("no RPC", "local", "linux", "ok"),
        ("no RPC", "auto", "linux", "warning"),
        ("no RPC", "auto", "darwin", "failed"),
        ("no RPC", "rpc", "linux", "failed"),
    ],
)
def test_a_torch_without_rpc_fails_where_nothing_else_is_left(
    fault: str | None, link: str, system: str, status: str
) -> None:
    assert doctor.rpc(fault, link, system)[0] == status


def test_a_torch_without_rpc_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    from ps.links import rpc

    assert doctor._rpc_fault() is None
    monkeypatch.setattr(rpc, "rpc", None)
    assert str(doctor._rpc_fault()).startswith("this build of torch has no TensorPipe RPC")


def test_a_torch_that_cannot_be_loaded_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, text = doctor.torch_build()
    assert status == "failed"
    assert text.startswith("cannot be loaded: ModuleNotFoundError:")


def test_more_gpus_than_there_are_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = doctor._look("gpus", lambda: doctor._gpus(Config(num_gpus=2)), 10)
    assert found.status == "failed"
    assert found.text.startswith("--num-gpus 2, but this process sees 1; type --num-gpus 1")
    assert doctor._gpus(Config(num_gpus=1)) == ("ok", "1 seen, 1 asked for with --num-gpus")


# Data


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two files that count as all of MNIST."""
    contents = {"train-images-idx3-ubyte": b"images", "train-labels-idx1-ubyte": b"labels"}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(mnist_files, "SHA256", sums)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    mnist_files.read.cache_clear()
    yield tmp_path
    mnist_files.read.cache_clear()


def data_of(folder: Path, workload: str = "auto") -> tuple[str, str]:
    config = Config(workload=workload, data_dir=folder)
    return doctor.data(config, doctor._mnist_fault(config))


def test_whole_files_of_mnist_are_what_auto_takes(mnist: Path) -> None:
    assert data_of(mnist) == ("ok", f"the files of MNIST in {mnist} are whole, so auto takes mnist")
    assert data_of(mnist, "mnist") == ("ok", f"the files of MNIST in {mnist} are whole")


def test_a_damaged_file_is_named_and_so_is_what_a_run_will_do(mnist: Path) -> None:
    (mnist / "train-labels-idx1-ubyte").write_bytes(b"lab")
    before = sorted(mnist.iterdir())
    status, text = data_of(mnist)
    assert status == "warning"
    assert text.startswith(f"{mnist / 'train-labels-idx1-ubyte'} is damaged: its 3 bytes")
    assert text.endswith("within 20 s, or take digits")
    assert sorted(mnist.iterdir()) == before  # nothing was fetched


def test_a_missing_file_is_named(mnist: Path) -> None:
    (mnist / "train-images-idx3-ubyte").unlink()
    status, text = data_of(mnist, "mnist")
    assert status == "warning"
    assert text.startswith("train-images-idx3-ubyte is not in")
    assert "digits" not in text


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ("digits", "digits are generated"),
        ("my.module:function", "what my.module:function reads is not known here"),
    ],
)
def test_other_workloads_need_no_files_of_mnist(tmp_path: Path, workload: str, text: str) -> None:
    assert data_of(tmp_path / "absent", workload) == ("ok", text)


def test_the_net_of_mnist_is_measured_though_its_files_are_missing(mnist: Path) -> None:
    config = Config(workload="mnist", data_dir=mnist)
    assert doctor._name_to_measure(config) == "mnist"
    (mnist / "train-images-idx3-ubyte").unlink()
    mnist_files.read.cache_clear()
    assert doctor._name_to_measure(config) == "digits"


# Leftovers


def process(pid: int, parent: int, *words: str, age_s: float = 120, is_own: bool = True) -> Process:
    return Process(pid, parent, words, age_s, is_own)


INIT = process(1, 0, "/sbin/init", is_own=False)
RANK = (PYTHON, "-u", "launch.py", "--epochs", "3")


@pytest.mark.parametrize(
    "processes",
    [
        [INIT, process(7, 1, *RANK)],
        [INIT, process(7, 6, *RANK)],
        [INIT, process(5, 1, "/usr/lib/systemd/systemd", "--user"), process(7, 5, *RANK)],
        [INIT, process(7, 1, PYTHON, "-u", "/home/me/ps/launch.py")],
    ],
    ids=["under pid 1", "parent gone", "under the user's systemd", "with a whole path"],
)
def test_a_rank_whose_torchrun_is_gone_is_named_with_what_to_type(
    processes: list[Process],
) -> None:
    assert doctor.leftover_processes(processes) == (
        "warning",
        "1 rank whose torchrun is gone (pid 7 since 2 min); to end them: kill 7",
    )


@pytest.mark.parametrize(
    "processes",
    [
        [INIT, process(6, 3, *TORCHRUN), process(7, 6, *RANK)],
        [process(1, 0, *TORCHRUN), process(7, 1, *RANK)],
        [INIT, process(6, 1, *TORCHRUN)],
        [INIT, process(6, 1, PYTHON, "-m", "torch.distributed.run", "launch.py")],
        [INIT, process(7, 1, *RANK, is_own=False)],
        [INIT, process(7, 1, "vim", "-R", "notes", "launch.py")],
        [INIT, process(7, 0, *RANK)],
        [INIT, process(7, 1)],
    ],
    ids=[
        *("torchrun runs", "torchrun is pid 1", "torchrun itself", "torchrun as a module"),
        *("another user's", "another program", "started from outside the container", "no command"),
    ],
)
def test_what_is_no_rank_or_has_its_torchrun_is_left_unnamed(processes: list[Process]) -> None:
    assert doctor.leftover_processes(processes) == ("ok", "none")


def test_many_ranks_are_counted_and_the_command_has_all_of_them() -> None:
    status, text = doctor.leftover_processes([process(pid, 1, *RANK) for pid in range(10, 18)])
    assert status == "warning"
    assert text.startswith("8 ranks whose torchrun is gone (pid 10 since 2 min, ")
    assert "pid 14 since 2 min, ...); to end them: kill 10 11 12 13 14 15 16 17" in text


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A process that sleeps in a file named launch.py, and whose parent has ended."""
    script = tmp_path / "launch.py"
    script.write_text("import time\ntime.sleep(60)\n")
    shell = f"{sys.executable} -u {script} >/dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    sleeper = psutil.Process(pid)
    yield pid
    sleeper.kill()
    sleeper.wait(10)


@pytest.mark.slow
def test_a_real_rank_without_parent_is_found_and_goes_on_running(orphan: int) -> None:
    def look() -> str:
        seen = list_processes()
        others = [one for one in seen if one.pid == orphan or not doctor._runs_launch(one)]
        return doctor.leftover_processes(others)[1]

    until = time.monotonic() + 10
    while look() == "none":
        assert time.monotonic() < until
        time.sleep(0.02)
    named = f"(pid {orphan} since 0 min); to end them: kill {orphan}"
    assert look() == f"1 rank whose torchrun is gone {named}"
    assert psutil.Process(orphan).is_running()


def aged(path: Path, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_half_written_files_of_killed_runs_are_named_and_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = [
        aged(tmp_path / "mine" / ".model.pt.partial", 700),
        aged(tmp_path / "my data" / "MNIST" / "raw" / ".fetch-x", 700),
        aged(tmp_path / "runs" / "a" / "checkpoints" / ".checkpoint.partial", 700),
    ]
    (tmp_path / "runs" / "latest").symlink_to("a")
    aged(tmp_path / "runs" / "b" / "checkpoints" / ".checkpoint.partial", 30)  # being written
    aged(tmp_path / "runs" / "b" / "checkpoints" / "000001-update-5-0123456789abcdef.pt", 700)
    config = Config(data_dir=Path("my data"), run_dir=Path("mine"))
    status, text = doctor.leftover_files(config, time.time())
    assert status == "warning"
    assert text == (
        "3 half-written files of a run that was killed; to remove them: "
        f"rm -r {old[0]} '{old[1]}' {old[2]}"
    )
    assert all(path.exists() for path in old)


def test_without_half_written_files_there_is_nothing_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.leftover_files(Config(), time.time()) == ("ok", "none")


# How checks are made


def test_a_check_that_raises_is_a_finding_in_one_line() -> None:
    def fail() -> NoReturn:
        raise ZeroDivisionError("by\nzero")

    text = "could not be checked: ZeroDivisionError: by zero"
    assert doctor._look("some", fail, 10) == Finding("some", "failed", text)


def test_a_plug_in_that_exits_is_a_finding() -> None:
    found = doctor._look("some", lambda: sys.exit("bye"), 10)
    assert found.text == "could not be checked: SystemExit: bye"


def test_a_check_that_hangs_is_a_finding_when_its_time_is_up() -> None:
    started_at = time.monotonic()
    found = doctor._look("some", lambda: ("ok", str(time.sleep(3))), 0.05)
    assert time.monotonic() - started_at < 1
    assert found.status == "failed"
    assert found.text == "could not be checked: TimeoutError: no answer within 0.05 s"


def test_a_file_name_that_is_no_text_can_be_printed() -> None:
    found = doctor._look("some", lambda: ("ok", os.fsdecode(b"data-\xff")), 10)
    assert found.text.encode() == rb"data-\udcff"


OK, WARNING, FAILED = (
    Finding("first", "ok", "good"),
    Finding("the second", "warning", "so so"),
    Finding("third", "failed", "bad; type: that"),
)


def test_the_first_failure_ends_a_launch_and_a_warning_does_not() -> None:
    doctor.require([OK, WARNING])
    with pytest.raises(LaunchError) as caught:
        doctor.require([WARNING, FAILED, Finding("last", "failed", "worse")])
    assert str(caught.value) == "third: bad; type: that"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("findings", "status"),
    [([], "ok"), ([OK], "ok"), ([WARNING, OK], "warning"), ([FAILED, WARNING], "failed")],
)
def test_the_worst_finding_is_the_status_of_all(findings: list[Finding], status: str) -> None:
    assert doctor.worst(findings) == status


# The cheap ones, and all


@pytest.mark.slow
def test_cheap_checks_take_milliseconds_and_do_not_load_torch() -> None:
    program = """
import sys, time
from ps.config import Config
from ps.doctor import cheap_checks
times_s = []
for _ in range(5):
    started_at = time.perf_counter()
    print([finding.name for finding in cheap_checks(Config(), 3)])
    times_s.append(time.perf_counter() - started_at)
assert min(times_s) < 0.05, times_s
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(CHEAP)] * 5


def test_a_host_without_memory_for_the_ranks_is_refused_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 600 * MIB)
    doctor.require(doctor.cheap_checks(Config(), 2))
    with pytest.raises(LaunchError, match=r"^memory: an estimated 750.0 MiB for 3 ranks"):
        doctor.require(doctor.cheap_checks(Config(), 3))


def test_a_low_limit_of_open_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, resource.RLIM_INFINITY))
    with pytest.raises(LaunchError, match=r"^open files: 64 allowed.*type: ulimit -n 112$"):
        doctor.require(doctor.cheap_checks(Config(), 3))


def test_a_system_that_does_not_tell_its_memory_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> NoReturn:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(resources, "available_memory_bytes", fail)
    findings = doctor.cheap_checks(Config(), 3)
    doctor.require(findings)
    assert by_name(findings)["memory"].status == "warning"


def test_the_disk_is_that_of_the_run_directory_which_need_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage(tmp_path)

    def note(folder: Path) -> object:
        asked.append(folder)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", note)
    monkeypatch.chdir(tmp_path)
    doctor._run_disk(Config(run_dir=tmp_path / "a" / "b"), MIB, "files")
    doctor._run_disk(Config(), MIB, "files")
    (tmp_path / "runs").mkdir()
    doctor._run_disk(Config(), MIB, "files")
    assert asked == [tmp_path, tmp_path, Path("runs")]


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    judged = doctor._run_disk(Config(run_dir=tmp_path / "run"), MIB, "files")
    assert judged == ("failed", f"{tmp_path} cannot be written; give another --run-dir")


def test_all_checks_judge_memory_and_disk_by_the_size_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Enough for the ranks, but not for 400 MB of weights with what Adam holds."""
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 4 * GIB)
    usage = type(shutil.disk_usage(tmp_path))(9 * GIB, 5 * GIB, 4 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.chdir(tmp_path)
    config = Config(workload="tests.plugins:hundred_million_parameters", optimizer="Adam")
    assert {finding.status for finding in doctor.cheap_checks(config, 3)} == {"ok"}
    findings = doctor.all_checks(config, 3)
    assert [finding.name for finding in findings] == [
        *CHEAP,
        *("host name", "cores", "/dev/shm", "torch", "rpc", "gpus", "data", "workload"),
        *("leftover processes", "leftover files"),
    ]
    found = by_name(findings)
    assert found["memory"].status == "failed"
    assert found["memory"].text.startswith(
        "an estimated 4.8 GiB for 3 ranks with model, optimizer and a checkpoint, without "
        "activations and data; 4.0 GiB available; "
    )
    assert found["disk"].status == "warning"
    assert found["disk"].text.startswith("3.7 GiB for 3 checkpoints and model.pt; 4.0 GiB free")
    assert found["workload"].text == (
        "tests.plugins:hundred_million_parameters can be made: weights 381.5 MiB, "
        "Adam holds 762.9 MiB"
    )


def test_a_plug_in_that_cannot_be_loaded_leaves_the_other_checks_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = by_name(doctor.all_checks(Config(workload="no_such_module:build"), 3))
    assert found["workload"] == Finding(
        "workload",
        "failed",
        "--workload no_such_module:build: ModuleNotFoundError: No module named 'no_such_module'",
    )
    assert "without model and data" in found["memory"].text
    assert found["torch"].status == "ok"


# The command


@pytest.fixture
def doctor_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls the command with checks that find what is given."""

    def call(findings: list[Finding], *args: str) -> int:
        monkeypatch.setattr(doctor, "all_checks", lambda config, world_size: findings)
        return command.main(["doctor", *args])

    monkeypatch.setattr(signals, "end_at_once", lambda: None)
    return call


def test_the_text_has_an_aligned_line_for_each_check_and_sums_up(
    doctor_says: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_says([OK, WARNING, FAILED]) == 3
    assert capsys.readouterr().out == (
        "ok       first       good\n"
        "warning  the second  so so\n"
        "FAILED   third       bad; type: that\n"
        "NOT READY: 3 checks, 1 failed, 1 with a warning\n"
    )


def test_warnings_alone_are_ready(
    doctor_says: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_says([OK, WARNING]) == 0
    assert capsys.readouterr().out.endswith("\nready: 2 checks, 0 failed, 1 with a warning\n")


@pytest.mark.parametrize(
    ("findings", "status", "code"),
    [([OK], "ok", 0), ([OK, WARNING], "warning", 0), ([FAILED, OK], "failed", 3)],
)
def test_json_has_the_status_and_every_check(
    doctor_says: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    findings: list[Finding],
    status: str,
    code: int,
) -> None:
    assert doctor_says(findings, "--json") == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["status"] == status
    assert printed["checks"] == [
        {"name": finding.name, "status": finding.status, "text": finding.text}
        for finding in findings
    ]


def test_world_size_and_options_of_launch_reach_the_checks(
    monkeypatch: pytest.MonkeyPatch, doctor_says: Callable[..., int]
) -> None:
    asked: list[tuple[Config, int]] = []
    doctor_says([OK])
    monkeypatch.setattr(doctor, "all_checks", lambda *args: asked.append(args) or [OK])
    command.main(["doctor"])
    command.main(["doctor", "--epochs", "7", "--world-size", "5", "--json", "--lr=0.5"])
    assert asked == [(Config(), 3), (Config(epochs=7, lr=0.5), 5)]


def test_the_options_of_the_run_to_go_on_from_reach_the_checks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    doctor_says: Callable[..., int],
) -> None:
    asked: list[tuple[Config, int]] = []
    doctor_says([OK])
    monkeypatch.setattr(doctor, "all_checks", lambda *args: asked.append(args) or [OK])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f"000001-update-7-{'0' * 16}.pt").touch()
    options = Config(epochs=7, batch_size=16).to_json(inherited_only=True)
    (tmp_path / "config.json").write_text(json.dumps({"options": options}))
    resume = ["--resume", str(tmp_path)]
    assert command.main(["doctor", *resume, "--epochs", "9"]) == 0
    assert asked == [(Config(epochs=9, batch_size=16, resume=str(tmp_path)), 3)]
    (tmp_path / "config.json").unlink()
    capsys.readouterr()
    assert command.main(["doctor", *resume]) == 7
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("config.json cannot be read: No such file or directory")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world-size", "0"], "argument --world-size: must be a whole number, 1 or more"),
        (["--world-size", "-2"], "argument --world-size: must be a whole number, 1 or more"),
        (["--world-size", "few"], "argument --world-size: must be a whole number, 1 or more"),
        (["--world-size"], "argument --world-size: expected one argument"),
        (["--json=yes"], "argument --json: ignored explicit argument 'yes'"),
        (["--epochs", "0"], "--epochs must be 1 or more, got 0"),
        (["--bogus"], "unrecognized arguments: --bogus; see: python launch.py --help"),
        (["now"], "unrecognized arguments: now"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    doctor_says: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    assert doctor_says([OK], *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith(f"python -m ps doctor: error: {message}")


def test_help_teaches(doctor_says: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor_says([], "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m ps doctor [--json] [--world-size N]")
    for part in ("--json", "default: 3", "python launch.py --help", "exit codes: 0", "3 something"):
        assert part in out


def run_command(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ps", *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "seen"), [([], ""), (["nurse"], ", not 'nurse'"), (["--json"], ", not '--json'")]
)
def test_without_a_known_command_there_is_a_usage_line_and_exit_code_2(
    args: list[str], seen: str
) -> None:
    done = run_command(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "usage: python -m ps doctor [--json] [--world-size N] [options of launch.py]"
        f"{seen}; more: python -m ps doctor --help\n"
    )


@pytest.mark.slow
def test_json_stands_alone_on_stdout_though_a_plug_in_prints(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("from tests.plugins import plain\nprint('here I am')\n")
    done = run_command("doctor", "--json", "--workload", "loud:plain", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert "here I am" in done.stderr
    assert done.returncode == (3 if found["status"] == "failed" else 0)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["torch"]["status"] == "ok"
    assert checks["workload"]["text"] == (
        "loud:plain can be made: weights 0.0 MiB, SGD holds 0.0 MiB"
    )
    assert list(tmp_path.glob("runs")) == []


HANGING = """
import runpy, sys, threading, time
from ps import doctor

def hang():
    threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
    print("hangs", flush=True)
    time.sleep(60)

doctor.BOUND_S = float(sys.argv.pop())
doctor._thorough = lambda *args: {"slow": hang}
runpy.run_module("ps", run_name="__main__")
"""


def start_hanging(bound_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HANGING, "doctor", str(bound_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_command_ends_though_a_check_hangs() -> None:
    with start_hanging(0.2) as started:
        out, _ = started.communicate(timeout=20)
    assert started.returncode == 3
    line = next(line for line in out.splitlines() if " slow " in line)
    assert line.startswith("FAILED ")
    assert line.endswith(" could not be checked: TimeoutError: no answer within 0.2 s")


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_without_a_traceback() -> None:
    with start_hanging(50) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "hangs\n"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=20)
    assert (started.returncode, out, err) == (-signal.SIGINT, "", "")
