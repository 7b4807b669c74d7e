"""What one process of a peer is to do, as it is handed over on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

BATCH_SIZE = 32
LEARNING_RATE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The same for every process of a peer, except for the index."""

    steps: int
    """Timed steps of all processes together."""
    num_processes: int = 2
    """Processes that train."""
    net: str = "conv"
    """conv, the net of the workload digits, or small, a perceptron; the images are the same."""
    tuned: bool = False
    """Whether freed memory is kept, as launch.py does it."""
    channels_last: bool = False
    warm_up: int = 5
    """Steps of each process before the clock starts."""
    index: int = 0
    """Which of the processes this is."""
    folder: str = ""
    """An empty folder for the processes to meet in, for peers that need one."""

    @property
    def own_steps(self) -> int:
        """Timed steps of each process."""
        return max(1, self.steps // self.num_processes)

    def scaled(self, factor: float) -> Task:
        """The same with factor times the steps."""
        return replace(self, steps=max(self.num_processes, round(self.steps * factor)))

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Task:
        return cls(**json.loads(text))
