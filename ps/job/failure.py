"""From an exception to how a rank ends: one table for outcomes and exit codes."""

from __future__ import annotations

import traceback

from ps.links.rendezvous import record_for_torchrun
from ps.server.roll import Outcome
from ps.settings.errors import Interrupted, PsError, exit_code_of
from ps.settings.log import log
from ps.settings.topology import Topology


def outcome_of(error: BaseException, topology: Topology, came: Interrupted | None) -> Outcome:
    """How the job ends when the server's own part raises.

    came is the request to end that this process has got, if any: what fails after it is no cause.
    """
    if isinstance(error, Interrupted):
        return Outcome("interrupted", error.exit_code, str(error))
    if came is not None:
        return outcome_of(came, topology, None)
    if isinstance(error, PsError):
        return Outcome("failed", error.exit_code, str(error))
    cause = f"{topology.role} rank {topology.rank}: {in_one_line(error)}"
    return Outcome("failed", exit_code_of(error), cause)


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def show_traceback(error: BaseException, topology: Topology) -> None:
    """Show the traceback of the error being handled, once.

    What is recorded for torchrun stands in its report; without torchrun it is printed here.
    """
    if topology.error_file is None:
        traceback.print_exc()
        return
    record_for_torchrun(error)
    log.error("%s; torchrun's report below has the traceback", in_one_line(error))
