"""The options of this program, each declared once: its default, its help and its limits.

Loads no torch, so that a wrong option and --help answer at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps.settings.errors import ConfigError
from ps.settings.faults import FORMS as FAULTS
from ps.settings.faults import Fault, parse_fault
from ps.settings.options import (
    check,
    continued,
    option,
    read_command_line,
    to_json,
    values_from_json,
)
from ps.settings.schedule import FORMS as SCHEDULES
from ps.settings.schedule import schedule_factor

LR = 0.03
WEEK_S = 7 * 24 * 3600
LEAST_START_TIMEOUT_S = 10
"""Importing torch takes seconds, and more where ranks share cores."""
LEAST_STALL_TIMEOUT_S = 3
"""A loaded host may not run a healthy process for a second or two."""
_IDENTIFIER = r"[^\W\d]\w*"
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(KiB|MiB|GiB|TiB|B)?"
USAGE = "torchrun --standalone --nproc_per_node=WORLD_SIZE launch.py [options]"
EPILOG = """\
Rank 0 is the parameter server, every other rank is a trainer. A single process is both.

  torchrun --standalone --nproc_per_node=4 launch.py
  torchrun --standalone --nproc_per_node=3 launch.py --workload mnist --epochs 5 --momentum 0.9
  torchrun --standalone --nproc_per_node=1 launch.py --num-gpus 1
  make train WORLD=4 ARGS="--optimizer Adam --lr 0.001"

