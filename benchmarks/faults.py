"""Lets faults happen to real jobs, and sees what becomes of them.

    python -m benchmarks.faults [--only TEXT] [--quick] [--json runs/faults.json]

Each row is run for both ways to compute and both links, at world size 3 unless it says otherwise.
After each, nothing may be left: no process, no shared memory, no socket, no temporary file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.plugins import EVALUATING, SPOILED
from tests.jobs import Done, Job, mnist_folder
from tests.leftovers import MARK, Leftovers

OVER_S = 10.0
ORPHANS_S = 5.0
STALL_S = 4.0
FOUND_S = STALL_S + 2.0
UPDATES = 400
STEADY = ("--workload", "benchmarks.plugins:steady", "--lr", "0.1")
SMALL = ("--workload", "benchmarks.plugins:small_perceptron", "--lr", "0.1")
SYNCHRONOUS = ("--max-lag", "0", "--momentum", "0.9", "--lr-schedule", "linear")
ACCURACY = 0.95
"""What the undisturbed job surpasses by far."""


@dataclass(frozen=True)
class Setting:
    compute: str
    link: str

    @property
    def args(self) -> tuple[str, ...]:
        return ("--compute", self.compute, "--link", self.link)

    def __str__(self) -> str:
        return f"{self.compute}/{self.link}"


SETTINGS = [Setting(*pair) for pair in itertools.product(("trainer", "server"), ("local", "rpc"))]


@dataclass(frozen=True)
class Result:
    row: str
    setting: str
    passed: bool
    seconds: float
    seen: str


Row = Callable[[Setting, Path], str]
"""Gives what was seen, in a few words; an AssertionError is a failure."""
ROWS: dict[str, tuple[Row, Sequence[Setting]]] = {}


def row(name: str, settings: Sequence[Setting] = SETTINGS) -> Callable[[Row], Row]:
    def add(function: Row) -> Row:
        ROWS[name] = (function, settings)
        return function

    return add


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="one setting a row, in turn")
    parser.add_argument("--json", type=Path, default=Path("runs/faults.json"))
    args = parser.parse_args()
    chosen = [
        (name, function, settings)
        for name, (function, settings) in ROWS.items()
        if args.only in name
    ]
    results = []
    for number, (name, function, settings) in enumerate(chosen):
        which = [settings[number % len(settings)]] if args.quick else settings
        for setting in which:
            result = _run(name, function, setting)
            word = "ok" if result.passed else "FAILED"
            line = f"{word:6} {setting!s:13} {result.seconds:5.0f} s  {name}: {result.seen}"
            print(line, flush=True)
            results.append(result)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    failed = sum(not result.passed for result in results)
    print(f"{len(results)} runs, {failed} failed; all are in {args.json}")
    sys.exit(1 if failed else 0)


def _run(name: str, function: Row, setting: Setting) -> Result:
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        tempfile.TemporaryDirectory(prefix="faults-tmp-") as temporary,
    ):
        os.environ["TMPDIR"] = temporary
        before = Leftovers(mark, Path(temporary))
        try:
            seen, passed = function(setting, Path(folder)), True
        except Exception as error:
            seen, passed = f"{type(error).__name__}: {error}"[:2000], False
        left = before.found()
    del os.environ["TMPDIR"]
    if left:
        seen, passed = f"{seen}; LEFT: {', '.join(left)}", False
    return Result(name, str(setting), passed, time.monotonic() - start, seen)


# --- what rows have in common


@contextmanager
def job_of(folder: Path, *args: str, **options: Any) -> Iterator[Job]:
    """A job that is gone at the end, whatever happens."""
    job = Job(folder, *args, **options)
    try:
        yield job
    finally:
        job.kill()


def rank_of(job: Job, rank: int) -> psutil.Process:
    """The process of a rank, once it is there."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(psutil.Error, KeyError):
            return job.ranks()[rank]
        time.sleep(0.02)
    raise AssertionError(f"there is no rank {rank}")


def expect(condition: bool, what: str, done: Done | None = None) -> None:
    """With the end of the output, if it does not hold."""
    tail = "\n".join(done.text.splitlines()[-25:]) if done else ""
    assert condition, f"{what}\n{tail}"


