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

from ps.host import gate, resources, signals
from ps.host.watch import HOLD_S, Watch
from ps.job import rundir
from ps.job.preparation import prepare, ready_timeout_s
from ps.settings import log
from ps.settings.config import parse_args
from ps.settings.errors import Interrupted, Orphaned, PsError
from ps.settings.topology import Topology

RPC_THREAD = "rpc"


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Parse, place, run; returns the exit code of this process."""
    signals.end_at_once()
    rank = environ.get("RANK") or "0"
    log.configure("server" if rank == "0" else "trainer", rank)
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if (code := rundir.refused(error_file)) is not None:
        return code  # an earlier attempt has said why, and another would say the same
    try:
        config = parse_args(argv)
        topology = Topology.from_environ(environ, argv)
        log.configure(topology.role, topology.rank, config.log_level)
        resources.limit_spinning(environ)
        watch = Watch()
        if topology.is_server:
            signals.raise_once()
            watch.on_orphaned = signals.interrupt  # it may be fetching for minutes
            watch.start()
            prepared = prepare(topology, config, argv)
            signals.end_after(prepared.run_dir.discard)
            watch.end_orphaned_after(prepared.run_dir.discard)
            from ps.job.run import run_server

            return run_server(topology, prepared, watch)
        watch.take_signals(signals.by_handle())
        watch.start()
        gate.wait(topology, resources.usable_cores(), ready_timeout_s(config))
        from ps.job.run import run_trainer

        return run_trainer(topology, config, watch)
    except PsError as error:
        if rank == "0":
            rundir.refuse_if_final(error_file, error.exit_code)
        is_orphaned = isinstance(error, Orphaned)
        if rank != "0" and "TORCHELASTIC_RUN_ID" in environ and not is_orphaned:
            # Rank 0 sees the same, or is the cause: torchrun names the rank that exits first.
            time.sleep(HOLD_S)
        log.log.error("%s", error)
        return error.exit_code
    except Interrupted as error:
        log.log.error("%s", error)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)  # noqa: TID251
    sys.stdout.flush()
    sys.stderr.flush()
    if code or any(thread.name == RPC_THREAD for thread in threading.enumerate()):
        os._exit(code)  # a normal exit aborts where RPC threads still wait for a lost peer
