"""PyTorch models in formats that need no code of this package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_into
from torch import Tensor, nn

from ..errors import UserError
from ..weights import FILE
from .artefacts import Predictor, torch_predictor, writing
from .model_folder import build_model, data_shape

FORMATS = ("onnx", "torch_export")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def export(folder: Path, target: Path, kind: str, precision: str, trusted: Sequence[str] = ()) -> None:
    """Turn a model folder into an .onnx or a .pt2 file.

    Args:
        folder: A model folder.
        target: The file to write.
        kind: onnx | torch_export.
        precision: fp32 | fp16 | bf16, what the model computes in; bf16 for torch_export only.
        trusted: As for load_model().

    Raises:
        UserError: if the format cannot hold the model.
    """
    if kind == "onnx" and precision == "bf16":
        raise UserError("--precision bf16 is nothing for onnx, whose CPU runtime has no such operators: take fp16")
    write(load_model(folder, trusted), target, data_shape(folder), PRECISIONS[precision])


class Deployed(nn.Module):
    """A model as artefacts have it: (n, *data.shape) float32, channels last, -> (n, classes) float32 logits."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model.eval().to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.model(channels_first(inputs).to(self.dtype))
        return logits.float()


def channels_first(inputs: Tensor) -> Tensor:
    """What the models take: images with their channels before height and width, anything else as it is."""
    return inputs.permute(0, 3, 1, 2) if inputs.dim() == 4 else inputs


def write(model: nn.Module, target: Path, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """Write a model as .onnx or .pt2, whole or not at all, for batches of any length.

    Nothing is optimized: the runtimes do that.

    Args:
        model: Takes (n, channels, height, width), or (n, features).
        target: The file; its suffix is the format.
        shape: One sample as the data set gives it, channels last.
        dtype: What the model computes in.

    Raises:
        UserError: if the model has operators that the format lacks.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
        made = Path(temporary, target.name)
        with writing(target.suffix):
            _write(Deployed(model, dtype), made, torch.zeros(2, *shape))
        made.rename(target)


def _write(model: Deployed, target: Path, example: Tensor) -> None:
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("n")},))
    if target.suffix == ".pt2":
        torch.export.save(program, target)
    else:
        _write_onnx(program, target)


def _write_onnx(program: torch.export.ExportedProgram, target: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not there
    made = torch.onnx.export(
        program, dynamo=True, optimize=False, verbose=False, input_names=["inputs"], output_names=["logits"]
    )
    assert made is not None
    for node in made.model.graph:
        node.metadata_props.clear()  # stack traces, which name files of this machine
    made.save(target, external_data=False)


def predictor(folder: Path, trusted: Sequence[str] = ()) -> Predictor:
    """The model in a folder, to be called as every artefact is."""
    return torch_predictor(Deployed(load_model(folder, trusted)))


def load_model(folder: str | Path, trusted: Sequence[str] = ()) -> nn.Module:
    """The model in a folder that `export` made, on the CPU, ready to answer; see model_folder.build_model().

    It takes (n, channels, height, width), or (n, features), already normalized as model.json says.
    """
    model: nn.Module = build_model(Path(folder), trusted)
    try:
        load_into(model, Path(folder) / FILE)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise UserError(f"the weights in {folder} do not fit its architecture ({error}): export it again") from error
    return model.eval()