def expect_named(done: Done, rank: int, words: str = "") -> None:
    """The report, or torchrun's where there is none yet, names the rank."""
    expect(done.exit_code != 0, "exit code 0", done)
    try:
        report = done.report
    except OSError:
        report = {"status": "running"}
    report = {"failure": None} | report
    if report["failure"] is None or report["status"] == "interrupted":
        root = done.text[done.text.rindex("Root Cause") :]
        expect(f"rank      : {rank}" in root, f"torchrun does not name rank {rank}", done)
        return
    expect(report["failure"]["rank"] == rank, f"rank {report['failure']['rank']} is named", done)
    expect(words in report["cause"], f"the cause is {report['cause']!r}", done)


def expect_done(done: Done, samples: int) -> None:
    expect(done.exit_code == 0, f"exit code {done.exit_code}", done)
    report = done.report
    expect(report["status"] == "done", report["status"], done)
    expect(report["samples_trained"] == samples, f"{report['samples_trained']} samples", done)
    expect(report["test_accuracy"] >= ACCURACY, f"accuracy {report['test_accuracy']}", done)


SAMPLES = 32 * UPDATES


# --- SIGKILL of each rank in turn


def _importing(job: Job, rank: int) -> None:
    rank_of(job, rank)
    time.sleep(0.5)
    rank_of(job, rank).kill()


def _joining(job: Job, rank: int) -> None:
    job.wait_for("usable cores")
    rank_of(job, rank).kill()


def _evaluating(job: Job, rank: int) -> None:
    job.wait_for(EVALUATING)
    rank_of(job, rank).kill()


def _at_the_end(job: Job, rank: int) -> None:
    job.wait_for(" evaluated: ")
    with suppress(AssertionError, psutil.Error):  # it may be over
        job.ranks()[rank].kill()


def _by_injection(job: Job, rank: int) -> None:
    job.wait_for("a fault will be injected")


STAGES: dict[str, tuple[Callable[[Job, int], None], str]] = {
    "while importing": (_importing, ""),
    "while joining": (_joining, ""),
    "at the first step": (_by_injection, "kill:{}@1"),
    "mid-epoch": (_by_injection, f"kill:{{}}@{UPDATES // 2}"),
    "in evaluation": (_evaluating, ""),
    "at the end": (_at_the_end, ""),
}


def _kill(stage: str, rank: int, setting: Setting, folder: Path, restarts: int) -> str:
    act, inject = STAGES[stage]
    fault = ("--inject", inject.format(rank)) if inject else ()
    with job_of(folder, *STEADY, *setting.args, *fault, restarts=restarts) as job:
        act(job, rank)
        killed_at = time.monotonic()
        done = job.wait()
        took_s = time.monotonic() - killed_at
    if stage == "at the end" and done.exit_code == 0 and done.report["attempt"] == 0:
        expect_done(done, SAMPLES)
        return "it was over before"
    if restarts:
        expect_done(done, SAMPLES)
        expect(done.report["attempt"] == 1, f"attempt {done.report['attempt']}", done)
        return f"recovered, accuracy {done.report['test_accuracy']:.4f}"
    if not inject:  # the time of an injected kill is not known here
        expect(took_s < OVER_S, f"over after {took_s:.1f} s", done)
    expect_named(done, rank, "killed by SIGKILL")
    return f"over after {took_s:.1f} s, rank {rank} named"


def _add_kills() -> None:
    for stage, rank, restarts in itertools.product(STAGES, (0, 1, 2), (0, 2)):
        name = f"SIGKILL of rank {rank} {stage}{', with restarts' if restarts else ''}"

        def run(
            setting: Setting,
            folder: Path,
            stage: str = stage,
            rank: int = rank,
            restarts: int = restarts,
        ) -> str:
            return _kill(stage, rank, setting, folder, restarts)

        row(name)(run)


_add_kills()


