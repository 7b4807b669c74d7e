"""What this program asks of the C library: its allocator, and an end with the parent."""

from __future__ import annotations

import ctypes  # noqa: TID251
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


_KEEP_BYTES = 1 << 30


_OLD_GLIBC_LIMIT_BYTES = 1 << 25


def keep_freed_memory() -> None:
    """Have glibc keep large freed buffers instead of returning them to the kernel.

    Otherwise each step pays page faults for its activations anew; one arena keeps the threads
    of a server from each holding its own. Does nothing where the C library is not glibc.
    See mallopt(3).
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
    """Never returns, and lets no other thread run Python code, whatever signals are handled.

    Waits for a mutex that it holds itself, as a deadlock in a C library does.
    """
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(mutex, None)
    while True:
        libc.pthread_mutex_lock(mutex)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, with that pid, ends. Linux only.

    See PR_SET_PDEATHSIG in prctl(2).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
