"""Messages as bytes, with tensors in them."""

from __future__ import annotations

import io
import pickle  # noqa: TID251
from typing import Any

import torch
from torch import Tensor


def encode(message: Any) -> bytes:
    """A message as bytes. Tensors in it, at any depth, may have any shape and dtype; on the CPU."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    return stream.getvalue()


def decode(content: bytes) -> Any:
    """The message, with its tensors on the CPU, contiguous, of the same shapes and dtypes.

    Only for bytes from encode() in a process of this job: it is a pickle.
    """
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    """Tensors travel as their bytes: torch's own pickling takes longer than the call."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        # A single element may count as contiguous whatever its stride; view(uint8) needs 1.
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)