@row("SIGKILL of a trainer every 20 s for 3 minutes, with restarts, MNIST")
def _again_and_again(setting: Setting, folder: Path) -> str:
    data_dir = mnist_folder()
    assert data_dir is not None, "MNIST is not there"
    epochs, kills = 5, 9
    args = ("--workload", "mnist", "--data-dir", str(data_dir), "--epochs", str(epochs))
    with job_of(folder, *args, *setting.args, restarts=kills + 1) as job:
        job.wait_for("updates 1/")
        for kill in range(kills):
            time.sleep(20)
            if job.process.poll() is not None:
                break
            rank_of(job, 1 + kill % 2).kill()
        done = job.wait(bound_s=600)
    expect(done.exit_code == 0, f"exit code {done.exit_code}", done)
    report = done.report
    expect(report["samples_trained"] == 60000 * epochs, f"{report['samples_trained']}", done)
    per_epoch = [record["updates"] for record in report["history"]]
    expect(per_epoch == [1875 * (e + 1) for e in range(epochs)], f"updates {per_epoch}", done)
    back = _steps_back(done)
    expect(max(back, default=0) <= 0, f"applied updates were lost: {back}", done)
    expect(report["attempt"] >= 5, f"only {report['attempt']} restarts", done)
    return (
        f"{report['attempt']} restarts, {report['samples_trained']} samples, no update lost, "
        f"accuracy {report['test_accuracy']:.4f}"
    )


def _steps_back(done: Done) -> list[int]:
    """For each restart, how many of the updates that were told of it did not go on from."""
    told, back = 0, []
    for line in done.lines_of_ranks():
        if found := re.search(r"going on from .* after (\d+) of", line):
            back.append(told - int(found[1]))
        elif found := re.search(r"updates (\d+)/", line):
            told = int(found[1])
    return back


# --- standing still, and ending in other ways


def _stop(rank: int, setting: Setting, folder: Path) -> str:
    args = (*STEADY, *setting.args, "--epochs", "1000", "--stall-timeout", str(STALL_S))
    with job_of(folder, *args) as job:
        job.wait_for("epoch 2/")
        stopped = rank_of(job, rank)
        stopped.suspend()
        start = time.monotonic()
        job.wait_for("| error: failed", bound_s=30)
        took_s = time.monotonic() - start
        stopped.resume()  # torchrun's SIGTERM waits for it
        done = job.wait()
    expect(took_s < FOUND_S, f"found after {took_s:.1f} s", done)
    expect_named(done, rank, "sto")  # has been stopped, or stood still
    expect(done.report["exit_code"] == 5, f"exit code {done.report['exit_code']}", done)
    return f"found after {took_s:.1f} s (--stall-timeout {STALL_S:.0f})"


@row("SIGSTOP of a trainer")
def _stopped_trainer(setting: Setting, folder: Path) -> str:
    return _stop(2, setting, folder)


@row("SIGSTOP of the server")
def _stopped_server(setting: Setting, folder: Path) -> str:
    return _stop(0, setting, folder)


def _injected(setting: Setting, folder: Path, fault: str, *args: str) -> Done:
    with job_of(folder, *STEADY, *setting.args, "--inject", fault, *args) as job:
        return job.wait()


@row("a trainer exits 0 early")
def _exits_early(setting: Setting, folder: Path) -> str:
    done = _injected(setting, folder, "exit0:2@50")
    expect_named(done, 2, "ended with exit code 0")
    return str(done.report["cause"])


@row("a trainer raises")
def _raises(setting: Setting, folder: Path) -> str:
    done = _injected(setting, folder, "raise:2@50")
    expect_named(done, 2, "RuntimeError: a fault was injected")
    return str(done.report["cause"])


@row("a trainer deadlocks holding the GIL")
def _deadlocks(setting: Setting, folder: Path) -> str:
    done = _injected(setting, folder, "deadlock:2@50", "--stall-timeout", str(STALL_S))
    expect_named(done, 2, "no progress")
    stacks = Path(done.report["failure"]["stacks"]).read_text()
    expect("hold_gil" in stacks, "the stacks do not show it", done)
    return f"over after {done.duration_s:.1f} s with its stacks"


@row("SIGKILL of torchrun")
def _no_torchrun(setting: Setting, folder: Path) -> str:
    with job_of(folder, *STEADY, *setting.args, "--epochs", "1000") as job:
        job.wait_for("epoch 2/")
        ranks = list(job.ranks().values())
        job.send(signal.SIGKILL)
        start = time.monotonic()
        _, alive = psutil.wait_procs(ranks, timeout=ORPHANS_S)
        took_s = time.monotonic() - start
        assert not alive, f"{len(alive)} ranks are there after {ORPHANS_S} s"
        job.process.wait()
        report = json.loads((job.run_dir / "report.json").read_text())
    assert report["exit_code"] == 9, report["exit_code"]
    assert report["checkpoint"], "nothing was saved"
    return f"all gone after {took_s:.1f} s, saved"


