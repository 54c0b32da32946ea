"""What a model costs to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...export.torch import Deployed, load_model


def count(folder: Path, shape: Sequence[int], trusted: Sequence[str]) -> dict[str, int]:
    """Parameters, and multiply-accumulates of convolutions, linear layers and attention, for one sample of `shape`.

    They are counted as a dense runtime does them: a weight of zero is multiplied too.
    """
    model = load_model(folder, trusted)
    with torch.no_grad(), _plain_attention(), FlopCounterMode(display=False) as counter:
        Deployed(model)(torch.zeros((1, *shape)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "macs": counter.get_total_flops() // 2}


@contextmanager
def _plain_attention() -> Iterator[None]:
    """As multiplications of matrices, which are counted; a whole layer or product as one operation would not be."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
