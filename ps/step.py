"""One order, worked on by a trainer while the model is on the server."""

from __future__ import annotations

from ps.protocol import Evaluate, Evaluated, Result, Server, Train, Trained
from ps.randomness import seed_process, step_seed
from ps.workload import Workload, fetch


class ServerSideWorker:
    """--compute server: the trainer brings the batch, computes the loss and starts backward."""

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
        with self._server.context() as context_id:
            outputs = self._server.forward(self._trainer, order, inputs)
            loss = self._workload.loss(outputs, targets)
            self._server.backward(context_id, loss)
        return Trained(order.epoch, order.batch, len(order.indices), loss.item(), context_id)

    def _evaluate(self, order: Evaluate) -> Evaluated:
        inputs, targets = fetch(self._workload.test, range(order.start, order.stop))
        outputs = self._server.evaluate(self._trainer, inputs)
        samples = order.stop - order.start
        loss_sum = self._workload.loss(outputs, targets).item() * samples
        correct = int(self._workload.correct(outputs, targets))
        return Evaluated(order.epoch, order.slice, samples, loss_sum, correct)
