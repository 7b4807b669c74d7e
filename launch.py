"""Train one model with a parameter server on this host.

    torchrun --standalone --nproc_per_node=4 launch.py

Rank 0 holds the weights, every other rank trains. `python launch.py --help` lists the options.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping, Sequence

from ps.host import gate, resources
from ps.host.signals import Phase, Signals
from ps.host.watch import HOLD_S, Watch
from ps.job import rundir
from ps.job.preparation import prepare, ready_timeout_s
from ps.settings import log
from ps.settings.config import parse_args
from ps.settings.errors import Interrupted, Orphaned, PsError, exit_code_of, is_explained
from ps.settings.topology import Origin, Topology

RPC_THREAD = "rpc"


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Parse, place, run; returns the exit code of this process."""
    signals = Signals()
    origin = Origin.from_environ(environ)
    log.configure(origin.role, origin.rank_text)
    if (code := rundir.refused(origin.error_file)) is not None:
        return code  # an earlier attempt has said why, and another would say the same
    try:
        code = run(argv, environ, signals)
    except (Exception, Interrupted) as error:
        code = exit_code_of(error)
        _tell(error, origin)
    if origin.is_server:
        rundir.refuse_if_final(origin.error_file, code)
    return code


def run(argv: Sequence[str], environ: MutableMapping[str, str], signals: Signals) -> int:
    """Be the rank that torchrun's variables name; returns the exit code."""
    config = parse_args(argv)
    topology = Topology.from_environ(environ, argv)
    log.configure(topology.role, topology.rank, config.log_level)
    resources.limit_spinning(environ)
    watch = Watch(signals)
    if topology.is_server:
        signals.enter(Phase.INTERRUPT)
        watch.start()
        prepared = prepare(topology, config, argv)
        signals.enter(Phase.CLEAN_UP, prepared.run_dir.discard)
        from ps.job.server_process import run_server  # late on purpose: this is what loads torch

        return run_server(topology, prepared, signals, watch)
    signals.enter(Phase.HANDED_OVER)
    watch.start()
    gate.wait(topology, resources.usable_cores(), ready_timeout_s(config))
    from ps.job.trainer_process import run_trainer

    return run_trainer(topology, config, watch)


def _tell(error: BaseException, origin: Origin) -> None:
    if not is_explained(error):
        traceback.print_exception(error)
        return
    is_trainers = isinstance(error, PsError) and not isinstance(error, Orphaned)
    if is_trainers and not origin.is_server and origin.is_under_torchrun:
        # Rank 0 sees the same, or is the cause: torchrun names the rank that exits first.
        time.sleep(HOLD_S)
    log.log.error("%s", error)


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)  # noqa: TID251
    sys.stdout.flush()
    sys.stderr.flush()
    if code or any(thread.name == RPC_THREAD for thread in threading.enumerate()):
        os._exit(code)  # a normal exit aborts where RPC threads still wait for a lost peer