exit codes: 0 done, 1 an error in the workload, 2 bad option, plug-in or data, 3 not started as
needed, 4 a peer was lost, 5 a peer stalled, 6 out of memory, 7 checkpoint unusable, 8 training
failed, 9 orphaned, 130 interrupted (128 + signal)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The options of a job. They are the same on every rank."""

    workload: str = option(
        "auto",
        "what to train: mnist, digits (generated, needs no network), a plug-in as "
        "module:function, or auto, which is mnist if its files are in --data-dir or can be "
        "fetched within seconds, and digits otherwise",
        group="workload",
        pattern=rf"auto|mnist|digits|{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}",
        wanted="auto, mnist, digits or module:function",
        metavar="NAME",
        resume="fixed",
    )
    data_dir: Path = option(
        Path("data"),
        "folder that holds MNIST/raw, or in which to create it",
        group="workload",
        metavar="DIR",
    )
    data_mirror: str = option(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "URL from which MNIST is fetched if it is not in --data-dir",
        group="workload",
        pattern="https?://.*",
        wanted="a URL that starts with http:// or https://",
        metavar="URL",
    )
    epochs: int = option(1, "passes over the training set", group="training", least=1)
    batch_size: int = option(
        32,
        "samples in one forward and backward pass",
        group="training",
        least=1,
        resume="fixed",
    )
    optimizer: str = option(
        "SGD", "name of an optimizer of torch.optim", group="training", resume="fixed"
    )
    lr: float | None = option(
        None,
        f"learning rate; without it {LR} for each batch of --batch-size in an update, so it is "
        "multiplied by --accumulate, and with --max-lag 0 by the number of trainers",
        group="training",
        above=0,
    )
    momentum: float | None = option(
        None,
        "momentum factor; without it the optimizer's own default",
        group="training",
        least=0,
        most=1,
        resume="fixed",
    )
    weight_decay: float | None = option(
        None,
        "weight decay factor; without it the optimizer's own default",
        group="training",
        least=0,
    )
    lr_schedule: str = option(
        "constant",
        f"factor on --lr as a function of the update: {SCHEDULES}",
        group="training",
        metavar="SCHEDULE",
    )
    clip_norm: float = option(
        0.0,
        "largest allowed 2-norm of all gradients together, 0 for no limit",
        group="training",
        least=0,
    )
    seed: int = option(
        0,
        "seed of the initial weights, the order of samples, and dropout",
        group="training",
        least=0,
        most=2**63 - 1,
        resume="fixed",
    )
    compute: str = option(
        "server",
        "where forward and backward run: server (with one replica of the model for each trainer), "
        "or trainer (each on its own copy of the weights)",
        group="machine",
        choices=("server", "trainer"),
    )
    max_lag: str = option(
        "inf",
        "how many orders a trainer may be ahead of the slowest one when it starts another: inf "
        "for any number, and each gradient is applied when it arrives; K for at most K; 0 to "
        "average one gradient of every trainer in each update",
        group="machine",
        pattern="inf|[0-9]{1,9}",
        wanted="inf or a whole number, 0 or more",
        metavar="inf|K|0",
        earlier_name="staleness",
    )
    link: str = option(
        "auto",
        "how trainers reach the server: local (Unix socket and shared memory), rpc (torch's RPC), "
        "or auto, which is local where that is supported and rpc otherwise",
        group="machine",
        choices=("auto", "local", "rpc"),
    )
    num_gpus: int = option(
        0,
        "GPUs of the server: 0 for none, 2 to split a Sequential model by layers",
        group="machine",
        least=0,
        most=2,
    )
    threads: int = option(
        0,
        "threads of one forward or backward pass, 0 to divide the usable cores among the trainers",
        group="machine",
        least=0,
        most=1024,
    )
    precision: str = option(
        "float32",
        "number format in which the model computes; weights, gradients and the optimizer's state "
        "stay float32",
        group="machine",
        choices=("float32", "bfloat16"),
    )
    channels_last: bool | None = option(
        None,
        "whether images and weights are in the channels_last memory format; without either flag "
        "it is on for the built-in workloads, and a plug-in decides for itself",
        group="machine",
    )
    accumulate: int = option(
        1,
        "batches of --batch-size in one gradient",
        group="training",
        least=1,
        most=2**20,
        resume="fixed",
    )
    num_workers: int = option(
        0,
        "loader processes of each trainer, which load batches ahead; 0 to load them in the "
        "trainer itself",
        group="machine",
        least=0,
        most=256,
    )
    run_dir: Path | None = option(
        None,
        "folder for what this run writes, new or empty; without it the folder of --resume, or "
        "runs/<time>-<id>",
        group="run",
        metavar="DIR",
        resume="own",
    )
    resume: str | None = option(
        None,
        "continue from the newest checkpoint of that run directory, with the options of that run "
        "unless others are typed; auto: from --run-dir if it has a checkpoint, else from "
        "runs/latest if that run is unfinished and this one is in runs/ too, else start from "
        "scratch, as without it",
        group="run",
        metavar="DIR|auto",
        resume="own",
    )
    checkpoint_every: str = option(
        "60s",
        "how often to save a checkpoint, in updates (500) or in seconds (60s); 0 for only when "
        "the job ends or fails",
        group="run",
        pattern="[0-9]{1,9}s?",
        wanted="a number of updates such as 500, or of seconds such as 60s",
        metavar="UPDATES|SECONDSs",
    )
    keep: int = option(2, "how many checkpoints to keep", group="run", least=1)
    start_timeout: float = option(
        120.0,
        "seconds to wait for all ranks to arrive",
        group="run",
        least=LEAST_START_TIMEOUT_S,
        most=WEEK_S,
    )
    rpc_timeout: float = option(
        0.0,
        "seconds that one call to the server may take, more than an order, an evaluation or a "
        "wait for other trainers takes; without it --stall-timeout finds a server that hangs",
        group="run",
        zero="no limit",
        least=LEAST_STALL_TIMEOUT_S,
        most=WEEK_S,
    )
    stall_timeout: float = option(
        300.0,
        "seconds without progress after which a trainer or the server counts as stalled; type "
        "more for a first step or an evaluation that takes longer, and 0 under a debugger",
        group="run",
        zero="never",
        least=LEAST_STALL_TIMEOUT_S,
        most=WEEK_S,
    )
    memory_limit: str = option(
        "0",
        "memory that all ranks together may use, such as 8GiB, if that is less than the host and "
        "its cgroup allow; 0 for no limit of its own",
        group="run",
        pattern=_SIZE,
        wanted="a size such as 8GiB or 500MiB",
        metavar="SIZE",
    )
    on_nonfinite: str = option(
        "stop",
        "what to do about a loss or gradient that is not finite, which never reaches the weights: "
        "stop the job, or skip the order and count it",
        group="training",
        choices=("stop", "skip"),
    )
    inject: tuple[str, ...] = option(
        (),
        f"inject a fault, to try out what happens; may be given several times: {FAULTS}",
        group="run",
        metavar="FAULT",
        resume="own",
    )
    log_level: str = option(
        "info",
        "least severe message to print",
        group="run",
        choices=("debug", "info", "warning"),
        resume="own",
    )

    def __post_init__(self) -> None:
        check(self)
        schedule_factor(self.lr_schedule)
        _ = self.faults  # reading them is the check
        if self.compute == "trainer" and self.num_gpus:
            raise ConfigError(
                f"--num-gpus {self.num_gpus} needs --compute server: trainers compute on the CPU"
            )

    def lr_of(self, batches_per_update: int) -> float:
        """The learning rate for updates that are a mean over so many batches of --batch-size.

        The linear scaling rule of Goyal et al., "Accurate, Large Minibatch SGD" (2017), unless
        --lr was typed.
        """
        return LR * batches_per_update if self.lr is None else self.lr

    @property
    def lag_limit(self) -> int | None:
        """--max-lag as a number of orders, None without a limit."""
        return None if self.max_lag == "inf" else int(self.max_lag)

    @property
    def checkpoint_updates(self) -> int | None:
        """--checkpoint-every in updates, None if it is never or in seconds."""
        return int(self.checkpoint_every) or None if self.checkpoint_every.isdigit() else None

    @property
    def checkpoint_interval_s(self) -> float | None:
        """--checkpoint-every in seconds, None if it is never or in updates."""
        every = self.checkpoint_every
        return None if every.isdigit() else float(every.removesuffix("s")) or None

    @property
    def rpc_timeout_s(self) -> float | None:
        """--rpc-timeout in seconds, None for no limit."""
        return self.rpc_timeout or None

    @property
    def stall_timeout_s(self) -> float | None:
        """--stall-timeout in seconds, None for never."""
        return self.stall_timeout or None

    @property
    def memory_limit_bytes(self) -> int | None:
        """--memory-limit in bytes, None without one."""
        number, unit = re.findall(_SIZE, self.memory_limit)[0]
        power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit or "B")
        return int(float(number) * 1024**power) or None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """--inject.

        Raises:
            ConfigError: a text is none of the forms of a fault.
        """
        return tuple(parse_fault(text) for text in self.inject)

    def to_json(self, *, inherited_only: bool = False) -> dict[str, Any]:
        """The options as JSON can hold them; inherited_only without those of one run alone."""
        return to_json(self, inherited_only=inherited_only)

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> Config:
        """Read what to_json() gave, in this or an earlier version.

        Raises:
            ConfigError: an option is unknown, or its value is not possible.
        """
        return cls(**values_from_json(cls, options))


def parse_args(argv: Sequence[str], inherited: Mapping[str, Any] | None = None) -> Config:
    """Read the command line. `--help` prints and raises SystemExit(0).

    inherited are the options of the run that is to be continued, as to_json() gave them.

    Raises:
        ConfigError: an option is unknown, its value has the wrong type or is out of range, or it
            must stay as it was in the run that is to be continued.
    """
    typed = read_command_line(
        Config,
        argv,
        prog="launch.py",
        usage=USAGE,
        description="Train one model with a parameter server on this host.",
        epilog=EPILOG,
    )
    if inherited is None:
        return Config(**typed)
    if typed.get("workload") == "auto":
        del typed["workload"]  # that run has settled what auto means
    values = continued(Config, typed, values_from_json(Config, inherited))
    try:
        return Config(**values)
    except ConfigError as error:
        hint = "what is not typed is taken from the run that is continued"
        raise ConfigError(f"{error} ({hint})") from None