@row("SIGTERM to torchrun, resumed: bit for bit")
def _interrupted(setting: Setting, folder: Path) -> str:
    args = ("--workload", "digits", *setting.args, *SYNCHRONOUS)
    with job_of(folder / "whole", *args) as job:
        whole = job.wait()
    expect_done(whole, SAMPLES)
    parts = []
    for number in range(3):
        with job_of(folder / f"part{number}", *args, *_going_on(parts)) as job:
            job.wait_for("updates ")
            time.sleep(random.uniform(0.3, 1.5))
            start = time.monotonic()
            job.send(signal.SIGTERM)
            done = job.wait()
            took_s = time.monotonic() - start
        expect(took_s < OVER_S, f"over after {took_s:.1f} s", done)
        expect(done.report["checkpoint"] is not None, "nothing was saved", done)
        parts.append(done)
    with job_of(folder / "rest", *args, *_going_on(parts)) as job:
        rest = job.wait()
    expect_done(rest, SAMPLES)
    same = all(value.equal(rest.model[name]) for name, value in whole.model.items())
    expect(same, "the weights differ", rest)
    at = [part.report["updates"] for part in parts]
    return f"interrupted after {at} updates, the weights are the same bit for bit"


def _going_on(parts: Sequence[Done]) -> tuple[str, ...]:
    return ("--resume", str(parts[-1].run_dir)) if parts else ()


# --- memory


@row("leak until the limit")
def _leaks(setting: Setting, folder: Path) -> str:
    limit = 2 << 30
    with _cgroup(limit) as enter:
        args = () if enter else ("--memory-limit", f"{limit}B")
        with job_of(
            folder,
            *(*STEADY, *setting.args, "--epochs", "1000", "--inject", "leak:2@100", *args),
            before=enter,
        ) as job:
            done = job.wait()
    expect_named(done, 2, "MiB")
    expect(done.report["exit_code"] == 6, f"exit code {done.report['exit_code']}", done)
    where = "in a cgroup" if enter else "--memory-limit, as no cgroup can be made"
    return f"{where}: {done.report['cause']}"


@contextmanager
def _cgroup(limit_bytes: int) -> Iterator[Callable[[], None] | None]:
    """What a process has to call to be in a new cgroup with that limit; None without rights."""
    name = f"parameter-server-{uuid.uuid4().hex[:6]}"
    for folder, file in (
        (Path("/sys/fs/cgroup/memory") / name, "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup") / name, "memory.max"),
    ):
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / file).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        yield partial(_enter, folder / "cgroup.procs")
        _remove_cgroup(folder)
        return
    yield None


def _enter(procs: Path) -> None:
    procs.write_text(str(os.getpid()))


def _remove_cgroup(folder: Path) -> None:
    for _ in range(50):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


# --- checkpoints


@row("100 SIGKILLs while checkpoints are written", SETTINGS[:1])
def _killed_while_saving(setting: Setting, folder: Path) -> str:
    kills = 100
    args = ("--checkpoint-every", "1", "--keep", "3", "--epochs", "100000")
    with job_of(folder, *SMALL, *setting.args, *args, world_size=1, restarts=kills) as job:
        newest = 0
        for kill in range(kills):
            job.wait_for("usable cores" if kill == 0 else "going on from", count=max(1, kill))
            time.sleep(random.uniform(0.0, 1.0))
            before = _newest_whole(job.run_dir)
            rank_of(job, 0).kill()
            after = _newest_whole(job.run_dir)
            assert after >= before >= newest, f"kill {kill}: {newest}, {before}, {after}"
            newest = after
        job.wait_for("going on from", count=kills)
    assert newest > kills, f"only {newest} updates"
    return f"{kills} kills, the newest whole one was never older; {newest} updates"


def _newest_whole(run_dir: Path) -> int:
    """The version in the newest checkpoint that can be loaded; 0 if there is none."""
    from ps.job.checkpoint import Checkpoints, read
    from ps.settings.errors import CheckpointUnusable

    for path in reversed(Checkpoints(run_dir).paths()):
        with suppress(CheckpointUnusable):
            return int(read(path)["store"]["version"])
    return 0


