from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import bench, contenders
from benchmarks.bench import Bench, rotated
from benchmarks.figures import Figure, figures_table, median, outcomes, rates_table, shares
from benchmarks.peers import ddp, hogwild, loops, processes, ray_server, tutorial
from benchmarks.peers.processes import MeasurementError
from benchmarks.peers.task import Task
from benchmarks.plugins import UPDATES_VARIABLE, small_perceptron, some_digits
from ps.settings.config import Config
from ps.workload import fetch
from ps.workloads.checks import check, make_model
from tests.jobs import ROOT

FIGURE = Figure("ours", "peer", least=1.1, target=1.5)


class Fixed:
    """A contender that has the same rate each time, or fails."""

    def __init__(self, rate: float | None, error: Exception | None = None) -> None:
        self.rate = rate
        self.error = error
        self.scales: list[float] = []

    def measure(self, scale: float) -> float | None:
        self.scales.append(scale)
        if self.error is not None:
            raise self.error
        return self.rate


def test_a_share_is_taken_within_each_round_and_only_then_the_median() -> None:
    ours, peer = [100.0, 300.0, 90.0], [50.0, 100.0, 90.0]
    assert shares(ours, peer) == (2.0, 3.0, 1.0)
    assert median(shares(ours, peer)) == 2.0
    assert median(ours) / median(peer) != 2.0  # type: ignore[operator]


def test_rounds_without_a_rate_do_not_count() -> None:
    assert shares([100.0, None, 90.0], [50.0, 100.0, None]) == (2.0,)
    assert median([None, 4.0, 1.0, None, 3.0]) == 3.0
    assert median([None]) is None
    assert median([]) is None


@pytest.mark.parametrize(
    ("peer", "verdict"),
    [(100.0, "target reached"), (110.0, "ok"), (136.0, "ok"), (137.0, "MISSED")],
)
def test_a_figure_is_judged_by_its_bound_and_its_target(peer: float, verdict: str) -> None:
    (outcome,) = outcomes({"ours": [150.0], "peer": [peer]}, [FIGURE])
    assert outcome.verdict == verdict


def test_a_share_that_only_rounds_to_the_bound_is_missed() -> None:
    (outcome,) = outcomes({"ours": [1.0996], "peer": [1.0]}, [FIGURE])
    assert outcome.verdict == "MISSED"
    assert figures_table([outcome]).splitlines() == [
        "median of the shares  share  at least  target",
        "ours / peer           1.100      1.10    1.50  MISSED",
    ]


@pytest.mark.parametrize("rates", [{}, {"ours": [2.0]}, {"ours": [2.0], "peer": [None]}])
def test_a_figure_without_rates_is_not_measured(rates: dict[str, list[float | None]]) -> None:
    (outcome,) = outcomes(rates, [FIGURE])
    assert (outcome.share, outcome.verdict) == (None, "not measured")
    assert figures_table([outcome]).splitlines()[1] == (
        "ours / peer               -      1.10    1.50  not measured"
    )


def test_an_outcome_in_the_file_has_the_claim_and_all_rounds() -> None:
    (outcome,) = outcomes({"ours": [3.0, 4.0], "peer": [2.0, 2.0]}, [FIGURE])
    assert outcome.to_json() == {
        "name": "ours / peer",
        "ours": "ours",
        "peer": "peer",
        "least": 1.1,
        "target": 1.5,
        "share": 1.75,
        "rounds": [1.5, 2.0],
        "verdict": "target reached",
    }


def test_the_table_of_rates_has_medians_ranges_shares_and_notes() -> None:
    rates: dict[str, list[float | None]] = {
        "plain": [100.0, 120.0, 110.0],
        "fast": [200.0, None, 330.0],
        "small": [900.0, 800.0, 700.0],
        "Ray": [None] * 3,
    }
    table = rates_table(rates, "plain", {"Ray": "skipped", "fast": "(new)"}, {"small"})
    assert table.splitlines() == [
        "samples/s  median  least  most  of plain",
        "plain         110    100   120     1.000",
        "fast          265    200   330     2.500  (new)",
        "small         800    700   900         -",
        "Ray             -      -     -         -  skipped",
    ]


def test_every_contender_comes_first_in_some_round() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_rounds_measure_each_contender_once_and_go_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, absent = Fixed(5.0), Fixed(None)
    bad = Fixed(None, MeasurementError("no server\nmore about it"))
    monkeypatch.setattr(bench, "due", lambda name, number: True)
    measured = Bench(scale=0.5)
    measured.run_rounds({"good": good, "bad": bad, "absent": absent}, rounds=3)
    assert measured.rates == {"good": [5.0] * 3, "bad": [None] * 3, "absent": [None] * 3}
    assert (good.scales, len(bad.scales), len(absent.scales)) == ([0.5] * 3, 1, 3)
    assert measured.notes == {
        "bad": "failed: no server",
        "absent": "skipped: not installed; pip install ray",
    }
    assert measured.failures == {"bad": "no server\nmore about it"}
    assert "more about it" in capsys.readouterr().out


