"""The plug-in interface: batches, the checks on every part, loading, and the untrained model."""

from __future__ import annotations

import subprocess
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

ROOT = Path(__file__).parents[2]
GOOD_PLUG_IN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ps import Workload


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
    message = str(caught.value)
    assert message.startswith("--workload a:b")
    return message


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
    return str(caught.value)


@pytest.mark.parametrize("indices", [[3, 1, 2], range(2, 4)])
def test_a_batch_is_collated_sample_by_sample_or_asked_for_at_once(indices: Sequence[int]) -> None:
    plain, batched = Squares(), BatchedSquares()
    for samples in (plain, batched):
        inputs, targets = fetch(samples, indices)
        assert inputs.tolist() == [[index, index + 0.5] for index in indices]
        assert targets.tolist() == [index**2 for index in indices]
    assert plain.asked == list(indices)
    assert (batched.batches, batched.asked) == ([indices], [])


def test_a_good_workload_passes() -> None:
    check(workload_of(), "--workload a:b")
    check(workload_of(train=Squares(), test=BatchedSquares()), "--workload a:b")
    assert workload_of().channels_last is False


@pytest.mark.parametrize(
    "seen", [{"model": 1}, None, "x" * 1000, nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
)
def test_anything_but_a_workload_is_refused_and_shown_in_one_short_line(seen: object) -> None:
    before, _, shown = refused(seen).partition(", got ")
    assert "ps.Workload" in before
    assert shown.startswith(type(seen).__name__)
    assert len(shown) <= 80
    assert "\n" not in shown


class Broken(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError("tape torn")


@pytest.mark.parametrize(
    ("parts", "value", "seen"),
    [
        (("model", "loss", "correct"), 3, "int 3"),
        (("train", "test"), 7, "int 7"),
        (("train", "test"), [], "none"),
        (("train", "test"), Broken(), "OSError: tape torn"),
        (("train", "test"), [(1.0, 2.0, 3.0)], "ValueError: too many"),
        (("train", "test"), [("text", 1)], "tuple ('text',) and Tensor tensor([1])"),
    ],
    ids=["not-callable", "no-data-set", "empty", "broken", "triples", "text"],
)
def test_an_unusable_part_is_refused_by_its_name_and_as_seen(
    parts: tuple[str, ...], value: object, seen: str
) -> None:
    for part in parts:
        message = refused(workload_of(**{part: value}))
        assert f": {part}" in message
        assert seen in message


def test_a_good_plug_in_is_called_with_the_config(plug_in: Callable[[str, str], None]) -> None:
    plug_in("good_plug_in", GOOD_PLUG_IN)
    config = Config(workload="good_plug_in:build", batch_size=6)
    workload = load_plug_in("good_plug_in:build", config)
    assert workload.name == "good_plug_in:build"
    assert (len(workload.train), len(workload.test)) == (6, 6)
    assert isinstance(workload.model(), nn.Linear)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "ModuleNotFoundError"),
        ("from math import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
        ("def build(config:\n", "SyntaxError"),
        ("def make(config): ...\n", "AttributeError"),
        ("def build(config): return {}['cifar']\n", "KeyError: 'cifar'"),
        ("def build(): ...\n", "TypeError"),
        ("def build(config): return 'net'\n", "ps.Workload"),
        (GOOD_PLUG_IN.replace("test=samples", "test=[]"), "test"),
    ],
    ids=["absent", "import", "syntax", "function", "raises", "config", "returns", "part"],
)
def test_an_unusable_plug_in_is_refused_by_its_name_with_the_reason(
    plug_in: Callable[[str, str], None], text: str | None, reason: str
) -> None:
    if text is not None:
        plug_in("bad_plug_in", text)
    message = load_refused("bad_plug_in:build")
    assert message.startswith("--workload bad_plug_in:build")
    assert reason in message


def test_a_plug_in_may_refuse_its_config_in_its_own_words(
    plug_in: Callable[[str, str], None],
) -> None:
    text = "from ps import ConfigError\n\n\ndef build(config):\n"
    plug_in("strict_plug_in", f"{text}    raise ConfigError('--batch-size must be even')\n")
    assert load_refused("strict_plug_in:build") == "--batch-size must be even"


