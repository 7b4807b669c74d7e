"""The commands beside launch.py: `python -m ps doctor`."""

from __future__ import annotations

import argparse  # noqa: TID251
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import NoReturn

from ps.host import signals
from ps.job import doctor
from ps.job.preflight import CheckResult, worst
from ps.job.preparation import with_inherited
from ps.settings.config import Config, parse_args
from ps.settings.errors import ConfigError, LaunchError, PsError

PROGRAM = "python -m ps doctor"
USAGE = f"{PROGRAM} [--json] [--world-size N] [options of launch.py]"
DESCRIPTION = """\
Checks this machine for a run with these options: system, cores, memory, disk, torch, GPUs,
workload, data, and what earlier runs have left. Starts, fetches, ends and removes nothing. Every
line says what was seen and, if that is not ok, what to do.
"""
EPILOG = f"""\
every option of launch.py can be given, as for the run: python launch.py --help

  {PROGRAM}
  {PROGRAM} --world-size 4 --compute trainer --optimizer Adam
  {PROGRAM} --workload my_module:my_function --json > doctor.json

exit codes: 0 nothing failed (there may be warnings), 2 bad option, 3 something failed, 7 the
options of the run to go on from cannot be read
"""
WORLD_SIZE = 3
STATUS_WIDTH = len("warning")


def main(argv: Sequence[str], check_timeout_s: float = doctor.THOROUGH_TIMEOUT_S) -> int:
    """Returns the exit code. Blocks for check_timeout_s for each check that hangs."""
    signals.restore_defaults()
    if argv[:1] == ["doctor"]:
        return _doctor(argv[1:], check_timeout_s)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: {USAGE}; more: {PROGRAM} --help")
        return 0
    seen = f", not {argv[0]!r}" if argv else ""
    print(f"usage: {USAGE}{seen}; more: {PROGRAM} --help", file=sys.stderr)
    return ConfigError.exit_code


def _doctor(argv: Sequence[str], check_timeout_s: float) -> int:
    try:
        as_json, world_size, config = _options(argv)
    except (PsError, argparse.ArgumentError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", ConfigError.exit_code)
    with redirect_stdout(sys.stderr):  # what a plug-in prints does not belong to the answer
        results = doctor.all_checks(config, world_size, check_timeout_s)
    print(_as_json(results) if as_json else _as_text(results))
    return LaunchError.exit_code if worst(results) == "failed" else 0


def _options(argv: Sequence[str]) -> tuple[bool, int, Config]:
    """--json, --world-size, and the options of launch.py. `--help` raises SystemExit(0)."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--world-size",
        type=_world_size,
        default=WORLD_SIZE,
        metavar="N",
        help=f"ranks of the run, --nproc_per_node of torchrun (default: {WORLD_SIZE}; at least 1)",
    )
    typed, others = parser.parse_known_args(argv)
    return typed.json, typed.world_size, with_inherited(parse_args(others), others)


def _world_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return int(text)


def _as_json(results: Sequence[CheckResult]) -> str:
    checks = [asdict(result) for result in results]
    return json.dumps({"status": worst(results), "checks": checks}, indent=2)


def _as_text(results: Sequence[CheckResult]) -> str:
    width = max(len(result.name) for result in results)
    lines = [
        f"{_word(result):{STATUS_WIDTH}}  {result.name:{width}}  {result.text}"
        for result in results
    ]
    return "\n".join([*lines, _summary(results)])


def _word(result: CheckResult) -> str:
    return "FAILED" if result.status == "failed" else result.status


def _summary(results: Sequence[CheckResult]) -> str:
    statuses = [result.status for result in results]
    failed, warnings = statuses.count("failed"), statuses.count("warning")
    counts = f"{len(results)} checks, {failed} failed, {warnings} with a warning"
    return f"{'NOT READY' if failed else 'ready'}: {counts}"


def leave(code: int) -> NoReturn:
    """End this process, also where a thread does not end."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)  # a check hangs, or a plug-in left a thread: a normal exit may wait or abort
    sys.exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