def test_a_contender_is_left_out_of_rounds_in_which_it_is_not_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "due", lambda name, number: name == "often" or number == 1)
    measured = Bench(scale=1.0)
    measured.run_rounds({"often": Fixed(2.0), "once": Fixed(3.0)}, rounds=3)
    assert measured.rates == {"often": [2.0, 2.0, 2.0], "once": [None, 3.0, None]}


def test_no_round_starts_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Fixed(2.0)
    monkeypatch.setattr(Bench, "elapsed_s", property(lambda _: 30.0 * len(slow.scales)))
    measured = Bench(scale=1.0)
    measured.run_rounds({"plain loops": slow}, rounds=9, bound_s=80.0)
    assert measured.rates == {"plain loops": [2.0, 2.0, 2.0]}
    assert "only 3 of 9 rounds" in capsys.readouterr().out


def test_both_sides_of_a_figure_are_due_together_often_enough() -> None:
    for figure in contenders.FIGURES:
        both = [
            all(contenders.due(name, n) for name in (figure.ours, figure.peer)) for n in range(5)
        ]
        assert both[0] and sum(both) >= 3, figure.name
    assert [contenders.due("Hogwild", number) for number in range(3)] == [True, False, False]


def test_a_section_that_fails_is_named_and_the_others_are_kept() -> None:
    measured = Bench(scale=1.0)
    measured.run_section("bad", lambda: [][0])
    measured.run_section("good", lambda: [1, 2])
    assert measured.sections == {"good": [1, 2]}
    assert list(measured.failures) == ["bad"]


def run_bench(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **rates: float
) -> tuple[int, dict[str, Any]]:
    """The exit code and the file of a benchmark of contenders with these rates."""
    monkeypatch.setattr(bench, "CONTENDERS", {name: Fixed(rate) for name, rate in rates.items()})
    monkeypatch.setattr(bench, "IN_FIGURES", {"ours", "peer"})
    monkeypatch.setattr(bench, "FIGURES", (FIGURE,))
    monkeypatch.setattr(bench, "due", lambda name, number: True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for section in ("_rates_by_trainers", "_idle_cost", "_calls"):
        monkeypatch.setattr(bench, section, lambda *_: None)
    code = bench.main(["--rounds", "2", "--out", str(folder), "--quick"])
    return code, json.loads((folder / "bench.json").read_text())


def test_a_missed_bound_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, content = run_bench(monkeypatch, tmp_path / "new", ours=100.0, peer=100.0, other=1.0)
    assert code == 0, "missing a claim is a result; only what was not measured is an error"
    assert "ours / peer           1.000      1.10    1.50  MISSED" in capsys.readouterr().out
    assert content["rates"] == {"ours": [100.0, 100.0], "peer": [100.0, 100.0]}
    assert content["medians"] == {"ours": 100.0, "peer": 100.0}
    assert content["figures"][0]["verdict"] == "MISSED"
    assert content["machine"]["usable_cores"] >= 1
    assert set(content["sections"]) == {"trainers", "idle", "calls"}


def test_the_bench_fails_if_something_could_not_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Fixed, "measure", lambda *_: 1 / 0)
    code, content = run_bench(monkeypatch, tmp_path, ours=1.0, peer=1.0)
    assert code == 1
    assert content["failures"] == {"ours": "division by zero", "peer": "division by zero"}


def test_the_rate_of_two_trainers_is_taken_from_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def measure(job: contenders.OurJob, scale: float) -> float:
        asked.append((job.world_size, scale))
        return 100.0 * job.world_size

    monkeypatch.setattr(contenders.OurJob, "measure", measure)
    measured = Bench(scale=1.0, rates={contenders.OUR_NAME: [5.0, None, 7.0]})
    rows = bench._rates_by_trainers(measured, (1, 2, 3))
    assert [row["samples_per_s"] for row in rows] == [200.0, 6.0, 400.0]
    assert asked == [(2, bench.SHORT_SCALE), (4, bench.SHORT_SCALE)]


def test_the_calls_are_printed_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"link": "rpc", "parameters": 1000, "empty_call_ms": 0.4, "push_refresh_ms": 2.0}
    monkeypatch.setattr(bench.calls, "measure", lambda quick: [row])
    assert bench._calls(Bench(scale=1.0), False) == [row]
    line = "rpc           1000 parameters: empty call 0.400 ms, push and refresh 2.000 ms"
    assert line in capsys.readouterr().out


def test_every_figure_is_about_contenders_and_every_bound_below_its_target() -> None:
    assert contenders.CONTENDERS.keys() >= contenders.IN_FIGURES
    assert contenders.BASE in contenders.IN_FIGURES
    assert all(figure.least < figure.target for figure in contenders.FIGURES)
    assert len({figure.name for figure in contenders.FIGURES}) == len(contenders.FIGURES)


