"""What the C library is asked for: the calls, as made-up libraries take them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ps.host.libc import end_with_parent, keep_freed_memory

M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
PR_SET_PDEATHSIG, SIGKILL = 1, 9
GIB = 1 << 30


@dataclass
class Library:
    largest: int = GIB
    """The largest value that mallopt takes."""
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return int(value <= self.largest)

    def prctl(self, *args: int) -> int:
        self.calls.append(args)
        return 0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[int]]:
    """Takes the library and the system; gives the exit codes with which this process ends."""

    def use(library: object, system: str = "linux") -> list[int]:
        codes: list[int] = []
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(os, "getppid", lambda: 4711)
        monkeypatch.setattr(os, "_exit", codes.append)
        return codes

    return use


@pytest.mark.parametrize(
    ("largest", "thresholds"), [(GIB, [GIB]), (GIB - 1, [GIB, 1 << 25])], ids=["new", "old"]
)
def test_glibc_is_asked_to_keep_as_much_as_it_takes(
    use: Callable[..., list[int]], largest: int, thresholds: list[int]
) -> None:
    use(library := Library(largest))
    keep_freed_memory()
    mmap_calls = [(M_MMAP_THRESHOLD, value) for value in thresholds]
    assert library.calls == [*mmap_calls, (M_TRIM_THRESHOLD, GIB), (M_ARENA_MAX, 1)]


def test_a_library_without_mallopt_and_other_systems_are_left_alone(
    use: Callable[..., list[int]],
) -> None:
    use(object())
    keep_freed_memory()
    codes = use(library := Library(), "darwin")
    keep_freed_memory()
    end_with_parent(4712)
    assert (library.calls, codes) == ([], [])


@pytest.mark.parametrize(("parent", "codes"), [(4711, []), (4712, [1])])
def test_the_kernel_kills_this_process_with_its_parent_or_it_ends_if_that_has_ended(
    use: Callable[..., list[int]], parent: int, codes: list[int]
) -> None:
    ended = use(library := Library())
    end_with_parent(parent)
    assert library.calls == [(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)]
    assert ended == codes
