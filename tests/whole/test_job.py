"""Whole jobs: what people start, what they see and what is left."""

from __future__ import annotations

import io
import json
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest
import torch

import launch
from benchmarks.idle import busy_fractions
from ps.workload import fetch
from ps.workloads import mnist_files
from tests import plugins
from tests.helpers import COMPUTE, end_processes, next_line
from tests.helpers import start as start_function
from tests.jobs import Ranks, free_port, mnist_folder, rank_variables, run_ranks
from tests.whole.conftest import StartRanks
from tests.whole.expect import expect_done

pytestmark = pytest.mark.slow

PLAIN = ("--workload", "tests.plugins:plain", "--batch-size", "8")
PACED = ("--batch-size", "8", "--staleness", "10")
"""No trainer runs through the epoch alone: each has its third batch, at which the faults happen."""
REPORT_KEYS = {
    *("status", "exit_code", "cause", "world_size", "compute", "max_lag", "workload", "epochs"),
    *("updates", "samples_trained", "samples_per_s", "train_loss", "test_loss", "test_accuracy"),
    *("staleness_mean", "staleness_p99", "staleness_max", "trainers", "history"),
    *("duration_s", "threads", "torch", "python"),
}


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_sample_is_trained_once_per_epoch_and_the_model_is_the_reported_one(
    tmp_path: Path, world_size: int, compute: str
) -> None:
    """Further world sizes: 2, 4 and 5 in the other tests of whole jobs."""
    args = (*PLAIN, "--epochs", "3", "--lr", "0.1", "--compute", compute)
    done = run_ranks(tmp_path, *args, world_size=world_size)
    report = expect_done(done)
    assert report.keys() >= REPORT_KEYS
    assert (report["world_size"], report["compute"]) == (world_size, compute)
    assert report["samples_trained"] == 3 * 400
    assert report["updates"] == 3 * 50
    assert [record["updates"] for record in report["history"]] == [50, 100, 150]
    trainers = report["trainers"]
    assert len(trainers) == max(1, world_size - 1)
    assert sum(record["samples"] for record in trainers.values()) == 3 * 400
    workload = plugins.perceptron()
    model = workload.model().eval()
    model.load_state_dict(done.model)
    inputs, targets = fetch(workload.test, range(len(workload.test)))
    with torch.inference_mode():
        outputs = model(inputs)
    assert report["test_accuracy"] == workload.correct(outputs, targets) / len(workload.test)
    loss = workload.loss(outputs, targets).item()
    assert report["test_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.timed
@pytest.mark.parametrize(("compute", "link"), [("server", "rpc"), ("trainer", "local")])
def test_ranks_listen_on_loopback_only_and_wait_without_using_a_core(
    tmp_path: Path, compute: str, link: str
) -> None:
    where = ("--compute", compute, "--link", link)
    job = Ranks(tmp_path, "--workload", "tests.plugins:slow", *PACED, *where, env={"SLOW_S": "5"})
    job.wait_for("updates 15/50")
    ranks = job.ranks()
    listening = {rank: listening_on(process) for rank, process in ranks.items()}
    used = busy_fractions(ranks, 3.0)
    expect_done(job.wait())
    assert set().union(*listening.values()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    if link == "local":
        assert (listening[1], listening[2]) == (set(), set())
    assert max(used.values()) < 0.02, used


def listening_on(process: psutil.Process) -> set[str]:
    return {
        connection.laddr.ip
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.timed
def test_a_slow_trainer_holds_nobody_up_and_the_report_shows_who_it_is(tmp_path: Path) -> None:
    """Rank 1 needs 160 ms for an order and rank 2 needs 40: together 31.25 orders a second."""
    done = run_ranks(tmp_path, "--workload", "tests.plugins:paced", "--batch-size", "8")
    report = expect_done(done)
    assert report["updates"] == 100
    training_s = report["samples_trained"] / report["samples_per_s"]
    assert 100 / 31.25 < training_s < 1.15 * 100 / 31.25
    slow, fast = (report["trainers"][rank] for rank in ("1", "2"))
    assert slow["order_s"] / fast["order_s"] == pytest.approx(4, rel=0.15)
    assert slow["orders"] + fast["orders"] == 100
    assert fast["orders"] / slow["orders"] == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("delay_s", [0.5, 2.0])
def test_a_signal_during_the_start_ends_it_at_once_and_leaves_what_the_readme_names(
    start: StartRanks, delay_s: float
) -> None:
    """Whatever the ranks are doing then: loading torch takes about 2 s."""
    job = start(*PLAIN, "--epochs", "1000")
    time.sleep(delay_s)
    job.send(signal.SIGINT)
    done = job.wait(bound_s=5.0)
    assert 130 in done.codes.values() or -signal.SIGINT in done.codes.values()
    assert "launch.py" not in done.text  # no frame of a traceback of ours
    left = {path.name for path in done.run_dir.iterdir()} if done.run_dir.exists() else set()
    assert left <= {"report.json", "config.json", "checkpoints", "health.jsonl"}


BAD_INPUT = {
    "value": (["--epochs", "0"], "--epochs"),
    "option": (["--bogus"], "--bogus"),
    "none": (["--workload", "no.such:thing"], "--workload no.such:thing"),
    "plug-in": (["--workload", "tests.plugins:returning_a_number"], "int 3"),
    "loss": (["--workload", "tests.plugins:loss_of_each_sample"], "scalar"),
    "negative": (["--staleness", "-1"], "--max-lag"),
    "staleness": (["--staleness", "two"], "'two'"),
    "gpus": ([*PLAIN, "--num-gpus", "2"], "--num-gpus 2"),
    "optimizer": ([*PLAIN, "--optimizer", "Sgd"], "SGD"),
    "data": (
        ["--workload", "mnist", "--data-dir", "/proc/none", "--data-mirror", "http://127.0.0.1:9/"],
        "/proc/none/MNIST/raw",
    ),
}


def test_bad_input_is_one_line_and_2_and_leaves_nothing(tmp_path: Path) -> None:
    """What torchrun and the other ranks make of it stands in the tests with torchrun."""
    used = tmp_path / "used"
    used.mkdir()
    (used / "precious").write_text("mine")
    process = start_function(be_rank_0_of_each, str(tmp_path))
    try:
        for name, (_, part) in BAD_INPUT.items():
            code, seconds, lines = json.loads(next_line(process))
            assert code == 2, name
            assert len(lines) == 1 and "server rank 0 | error: " in lines[0], lines
            assert part in lines[0]
            assert seconds < 5
        code, _, [line] = json.loads(next_line(process))
        assert (code, "precious" in line) == (2, True)
    finally:
        end_processes(process)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]
    assert [(path.name, path.read_text()) for path in used.iterdir()] == [("precious", "mine")]


def be_rank_0_of_each(folder: str) -> None:
    """Prints the exit code, the seconds that it took, and the lines, of each launch."""
    for name, (args, _) in BAD_INPUT.items():
        print(be_rank_0(Path(folder) / name, args), flush=True)
    print(be_rank_0(Path(folder) / "used", [*PLAIN]), flush=True)


def be_rank_0(run_dir: Path, args: list[str]) -> str:
    output = io.StringIO()
    environment = rank_variables(0, 3, free_port())
    start = time.monotonic()
    with redirect_stdout(output), redirect_stderr(output):
        code = launch.main([*args, "--run-dir", str(run_dir)], environment)
    return json.dumps([code, time.monotonic() - start, output.getvalue().splitlines()])


@pytest.mark.timeout(300)
def test_mnist_reaches_97_percent_in_one_epoch_with_two_trainers(tmp_path: Path) -> None:
    folder = mnist_folder()
    if folder is None:
        pytest.skip(f"MNIST is not here: put {', '.join(mnist_files.SHA256)} into data/MNIST/raw")
    done = Ranks(tmp_path, "--workload", "mnist", "--data-dir", str(folder)).wait(bound_s=280)
    report = expect_done(done)
    assert report["test_accuracy"] >= 0.97
    assert report["samples_trained"] == 60000
    assert report["updates"] == 1875
    assert report["history"][0]["test_accuracy"] == report["test_accuracy"]
