"""Train one model with a parameter server on this host.

    torchrun --standalone --nproc_per_node=4 launch.py

Rank 0 holds the weights, every other rank trains. `python launch.py --help` lists the options.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from ps import log
from ps.config import parse_args
from ps.errors import ConfigError, PeerLost, PsError
from ps.interruption import end_at_once, interruptible
from ps.preparation import prepare
from ps.topology import Topology

HOLD_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Parse, place, run; returns the exit code of this process."""
    end_at_once()  # until a role has something to put in order
    try:
        config = parse_args(argv)
        topology = Topology.from_environ(os.environ, argv)
        log.configure(topology.role, topology.rank, config.log_level)

        if topology.is_server:
            with interruptible():
                prepared = prepare(topology, config)
            from ps.run import run_server  # late on purpose: this is what loads torch

            return run_server(topology, config, prepared)
        from ps.run import run_trainer

        return run_trainer(topology, config)
    except PsError as error:
        return _end(error, rank=os.environ.get("RANK") or "0")


def _end(error: PsError, rank: str) -> int:
    """Print the one line. The rank that holds the cause exits first: another that sees the same,
    or only what followed from it, leaves torchrun the time to end it."""
    if isinstance(error, ConfigError | PeerLost) and rank != "0":
        time.sleep(HOLD_S)
    log.configure("server" if rank == "0" else "trainer", rank)
    log.log.error("%s", error)
    return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a normal exit aborts where RPC threads still wait for a lost peer