def test_a_task_survives_the_command_line_and_is_scaled_in_steps_alone() -> None:
    task = Task(steps=101, net="small", tuned=True, index=1, folder="/somewhere")
    assert Task.from_text(task.to_text()) == task
    assert task.own_steps == 50
    assert task.scaled(0.5) == Task(steps=50, net="small", tuned=True, index=1, folder="/somewhere")
    assert task.scaled(0.001).own_steps == 1


def test_an_epoch_of_some_digits_has_as_many_updates_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(UPDATES_VARIABLE, "3")
    workload = some_digits(Config())
    check(workload, "some_digits")
    assert (len(workload.train), len(workload.test)) == (96, 200)
    inputs, targets = fetch(workload.train, [95, 0])
    assert (inputs.shape, targets.shape) == ((2, 1, 28, 28), (2,))
    assert inputs[1].equal(workload.train[0][0])


def test_the_small_perceptron_maps_digits_to_log_probabilities() -> None:
    workload = small_perceptron(Config())
    check(workload, "small_perceptron")
    model = make_model(workload, seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == 784 * 64 + 64 + 64 * 10 + 10
    outputs = model(fetch(workload.train, range(4))[0])
    assert outputs.exp().sum(dim=1).tolist() == pytest.approx([1.0] * 4)


def test_without_ray_there_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ray_server.rate(Task(steps=1)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "task"),
    [
        (loops.rate, Task(steps=4, tuned=True, channels_last=True, warm_up=1)),
        (ddp.rate, Task(steps=4, net="small", warm_up=1)),
        (hogwild.rate, Task(steps=4, net="small", warm_up=1)),
        (tutorial.rate, Task(steps=3, num_processes=1, warm_up=1)),
        (ray_server.rate, Task(steps=4, net="small", warm_up=1)),
    ],
    ids=["loops", "ddp", "hogwild", "tutorial", "ray"],
)
def test_a_peer_has_a_rate_and_leaves_no_process(
    rate: Callable[[Task], float | None], task: Task
) -> None:
    """That none is left anywhere on the machine is checked after every test."""
    before = set(psutil.Process().children(recursive=True))
    measured = rate(task)
    if measured is None:
        pytest.skip("Ray is not installed")
    assert measured > 0
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.slow
def test_a_process_that_fails_is_named_at_once_and_the_other_is_ended() -> None:
    tasks = [Task(steps=1), Task(steps=1, net="none", index=1)]
    started_at = time.monotonic()
    with pytest.raises(MeasurementError) as caught:
        processes.total_rate("benchmarks.peers.loops", tasks)
    first, *_, last = str(caught.value).splitlines()
    assert first == "benchmarks.peers.loops: process 1 ended with 1"
    assert last == "KeyError: 'none'"
    assert time.monotonic() - started_at < processes.START_BOUND_S / 3


@pytest.mark.slow
def test_a_bench_that_is_stopped_ends_what_it_has_started(tmp_path: Path) -> None:
    """Even the processes of its processes; that none is left is checked after every test."""
    command = ["-m", "benchmarks.bench", "--only", "small Hogwild", "--out", str(tmp_path)]
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE) as started:
        process = psutil.Process(started.pid)
        until = time.monotonic() + 60
        while len(process.children(recursive=True)) < 3 and time.monotonic() < until:
            time.sleep(0.1)
        assert len(process.children(recursive=True)) >= 3
        started.terminate()
        assert started.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_whose_benchmark_has_gone_ends_by_itself() -> None:
    module = "benchmarks.peers.processes"
    done = subprocess.run(
        [sys.executable, "-m", module, "benchmarks.peers.loops", Task(steps=1).to_text()],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("bench ready\n", "the benchmark has ended\n")


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_job_that_fails_says_why() -> None:
    job = contenders.OurJob(options=("--compute", "nowhere"), updates=2)
    with pytest.raises(MeasurementError, match=r"--compute must be .*nowhere"):
        job.measure(1.0)


def test_the_steady_rate_is_that_between_the_first_and_the_last_progress_line() -> None:
    output = [
        (1.0, "server rank 0 | workload digits: 1 epoch of 400 updates, ..."),
        (2.0, "server rank 0 | epoch 1/1  updates 1/400  loss 2.3  90 samples/s  staleness 0.00"),
        (3.0, "server rank 0 | epoch 1/1  updates 41/400  loss 2.3  90 samples/s  staleness 0.00"),
        (4.5, "server rank 0 | epoch 1/1  updates 101/400  loss 2.3  9 samples/s  staleness 0.00"),
        (9.0, "server rank 0 | done: 400 updates, 12800 samples in 7.5 s"),
    ]
    assert contenders.steady_rate(output) == 32 * 100 / 2.5
    with pytest.raises(MeasurementError, match="fewer than two progress lines"):
        contenders.steady_rate(output[:2])