@row("disk full during a checkpoint")
def _disk_full(setting: Setting, folder: Path) -> str:
    args = (*STEADY, *setting.args, "--epochs", "8", "--checkpoint-every", "50")
    with _small_disk(folder / "disk", 24 << 20) as disk:
        with job_of(disk, *args) as job:
            job.wait_for("epoch 1/8 evaluated")
            good = _newest_whole(job.run_dir)
            ballast = disk / "ballast"
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            job.wait_for("no checkpoint could be saved")
            kept = _newest_whole(job.run_dir)
            ballast.unlink()
            job.wait_for("checkpoints are saved again")
            done = job.wait()
        expect(kept >= good > 0, f"the newest whole one had {good} updates, then {kept}", done)
        expect_done(done, 8 * SAMPLES)
    return "a warning, the last good one stayed, saved again with room, done"


@contextmanager
def _small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        raise AssertionError("a file system can be mounted by root alone: not tried")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@row("run directory removed")
def _no_run_dir(setting: Setting, folder: Path) -> str:
    args = (*STEADY, *setting.args, "--epochs", "3", "--checkpoint-every", "50")
    with job_of(folder, *args) as job:
        job.wait_for("epoch 1/3 evaluated")
        shutil.rmtree(job.run_dir, ignore_errors=True)
        done = job.wait()
    expect_done(done, 3 * SAMPLES)
    expect(bool(done.model), "no model", done)
    return "trained to the end, report and model written"


def _with_checkpoints(setting: Setting, folder: Path) -> Done:
    args = (*STEADY, *setting.args, "--checkpoint-every", "50", "--keep", "3")
    with job_of(folder, *args) as job:
        done = job.wait()
    expect_done(done, SAMPLES)
    return done


