"""Whole jobs under a real torchrun: what people start, what they see and what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.idle import busy_fractions
from benchmarks.jobs import Job, mnist_folder, run_job
from ps.workload import fetch
from ps.workloads import mnist_files
from tests import plugins
from tests.helpers import COMPUTE

pytestmark = pytest.mark.torchrun

QUIET_S = 1.5
PLAIN = ("--workload", "tests.plugins:plain", "--batch-size", "8")
PACED = ("--batch-size", "8", "--max-lag", "10")
"""No trainer runs through the epoch alone: each has its third batch, at which the faults happen."""
REPORT_KEYS = {
    *("status", "exit_code", "cause", "world_size", "compute", "max_lag", "workload", "epochs"),
    *("updates", "samples_trained", "samples_per_s", "train_loss", "test_loss", "test_accuracy"),
    *("staleness_mean", "staleness_p99", "staleness_max", "trainers", "history"),
    *("duration_s", "threads", "torch", "python"),
}


def assert_ended(ranks: Iterable[psutil.Process], within_s: float) -> None:
    """The ranks, not torchrun: a signal that meets it looking at a rank leaves it with a lock
    held, and then it waits a minute for ranks that have ended."""
    until = time.monotonic() + within_s
    left = [rank for rank in ranks if is_at_work(rank)]
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [rank for rank in left if is_at_work(rank)]
    assert not left


def is_at_work(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def slowdown() -> float:
    """How much longer than on a quiet machine it takes at the moment to load torch."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - start) / QUIET_S)


@pytest.mark.parametrize(
    ("world_size", "compute"),
    [*((size, "server") for size in (1, 2, 3, 6)), *((size, "trainer") for size in (1, 3))],
)
def test_every_sample_is_trained_once_per_epoch_at_any_world_size(
    tmp_path: Path, world_size: int, compute: str
) -> None:
    args = (*PLAIN, "--epochs", "3", "--compute", compute)
    done = run_job(tmp_path, *args, world_size=world_size)
    assert done.exit_code == 0, done.text
    report = done.report
    assert report.keys() >= REPORT_KEYS
    assert (report["status"], report["exit_code"], report["cause"]) == ("done", 0, None)
    assert (report["world_size"], report["compute"]) == (world_size, compute)
    assert report["samples_trained"] == 3 * 400
    assert report["updates"] == 3 * 50
    assert [record["updates"] for record in report["history"]] == [50, 100, 150]
    trainers = report["trainers"]
    assert len(trainers) == max(1, world_size - 1)
    assert sum(record["samples"] for record in trainers.values()) == 3 * 400


def test_a_clean_run_prints_only_lines_with_role_and_rank(tmp_path: Path) -> None:
    done = run_job(tmp_path, *PLAIN)
    assert done.exit_code == 0
    assert [line for _, line in done.output] == done.lines_of_ranks()
    assert all(line.startswith("server rank 0 | ") for line in done.lines_of_ranks())
    assert "warning" not in done.text


