"""One order, worked on by a trainer: where the server computes, and where the trainer does.

The server's halves are in ps.server.compute, under the same names.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox
from ps.model.passes import Passes
from ps.model.randomness import evaluation_seed, loss_seed, seed_process, step_seed
from ps.protocol import Assignment, Evaluate, Evaluated, Push, Result, Server, Train, Trained
from ps.settings.errors import TrainingFailed
from ps.trainer.loading import Loader
from ps.workload import Workload, fetch


class Worker(Protocol):
    def do(self, assignment: Assignment) -> Result:
        """Work on the order to the end. Blocks."""


class ServerComputeWorker:
    """--compute server: the trainer brings the batch, computes the loss and starts backward.

    Backward is cut at the outputs: the trainer's part ends in their gradient, which it hands in
    with the order, and the server's part goes on from there. Two calls make a step.
    """

    def __init__(
        self, trainer: int, server: Server, workload: Workload, passes: Passes, loader: Loader
    ) -> None:
        self._trainer = trainer
        self._server = server
        self._workload = workload
        self._passes = passes
        self._loader = loader

    def do(self, assignment: Assignment) -> Result:
        """Blocks for several calls to the server."""
        order = assignment.order
        if isinstance(order, Evaluate):
            return self._evaluate(order)
        self._loader.expect(order, assignment.prefetch)
        return self._train(order)

    def _train(self, order: Train) -> Trained:
        samples, loss_sum, gradient = len(order.indices), 0.0, None
        for micro_batch, indices in enumerate(self._passes.micro_batches(order.indices)):
            if gradient is not None:
                self._server.backward(self._trainer, gradient)
            inputs, targets = self._loader.batch(order, micro_batch, indices)
            seed_process(loss_seed(self._passes.seed, order.epoch, order.batch, micro_batch))
            outputs = self._server.forward(self._trainer, order.epoch, order.batch, inputs)
            loss = self._workload.loss(outputs.requires_grad_(), targets)
            _backward(loss, len(indices), samples)
            loss_sum += loss.item() * len(indices)
            gradient = outputs.grad
            if gradient is None:
                raise TrainingFailed("the loss does not depend on the outputs of the model")
        assert gradient is not None
        return Trained(order.epoch, order.batch, samples, loss_sum / samples, gradient)

    def _evaluate(self, order: Evaluate) -> Evaluated:
        seed_process(evaluation_seed(self._passes.seed, order.epoch, order.slice))
        inputs, targets = fetch(self._workload.test, range(order.start, order.stop))
        return _evaluated(
            order, self._workload, self._server.evaluate(self._trainer, inputs), targets
        )


class TrainerComputeWorker:
    """--compute trainer: forward and backward on this trainer's copy of the model.

    The model's weights are views of mailbox.weights. Each gradient goes into mailbox.gradients
    as soon as autograd has it, so that it is not there twice.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        flat: FlatModel,
        mailbox: Mailbox,
        passes: Passes,
        loader: Loader,
    ) -> None:
        """flat is the model's, and moved to mailbox.weights."""
        self._workload = workload
        self._model = model
        self._passes = passes
        self._loader = loader
        self._flat = flat
        self._used: set[int] = set()
        gradients = flat.trained.views(mailbox.gradients)
        for place, parameter in enumerate(flat.parameters):
            hook = _GradientHook(place, gradients[place], self._used)
            parameter.register_post_accumulate_grad_hook(hook)

    def do(self, assignment: Assignment) -> Result:
        """Calls nobody: the weights of the assignment are in the mailbox."""
        order = assignment.order
        if isinstance(order, Evaluate):
            return self._evaluate(order)
        self._loader.expect(order, assignment.prefetch)
        return self._train(order, assignment.weights.version)

    def _train(self, order: Train, version: int) -> Trained:
        samples, loss_sum = len(order.indices), 0.0
        self._used.clear()
        for micro_batch, indices in enumerate(self._passes.micro_batches(order.indices)):
            inputs, targets = self._loader.batch(order, micro_batch, indices)
            seed_process(step_seed(self._passes.seed, order.epoch, order.batch, micro_batch))
            outputs = self._passes.run(self._model, inputs)
            loss = self._workload.loss(outputs, targets)
            _backward(loss, len(indices), samples)
            loss_sum += loss.item() * len(indices)
        return Trained(order.epoch, order.batch, samples, loss_sum / samples, self._push(version))

    def _push(self, version: int) -> Push:
        self._flat.gather_buffers()
        count = len(self._flat.parameters)
        if len(self._used) == count:
            return Push(version)
        return Push(version, tuple(place for place in range(count) if place not in self._used))

    def _evaluate(self, order: Evaluate) -> Evaluated:
        seed_process(evaluation_seed(self._passes.seed, order.epoch, order.slice))
        inputs, targets = fetch(self._workload.test, range(order.start, order.stop))
        self._model.eval()
        with torch.inference_mode():
            outputs = self._passes.run(self._model, inputs)
        self._model.train()
        return _evaluated(order, self._workload, outputs, targets)


class _GradientHook:
    """Moves a parameter's gradient to its place in the mailbox; those of further micro-batches are
    added there."""

    def __init__(self, place: int, view: Tensor, used: set[int]) -> None:
        self._place = place
        self._view = view
        self._used = used

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise TrainingFailed(
                "a gradient is sparse, and --compute trainer takes dense ones alone; type "
                "--compute server"
            )
        if self._place in self._used:
            self._view.add_(parameter.grad)
        else:
            self._view.copy_(parameter.grad)
            self._used.add(self._place)
        parameter.grad = None


def _backward(loss: Tensor, micro_batch_size: int, samples: int) -> None:
    """Backward from the micro-batch's share of the mean over all samples of the order."""
    share = micro_batch_size / samples
    (loss if share == 1 else loss * share).backward()


def _evaluated(order: Evaluate, workload: Workload, outputs: Tensor, targets: Tensor) -> Evaluated:
    """What the slice gave."""
    samples = order.stop - order.start
    loss_sum = workload.loss(outputs, targets).item() * samples
    correct = int(workload.correct(outputs, targets))
    return Evaluated(order.epoch, order.slice, samples, loss_sum, correct)
