"""One order, worked on by a trainer while the model is on the server."""

from __future__ import annotations

from ps.errors import TrainingFailed
from ps.protocol import Evaluate, Evaluated, Result, Server, Train, Trained
from ps.randomness import seed_process, step_seed
from ps.workload import Workload, fetch


class ServerSideWorker:
    """--compute server: the trainer brings the batch, computes the loss and starts backward.

    Backward is cut at the outputs: the trainer's part ends in their gradient, which it hands in
    with the order, and the server's part goes on from there. Two calls make a step.
    """

    def __init__(self, trainer: int, server: Server, workload: Workload, seed: int) -> None:
        self._trainer = trainer
        self._server = server
        self._workload = workload
        self._seed = seed

    def do(self, order: Train | Evaluate) -> Result:
        """Work on the order to the end. Blocks for several calls to the server."""
        return self._train(order) if isinstance(order, Train) else self._evaluate(order)

    def _train(self, order: Train) -> Trained:
        seed_process(step_seed(self._seed, order.epoch, order.batch))
        inputs, targets = fetch(self._workload.train, order.indices)
        outputs = self._server.forward(self._trainer, order.epoch, order.batch, inputs)
        loss = self._workload.loss(outputs.requires_grad_(), targets)
        loss.backward()
        if outputs.grad is None:
            raise TrainingFailed("the loss does not depend on the outputs of the model")
        return Trained(order.epoch, order.batch, len(order.indices), loss.item(), outputs.grad)

    def _evaluate(self, order: Evaluate) -> Evaluated:
        inputs, targets = fetch(self._workload.test, range(order.start, order.stop))
        outputs = self._server.evaluate(self._trainer, inputs)
        samples = order.stop - order.start
        loss_sum = self._workload.loss(outputs, targets).item() * samples
        correct = int(self._workload.correct(outputs, targets))
        return Evaluated(order.epoch, order.slice, samples, loss_sum, correct)
