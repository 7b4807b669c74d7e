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
class _Span:
    """The bytes of one tensor in the buffer, and how they are read."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, start: int) -> _Span:
        stop = start + tensor.numel() * tensor.element_size()
        return cls(start, stop, tensor.dtype, tuple(tensor.shape), _dense_strides(tensor))

    def view(self, buffer: Tensor, base: int) -> Tensor:
        elements = buffer[self.start - base : self.stop - base].view(self.dtype)
        return elements.as_strided(self.shape, self.strides)


class Layout:
    """Where each of some tensors lies. Depends on their shapes, dtypes and strides alone."""

    def __init__(self, tensors: Sequence[Tensor], start: int = 0) -> None:
        """tensors: of any shape, dtype and device; only their forms matter.

        start: the byte of the buffer at which the first one lies, a multiple of ALIGNMENT_BYTES.
        """
        self.start = start
        self._spans = []
        for tensor in tensors:
            span = _Span.of(tensor, start)
            self._spans.append(span)
            start = math.ceil(span.stop / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.stop = start
        """The byte after the last tensor and its padding: where another layout may start."""

    def views(self, buffer: Tensor, base: int = 0) -> list[Tensor]:
        """The tensors, each of its own shape, dtype and strides, as views of a buffer.

        buffer: uint8 [stop - base or more] on the CPU; its first byte is the byte `base`.
        """
        return [span.view(buffer, base) for span in self._spans]

    def blocks(self, buffer: Tensor) -> list[Tensor]:
        """The same bytes in as few tensors as there are runs of one dtype, each 1-D of that dtype.

        They also cover the padding between tensors. buffer: uint8 [stop or more] on the CPU.
        """
        runs: list[tuple[int, int, torch.dtype]] = []
        for span in self._spans:
            start = span.start
            if runs and runs[-1][2] == span.dtype:
                start = runs.pop()[0]
            runs.append((start, span.stop, span.dtype))
        return [buffer[start:stop].view(dtype) for start, stop, dtype in runs]

    def describe(self) -> str:
        """The same text for equal layouts, and only for these."""
        return repr(self._spans)


class FlatModel:
    """Where a module's tensors lie in one buffer: trained parameters first, then buffers, then
    frozen parameters, which never change.

    Only for modules on the CPU; their tensors may have any shape and dtype.
    """

    def __init__(self, module: nn.Module) -> None:
        """Changes nothing of the module; move_to() does."""
        parameters = list(module.parameters())
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._slots = _buffer_slots(module)
        self._buffers = [_value(slot) for slot in self._slots]
        self.trained = Layout(self.parameters)
        self.buffers = Layout(self._buffers, self.trained.stop)
        frozen = Layout(self._frozen, self.buffers.stop)
        self.moving_bytes = self.buffers.stop
        """Length of the buffer's first part, which holds all that changes during training."""
        self.total_bytes = frozen.stop
        self._layouts = (self.trained, self.buffers, frozen)

    def describe(self) -> str:
        """The same text for modules whose buffers mean the same."""
        return "; ".join(layout.describe() for layout in self._layouts)

    def move_to(self, buffer: Tensor, *, keep_values: bool) -> None:
        """Make the module's tensors views of the buffer; they stay the same objects.

        buffer: uint8 [total_bytes or more] on the CPU. keep_values writes the module's values into
        it; otherwise the module takes the values that are there.
        """
        trained, buffers, frozen = (layout.views(buffer) for layout in self._layouts)
        for parameter, view in zip(
            [*self.parameters, *self._frozen], [*trained, *frozen], strict=True
        ):
            if keep_values:
                view.copy_(parameter.detach())
            parameter.data = view
        self._buffers = [_value(slot) for slot in self._slots]
        for module_buffer, view in zip(self._buffers, buffers, strict=True):
            if keep_values:
                view.copy_(module_buffer)
            module_buffer.data = view  # it stays the object that the module may know elsewhere too

    def gather_buffers(self) -> None:
        """Copy buffers that the module replaced, instead of changing them, back into the buffer.

        Only after move_to(). They may have another dtype or device now.

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
