"""PyTorch models in formats that need no code of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..runtime import Floats, Predictor
from .models import load_model


class Deployed(nn.Module):
    """A model as artefacts have it: (n, *data.shape) float32, channels last, -> (n, classes) float32 logits."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model.eval().to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """Images get their channels first."""
        if inputs.ndim == 4:
            inputs = inputs.permute(0, 3, 1, 2)
        logits: Tensor = self.model(inputs.to(self.dtype))
        return logits.float()


def predictor(folder: Path, trusted: Sequence[str] = ()) -> Predictor:
    """The model in a folder, to be called as every artefact is."""
    model = Deployed(load_model(folder, trusted))

    def predict(inputs: Floats) -> Floats:
        with torch.inference_mode():
            logits: Floats = model(torch.from_numpy(inputs)).numpy()
            return logits

    return predict
