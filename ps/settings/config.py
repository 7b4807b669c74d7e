"""The options, each declared once: default, help with unit, and limit.

Knows nothing of torch, so that a wrong option and --help answer before it is loaded.
"""

from __future__ import annotations

import argparse  # noqa: TID251
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from ps.settings.errors import ConfigError
from ps.settings.faults import FORMS as FAULTS
from ps.settings.faults import Fault, parse_fault
from ps.settings.schedule import FORMS, schedule_factor

LR = 0.03
WEEK_S = 7 * 24 * 3600
USAGE = "torchrun --standalone --nproc_per_node=WORLD_SIZE launch.py [options]"
EPILOG = """\
Rank 0 is the parameter server, every other rank a trainer; with one process it is both.

  torchrun --standalone --nproc_per_node=4 launch.py
  torchrun --standalone --nproc_per_node=3 launch.py --workload mnist --epochs 5 --momentum 0.9
  torchrun --standalone --nproc_per_node=1 launch.py --num-gpus 1
  make train WORLD=4 ARGS="--optimizer Adam --lr 0.001"

exit codes: 0 done, 1 an error in the workload, 2 bad option, plug-in or data, 3 not started as
needed, 4 a peer was lost, 5 a peer stalled, 6 out of memory, 7 checkpoint unusable, 8 training
failed, 9 orphaned, 130 interrupted (128 + signal)
"""


