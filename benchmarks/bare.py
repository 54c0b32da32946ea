"""What the hand-written loops of step_time.py have in common."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

BATCH, WINDOW, WINDOWS, SAMPLES = 64, 10, 30, 4096
SHAPES = {"mlp": (8, 8, 1), "cnn": (32, 32, 3)}


def make_model(models: ModuleType, name: str) -> Any:
    """The model that step_time.py's options give the project."""
    return models.mlp(SHAPES[name], 10, [512, 512]) if name == "mlp" else models.cnn(SHAPES[name], 10)


def measure(step: Callable[[], object], finish: Callable[[], float]) -> float:
    """The median time of one step in ms, over windows of 10 steps of which the first are warm-up."""
    times = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for _ in range(WINDOW):
            step()
        finish()
        times.append((time.perf_counter() - start) / WINDOW * 1000)
    return statistics.median(times[5:])


def plan(rank: int, size: int) -> Iterator[list[int]]:
    """The rows of each step of a rank, for ever."""
    import numpy as np

    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        for batch in order.reshape(-1, BATCH * size):
            yield batch[rank * BATCH : (rank + 1) * BATCH].tolist()
