"""python -m ps doctor: what each thorough check says of good and bad readings, and the command."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ps import __main__ as command
from ps.host import resources, signals
from ps.job import doctor, preflight
from ps.job.preflight import CheckResult
from ps.links import rpc
from ps.settings.config import Config
from ps.workloads import mnist_files
from tests.jobs import ROOT

MIB, GIB = 1 << 20, 1 << 30
OK, WARNING, FAILED = (
    CheckResult("first", "ok", "good"),
    CheckResult("the second", "warning", "so so"),
    CheckResult("third", "failed", "bad; type: that"),
)


@pytest.mark.parametrize("error", [OSError("no"), socket.gaierror(-2, "no"), UnicodeError("no")])
def test_a_host_name_that_does_not_resolve_is_no_fault_but_is_said(error: Exception) -> None:
    def fail(name: str) -> NoReturn:
        raise error

    status, text = doctor.host_name("box", fail)
    assert status == "ok"
    assert "--local-addr=127.0.0.1" in text
    assert doctor.host_name("box", lambda name: "10.0.0.7") == ("ok", "box is 10.0.0.7")


def test_a_name_server_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.resolve("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: time.sleep(3))
    started_at = time.monotonic()
    with pytest.raises(TimeoutError):
        doctor.resolve("box", timeout_s=0.05)
    assert time.monotonic() - started_at < 1


@pytest.mark.parametrize(
    ("usable", "options", "world_size", "parts"),
    [
        (8, {}, 3, ["8 usable", "server: 4 threads for each of 2 trainers", "trainer: 1 thread"]),
        (2, {}, 1, ["one process", "2 threads"]),
        (
            *(4, {"compute": "trainer"}, 5),
            ["trainer: 1 thread for each of 4 trainers", "server: 1 thread"],
        ),
        (2, {}, 5, ["more threads than cores", "--nproc_per_node=3"]),
        (4, {"threads": 3}, 3, ["server: 3 threads", "more threads than cores", "--threads"]),
    ],
)
def test_the_threads_of_each_role_are_said_and_more_threads_than_cores_are_a_warning(
    usable: int, options: dict[str, Any], world_size: int, parts: list[str]
) -> None:
    status, text = doctor.cores(usable, Config(**options), world_size)
    assert status == ("warning" if "more threads than cores" in parts else "ok")
    assert all(part in text for part in parts)


def test_shared_memory_of_the_system_may_be_small_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.dev_shm(tmp_path / "absent")[0] == "ok"
    usage = type(shutil.disk_usage(tmp_path))(64 * MIB, 60 * MIB, 4 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    status, text = doctor.dev_shm(tmp_path)
    assert status == "ok"
    assert text.startswith("64.0 MiB, 60.0 MiB ")


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


def test_a_torch_without_rpc_or_that_cannot_be_loaded_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.rpc_fault() is None
    monkeypatch.setattr(rpc, "rpc", None)
    assert "TensorPipe" in str(doctor.rpc_fault())
    assert torch.__version__ in doctor.torch_build()[1]
    monkeypatch.setitem(sys.modules, "torch", None)
    status, text = doctor.torch_build()
    assert status == "failed"
    assert "ModuleNotFoundError" in text


def test_more_gpus_than_there_are_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [result] = preflight.make({"gpus": lambda: doctor.gpus(Config(num_gpus=2))}, 10)
    assert result.status == "failed"
    assert result.text.startswith("--num-gpus 2")
    assert doctor.gpus(Config(num_gpus=1))[0] == "ok"


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


def data_of(folder: Path, workload: str) -> tuple[str, str]:
    config = Config(workload=workload, data_dir=folder)
    return doctor.data(config, doctor.mnist_fault(config))


@pytest.mark.parametrize("workload", ["auto", "mnist"])
def test_files_of_mnist_that_are_missing_or_damaged_are_named_and_nothing_is_fetched(
    mnist: Path, workload: str
) -> None:
    config = Config(workload=workload, data_dir=mnist)
    status, text = data_of(mnist, workload)
    assert status == "ok"
    assert ("auto" in text) == (workload == "auto")
    assert doctor.name_to_measure(config) == "mnist"
    for spoil in (lambda path: path.write_bytes(b"lab"), lambda path: path.unlink()):
        path = mnist / "train-labels-idx1-ubyte"
        spoil(path)
        mnist_files.read.cache_clear()
        before = sorted(mnist.iterdir())
        status, text = data_of(mnist, workload)
        assert status == "warning"
        assert path.name in text
        assert ("digits" in text) == (workload == "auto")
        assert sorted(mnist.iterdir()) == before
        assert doctor.name_to_measure(config) == "digits"


@pytest.mark.parametrize("workload", ["digits", "my.module:function"])
def test_other_workloads_need_no_files_of_mnist(tmp_path: Path, workload: str) -> None:
    status, text = data_of(tmp_path / "absent", workload)
    assert status == "ok"
    assert workload in text
    assert doctor.name_to_measure(Config(workload=workload)) == workload


# All of them


def test_all_checks_judge_memory_and_disk_by_the_size_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Enough for the ranks, but not for 400 MB of weights with what Adam holds."""
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 4 * GIB)
    usage = type(shutil.disk_usage(tmp_path))(9 * GIB, 5 * GIB, 4 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.chdir(tmp_path)
    config = Config(workload="tests.plugins:hundred_million_parameters", optimizer="Adam")
    assert {result.status for result in preflight.preflight_checks(config, 3)} == {"ok"}
    results = {result.name: result for result in doctor.all_checks(config, 3)}
    assert list(results) == [
        *("platform", "loopback", "open files", "memory", "disk"),
        *("host name", "cores", "/dev/shm", "torch", "rpc", "gpus", "data", "workload"),
        *("leftover processes", "leftover files"),
    ]
    for name, status, parts in (
        ("memory", "failed", ["4.8 GiB", "3 ranks", "4.0 GiB"]),
        ("disk", "warning", ["3.7 GiB", "3 checkpoints", "4.0 GiB"]),
        ("workload", "ok", [config.workload, "381.5 MiB", "762.9 MiB"]),
    ):
        assert results[name].status == status
        assert all(part in results[name].text for part in parts)


def test_a_plug_in_that_cannot_be_loaded_leaves_the_other_checks_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(workload="no_such_module:build")
    results = {result.name: result for result in doctor.all_checks(config, 3)}
    assert results["workload"].status == "failed"
    assert "ModuleNotFoundError" in results["workload"].text
    assert "without model and data" in results["memory"].text
    assert results["torch"].status == "ok"


# The command


class Doctor:
    """The command, with checks that give what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results = [OK]
        self.asked: list[tuple[Config, int]] = []
        monkeypatch.setattr(doctor, "all_checks", self._check)
        monkeypatch.setattr(signals, "restore_defaults", lambda: None)

    def _check(self, config: Config, world_size: int, timeout_s: float) -> list[CheckResult]:
        self.asked.append((config, world_size))
        return self.results

    def __call__(self, *args: str) -> int:
        return command.main(["doctor", *args])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    return Doctor(monkeypatch)


@pytest.mark.parametrize(
    ("results", "status", "code"),
    [([OK], "ok", 0), ([OK, WARNING], "warning", 0), ([OK, WARNING, FAILED], "failed", 3)],
)
def test_text_has_an_aligned_line_for_each_check_and_json_has_the_same(
    call: Doctor,
    capsys: pytest.CaptureFixture[str],
    results: list[CheckResult],
    status: str,
    code: int,
) -> None:
    call.results = results
    assert call() == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "warning", "FAILED"][: len(results)]
    assert len({line.index(r.text) for line, r in zip(lines, results, strict=True)}) == 1
    assert last.startswith("NOT READY: 3" if code else "ready: ")
    assert call("--json") == code
    assert json.loads(capsys.readouterr().out) == {
        "status": status,
        "checks": [{"name": r.name, "status": r.status, "text": r.text} for r in results],
    }


def test_world_size_and_options_of_launch_reach_the_checks(call: Doctor) -> None:
    call()
    call("--epochs", "7", "--world-size", "5", "--json", "--lr=0.5")
    assert call.asked == [(Config(), 3), (Config(epochs=7, lr=0.5), 5)]


def test_the_options_of_the_run_to_go_on_from_reach_the_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: Doctor
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f"000001-update-7-{'0' * 16}.pt").touch()
    options = Config(epochs=7, batch_size=16).to_json(inherited_only=True)
    (tmp_path / "config.json").write_text(json.dumps({"options": options}))
    resume = ["--resume", str(tmp_path)]
    assert call(*resume, "--epochs", "9") == 0
    assert call.asked == [(Config(epochs=9, batch_size=16, resume=str(tmp_path)), 3)]
    (tmp_path / "config.json").unlink()
    capsys.readouterr()
    assert call(*resume) == 7
    [line] = capsys.readouterr().err.splitlines()
    assert "config.json" in line


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--world-size", "0"], "--world-size"),
        (["--world-size", "-2"], "--world-size"),
        (["--world-size", "few"], "--world-size"),
        (["--world-size"], "--world-size"),
        (["--json=yes"], "--json"),
        (["--epochs", "0"], "--epochs"),
        (["--bogus"], "--bogus"),
        (["now"], "now"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    call: Doctor, capsys: pytest.CaptureFixture[str], args: list[str], part: str
) -> None:
    assert call(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("python -m ps doctor: error: ")
    assert part in line


def test_help_teaches(call: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for part in ("--json", "--world-size N", "default: 3", "python launch.py --help", "exit codes"):
        assert part in out


@pytest.mark.parametrize(
    ("args", "code"), [([], 2), (["nurse"], 2), (["--json"], 2), (["--help"], 0)]
)
def test_without_a_known_command_there_is_a_usage_line(
    call: Doctor, capsys: pytest.CaptureFixture[str], args: list[str], code: int
) -> None:
    assert command.main(args) == code
    out, err = capsys.readouterr()
    [line] = (out if code == 0 else err).splitlines()
    assert line.startswith("usage: python -m ps doctor ")
    assert code == 0 or all(arg in line for arg in args)


@pytest.mark.slow
def test_json_stands_alone_on_stdout_though_a_plug_in_prints(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("from tests.plugins import plain\nprint('here I am')\n")
    done = subprocess.run(
        [sys.executable, "-m", "ps", "doctor", "--json", "--workload", "loud:plain"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    printed = json.loads(done.stdout)
    assert "here I am" in done.stderr
    assert done.returncode == (3 if printed["status"] == "failed" else 0)
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["torch"]["status"] == "ok"
    assert "loud:plain" in checks["workload"]["text"]
    assert list(tmp_path.glob("runs")) == []


HANGING = """
import socket, sys, threading, time
from ps.__main__ import leave, main

def hang():
    threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
    print("hangs", file=sys.stderr, flush=True)
    time.sleep(60)

socket.gethostname = hang
leave(main(["doctor"], check_timeout_s=float(sys.argv[1])))
"""


def start_hanging(timeout_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HANGING, str(timeout_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_command_ends_though_a_check_hangs() -> None:
    with start_hanging(0.2) as started:
        out, _ = started.communicate(timeout=60)
    assert started.returncode == 3
    line = next(line for line in out.splitlines() if " host name " in line)
    assert line.startswith("FAILED ")
    assert "0.2 s" in line


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_without_a_traceback() -> None:
    with start_hanging(50) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "hangs\n"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=20)
    assert (started.returncode, out, err) == (-signal.SIGINT, "", "")
