"""The ways in which a job can fail, each with its exit code.

Some are never raised: they only give a finding its exit code.
"""

from __future__ import annotations


class PsError(Exception):
    """Base of every error whose message is meant for the person who started the job."""

    exit_code = 1


class ConfigError(PsError):
    """An option, a plug-in or a data set is unusable. Every rank would see the same."""

    exit_code = 2


class LaunchError(PsError):
    """The process was not started as needed: no torchrun, no RPC, a rank that never came."""

    exit_code = 3


class PeerLost(PsError):
    """A peer that this process needs is gone or does not answer."""

    exit_code = 4


class Stalled(PsError):
    """A process makes no progress any more."""

    exit_code = 5


class OutOfMemory(PsError):
    """The job is about to use more memory than it may."""

    exit_code = 6


class CheckpointUnusable(PsError):
    """A checkpoint is damaged, or of another job."""

    exit_code = 7


class TrainingFailed(PsError):
    """A gradient is missing or not finite. The weights are as they were before it."""

    exit_code = 8


class Orphaned(PsError):
    """torchrun, the parent of all ranks, is gone."""

    exit_code = 9

    def __init__(self) -> None:
        super().__init__("torchrun, the parent of all ranks, is gone")


class Interrupted(BaseException):
    """A signal asked this process to end. Like KeyboardInterrupt, not for `except Exception`."""

    def __init__(self, signal_name: str, signal_number: int) -> None:
        hint = ", which torchrun sends when it is stopped or another rank has failed"
        super().__init__(f"stopped by {signal_name}{hint if signal_name == 'SIGTERM' else ''}")
        self.exit_code = 128 + signal_number


def first_line(error: object) -> str:
    """The first line of its text, without the C++ stack that torch appends; may be empty."""
    return (str(error).splitlines() or [""])[0]
