"""Models as people write them end with the weights that a plain loop gives them.

One trainer, or several in step, in this process; wherever forward and backward run.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from ps.model.passes import Passes
from ps.protocol import Assignment, Train
from ps.workload import Workload, fetch
from tests.helpers import (
    COMPUTE,
    assert_equal,
    momentum_sgd,
    server_of,
    sgd,
    train_all,
    train_alone,
)
from tests.jobs import Ranks
from tests.plugins import Points, embedding, perceptron, some_digits

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take long where other programs use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.05, momentum=0.9, weight_decay=0.1)


def workload_of(model: Callable[[], nn.Module], width: int = 6, num_train: int = 400) -> Workload:
    """A model that maps [n, width] to three logits."""
    return replace(
        perceptron(),
        model=model,
        train=Points(num_train, width, 3),
        test=Points(97, width, 3),
        loss=nn.functional.cross_entropy,
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def with_batch_norm_for_images() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)),
        *(nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 3)),
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class Sometimes(nn.Module):
    """Some of its layers are for rare samples, and left out if a batch has none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.seldom = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs)
        for layer, rare in ((self.sometimes, inputs[:, :1] > 1), (self.seldom, inputs[:, :1] > 2)):
            if rare.any():
                outputs = outputs + rare * layer(inputs)
        return outputs


class Tied(nn.Module):
    """One weight in two layers, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 12)
        self.decode = nn.Linear(12, 6)
        self.encode.weight = nn.Parameter(self.decode.weight.detach().t().clone())
        self.again = nn.Linear(6, 12)
        self.again.weight = self.encode.weight
        self.norm = nn.LayerNorm(12)
        self.also_norm = self.norm
        self.out = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.decode(self.norm(self.encode(inputs)))
        outputs: Tensor = self.out(self.also_norm(self.again(inner)))
        return outputs


class MixedDtypes(nn.Module):
    seen: Tensor
    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Linear(6, 8, dtype=torch.float64)
        self.rough = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.out = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.flag.logical_not_()
        hidden = self.exact(inputs.double()).tanh()
        outputs: Tensor = self.out(self.rough(hidden.bfloat16()).float())
        return outputs


class Odd(nn.Module):
    """Parameters of no elements and of no dimensions, a transposed one, and such buffers."""

    steps: Tensor
    not_saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("none", torch.empty(2, 0))
        self.register_buffer("no_numbers", torch.empty(2, 0, dtype=torch.int64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("not_saved", torch.ones(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.turned * self.scale + self.nothing.sum()
        if self.training:
            self.steps += 1
            self.not_saved *= 0.99
            outputs = outputs * self.not_saved
        return outputs


class Replacing(nn.Module):
    """Gives its buffers new tensors instead of changing them."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        outputs: Tensor = self.layer(inputs - self.mean) * (1 + 0.01 * self.steps)
        return outputs


class Aliased(nn.Module):
    """Reaches a buffer by another name, which is no buffer of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.state = [self.mean]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.state[0].lerp_(inputs.mean(0), 0.1)
        outputs: Tensor = self.layer(inputs - self.mean)
        return outputs


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(inputs.view(-1, 3, 2))
        outputs: Tensor = self.out(hidden[:, -1])
        return outputs


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(48, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encoder(inputs.unsqueeze(2).expand(-1, -1, 8))
        outputs: Tensor = self.out(hidden.flatten(1))
        return outputs


def with_parametrized_weights() -> nn.Module:
    """Spectral norm keeps vectors in buffers and renews them in each forward pass."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    return nn.Sequential(spectral, nn.ReLU(), normed)


WORKLOADS = {
    "batch-norm": workload_of(with_batch_norm),
    "batch-norm-2d": workload_of(with_batch_norm_for_images, width=48),
    "frozen": workload_of(frozen),
    "sometimes-unused": workload_of(Sometimes),
    "tied": workload_of(Tied),
    "mixed-dtypes": workload_of(MixedDtypes),
    "empty-and-scalar": workload_of(Odd),
    "replaced-buffer": workload_of(Replacing),
    "aliased-buffer": workload_of(Aliased),
    "lstm": workload_of(Recurrent),
    "transformer": workload_of(Attending),
    "parametrized": workload_of(with_parametrized_weights),
    "embedding": embedding(sparse=False),
}


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", WORKLOADS)
def test_one_trainer_equals_a_plain_loop_bit_for_bit(name: str, compute: str) -> None:
    workload = WORKLOADS[name]
    parts = server_of(workload, compute=compute, optimizer=decaying)
    train_all(parts)
    assert parts.store.version == 50
    expected = train_alone(workload, updates=50, optimizer=decaying)
    assert_equal(parts.store.state_dict(), expected, within=0)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_weights_that_are_saved_have_the_accuracy_that_was_reported(
    name: str, compute: str
) -> None:
    workload = WORKLOADS[name]
    parts = server_of(workload, compute=compute, trainers=(1, 2), optimizer=decaying)
    train_all(parts)
    model = workload.model().eval()
    model.load_state_dict(parts.store.state_dict())
    inputs, targets = fetch(workload.test, range(len(workload.test)))
    with torch.inference_mode():
        outputs = model(inputs)
    [record] = parts.metrics.history
    assert record.test_accuracy == workload.correct(outputs, targets) / len(workload.test)
    assert record.test_loss == pytest.approx(workload.loss(outputs, targets).item(), rel=1e-5)


OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_a_plain_loop_bit_for_bit(name: str, compute: str) -> None:
    """The memory of the gradients is used again in each step: none may be kept."""
    workload = workload_of(lambda: nn.Sequential(*(nn.Linear(n, 3, bias=False) for n in (6, 3))))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        return made

    parts = server_of(workload, compute=compute, optimizer=optimizer)
    train_all(parts)
    expected = train_alone(workload, updates=50, optimizer=optimizer)
    assert_equal(parts.store.state_dict(), expected, within=0)


@pytest.mark.parametrize(
    "name", ["batch-norm", "mixed-dtypes", "replaced-buffer", "aliased-buffer"]
)
def test_trainers_that_take_turns_see_the_buffers_of_each_other(name: str) -> None:
    """Where the server computes, each forward pass sees the newest weights and buffers."""
    workload = WORKLOADS[name]
    parts = server_of(workload, trainers=(1, 2), optimizer=momentum_sgd)
    workers = {trainer: parts.worker(trainer) for trainer in (1, 2)}
    orders = {trainer: parts.server.next_order(trainer, None).wait() for trainer in (1, 2)}
    for turn in range(20):
        trainer = 1 + turn % 2
        assignment = orders[trainer]
        assert isinstance(assignment, Assignment) and isinstance(assignment.order, Train)
        assert assignment.order.batch == turn
        result = workers[trainer].do(assignment)
        orders[trainer] = parts.server.next_order(trainer, result).wait()
    assert dict(parts.metrics.staleness) == {0: 20}
    expected = train_alone(workload, updates=20, optimizer=momentum_sgd)
    assert_equal(parts.store.state_dict(), expected)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", ["sometimes-unused", "tied", "empty-and-scalar", "frozen"])
def test_trainers_in_step_equal_one_process_on_the_joint_batch(name: str, compute: str) -> None:
    """A parameter that the batch of one trainer does not use has the gradient of the other."""
    workload = replace(WORKLOADS[name], train=Points(416, 6, 3))
    parts = server_of(workload, compute=compute, trainers=(1, 2), max_lag=0, optimizer=decaying)
    train_all(parts)
    assert parts.store.version == 26
    expected = train_alone(workload, updates=26, batch_size=16, optimizer=decaying)
    assert_equal(parts.store.state_dict(), expected)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", ["sometimes-unused", "tied", "frozen", "embedding"])
def test_accumulated_batches_equal_the_joint_batch(name: str, compute: str) -> None:
    """Orders of 24 samples, computed 7 at once: the last part of each is smaller."""
    parts = server_of(
        WORKLOADS[name],
        compute=compute,
        batch_size=24,
        epochs=3,
        optimizer=decaying,
        passes=Passes(batch_size=7),
    )
    train_all(parts)
    assert parts.store.version == 51
    expected = train_alone(WORKLOADS[name], updates=51, batch_size=24, optimizer=decaying)
    assert_equal(parts.store.state_dict(), expected)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
def test_the_conv_net_equals_a_plain_loop_in_every_precision_and_memory_format(
    compute: str, bfloat16: bool, channels_last: bool
) -> None:
    workload = some_digits(160, 40)
    passes = Passes(seed=3, bfloat16=bfloat16, channels_last=channels_last)
    parts = server_of(
        workload, compute=compute, batch_size=16, optimizer=momentum_sgd, passes=passes
    )
    train_all(parts)
    assert parts.store.version == 10
    expected = train_alone(
        workload, updates=10, batch_size=16, optimizer=momentum_sgd, passes=passes
    )
    state = parts.store.state_dict()
    assert_equal(state, expected, within=0)
    assert {value.dtype for value in state.values()} == {torch.float32}
    in_format = state["conv2.weight"].is_contiguous(memory_format=torch.channels_last)
    assert in_format == channels_last


@dataclass
class Footprint:
    """The most memory that a process had at any look, in bytes. Its programs do not count."""

    own: int = 0
    with_shared: int = 0

    def look(self, process: psutil.Process) -> None:
        text = Path(f"/proc/{process.pid}/status").read_text()
        kibibytes = {name: int(size) for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", text)}
        own = 1024 * kibibytes["RssAnon"]
        self.own = max(self.own, own)
        self.with_shared = max(self.with_shared, own + 1024 * kibibytes["RssShmem"])


def footprints(folder: Path, plugin: str) -> dict[int, Footprint]:
    """Of the ranks of a job in which the trainer computes."""
    job = Ranks(
        folder,
        *("--workload", f"tests.plugins:{plugin}", "--compute", "trainer", "--link", "local"),
        *("--batch-size", "2", "--lr", "1e-9", "--threads", "1"),
        world_size=2,
    )
    seen = {rank: Footprint() for rank in (0, 1)}
    while job.is_running:
        for rank, process in job.ranks().items():
            with suppress(OSError, KeyError):  # just forked, or just ended
                seen[rank].look(process)
        time.sleep(0.01)
    done = job.wait()
    assert done.exit_code == 0, done.text
    return seen


def test_a_hundred_million_parameters_are_in_memory_once_on_each_side(tmp_path: Path) -> None:
    """What a trainer shares with the server, which is weights and gradients, is the trainer's."""
    weights = gradients = 4 * 100_000_000
    base = footprints(tmp_path / "few", "few_parameters")
    large = footprints(tmp_path / "many", "hundred_million_parameters")
    trainer = large[1].with_shared - base[1].with_shared
    server = large[0].own - base[0].own
    assert trainer <= 1.15 * (weights + gradients), (base, large)
    assert server <= 1.15 * weights, (base, large)
