"""Copies and comparisons of states: nested dictionaries and lists with tensors in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_cpu(value: Any, *, copy: bool) -> Any:
    """The same dictionaries, lists and tuples, with their tensors detached and on the CPU.

    Tensors keep shape and dtype; those that were one and the same memory are one again. With copy
    none shares memory with the original; without, those that are on the CPU already do.
    """
    return _to_cpu(value, {}, copy)


def _to_cpu(value: Any, copies: dict[tuple[object, ...], Tensor], copy: bool) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value.detach().to("cpu", copy=copy)  # its memory has no one address
        key = storage_key(value)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=copy)
        return copies[key]
    if isinstance(value, dict):
        return {name: _to_cpu(item, copies, copy) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item, copies, copy) for item in value)
    return value


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first difference in names, types, shapes and dtypes between two modules' state_dicts.

    Tensors may have any shape, dtype and device; their values and devices are not compared. None
    if there is no difference.
    """
    for name in [*own, *other]:
        kinds = [_kind(state[name]) if name in state else "nothing" for state in (own, other)]
        if kinds[0] != kinds[1]:
            return f"{name} is {kinds[1]} there and {kinds[0]} here"
    return None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for strided tensors, of any shape, dtype and device, that are the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def in_own_storage(views: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
    """The same memory as tensors whose storage holds their own elements alone.

    views: dense, of any shape and dtype, into buffer, which is uint8 [bytes] on the CPU. As they
    are, each would bring all of the buffer into a file. Those that are one memory share a storage.
    """
    memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
    start = buffer.data_ptr()
    own = {storage_key(v): _own_storage(v, memory, v.data_ptr() - start) for v in views.values()}
    return {name: own[storage_key(view)] for name, view in views.items()}


def _own_storage(view: Tensor, memory: memoryview, start: int) -> Tensor:
    if not view.numel():
        return view.detach().clone()
    part = memory[start : start + view.numel() * view.element_size()]
    return torch.frombuffer(part, dtype=view.dtype).as_strided(view.shape, view.stride())