def test_the_saved_model_has_the_accuracy_of_the_report(tmp_path: Path) -> None:
    done = run_job(tmp_path, *PLAIN, "--epochs", "2", "--lr", "0.1")
    workload = plugins.perceptron()
    model = workload.model().eval()
    model.load_state_dict(done.model)
    inputs, targets = fetch(workload.test, range(len(workload.test)))
    with torch.inference_mode():
        outputs = model(inputs)
    assert done.report["test_accuracy"] == workload.correct(outputs, targets) / len(workload.test)
    loss = workload.loss(outputs, targets).item()
    assert done.report["test_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_trainer_that_raises_ends_the_job_and_is_the_cause(tmp_path: Path, compute: str) -> None:
    done = run_job(tmp_path, "--workload", "tests.plugins:raising", *PACED, "--compute", compute)
    assert done.exit_code != 0
    assert done.duration_s - done.time_of("boom in the loss") < 10
    assert done.text.count("Traceback (most recent call last):\n    File") == 1
    assert "trainer rank 2 | error: ValueError: boom in the loss" in done.text
    assert done.report["status"] == "failed"
    assert done.report["cause"] == "trainer rank 2: ValueError: boom in the loss"
    assert "Root Cause" in done.text
    root = done.text[done.text.index("Root Cause") :]
    assert "rank      : 2" in root
    assert not (done.run_dir / "model.pt").exists()


@pytest.mark.parametrize("compute", COMPUTE)
def test_ctrl_c_ends_with_130_and_no_traceback_of_ours(tmp_path: Path, compute: str) -> None:
    job = Job(tmp_path, *PLAIN, "--epochs", "1000", "--compute", compute)
    job.wait_for("epoch 2/1000")
    ranks = job.ranks()
    job.send(signal.SIGINT)
    assert_ended(ranks.values(), within_s=10.0)
    job.kill()
    done = job.wait()
    assert done.report["exit_code"] == 130
    assert done.report["status"] == "interrupted"
    assert done.report["cause"] == "stopped by SIGINT"
    assert "terminate called" not in done.text
    assert "launch.py" not in done.text  # no frame of a traceback of ours


@pytest.mark.parametrize(("compute", "link"), [("server", "rpc"), ("trainer", "local")])
def test_ranks_listen_on_loopback_only_and_wait_without_using_a_core(
    tmp_path: Path, compute: str, link: str
) -> None:
    job = Job(
        tmp_path,
        *("--workload", "tests.plugins:slow", *PACED),
        *("--compute", compute, "--link", link),
        env={"SLOW_S": "6"},
    )
    job.wait_for("updates 15/50")
    ranks = job.ranks()
    addresses = {
        connection.laddr.ip
        for process in ranks.values()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    used = busy_fractions(ranks, 3.0)
    done = job.wait()
    assert done.exit_code == 0, done.text
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert bool(addresses) == (link == "rpc")
    assert max(used.values()) < 0.02, used


def test_a_slow_trainer_holds_nobody_up_and_the_report_shows_who_it_is(tmp_path: Path) -> None:
    """Rank 1 needs 160 ms for an order and rank 2 needs 40: together 31.25 orders a second."""
    done = run_job(tmp_path, "--workload", "tests.plugins:paced", "--batch-size", "8")
    assert done.exit_code == 0, done.text
    report = done.report
    assert report["updates"] == 100
    training_s = report["samples_trained"] / report["samples_per_s"]
    assert 100 / 31.25 < training_s < 1.15 * 100 / 31.25
    slow, fast = (report["trainers"][rank] for rank in ("1", "2"))
    assert slow["order_s"] / fast["order_s"] == pytest.approx(4, rel=0.15)
    assert slow["orders"] + fast["orders"] == 100
    assert fast["orders"] / slow["orders"] == pytest.approx(4, rel=0.2)


def test_without_memory_for_the_local_link_the_job_runs_over_rpc_and_says_why(
    tmp_path: Path,
) -> None:
    workload = ("--workload", "tests.plugins:without_memory", "--batch-size", "8")
    done = run_job(tmp_path, *workload, "--compute", "trainer")
    assert done.exit_code == 0, done.text
    assert done.report["samples_trained"] == 400
    [line] = [line for line in done.lines_of_ranks() if "warning" in line]
    assert "the local link cannot work here, RPC is used instead: it needs " in line
    assert "docker run --memory" in line


def test_without_mnist_and_network_the_digits_are_trained_and_it_is_said(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    done = run_job(
        tmp_path,
        *("--data-dir", str(data_dir), "--data-mirror", "http://127.0.0.1:9/mnist"),
        *("--batch-size", "256"),
        world_size=4,
    )
    assert done.exit_code == 0, done.text
    assert "warning: NOT MNIST, training on generated digits instead: " in done.text
    assert "train-images-idx3-ubyte is not in" in done.text
    assert (done.report["workload"], done.report["status"]) == ("digits", "done")
    assert done.report["samples_trained"] == 12800
    assert not data_dir.exists()


@pytest.mark.parametrize("delay_s", [2.2, 3.0, 4.5])
def test_ctrl_c_during_the_start_ends_it_at_once_and_leaves_what_the_readme_names(
    tmp_path: Path, delay_s: float
) -> None:
    """torchrun needs about 2 s, loading torch 2 more: whatever the ranks are doing then."""
    job = Job(tmp_path, *PLAIN, "--epochs", "1000")
    time.sleep(delay_s)
    ranks = psutil.Process(job.process.pid).children()
    job.send(signal.SIGINT)
    assert_ended(ranks, within_s=5.0)
    job.kill()
    done = job.wait()
    assert "launch.py" not in done.text
    left = {path.name for path in done.run_dir.iterdir()}
    assert left <= {"torchrun", "report.json", "config.json", "checkpoints", "health.jsonl"}


BAD_INPUT = [
    pytest.param(["--epochs", "0"], "--epochs must be 1 or more, got 0", id="value"),
    pytest.param(["--bogus"], "unrecognized arguments: --bogus", id="option"),
    pytest.param(["--workload", "no.such:thing"], "--workload no.such:thing: ModuleNot", id="none"),
    pytest.param(
        ["--workload", "tests.plugins:returning_a_number"],
        "ps.Workload, got int 3",
        id="plug-in",
    ),
    pytest.param(
        ["--workload", "tests.plugins:loss_of_each_sample"],
        "workload perceptron: loss must return a scalar tensor, got Tensor tensor([",
        id="loss",
    ),
    pytest.param(["--staleness", "-1"], "--max-lag", id="negative"),
    pytest.param(["--staleness", "two"], "'two'", id="staleness"),
    pytest.param(
        ["--workload", "tests.plugins:with_sparse_gradients", "--compute", "trainer"],
        "sparse gradients",
        id="sparse",
    ),
    pytest.param(
        [
            *(
                "--workload",
                "tests.plugins:without_memory",
                "--compute",
                "trainer",
                "--link",
                "local",
            )
        ],
        "--link local cannot work here: it needs 0 MiB of shared memory, and 0 MiB are free",
        id="link",
    ),
    pytest.param([*PLAIN, "--num-gpus", "2"], "--num-gpus 2, but this process sees", id="gpus"),
    pytest.param([*PLAIN, "--optimizer", "Sgd"], "did you mean SGD?", id="optimizer"),
    pytest.param(
        ["--workload", "mnist", "--data-dir", "/proc/none", "--data-mirror", "http://127.0.0.1:9/"],
        "train-images-idx3-ubyte is not in /proc/none/MNIST/raw, and it cannot be fetched",
        id="data",
    ),
]


@pytest.mark.parametrize(("args", "message"), BAD_INPUT)
def test_bad_input_ends_with_2_and_one_line_within_5_s(
    tmp_path: Path, args: list[str], message: str
) -> None:
    done = run_job(tmp_path, *args)
    assert done.exit_code != 0
    [line] = done.lines_of_ranks()
    assert line.startswith("server rank 0 | error: ")
    assert message in line
    assert done.time_of(message) < 5 or done.time_of(message) < 5 * slowdown()
    root = done.text[done.text.index("Root Cause") :]
    assert "rank      : 0" in root
    assert "exitcode  : 2" in root
    left = {path.name for path in done.run_dir.iterdir()} if done.run_dir.exists() else set()
    assert left <= {"torchrun"}


def test_a_run_directory_in_use_is_refused_and_its_files_stay(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("mine")
    done = run_job(tmp_path, *PLAIN)
    assert done.exit_code != 0
    [line] = done.lines_of_ranks()
    assert "is not empty (it holds precious)" in line
    assert (done.run_dir / "precious").read_text() == "mine"
    assert not (done.run_dir / "report.json").exists()


@pytest.mark.timeout(300)
def test_mnist_reaches_97_percent_in_one_epoch_with_two_trainers(tmp_path: Path) -> None:
    folder = mnist_folder()
    if folder is None:
        pytest.skip(f"MNIST is not here: put {', '.join(mnist_files.SHA256)} into data/MNIST/raw")
    done = Job(tmp_path, "--workload", "mnist", "--data-dir", str(folder)).wait(bound_s=280)
    assert done.exit_code == 0, done.text
    report = done.report
    assert report["test_accuracy"] >= 0.97
    assert report["samples_trained"] == 60000
    assert report["updates"] == 1875
    assert report["history"][0]["test_accuracy"] == report["test_accuracy"]
