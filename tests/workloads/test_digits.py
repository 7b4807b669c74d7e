"""The generated data set: deterministic, balanced, quick to make, and hard enough to learn from."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from ps.settings.config import Config
from ps.workload import Workload, fetch, share_by
from ps.workloads import catalogue, digits
from ps.workloads.checks import make_model
from ps.workloads.images import Images, conv_net, correct


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take twice as long when others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return catalogue.load("digits", Config())  # which checks it too


def accuracy(model: nn.Module, samples: Images, count: int) -> float:
    model.eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, count, 500):
            inputs, targets = samples.batch(range(start, min(start + 500, count)))
            right += correct(model(inputs), targets)
    model.train()
    return right / count


def train(model: nn.Module, workload: Workload, epochs: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        order = torch.randperm(len(workload.train)).tolist()
        for start in range(0, len(order), 64):
            inputs, targets = fetch(workload.train, order[start : start + 64])
            optimizer.zero_grad()
            workload.loss(model(inputs), targets).backward()
            optimizer.step()


def test_the_images_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    images, classes = digits.generate(50, seed=3)
    torch.manual_seed(2)
    again, same_classes = digits.generate(50, seed=3)
    others, other_classes = digits.generate(50, seed=4)
    assert torch.equal(images, again)
    assert torch.equal(classes, same_classes)
    assert not torch.equal(images, others)
    assert not torch.equal(classes, other_classes)


def test_making_images_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    digits.generate(10, seed=0)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("count", [1, 10, 50])
def test_images_and_classes_are_bytes_in_the_shape_of_mnist(count: int) -> None:
    images, classes = digits.generate(count, seed=0)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (count, 28, 28))
    assert (classes.dtype, tuple(classes.shape)) == (torch.uint8, (count,))


@pytest.mark.parametrize("count", [10, 50, 1000])
def test_each_class_comes_equally_often(count: int) -> None:
    classes = torch.arange(10).repeat(count // 10)
    _, made = digits.generate(count, seed=1)
    assert torch.equal(made.sort().values, classes.sort().values.to(torch.uint8))


def test_the_images_of_one_class_all_differ() -> None:
    images, classes = digits.generate(200, seed=0)
    threes = images[classes == 3].flatten(1)
    assert len(threes) == 20
    assert len(torch.unique(threes, dim=0)) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_all_of_it_is_made_in_two_seconds_of_one_core() -> None:
    started_s = time.process_time()
    digits.generate(digits.NUM_TRAIN + digits.NUM_TEST, digits.SEED)
    assert time.process_time() - started_s < 2.0


def test_the_workload_holds_12800_and_2000_samples_and_wants_channels_last(
    workload: Workload,
) -> None:
    assert (workload.name, len(workload.train), len(workload.test)) == ("digits", 12800, 2000)
    assert workload.channels_last is True


def test_the_images_are_made_once_per_host(request: pytest.FixtureRequest) -> None:
    asked: list[str] = []

    def share(name: str, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        asked.append(name)
        return torch.zeros(14_800, 28, 28, dtype=torch.uint8), torch.ones(14_800).to(torch.uint8)

    share_by(share)
    request.addfinalizer(lambda: share_by(None))
    workload = digits.build(Config())
    assert asked == ["digits"]
    inputs, targets = fetch(workload.test, range(3))
    assert inputs.unique().tolist() == [-1.0]
    assert targets.tolist() == [1, 1, 1]


def test_no_test_image_is_among_the_training_images(workload: Workload) -> None:
    train, _ = fetch(workload.train, range(12800))
    test, _ = fetch(workload.test, range(2000))
    both = torch.cat([train, test]).flatten(1).mul(1000).round().to(torch.int16)
    seen = {image.numpy().tobytes() for image in both}
    assert len(seen) == 14_800


def test_a_batch_is_normalised_for_the_net_and_one_sample_is_a_row_of_it(
    workload: Workload,
) -> None:
    inputs, targets = fetch(workload.train, range(1000))
    assert (inputs.dtype, tuple(inputs.shape)) == (torch.float32, (1000, 1, 28, 28))
    assert (targets.dtype, tuple(targets.shape)) == (torch.int64, (1000,))
    assert abs(inputs.mean().item()) < 0.1
    assert abs(inputs.std().item() - 1.0) < 0.15
    image, target = workload.train[7]
    assert torch.equal(image, inputs[7])
    assert torch.equal(target, targets[7])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_untrained_net_is_at_chance(workload: Workload, seed: int) -> None:
    model = make_model(workload, seed)
    assert isinstance(workload.test, Images)
    assert 0.03 <= accuracy(model, workload.test, 500) <= 0.2


def test_correct_counts_the_samples_whose_largest_output_is_their_class() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert correct(outputs, torch.tensor([1, 1, 1])) == 2
    assert correct(outputs, torch.tensor([0, 1, 0])) == 0


def test_the_net_is_the_tutorials_and_gives_log_probabilities() -> None:
    assert {name: tuple(value.shape) for name, value in conv_net().state_dict().items()} == {
        "conv1.weight": (32, 1, 3, 3),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3),
        "conv2.bias": (64,),
        "fc1.weight": (128, 9216),
        "fc1.bias": (128,),
        "fc2.weight": (10, 128),
        "fc2.bias": (10,),
    }
    outputs = conv_net()(torch.randn(3, 1, 28, 28))
    assert tuple(outputs.shape) == (3, 10)
    torch.testing.assert_close(outputs.exp().sum(dim=1), torch.ones(3))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(300)
def test_a_linear_model_stays_clearly_below_the_net(workload: Workload) -> None:
    def linear() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.LogSoftmax(dim=1))

    def trained(make: Callable[[], nn.Module], epochs: int, lr: float) -> float:
        torch.manual_seed(0)
        model = make()
        train(model, workload, epochs, lr)
        assert isinstance(workload.test, Images)
        return accuracy(model, workload.test, 2000)

    line, net = trained(linear, 10, 0.01), trained(conv_net, 1, 0.02)
    assert line > 0.4, "the linear model was not trained"
    assert net - line >= 0.05, f"linear {line:.3f}, net {net:.3f}"


@pytest.mark.parametrize("indices", [[2, 0, 2], (2, 0, 2), array("q", [2, 0, 2])])
def test_images_are_fetched_in_the_order_asked_for(indices: Sequence[int]) -> None:
    pixels = torch.arange(3, dtype=torch.uint8).view(3, 1, 1).expand(3, 28, 28).contiguous()
    classes: Tensor = torch.tensor([5, 6, 7], dtype=torch.uint8)
    images = Images(pixels * 51, classes, mean=0.2, std=0.1)
    inputs, targets = images.batch(indices)
    assert targets.tolist() == [7, 5, 7]
    wanted = torch.tensor([2.0, -2.0, 2.0])
    torch.testing.assert_close(inputs[:, 0, 0, 0], wanted, rtol=1e-5, atol=1e-5)
