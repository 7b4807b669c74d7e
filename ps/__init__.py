"""A single-host parameter-server launcher for PyTorch: the names that a plug-in imports.

Everything else is private, in the packages below. Torch is loaded by the first use of a name that
needs it, so that importing `ps` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ps.settings.config import Config
from ps.settings.errors import (
    CheckpointUnusable,
    ConfigError,
    LaunchError,
    OutOfMemory,
    PeerLost,
    PsError,
    Stalled,
    TrainingFailed,
)

if TYPE_CHECKING:
    from ps.workload import Samples, Workload, fetch, once_per_host

__all__ = [
    "CheckpointUnusable",
    "Config",
    "ConfigError",
    "LaunchError",
    "OutOfMemory",
    "PeerLost",
    "PsError",
    "Samples",
    "Stalled",
    "TrainingFailed",
    "Workload",
    "fetch",
    "once_per_host",
]

_NEED_TORCH = ("Samples", "Workload", "fetch", "once_per_host")


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        from ps import workload

        return getattr(workload, name)
    raise AttributeError(f"module 'ps' has no attribute {name!r}")
