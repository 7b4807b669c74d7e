"""Memory that can be handed to other processes of this host."""

from __future__ import annotations

import mmap  # noqa: TID251
import os
import weakref

import torch
from torch import Tensor


class Memory:
    """Memory that can be handed to other processes. It stays while anybody uses it."""

    def __init__(self, handle: int) -> None:
        """Owns the handle, which is closed with it."""
        self.handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def allocate(cls, num_bytes: int) -> Memory:
        """Takes all of it at once, so that none is missing later.

        Raises:
            OSError: there is not enough.
        """
        memory = cls(os.memfd_create("parameter-server"))
        try:
            os.posix_fallocate(memory.handle, 0, max(1, num_bytes))
        except OSError:
            memory.close()
            raise
        return memory

    def bytes(self, *, private: bool = False) -> Tensor:
        """It as a uint8 tensor. What is written to a private one stays in this process."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        return torch.frombuffer(mmap.mmap(self.handle, 0, access=access), dtype=torch.uint8)

    def close(self) -> None:
        """Once it was handed over, and bytes() is not called any more."""
        self._close()
