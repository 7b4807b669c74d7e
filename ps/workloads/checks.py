"""How a plug-in is loaded, and the checks on a workload before it is trained."""

from __future__ import annotations

import importlib  # noqa: TID251
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ps.settings.config import Config
from ps.settings.errors import ConfigError, PsError
from ps.workload import Workload, fetch


def load_plug_in(text: str, config: Config) -> Workload:
    """Import module:function, call it with the config and check what it returns.

    Raises:
        ConfigError: it cannot be imported, raises, or does not return a Workload with usable
            parts.
    """
    module_name, _, function_name = text.partition(":")
    try:
        build = getattr(importlib.import_module(module_name), function_name)
        workload = build(config)
    except PsError:
        raise
    except Exception as error:
        raise ConfigError(f"--workload {text}: {type(error).__name__}: {error}") from error
    check(workload, f"--workload {text}")
    return workload  # type: ignore[no-any-return]


def check(workload: object, source: str) -> None:
    """Check the types of the parts, and that sample 0 of each data set is a pair of tensors.

    Raises:
        ConfigError: a part is unusable. The message starts with source, and names the part.
    """
    if not isinstance(workload, Workload):
        raise ConfigError(f"{source} must return a ps.Workload, got {_shown(workload)}")
    for part in ("model", "loss", "correct"):
        if not callable(getattr(workload, part)):
            raise ConfigError(
                f"{source}: {part} must be callable, got {_shown(getattr(workload, part))}"
            )
    for part in ("train", "test"):
        _check_samples(getattr(workload, part), f"{source}: {part}")


def make_model(workload: Workload, seed: int) -> nn.Module:
    """The untrained model, in training mode; its weights depend on the seed alone.

    Raises:
        ConfigError: it cannot be made, is no module, or has no parameter to train.
    """
    torch.manual_seed(seed)
    try:
        model = workload.model()
    except Exception as error:
        raise ConfigError(
            f"workload {workload.name}: model() raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"workload {workload.name}: model() must return an nn.Module, got {_shown(model)}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"workload {workload.name}: the model has no parameter to train")
    return model.train()


def refuse_without_layout(workload: Workload, model: nn.Module) -> None:
    """Check a model whose parameters and gradients are to be in one buffer of known size.

    Raises:
        ConfigError: a layer makes sparse gradients, or does not know the size of its parameters.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(
                f"workload {workload.name}: {name} is lazy, and --compute trainer must know its "
                "size; run the model once in model(), or type --compute server"
            )
    for name, layer in model.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise ConfigError(
                f"workload {workload.name}: {type(layer).__name__} {name} makes sparse gradients, "
                "and --compute trainer only takes dense ones; make it with sparse=False, or type "
                "--compute server"
            )


def try_out(
    workload: Workload,
    model: nn.Module,
    input_device: torch.device,
    run: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Run sample 0 through model, loss and correct, so that a mistake shows before training.

    run(model, inputs) gets inputs [1, ...] on input_device, and returns the outputs. The model is
    evaluated without gradients, and is in training mode afterwards.

    Raises:
        ConfigError: a part raises, or returns something else than it should.
    """
    inputs, targets = fetch(workload.train, [0])
    part = "model"
    try:
        with torch.no_grad():
            outputs = run(model.eval(), inputs.to(input_device))
        _expect(isinstance(outputs, Tensor), workload, "model", "a tensor", outputs)
        outputs, part = outputs.to("cpu"), "loss"
        loss = workload.loss(outputs, targets)
        scalar = isinstance(loss, Tensor) and loss.numel() == 1
        _expect(scalar, workload, "loss", "a scalar tensor", loss)
        part = "correct"
        correct = workload.correct(outputs, targets)
        _expect(int(correct) in (0, 1), workload, "correct", "0 or 1 for one sample", correct)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"workload {workload.name}: {part} raised {type(error).__name__}: {error} "
            f"(inputs {_shape(inputs)}, targets {_shape(targets)})"
        ) from error
    finally:
        model.train()


def _expect(fulfilled: bool, workload: Workload, part: str, wanted: str, got: object) -> None:
    if not fulfilled:
        raise ConfigError(
            f"workload {workload.name}: {part} must return {wanted}, got {_shown(got)}"
        )


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_samples(samples: Any, source: str) -> None:
    try:
        length = len(samples)
    except TypeError:
        raise ConfigError(f"{source} must be a map-style data set, got {_shown(samples)}") from None
    if length < 1:
        raise ConfigError(f"{source} must hold at least one sample, got none")
    try:
        inputs, targets = fetch(samples, [0])
    except Exception as error:
        raise ConfigError(
            f"{source}: sample 0 gives no (input, target) pair: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        got = f"{_shown(inputs)} and {_shown(targets)}"
        raise ConfigError(f"{source}: sample 0 must be a pair of tensors, got {got}")


def _shown(value: object) -> str:
    return f"{type(value).__name__} {' '.join(repr(value).split())}"[:80]