def option(
    default: Any,
    help: str,
    *,
    group: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    resume: str = "inherited",
) -> Any:
    """A dataclass field that is also a command-line option of the same name.

    resume tells what it is in a run that goes on from another: "inherited" from there unless it
    is typed, "fixed", which is to be the same, or "own".
    """
    metadata = {
        "help": help,
        "group": group,
        "least": least,
        "above": above,
        "most": most,
        "choices": choices,
        "metavar": metavar,
        "resume": resume,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What the person who started the job asked for. The same on every rank."""

    workload: str = option(
        "auto",
        "mnist, digits (generated, needs no network), a plug-in as module:function, or auto: "
        "mnist if it is in --data-dir or can be fetched shortly, else digits",
        group="workload",
        metavar="NAME",
        resume="fixed",
    )
    data_dir: Path = option(
        Path("data"), "folder with MNIST/raw, or where to put it", group="workload", metavar="DIR"
    )
    data_mirror: str = option(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "where MNIST is fetched from if it is not in --data-dir",
        group="workload",
        metavar="URL",
    )
    epochs: int = option(1, "passes over the training set", group="training", least=1)
    batch_size: int = option(
        32, "samples that are computed at once", group="training", least=1, resume="fixed"
    )
    optimizer: str = option(
        "SGD", "any optimizer of torch.optim, by name", group="training", resume="fixed"
    )
    lr: float | None = option(
        None,
        f"learning rate; without it {LR} for each batch of --batch-size in an update, so times "
        "the trainers with --staleness 0, and times --accumulate",
        group="training",
        above=0,
    )
    momentum: float | None = option(
        None,
        "momentum factor, the optimizer's own without it",
        group="training",
        least=0,
        most=1,
        resume="fixed",
    )
    weight_decay: float | None = option(
        None, "weight decay factor, the optimizer's own without it", group="training", least=0
    )
    lr_schedule: str = option(
        "constant", f"factor on --lr by updates: {FORMS}", group="training", metavar="SCHEDULE"
    )
    clip_norm: float = option(
        0.0, "largest 2-norm of all gradients together, 0 for no limit", group="training", least=0
    )
    seed: int = option(
        0,
        "seed of weights, order of samples, dropout",
        group="training",
        least=0,
        most=2**63 - 1,
        resume="fixed",
    )
    compute: str = option(
        "server",
        "where forward and backward run: server (one replica for each trainer there), or trainer "
        "(each on a copy of the weights)",
        group="machine",
        choices=("server", "trainer"),
    )
    staleness: str = option(
        "inf",
        "inf applies each gradient when it arrives; K lets no trainer start an order when it is "
        "more than K ahead of the slowest; 0 makes one update of a gradient of each trainer",
        group="machine",
        metavar="inf|K|0",
    )
    link: str = option(
        "auto",
        "how trainers reach the server: local (Unix socket and shared memory), rpc (torch's RPC), "
        "or auto: local if it works here, else rpc",
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
        "threads of one forward or backward, 0 to divide the usable cores among the trainers",
        group="machine",
        least=0,
        most=1024,
    )
    precision: str = option(
        "float32",
        "what the model computes in; weights, gradients and optimizer stay float32",
        group="machine",
        choices=("float32", "bfloat16"),
    )
    channels_last: bool | None = option(
        None,
        "images and weights in channels_last memory format; without either flag it is on for "
        "the built-in workloads, and for a plug-in what it says itself",
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
        "processes of each trainer that load batches ahead, 0 to load them in the trainer",
        group="machine",
        least=0,
        most=256,
    )
    run_dir: Path | None = option(
        None,
        "folder for what this run leaves, new or empty; without it that of --resume, or "
        "runs/<time>-<id>",
        group="run",
        metavar="DIR",
        resume="own",
    )
    resume: str | None = option(
        None,
        "continue from the newest checkpoint of that run, with its options unless others are "
        "typed; auto: from --run-dir if it has one, else from runs/latest if that run is "
        "unfinished and this one is in runs/ too, else as without it: start from scratch",
        group="run",
        metavar="DIR|auto",
        resume="own",
    )
    checkpoint_every: str = option(
        "60s",
        "how often to save all that training goes on from, in updates (500) or seconds (60s); "
        "0 for only when the job ends or fails",
        group="run",
        metavar="UPDATES|SECONDSs",
    )
    keep: int = option(2, "checkpoints to keep, the newest ones", group="run", least=1)
    start_timeout: float = option(
        120.0, "seconds to wait for all ranks to arrive", group="run", least=1, most=WEEK_S
    )
    rpc_timeout: float = option(
        0.0,
        "seconds one call to the server may take, 0 for no limit of its own: a server that hangs "
        "is found by --stall-timeout, which also says why",
        group="run",
        least=0,
        most=WEEK_S,
    )
    stall_timeout: float = option(
        300.0,
        "seconds without progress after which a trainer or the server counts as stalled; more for "
        "a first step or an evaluation that takes longer, 0 for never, as under a debugger",
        group="run",
        least=0,
        most=WEEK_S,
    )
    memory_limit: str = option(
        "0",
        "memory that all ranks together may use, such as 8GiB, where the host and its cgroup "
        "would allow more; 0 for no limit of its own",
        group="run",
        metavar="SIZE",
    )
    on_nonfinite: str = option(
        "stop",
        "what to do with a loss or gradient that is not finite, which never reaches the weights: "
        "stop the job, or skip the order and count it",
        group="training",
        choices=("stop", "skip"),
    )
    inject: tuple[str, ...] = option(
        (),
        f"inject a fault, none without it; may be given several times: {FAULTS}",
        group="run",
        metavar="FAULT",
        resume="own",
    )
    log_level: str = option(
        "info",
        "least severe line to print",
        group="run",
        choices=("debug", "info", "warning"),
        resume="own",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec.name, getattr(self, spec.name), spec.metadata)
        schedule_factor(self.lr_schedule)
        if self.staleness != "inf" and not re.fullmatch("[0-9]{1,9}", self.staleness):
            raise ConfigError(
                f"--staleness must be inf or a whole number, 0 or more, got {self.staleness!r}"
            )
        _ = self.memory_limit_bytes, self.faults
        if not re.fullmatch("[0-9]{1,9}s?", self.checkpoint_every):
            raise ConfigError(
                "--checkpoint-every must be a number of updates such as 500, or of seconds such "
                f"as 60s, got {self.checkpoint_every!r}"
            )
        if self.compute == "trainer" and self.num_gpus:
            raise ConfigError(
                f"--num-gpus {self.num_gpus} is for --compute server; trainers compute on the CPU"
            )
        if not self.data_mirror.startswith(("http://", "https://")):
            raise ConfigError(
                f"--data-mirror must start with http:// or https://, got {self.data_mirror!r}"
            )
        if self.workload not in ("auto", "mnist", "digits") and not _is_plug_in(self.workload):
            raise ConfigError(
                f"--workload must be auto, mnist, digits or module:function, got {self.workload!r}"
            )

    def lr_of(self, batches_per_update: int) -> float:
        """The learning rate for updates that are a mean over so many batches of --batch-size.

        The linear scaling rule of Goyal et al., "Accurate, Large Minibatch SGD" (2017), unless
        --lr was typed.
        """
        return LR * batches_per_update if self.lr is None else self.lr

    @property
    def max_lag(self) -> int | None:
        """--staleness as a number of orders, None without a limit."""
        return None if self.staleness == "inf" else int(self.staleness)

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
        """--rpc-timeout, None for no limit."""
        return self.rpc_timeout or None

    @property
    def stall_timeout_s(self) -> float | None:
        """--stall-timeout, None for never."""
        return self.stall_timeout or None

    @property
    def memory_limit_bytes(self) -> int | None:
        """--memory-limit in bytes, None without one."""
        found = re.fullmatch(
            r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(KiB|MiB|GiB|TiB|B)?", self.memory_limit
        )
        if not found:
            raise ConfigError(
                f"--memory-limit must be a size such as 8GiB or 500MiB, got {self.memory_limit!r}"
            )
        power = ("B", "KiB", "MiB", "GiB", "TiB").index(found[2] or "B")
        return int(float(found[1]) * 1024**power) or None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """--inject."""
        return tuple(parse_fault(text) for text in self.inject)

    def to_json(self, *, inherited_only: bool = False) -> dict[str, Any]:
        """The options as JSON can hold them; inherited_only without those of one run alone."""
        return {
            spec.name: _plain(value)
            for spec in fields(self)
            for value in [getattr(self, spec.name)]
            if not (inherited_only and spec.metadata["resume"] == "own")
        }

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> Config:
        """What to_json() gave.

        Raises:
            ConfigError: there is an option that is not known here, or an impossible value.
        """
        types = {spec.name: str(spec.type) for spec in fields(cls)}
        if unknown := sorted(options.keys() - types.keys()):
            raise ConfigError(f"{flag(unknown[0])} is not an option of this version")
        return cls(**{name: _from_plain(types[name], name, options[name]) for name in options})


def _from_plain(annotation: str, name: str, value: Any) -> Any:
    if value is None and annotation.endswith("| None"):
        return None
    kind = _kind(annotation)
    in_json: Any = {Path: str, tuple: list, float: (float, int)}.get(kind, kind)
    if not isinstance(value, in_json) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{flag(name)} cannot be {value!r}")
    return kind(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(name: str, got: Any, limits: Any) -> None:
    if got is None:
        return
    if isinstance(got, float) and not math.isfinite(got):
        raise ConfigError(f"{flag(name)} must be finite, got {got}")
    if limits["least"] is not None and got < limits["least"]:
        raise ConfigError(f"{flag(name)} must be {limits['least']} or more, got {got}")
    if limits["above"] is not None and got <= limits["above"]:
        raise ConfigError(f"{flag(name)} must be above {limits['above']}, got {got}")
    if limits["most"] is not None and got > limits["most"]:
        raise ConfigError(f"{flag(name)} must be {limits['most']} or less, got {got}")
    if limits["choices"] and got not in limits["choices"]:
        raise ConfigError(f"{flag(name)} must be {' or '.join(limits['choices'])}, got {got!r}")


def _is_plug_in(text: str) -> bool:
    module, colon, function = text.partition(":")
    names = [*module.split("."), function]
    return bool(colon) and all(name.isidentifier() for name in names)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see: python launch.py --help")


def parse_args(argv: Sequence[str], inherited: Mapping[str, Any] | None = None) -> Config:
    """Read the command line. `--help` prints and raises SystemExit(0).

    inherited are the options of the run to go on from, as to_json() gave them.

    Raises:
        ConfigError: an option is unknown, its value is of the wrong kind or out of range, or it
            cannot change when a run goes on.
    """
    typed = vars(_parser().parse_args(argv))
    if "inject" in typed:
        typed["inject"] = tuple(typed["inject"])
    if inherited is None:
        return Config(**typed)
    base = Config.from_json(inherited)
    if typed.get("workload") == "auto":
        del typed["workload"]  # what it stands for was settled there
    for spec in fields(Config):
        before = getattr(base, spec.name)
        if spec.metadata["resume"] == "fixed" and typed.get(spec.name, before) != before:
            raise ConfigError(
                f"{flag(spec.name)} {typed[spec.name]} cannot be: the run to go on from has "
                f"{before}; omit it, or omit --resume"
            )
    return replace(base, **typed)


def _parser() -> argparse.ArgumentParser:
    """Gives what was typed, and nothing for the other options."""
    parser = _Parser(
        prog="launch.py",
        usage=USAGE,
        description="Train one model with a parameter server on this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for spec in fields(Config):
        group = spec.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(
            flag(spec.name), **_argument(_kind(str(spec.type)), spec.default, spec.metadata)
        )
    return parser


def _argument(kind: type, default: Any, metadata: Any) -> dict[str, Any]:
    text = metadata["help"].replace("%", "%%")
    limits = [
        f"{word} {metadata[key]}"
        for key, word in (("least", "at least"), ("above", "above"), ("most", "at most"))
        if metadata[key] is not None
    ]
    notes = [*([f"default: {default}"] if default not in (None, ()) else []), *limits]
    text += f" ({'; '.join(notes)})" if notes else ""
    if kind is tuple:
        return {"action": "append", "help": text, "metavar": metadata["metavar"]}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    choices = metadata["choices"]
    metavar = metadata["metavar"] or ("|".join(choices) if choices else _metavar(kind))
    return {"type": _named(kind), "help": text, "metavar": metavar}


def _kind(annotation: str) -> type:
    """The type in an annotation such as `float | None`."""
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}
    return tuple if annotation.startswith("tuple") else kinds[annotation.removesuffix(" | None")]


def _metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _named(kind: type) -> Any:
    """The converter, under the name that argparse shows when a value does not fit."""
    words = {int: "whole number", float: "number", Path: "folder", str: "text"}

    def convert(text: str) -> Any:
        if not text:
            raise ValueError("empty")
        return kind(text)

    convert.__name__ = words.get(kind, kind.__name__)
    return convert
