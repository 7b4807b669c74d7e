"""The plug-in interface: batches, the checks on every part, loading, and the untrained model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ps.model.passes import Passes
from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workload import Workload, fetch, once_per_host, share_by
from ps.workloads.checks import check, load_plug_in, make_model, refuse_without_layout, try_out

GOOD_PLUG_IN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ps.workload import Workload


def build(config):
    samples = TensorDataset(torch.zeros(config.batch_size, 2), torch.zeros(config.batch_size))
    return Workload(
        name=config.workload,
        model=lambda: nn.Linear(2, 1),
        train=samples,
        test=samples,
        loss=lambda outputs, targets: outputs.mean(),
        correct=lambda outputs, targets: 0,
    )
"""


class Squares(Dataset[tuple[Tensor, int]]):
    """Sample i is ([i, i + 0.5], i squared); counts how it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(index)
        return torch.tensor([index, index + 0.5]), index**2


class BatchedSquares(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Sequence[int]] = []

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.batches.append(indices)
        chosen = torch.tensor(indices)
        return torch.stack([chosen, chosen + 0.5], dim=1), chosen**2


def workload_of(**parts: object) -> Workload:
    samples = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    usable: dict[str, Any] = {
        "name": "tiny",
        "model": lambda: nn.Linear(2, 1),
        "train": samples,
        "test": samples,
        "loss": lambda outputs, targets: outputs.mean(),
        "correct": lambda outputs, targets: 0,
    }
    return Workload(**(usable | parts))


def refused(workload: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check(workload, "--workload a:b")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Writes a module that can be imported until the test ends."""
    names: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def load_refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_plug_in(text, Config(workload=text))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_plain_data_set_is_fetched_and_collated_sample_by_sample() -> None:
    samples = Squares()
    inputs, targets = fetch(samples, [3, 1, 2])
    assert torch.equal(inputs, torch.tensor([[3, 3.5], [1, 1.5], [2, 2.5]]))
    assert torch.equal(targets, torch.tensor([9, 1, 4]))
    assert samples.asked == [3, 1, 2]


def test_a_data_set_with_batch_is_asked_once_for_all() -> None:
    samples = BatchedSquares()
    inputs, targets = fetch(samples, [3, 1, 2])
    assert torch.equal(inputs, torch.tensor([[3, 3.5], [1, 1.5], [2, 2.5]]))
    assert torch.equal(targets, torch.tensor([9, 1, 4]))
    assert (samples.batches, samples.asked) == ([[3, 1, 2]], [])


@pytest.mark.parametrize("samples", [Squares(), BatchedSquares()])
def test_a_range_of_indices_is_a_batch_too(samples: Squares) -> None:
    inputs, targets = fetch(samples, range(2, 4))
    assert (inputs.tolist(), targets.tolist()) == ([[2, 2.5], [3, 3.5]], [4, 9])


def test_a_good_workload_passes() -> None:
    check(workload_of(), "--workload a:b")
    check(workload_of(train=Squares(), test=BatchedSquares()), "--workload a:b")


def test_anything_but_a_workload_is_refused() -> None:
    assert refused({"model": 1}) == (
        "--workload a:b must return a ps.workload.Workload, got dict {'model': 1}"
    )
    assert refused(None) == ("--workload a:b must return a ps.workload.Workload, got NoneType None")


