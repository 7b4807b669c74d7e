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

    def __init__(self, text: str, rank: int = 0) -> None:
        """rank is who holds the cause."""
        super().__init__(text)
        self.rank = rank


class Orphaned(PsError):
    """torchrun, the parent of all ranks, is gone."""

    exit_code = 9

    def __init__(self) -> None:
        super().__init__("torchrun, the parent of all ranks, is gone")


class Interrupted(BaseException):
    """This process was asked to end. Like KeyboardInterrupt, not for `except Exception`."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    @classmethod
    def by_signal(cls, name: str, number: int) -> Interrupted:
        hint = ", which torchrun sends when it is stopped or another rank has failed"
        return cls(f"stopped by {name}{hint if name == 'SIGTERM' else ''}", 128 + number)

    @classmethod
    def by_error(cls, error: PsError) -> Interrupted:
        return cls(str(error), error.exit_code)


def is_explained(error: BaseException) -> bool:
    """Whether its message says all that the person who started the job needs to know."""
    return isinstance(error, PsError | Interrupted)


def exit_code_of(error: BaseException) -> int:
    """Ours have their own; 1 for everything else, also where a plug-in calls sys.exit()."""
    return error.exit_code if isinstance(error, PsError | Interrupted) else 1


def first_line(error: object) -> str:
    """The first line of its text, without the C++ stack that torch appends; may be empty."""
    return (str(error).splitlines() or [""])[0]
