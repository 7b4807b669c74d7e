"""What this program asks of the C library: its allocator's settings, and an end with the parent."""

from __future__ import annotations

import ctypes  # noqa: TID251
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_KEEP_BYTES = 1 << 30
_OLD_GLIBC_LIMIT_BYTES = 1 << 25
"""The largest threshold that older versions of glibc take."""


def keep_freed_memory() -> None:
    """Have glibc keep large freed buffers instead of returning them to the kernel.

    Otherwise each step pays the page faults of its activations again. With one arena, the
    threads of a server do not each keep memory of their own. Does nothing where the C library is
    not glibc. See mallopt(3).
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if not mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES):
        mallopt(_M_MMAP_THRESHOLD, _OLD_GLIBC_LIMIT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_ARENA_MAX, 1)


def hold_gil() -> None:
    """Never return, and let no thread of this process run Python code any more.

    Waits for a mutex that it holds itself, as a deadlock in a C library does. A fault to inject.
    """
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(mutex, None)
    while True:
        libc.pthread_mutex_lock(mutex)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Does nothing outside Linux.

    parent is the parent's pid: where it has ended already, this process exits at once with 1.

    See PR_SET_PDEATHSIG in prctl(2).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
