"""Tensors one behind the other in one buffer of bytes, so that one copy moves them all.

Each keeps its shape, dtype and strides, channels_last included, and starts at a cache line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ps.settings.errors import TrainingFailed

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, buffer: Tensor, base: int) -> Tensor:
        elements = buffer[self.start - base : self.stop - base].view(self.dtype)
        return elements.as_strided(self.shape, self.strides)


class Layout:
    """Where each of some tensors lies. Depends on their shapes, dtypes and strides alone."""

    def __init__(self, tensors: Sequence[Tensor], start: int = 0) -> None:
        self.start = start
        self._places = []
        for tensor in tensors:
            stop = start + tensor.numel() * tensor.element_size()
            strides = _dense_strides(tensor)
            self._places.append(_Place(start, stop, tensor.dtype, tuple(tensor.shape), strides))
            start = math.ceil(stop / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.stop = start

    def views(self, buffer: Tensor, base: int = 0) -> list[Tensor]:
        """The tensors as views of a uint8 buffer that holds the bytes from `base` to stop."""
        return [place.view(buffer, base) for place in self._places]

    def blocks(self, buffer: Tensor) -> list[Tensor]:
        """The same bytes of a buffer, and the gaps, in as few tensors as there are runs of one
        dtype."""
        runs: list[tuple[int, int, torch.dtype]] = []
        for place in self._places:
            start = place.start
            if runs and runs[-1][2] == place.dtype:
                start = runs.pop()[0]
            runs.append((start, place.stop, place.dtype))
        return [buffer[start:stop].view(dtype) for start, stop, dtype in runs]

    def describe(self) -> str:
        """The same text for equal layouts, and only for these."""
        return repr(self._places)


class FlatModel:
    """The places of a module's tensors in one buffer: trained parameters first, then buffers,
    then frozen parameters, which never change.

    Only for modules on the CPU.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._slots = _buffer_slots(module)
        self.trained = Layout(self.parameters)
        self.buffers = Layout([_value(slot) for slot in self._slots], self.trained.stop)
        frozen = Layout(self._frozen, self.buffers.stop)
        self.moving_bytes = self.buffers.stop
        """What changes during training: the first part of the buffer."""
        self.total_bytes = frozen.stop
        self._layouts = (self.trained, self.buffers, frozen)

    def describe(self) -> str:
        """The same text for modules whose buffers mean the same."""
        return "; ".join(layout.describe() for layout in self._layouts)

    def move_to(self, buffer: Tensor, *, keep_values: bool) -> None:
        """Make the module's tensors views of a uint8 buffer [total_bytes or more].

        keep_values writes the module's values into it; otherwise the module takes what is there.
        """
        trained, buffers, frozen = (layout.views(buffer) for layout in self._layouts)
        for parameter, view in zip(
            [*self.parameters, *self._frozen], [*trained, *frozen], strict=True
        ):
            if keep_values:
                view.copy_(parameter.detach())
            parameter.data = view
        self._buffers = [_value(slot) for slot in self._slots]
        for buffer, view in zip(self._buffers, buffers, strict=True):
            if keep_values:
                view.copy_(buffer)
            buffer.data = view  # not the view in its place: the module may know it elsewhere too

    def gather_buffers(self) -> None:
        """Bring back buffers that the module replaced instead of changing them in place.

        Raises:
            TrainingFailed: one has another shape now.
        """
        for slot, buffer in zip(self._slots, self._buffers, strict=True):
            for part, name in slot:
                value = part._buffers[name]
                if value is buffer or value is None:
                    continue
                if value.shape != buffer.shape:
                    raise TrainingFailed(f"buffer {name} changed its shape in a step")
                buffer.copy_(value)
                _put(slot, buffer)


_Slot = list[tuple[nn.Module, str]]
"""Every place in a module tree at which one and the same buffer is registered."""


def _buffer_slots(module: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                slots.setdefault(id(buffer), []).append((part, name))
    return list(slots.values())


def _value(slot: _Slot) -> Tensor:
    part, name = slot[0]
    buffer = part._buffers[name]
    assert buffer is not None
    return buffer


def _put(slot: _Slot, buffer: Tensor) -> None:
    for part, name in slot:
        part._buffers[name] = buffer


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill a block of memory, else contiguous ones."""
    if tensor.is_contiguous():
        return tensor.stride()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
