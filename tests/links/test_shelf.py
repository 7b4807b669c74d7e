"""Tensors shared between real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ps import workload
from ps.links.channel import Listener
from ps.links.memory import Memory
from ps.links.shelf import Shelf, take_from
from ps.settings.errors import LaunchError, PeerLost
from ps.workload import once_per_host
from tests.jobs import ROOT

MEGABYTES = 64

TAKER = """
import json, re, sys
import torch
from ps.links.channel import Address
from ps.links.shelf import take_from
from ps.settings.errors import LaunchError, PeerLost
from ps.workload import once_per_host

def never():
    raise AssertionError("made a second time")

take_from(Address(*sys.argv[1:3]), 10.0)
big, small, empty = once_per_host("items", never)
own, = once_per_host("other", lambda: [torch.ones(2)])
total = int(big.sum())
text = open("/proc/self/smaps").read()
mapping = re.search(r"memfd:parameter-server.*?^VmFlags", text, re.S | re.M)[0]
kb = lambda field: int(re.search(rf"^{field}: +(\\d+) kB", mapping, re.M)[1])
small += 1
print(json.dumps([total, small.tolist(), str(small.dtype), list(empty.shape), own.tolist(),
                  kb("Rss"), kb("Private_Dirty")]))
"""


@pytest.fixture(autouse=True)
def _unshared_again() -> Iterator[None]:
    yield
    workload.share_by(None)


def make() -> Sequence[Tensor]:
    big = torch.full((MEGABYTES << 20,), 3, dtype=torch.uint8)
    return [big, torch.arange(3.0, dtype=torch.float64), torch.empty(0, 5)]


@pytest.mark.slow
def test_another_process_sees_the_tensors_without_a_copy_of_its_own() -> None:
    shelf = Shelf()
    shelf.open()
    kept = once_per_host("items", make)
    assert torch.equal(kept[0], make()[0])
    taker = subprocess.run(
        [sys.executable, "-c", TAKER, shelf.address.name, shelf.address.key],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert taker.returncode == 0, taker.stderr
    total, small, dtype, empty, own, rss_kb, dirty_kb = json.loads(taker.stdout)
    assert total == 3 * (MEGABYTES << 20)
    assert (small, dtype, empty, own) == ([1.0, 2.0, 3.0], "torch.float64", [0, 5], [1.0, 1.0])
    assert rss_kb > MEGABYTES * 900  # it has read all of it
    assert dirty_kb < 100  # and owns the one page that it wrote to
    assert kept[1].tolist() == [0.0, 1.0, 2.0]


def test_a_wrong_key_gets_nothing() -> None:
    shelf = Shelf()
    shelf.open()
    once_per_host("items", make)
    wrong = type(shelf.address)(shelf.address.name, "00" * 32)
    take_from(wrong, 5.0)
    with pytest.raises(LaunchError, match="digest"):
        once_per_host("items", make)


def test_without_memory_for_it_each_rank_makes_its_own_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def refuse(num_bytes: int) -> Memory:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Memory, "allocate", refuse)
    shelf = Shelf()
    shelf.open()
    assert once_per_host("items", make)[1].tolist() == [0.0, 1.0, 2.0]
    [line] = warnings.messages
    assert "No space left on device" in line
    take_from(shelf.address, 5.0)
    assert once_per_host("items", lambda: [torch.zeros(1)])[0].tolist() == [0.0]


def test_a_server_that_goes_before_the_data_came_is_lost() -> None:
    listener = Listener(lambda channel: channel.receive())  # and no more
    listener.open()
    take_from(listener.address, 5.0)
    with pytest.raises(PeerLost, match=r"server .*: .*\w"):
        once_per_host("items", make)
    listener.close()
