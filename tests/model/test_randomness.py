"""Every pass draws from its own seed, whoever does it and whatever goes on beside it."""

from __future__ import annotations

import random
import threading

import torch
from torch import nn

from ps.model.randomness import SeededForward, seed_process, step_seed
from ps.workloads.images import conv_net


def test_step_seed_is_pinned_and_differs_by_each_of_its_parts() -> None:
    assert step_seed(0, 0, 0) == 332010422350170621
    seeds = {step_seed(*parts) for parts in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_parts_of_an_order_draw_from_seeds_of_their_own() -> None:
    assert step_seed(7, 2, 5, 0) == step_seed(7, 2, 5) == 5177443693879670537
    assert step_seed(7, 2, 5, 3) == 8221517021391141054
    seeds = {
        step_seed(seed, epoch, batch, part)
        for seed in (0, 1, 11)
        for epoch in (0, 1, 11)
        for batch in (0, 1, 11)
        for part in (0, 1, 11)
    }
    assert len(seeds) == 81


def test_seed_process_makes_torch_and_python_repeat() -> None:
    def draw() -> tuple[list[float], float]:
        seed_process(7)
        return torch.rand(3).tolist(), random.random()

    assert draw() == draw()
    torch.manual_seed(7)
    assert torch.rand(3).tolist() == draw()[0]


def test_a_seeded_forward_draws_what_manual_seed_would() -> None:
    net, inputs = conv_net(), torch.randn(4, 1, 28, 28)
    torch.manual_seed(11)
    expected = net(inputs)
    torch.manual_seed(99)
    with SeededForward(11):
        got = net(inputs)
    assert torch.equal(got, expected)


def test_a_seeded_forward_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    with SeededForward(3):
        torch.rand(5)
        nn.functional.dropout(torch.ones(8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_was_given_is_used() -> None:
    with SeededForward(3):
        got = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(got, torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_forward_passes_in_threads_do_not_disturb_each_other() -> None:
    net, inputs = conv_net(), torch.randn(4, 1, 28, 28)
    expected = {}
    for seed in range(4):
        with SeededForward(seed):
            expected[seed] = net(inputs)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(15):
            with SeededForward(seed):
                if not torch.equal(net(inputs), expected[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_operators_that_take_no_generator_draw_from_the_seed_too() -> None:
    """rand and randn have overloads without one; the fused dropout of GPUs has none at all."""

    def draw() -> list[torch.Tensor]:
        first = torch.rand(3)
        dropped, kept = torch.native_dropout(torch.ones(100), 0.25, True)
        return [first, dropped, kept, torch.randn(3), torch.rand_like(first), torch.randperm(9)]

    torch.manual_seed(5)
    expected = draw()
    with SeededForward(5):
        got = draw()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_model_with_every_kind_of_dropout_draws_what_manual_seed_would() -> None:
    net = nn.Sequential(
        nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.RReLU(), nn.FeatureAlphaDropout(0.2)
    )
    inputs = torch.randn(4, 3, 5)
    torch.manual_seed(11)
    expected = net(inputs)
    with SeededForward(11):
        assert torch.equal(net(inputs), expected)