@row("newest checkpoint truncated")
def _truncated(setting: Setting, folder: Path) -> str:
    first = _with_checkpoints(setting, folder / "first")
    *_, before, newest = sorted((first.run_dir / "checkpoints").glob("*.pt"))
    os.truncate(newest, newest.stat().st_size // 2)
    again = ("--resume", str(first.run_dir), "--epochs", "2")
    with job_of(folder / "second", *again) as job:
        done = job.wait()
    expect(f"checkpoint {newest} is not used" in done.text, "it is not named", done)
    expect(done.report["resumed_from"] == str(before), f"{done.report['resumed_from']}", done)
    expect_done(done, 2 * SAMPLES)
    return "named, and the one before was used"


@row("checkpoint from another model")
def _foreign(setting: Setting, folder: Path) -> str:
    first = _with_checkpoints(setting, folder / "first")
    config = first.run_dir / "config.json"
    config.write_text(config.read_text().replace("plugins:steady", "plugins:other_model"))
    with job_of(folder / "second", "--resume", str(first.run_dir), restarts=2) as job:
        done = job.wait()
    expect("exitcode  : 7" in done.text, "not exit code 7", done)
    expect("it is of another model" in done.text, "it is not said", done)
    expect(done.text.count("| error: none of the") == 1, "not said once", done)
    return "each named, exit code 7, not tried again"


# --- what is not finite


def _stop_and_skip(setting: Setting, folder: Path, workload: str) -> tuple[Done, Done]:
    """The job that stops at an order that is not finite, and the one that leaves it out."""
    args = ("--workload", f"benchmarks.plugins:{workload}", *setting.args)
    with job_of(folder / "stop", *args) as job:
        stopped = job.wait()
    expect(stopped.report["exit_code"] == 8, f"{stopped.report['exit_code']}", stopped)
    with job_of(folder / "skip", *args, "--lr", "0.1", "--on-nonfinite", "skip") as job:
        done = job.wait()
    expect_done(done, SAMPLES - 32)
    expect(done.report["orders_skipped"] == 1, f"{done.report['orders_skipped']}", done)
    return stopped, done


@row("NaN in the data")
def _nan(setting: Setting, folder: Path) -> str:
    stopped, done = _stop_and_skip(setting, folder, "nan_in_the_data")
    culprit = stopped.report["failure"]["last_order"]["samples"]
    expect(SPOILED in culprit, f"sample {SPOILED} is not in {culprit}", stopped)
    expect(SPOILED in done.report["skipped"][0]["samples"], "the order is not named", done)
    return "stop: code 8 and the order; skip: one order left out, done"


@row("infinite gradient")
def _infinite(setting: Setting, folder: Path) -> str:
    stopped, _ = _stop_and_skip(setting, folder, "infinite_gradient")
    expect_named(stopped, 1, "is not finite")
    return f"stop: {stopped.report['cause']}; skip: one order left out, done"


# --- several jobs, and host names


@row("two jobs at once")
def _two(setting: Setting, folder: Path) -> str:
    with (
        job_of(folder / "one", *STEADY, *setting.args) as one,
        job_of(folder / "two", *STEADY, *setting.args) as two,
    ):
        for job in (one, two):
            expect_done(job.wait(), SAMPLES)
    return "both done"


@row("a job straight after a killed one")
def _straight_after(setting: Setting, folder: Path) -> str:
    with job_of(folder / "one", *STEADY, *setting.args, "--epochs", "1000") as job:
        job.wait_for("epoch 2/")
    with job_of(folder / "two", *STEADY, *setting.args) as job:
        expect_done(job.wait(), SAMPLES)
    return "done"


def _named_host(setting: Setting, folder: Path, prepare: str) -> str:
    """In a network of its own, whose host has another name."""
    network = ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
    if subprocess.run([*network, "true"], capture_output=True).returncode != 0:
        raise AssertionError("a network of its own can be made by root alone: not tried")
    wrap = [*network, f'ip link set lo up; {prepare}; exec "$@"', "sh"]
    with job_of(folder, *STEADY, *setting.args, "--epochs", "3", wrap=wrap) as job:
        job.wait_for("epoch 2/")
        foreign = _foreign_listeners(job)
        done = job.wait()
    expect(not foreign, f"listens on {foreign}", done)
    expect_done(done, 3 * SAMPLES)
    return "done, listens on loopback only"


def _foreign_listeners(job: Job) -> list[str]:
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        for connection in process.net_connections():
            address = getattr(connection.laddr, "ip", "")
            listens = connection.status == psutil.CONN_LISTEN
            if listens and address not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                found.append(f"{address} by {process.pid}")
    return found


@row("host name that does not resolve")
def _no_name(setting: Setting, folder: Path) -> str:
    return _named_host(setting, folder, "hostname nohost-xyz")


@row("host name on another address")
def _other_address(setting: Setting, folder: Path) -> str:
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.9.8.7 elsewhere\n")
    prepare = f"ip addr add 10.9.8.7/32 dev lo; mount --bind {hosts} /etc/hosts; hostname elsewhere"
    return _named_host(setting, folder, prepare)


# --- how long it takes


@row("restart: SIGKILL of a trainer to the next update", SETTINGS[:1] + SETTINGS[2:3])
def _restart(setting: Setting, folder: Path) -> str:
    shares = []
    for number in range(5):
        args = (*STEADY, *setting.args, "--epochs", "1000")
        with job_of(folder / str(number), *args, restarts=1) as job:
            job.wait_for("updates 1/")
            fresh_s = job.time_of("updates 1/")
            job.wait_for("epoch 2/")
            killed_at = job.now()
            rank_of(job, 2).kill()
            job.wait_for("going on from")
            resumed_at = job.time_of("going on from")
            job.wait_for("updates ", after_s=resumed_at)
            again_s = job.time_of("updates ", after_s=resumed_at) - killed_at
        shares.append(again_s / fresh_s)
    share = statistics.median(shares)
    assert share <= 1.5, f"{share:.2f} of a fresh start: {shares}"
    return f"{share:.2f} of a fresh start's time to its first update (at most 1.5; median of 5)"


@row("cost of watching", SETTINGS[:1] + SETTINGS[2:3])
def _cost(setting: Setting, folder: Path) -> str:
    args = ("--workload", "digits", *setting.args, "--epochs", "1")
    shares = []
    programs = ("launch.py", "benchmarks/unwatched.py")
    for number in range(6):
        rates = {}
        for program in programs if number % 2 else programs[::-1]:
            with job_of(folder / f"{number}{Path(program).stem}", *args, program=program) as job:
                rates[program] = job.wait().report["samples_per_s"]
        shares.append(rates[programs[0]] / rates[programs[1]])
    share = statistics.median(shares)
    assert share >= 0.99, f"{share:.3f} of the rate without: {shares}"
    return f"{share:.3f} of the rate without (at least 0.99; median of 6)"


if __name__ == "__main__":
    main()
