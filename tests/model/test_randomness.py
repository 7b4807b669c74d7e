"""What is drawn depends on its seed alone, whoever draws it and whatever goes on beside it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ps.model.randomness import (
    SeededForward,
    evaluation_seed,
    loading_seed,
    loss_seed,
    permutation,
    seed_process,
    step_seed,
)
from ps.workloads.images import conv_net


def sorted_by_keys(seed: int, epoch: int, length: int) -> list[int]:
    """The definition of the permutation."""
    draw = random.Random(f"{seed}-{epoch}").random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


@given(st.integers(), st.integers(0, 100), st.integers(0, 200))
def test_the_permutation_sorts_by_pythons_random_keys(seed: int, epoch: int, length: int) -> None:
    assert list(permutation(seed, epoch, length)) == sorted_by_keys(seed, epoch, length)


@pytest.mark.parametrize("length", [9_999, 10_000, 10_001, 35_000])
def test_the_permutation_of_many_samples_is_no_other(length: int) -> None:
    assert list(permutation(7, 2, length)) == sorted_by_keys(7, 2, length)


def test_the_permutation_is_pinned() -> None:
    """A run that is resumed by another version goes on with the same samples."""
    assert list(permutation(0, 0, 10)) == [5, 4, 2, 0, 8, 3, 1, 9, 6, 7]
    assert list(permutation(0, 1, 10)) == [9, 0, 2, 8, 5, 3, 7, 1, 4, 6]


def longest_pause(work: Callable[[], object]) -> float:
    """The longest time for which this thread cannot run beside the work, as a share of it all."""
    thread = threading.Thread(target=work)
    start = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (last - start)


def test_other_threads_go_on_while_the_samples_of_an_epoch_are_put_in_order() -> None:
    """A sort that holds the GIL takes more than half of the time. Busy machines make pauses too."""
    assert min(longest_pause(lambda: permutation(0, 0, 300_000)) for _ in range(4)) < 0.35


def test_the_seeds_of_forward_passes_are_pinned() -> None:
    assert step_seed(0, 0, 0) == 332010422350170621
    assert step_seed(7, 2, 5, 0) == step_seed(7, 2, 5) == 5177443693879670537
    assert step_seed(7, 2, 5, 3) == 8221517021391141054


def test_every_purpose_and_every_micro_batch_has_a_seed_of_its_own() -> None:
    numbers = (0, 1, 11)
    seeds = [
        seed_of(seed, epoch, batch, micro_batch)
        for seed_of in (step_seed, loading_seed, loss_seed)
        for seed in numbers
        for epoch in numbers
        for batch in numbers
        for micro_batch in numbers
    ]
    seeds += [evaluation_seed(a, b, c) for a in numbers for b in numbers for c in numbers]
    assert len(set(seeds)) == 3 * 81 + 27
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_process_makes_torch_and_python_repeat() -> None:
    def draw() -> tuple[list[float], float]:
        seed_process(7)
        return torch.rand(3).tolist(), random.random()

    assert draw() == draw()
    torch.manual_seed(7)
    assert torch.rand(3).tolist() == draw()[0]


def operators() -> list[Tensor]:
    """rand and randn have overloads without a generator; native_dropout takes none at all."""
    first = torch.rand(3)
    dropped, kept = torch.native_dropout(torch.ones(100), 0.25, True)
    return [first, dropped, kept, torch.randn(3), torch.rand_like(first), torch.randperm(9)]


DROPOUTS = nn.Sequential(
    nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.RReLU(), nn.FeatureAlphaDropout(0.2)
)
NET, IMAGES = conv_net(), torch.randn(4, 1, 28, 28)


@pytest.mark.parametrize(
    "draw",
    [operators, lambda: [DROPOUTS(torch.ones(4, 3, 5))], lambda: [NET(IMAGES)]],
    ids=["operators", "kinds of dropout", "net"],
)
def test_a_seeded_forward_draws_what_manual_seed_would_and_nothing_from_the_default_generator(
    draw: Callable[[], list[Tensor]],
) -> None:
    torch.manual_seed(5)
    expected = draw()
    before = torch.get_rng_state()
    with SeededForward(5):
        got = draw()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_was_given_is_used() -> None:
    with SeededForward(3):
        got = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(got, torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_forward_passes_in_threads_do_not_disturb_each_other() -> None:
    expected = {}
    for seed in range(4):
        with SeededForward(seed):
            expected[seed] = NET(IMAGES)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(15):
            with SeededForward(seed):
                if not torch.equal(NET(IMAGES), expected[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
