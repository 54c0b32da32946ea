"""The random generators that no framework owns: Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def seed_host(seed: int) -> None:
    """Start both generators anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def host_state() -> dict[str, Any]:
    """Where both generators are, in plain types."""
    _, key, *position = np.random.get_state()
    return {"python": random.getstate(), "numpy": [np.asarray(key).tolist(), *position]}


def load_host_state(state: dict[str, Any]) -> None:
    """Go on from what host_state() gave; lists may stand for tuples, as after JSON."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, *position = state["numpy"]
    np.random.set_state(("MT19937", np.array(key, np.uint32), *position))