@pytest.mark.parametrize("part", ["model", "loss", "correct"])
def test_a_part_that_cannot_be_called_is_refused_by_its_name(part: str) -> None:
    message = f"--workload a:b: {part} must be callable, got int 3"
    assert refused(workload_of(**{part: 3})) == message


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_data_set_without_a_length_is_refused_by_its_name(part: str) -> None:
    assert refused(workload_of(**{part: 7})) == (
        f"--workload a:b: {part} must be a map-style data set, got int 7"
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_data_set_is_refused_by_its_name(part: str) -> None:
    assert refused(workload_of(**{part: []})) == (
        f"--workload a:b: {part} must hold at least one sample, got none"
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_data_set_that_cannot_be_read_is_refused_with_the_reason(part: str) -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise OSError("tape torn")

    assert refused(workload_of(**{part: Broken()})) == (
        f"--workload a:b: {part}: sample 0 gives no (input, target) pair: OSError: tape torn"
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_samples_that_are_no_pairs_are_refused(part: str) -> None:
    message = refused(workload_of(**{part: [(1.0, 2.0, 3.0)]}))
    assert message.startswith(
        f"--workload a:b: {part}: sample 0 gives no (input, target) pair: ValueError: too many"
    )


def test_a_pair_that_is_not_of_tensors_is_refused_as_seen() -> None:
    assert refused(workload_of(test=[("text", 1)])) == (
        "--workload a:b: test: sample 0 must be a pair of tensors, "
        "got tuple ('text',) and Tensor tensor([1])"
    )


def test_what_was_seen_is_cut_short() -> None:
    message = refused("x" * 1000)
    assert message == "--workload a:b must return a ps.workload.Workload, got str '" + "x" * 75
    assert len(message.partition(", got ")[2]) == 80


def test_what_was_seen_is_told_in_one_line() -> None:
    message = refused(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert message.startswith("--workload a:b must return a ps.workload.Workload, got Sequential ")
    assert "\n" not in message


def test_a_good_plug_in_is_called_with_the_config(plug_in: Callable[[str, str], None]) -> None:
    plug_in("good_plug_in", GOOD_PLUG_IN)
    config = Config(workload="good_plug_in:build", batch_size=6)
    workload = load_plug_in("good_plug_in:build", config)
    assert workload.name == "good_plug_in:build"
    assert (len(workload.train), len(workload.test)) == (6, 6)
    assert isinstance(workload.model(), nn.Linear)


def test_a_plug_in_that_is_not_there_is_refused() -> None:
    assert load_refused("no_such_plug_in:build") == (
        "--workload no_such_plug_in:build: ModuleNotFoundError: No module named 'no_such_plug_in'"
    )


def test_a_plug_in_that_cannot_be_imported_is_refused(
    plug_in: Callable[[str, str], None],
) -> None:
    plug_in("importing_plug_in", "from math import no_such_name\n")
    message = load_refused("importing_plug_in:build")
    assert message.startswith(
        "--workload importing_plug_in:build: ImportError: cannot import name 'no_such_name'"
    )


def test_a_plug_in_with_a_mistake_in_its_text_is_refused(
    plug_in: Callable[[str, str], None],
) -> None:
    plug_in("torn_plug_in", "def build(config:\n")
    message = load_refused("torn_plug_in:build")
    assert message.startswith("--workload torn_plug_in:build: SyntaxError: '(' was never closed")


def test_a_plug_in_without_that_function_is_refused(plug_in: Callable[[str, str], None]) -> None:
    plug_in("other_plug_in", "def make(config): ...\n")
    assert load_refused("other_plug_in:build") == (
        "--workload other_plug_in:build: AttributeError: "
        "module 'other_plug_in' has no attribute 'build'"
    )


def test_a_plug_in_that_raises_is_refused_with_what_it_raised(
    plug_in: Callable[[str, str], None],
) -> None:
    plug_in("raising_plug_in", "def build(config): return {}['cifar']\n")
    assert load_refused("raising_plug_in:build") == (
        "--workload raising_plug_in:build: KeyError: 'cifar'"
    )


def test_a_plug_in_may_refuse_its_config_in_its_own_words(
    plug_in: Callable[[str, str], None],
) -> None:
    text = "from ps import ConfigError\n\n\ndef build(config):\n"
    plug_in("strict_plug_in", f"{text}    raise ConfigError('--batch-size must be even')\n")
    assert load_refused("strict_plug_in:build") == "--batch-size must be even"


def test_a_plug_in_that_returns_something_else_is_refused(
    plug_in: Callable[[str, str], None],
) -> None:
    plug_in("wrong_plug_in", "def build(config): return 'net'\n")
    assert load_refused("wrong_plug_in:build") == (
        "--workload wrong_plug_in:build must return a ps.workload.Workload, got str 'net'"
    )


def test_a_plug_in_with_an_unusable_part_is_refused(plug_in: Callable[[str, str], None]) -> None:
    plug_in("part_plug_in", GOOD_PLUG_IN.replace("test=samples", "test=[]"))
    assert load_refused("part_plug_in:build") == (
        "--workload part_plug_in:build: test must hold at least one sample, got none"
    )


def test_a_plug_in_that_takes_no_config_is_refused(plug_in: Callable[[str, str], None]) -> None:
    plug_in("shy_plug_in", "def build(): ...\n")
    assert load_refused("shy_plug_in:build") == (
        "--workload shy_plug_in:build: TypeError: "
        "build() takes 0 positional arguments but 1 was given"
    )


def test_the_weights_depend_on_the_seed_alone() -> None:
    workload = workload_of(model=lambda: nn.Linear(20, 20))
    torch.manual_seed(123)
    first = make_model(workload, seed=5).state_dict()
    torch.rand(7)
    again = make_model(workload, seed=5).state_dict()
    other = make_model(workload, seed=6).state_dict()
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])


def test_the_weights_are_those_of_a_plain_script_with_that_seed() -> None:
    torch.manual_seed(5)
    plain = nn.Linear(20, 20)
    made = make_model(workload_of(model=lambda: nn.Linear(20, 20)), seed=5)
    assert torch.equal(made.state_dict()["weight"], plain.weight)


def test_the_untrained_model_is_in_training_mode() -> None:
    made = make_model(workload_of(model=lambda: nn.Linear(2, 1).eval()), seed=0)
    assert made.training is True


def test_a_model_that_is_no_module_is_refused_as_seen() -> None:
    with pytest.raises(ConfigError) as caught:
        make_model(workload_of(model=lambda: [1, 2]), seed=0)
    assert str(caught.value) == ("workload tiny: model() must return an nn.Module, got list [1, 2]")


@pytest.mark.parametrize(
    "model", [nn.ReLU, lambda: nn.Linear(2, 1).requires_grad_(False)], ids=["none", "frozen"]
)
def test_a_model_with_nothing_to_train_is_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_model(workload_of(model=model), seed=0)
    assert str(caught.value) == "workload tiny: the model has no parameter to train"


def test_a_model_that_is_partly_frozen_is_good() -> None:
    def partly_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return model

    made = make_model(workload_of(model=partly_frozen), seed=0)
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert trained == ["1.weight", "1.bias"]


def tried_out(run: Callable[[nn.Module, Tensor], Tensor] | None = None, **parts: object) -> str:
    """What a try-out of the workload refuses, "" if it is good."""
    workload = workload_of(**parts)
    model = workload.model()
    try:
        try_out(workload, model, torch.device("cpu"), run or Passes().run)
    except ConfigError as error:
        return str(error)
    finally:
        assert model.training is True
    return ""


def test_a_good_workload_is_tried_out_on_one_sample_without_gradients() -> None:
    asked: list[tuple[int, bool, bool]] = []

    def run(model: nn.Module, inputs: Tensor) -> Tensor:
        asked.append((len(inputs), model.training, torch.is_grad_enabled()))
        outputs: Tensor = model(inputs)
        return outputs

    assert tried_out(run) == ""
    assert asked == [(1, False, False)]


def test_the_model_is_tried_out_in_the_precision_and_format_it_will_be_trained_in() -> None:
    class Picky(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            raise ValueError(f"autocast {torch.is_autocast_enabled('cpu')}")

    message = tried_out(Passes(bfloat16=True).run, model=lambda: Picky(2, 1))
    assert message == (
        "workload tiny: model raised ValueError: autocast True "
        "(inputs float32 [1, 2], targets float32 [1])"
    )


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_model_that_gives_no_tensor_is_refused_as_seen(bfloat16: bool) -> None:
    class Twice(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return ("first", "second")

    assert tried_out(Passes(bfloat16=bfloat16).run, model=lambda: Twice(2, 1)) == (
        "workload tiny: model must give a tensor, got tuple ('first', 'second')"
    )


def test_a_loss_that_is_no_scalar_is_refused_as_seen() -> None:
    assert tried_out(loss=lambda outputs, targets: torch.ones(2)) == (
        "workload tiny: loss must give a scalar tensor, got Tensor tensor([1., 1.])"
    )
    assert tried_out(loss=lambda outputs, targets: 1.5) == (
        "workload tiny: loss must give a scalar tensor, got float 1.5"
    )


def test_a_count_of_right_samples_beyond_the_batch_is_refused() -> None:
    assert tried_out(correct=lambda outputs, targets: 2) == (
        "workload tiny: correct must give 0 or 1 for one sample, got int 2"
    )


@pytest.mark.parametrize("part", ["loss", "correct"])
def test_a_part_that_raises_is_named_with_what_it_was_given(part: str) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("cat")

    parts: dict[str, Any] = {part: broken}
    assert tried_out(**parts) == (
        f"workload tiny: {part} raised KeyError: 'cat' (inputs float32 [1, 2], targets float32 [1])"
    )


def embedding(*, sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=sparse))


def test_a_layer_with_sparse_gradients_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_without_layout(workload_of(), embedding(sparse=True))
    assert str(caught.value) == (
        "workload tiny: Embedding 1 makes sparse gradients, and --compute trainer takes dense ones "
        "alone; make it with sparse=False, or type --compute server"
    )
    refuse_without_layout(workload_of(), embedding(sparse=False))


def make_tensors() -> list[Tensor]:
    return [torch.ones(2), torch.zeros(3, dtype=torch.uint8)]


def test_without_other_ranks_shared_tensors_are_made_here() -> None:
    first, second = once_per_host("mine", make_tensors)
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0, 0, 0])


def test_shared_tensors_come_from_where_the_process_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps.workload._share", None)  # is put back after the test
    asked: list[str] = []

    def share(name: str, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        asked.append(name)
        return [tensor + 1 for tensor in make()]

    share_by(share)
    first, second = once_per_host("mine", make_tensors)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [1, 1, 1])
    assert asked == ["mine"]


def test_a_plug_in_gets_channels_last_only_if_it_says_so() -> None:
    assert workload_of().channels_last is False
    assert workload_of(channels_last=True).channels_last is True


def test_a_workload_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload_of().name = "other"  # type: ignore[misc]