def test_the_weights_are_those_of_a_plain_script_with_that_seed() -> None:
    workload = workload_of(model=lambda: nn.Linear(20, 20))
    torch.manual_seed(5)
    plain = nn.Linear(20, 20).weight
    for seed in (5, 5, 6):
        made = make_model(workload, seed).state_dict()["weight"]
        assert torch.equal(made, plain) is (seed == 5)


def test_the_untrained_model_is_in_training_mode() -> None:
    made = make_model(workload_of(model=lambda: nn.Linear(2, 1).eval()), seed=0)
    assert made.training is True


def failing() -> nn.Module:
    raise KeyError("cat")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: [1, 2], "nn.Module, got list [1, 2]"),
        (failing, "KeyError: 'cat'"),
        (nn.ReLU, "no parameter"),
        (lambda: nn.Linear(2, 1).requires_grad_(False), "no parameter"),
    ],
    ids=["list", "raises", "none", "frozen"],
)
def test_a_model_that_cannot_be_trained_is_refused(
    model: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ConfigError, match="workload tiny: ") as caught:
        make_model(workload_of(model=model), seed=0)
    assert reason in str(caught.value)


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
    assert "model raised ValueError: autocast True" in message


class Twice(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return ("first", "second")


@pytest.mark.parametrize(
    ("part", "value", "seen"),
    [
        ("model", lambda: Twice(2, 1), "tuple ('first', 'second')"),
        ("loss", lambda outputs, targets: torch.ones(2), "Tensor tensor([1., 1.])"),
        ("loss", lambda outputs, targets: 1.5, "float 1.5"),
        ("correct", lambda outputs, targets: 2, "int 2"),
    ],
)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_part_that_returns_something_else_is_refused_as_seen(
    part: str, value: object, seen: str, bfloat16: bool
) -> None:
    message = tried_out(Passes(bfloat16=bfloat16).run, **{part: value})
    assert message.startswith(f"workload tiny: {part} ")
    assert message.endswith(seen)


@pytest.mark.parametrize("part", ["loss", "correct"])
def test_a_part_that_raises_is_named_with_what_it_was_given(part: str) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("cat")

    parts: dict[str, Any] = {part: broken}
    message = tried_out(**parts)
    assert message.startswith(f"workload tiny: {part} raised KeyError: 'cat'")
    assert message.endswith("(inputs float32 [1, 2], targets float32 [1])")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Embedding(5, 2, sparse=False), ()),
        (nn.Embedding(5, 2, sparse=True), ("Embedding 1", "sparse=False", "--compute server")),
        (nn.LazyLinear(2), ("1.weight", "lazy", "--compute server")),
    ],
    ids=["dense", "sparse", "lazy"],
)
def test_a_layer_that_cannot_be_in_one_buffer_is_refused_by_its_name(
    layer: nn.Module, words: tuple[str, ...]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer)
    message = ""
    try:
        refuse_without_layout(workload_of(), model)
    except ConfigError as error:
        message = str(error)
    assert bool(message) is bool(words)
    assert all(word in message for word in words)


def make_tensors() -> list[Tensor]:
    return [torch.ones(2), torch.zeros(3, dtype=torch.uint8)]


def test_shared_tensors_are_made_here_unless_the_process_has_another_source(
    request: pytest.FixtureRequest,
) -> None:
    asked: list[str] = []

    def share(name: str, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        asked.append(name)
        return [tensor + 1 for tensor in make()]

    request.addfinalizer(lambda: share_by(None))
    assert [made.tolist() for made in once_per_host("mine", make_tensors)] == [[1, 1], [0, 0, 0]]
    share_by(share)
    assert [made.tolist() for made in once_per_host("mine", make_tensors)] == [[2, 2], [1, 1, 1]]
    assert asked == ["mine"]


@pytest.mark.slow
def test_names_that_need_no_torch_do_not_load_it() -> None:
    program = """
import sys
import launch, ps
assert ps.Config and ps.ConfigError
assert "torch" not in sys.modules, "torch was loaded"
assert ps.Workload and ps.once_per_host
assert "torch" in sys.modules
try:
    ps.workloed
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "'workloed'" in done.stdout
