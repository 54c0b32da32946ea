"""Smaller PyTorch models: int8 for ONNX Runtime, fp16 and bf16; docs/compress.md says what each is good for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.onnx.ops import symbolic, symbolic_multi_out

from ...errors import UserError
from ...export.artefacts import Floats
from ...export.model_folder import data_shape
from ...export.torch import PRECISIONS, channels_first, load_model, write
from ...ranks import Communicator
from ..quantization import check_method
from .fake_quantize import (
    ROUNDED,
    WEIGHT_STEPS,
    FakeQuantize,
    Layer,
    calibrating,
    check_ranges,
    following,
    is_call,
    merge_ranges,
    module_of,
    prepare,
    quantizers,
    skipped_layers,
    weight_scale,
)

INT8 = (".onnx",)
METHODS = {"static": INT8, "dynamic": INT8, "weight_only": INT8, "fp16": (".onnx", ".pt2"), "bf16": (".pt2",)}


class TorchQuantizer:
    """See wing.Quantizer. For `static` the model is prepared to be calibrated.

    The methods: static (int8 weights and activations) | dynamic (int8 weights in dense layers, their inputs by the
    range of each call) | weight_only (int8 weights, computes in float32: smaller, not faster) | fp16 | bf16.
    """

    def __init__(self, folder: Path, method: str, skip: Sequence[str] = (), trusted: Sequence[str] = ()) -> None:
        model = load_model(folder, trusted)
        self._model = prepare(model, skip) if method == "static" else model
        self._shape, self._method, self._skip = data_shape(folder), method, skip

    def observe(self, batches: Iterable[Floats]) -> int:
        """Widen the ranges."""
        seen = 0
        with calibrating(self._model), torch.no_grad():
            for batch in batches:
                self._model(channels_first(torch.from_numpy(batch)))
                seen += len(batch)
        return seen

    def merge(self, communicator: Communicator) -> None:
        """Give every rank the widest ranges."""
        merge_ranges(self._model, communicator)

    def convert(self, target: Path) -> dict[str, Any]:
        """As .onnx, or .pt2."""
        if self._method in ("static", "qat"):
            assert isinstance(self._model, fx.GraphModule)
            return convert(self._model, target, self._shape, self._skip)
        return _convert_unprepared(self._model, target, self._shape, self._method, self._skip)


def convert(model: fx.GraphModule, target: Path, shape: Sequence[int], skip: Sequence[str] = ()) -> dict[str, Any]:
    """Write a prepared model whose ranges are known as .onnx, in int8; one process does it.

    Args:
        model: What prepare() made, calibrated or trained, with merged ranges.
        target: The .onnx file.
        shape: One sample as the data set gives it, channels last.
        skip: What prepare() was given, for the report.

    Returns:
        `quantized`: the names of the int8 layers; `fp32`: of the others that have weights, each with the reason.

    Raises:
        UserError: if the model was not calibrated, or the target is no .onnx.
    """
    check_method("static", target, METHODS)
    check_ranges(model)
    skipped = skipped_layers(model, skip)
    made = copy.deepcopy(model).cpu().eval()
    _fold_batch_norms(made)
    for node in made.graph.nodes:
        if is_call(node, made, *ROUNDED.values()):
            scale, _ = module_of(node.args[0], made).scale()
            made.set_submodule(str(node.target), _Int8Layer(module_of(node, made), scale))
    for name, place in quantizers(made).items():
        made.set_submodule(name, _Rounding(place))
    write(made, target, shape)
    return _report(made, skipped)


def _fold_batch_norms(model: fx.GraphModule) -> None:
    for node in model.graph.nodes:
        after = following(node)
        if is_call(node, model, ROUNDED[nn.Conv2d]) and is_call(after, model, nn.BatchNorm2d):
            layer, norm = module_of(node, model), module_of(after, model)
            model.set_submodule(str(node.target), fuse_conv_bn_eval(layer, norm))
            model.set_submodule(str(after.target), nn.Identity())


def _convert_unprepared(
    model: nn.Module, target: Path, shape: Sequence[int], method: str, skip: Sequence[str]
) -> dict[str, Any]:
    """What needs no calibration, and so no trace of the model."""
    skipped = skipped_layers(model, skip)
    if method in PRECISIONS:
        if skip:
            raise UserError(f"compress.skip={skip[0]} has no meaning for {method}: it is for the whole model")
        write(model, target, shape, PRECISIONS[method])
        return {"quantized": [name for name, _ in _weighted(model)], "fp32": {}}
    kinds, form = (ROUNDED, _Int8Layer) if method == "weight_only" else ((nn.Linear,), _DynamicLinear)
    for name, layer in list(model.named_modules()):
        if type(layer) in kinds and name not in skipped:
            model.set_submodule(name, form(layer))
    write(model, target, shape)
    return _report(model, skipped, method)


def _weighted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that hold weights themselves."""
    found = [(name, module) for name, module in model.named_modules() if not isinstance(module, _Rounding)]
    return [item for item in found if [*item[1].parameters(recurse=False)] or isinstance(item[1], _Int8Layer)]


def _report(model: nn.Module, skip: Sequence[str], method: str = "static") -> dict[str, Any]:
    quantized = [name for name, layer in _weighted(model) if isinstance(layer, _Int8Layer)]
    others = {name: layer for name, layer in _weighted(model) if name not in quantized}
    return {
        "quantized": quantized,
        "fp32": {name: _reason(name, layer, skip, method) for name, layer in others.items()},
    }


def _reason(name: str, layer: nn.Module, skip: Sequence[str], method: str) -> str:
    if name in skip:
        return "skipped as asked"
    if isinstance(layer, nn.Conv2d) and method == "dynamic":
        return "the dynamic method is for dense layers"
    if type(layer) in ROUNDED:
        return "used more than once"
    return f"{type(layer).__name__} is not quantized"


class _Int8Layer(nn.Module):
    """A layer with its weight in int8, and with the scale of its input its bias in int32: all that int8 kernels need.

    It is written in terms of ONNX' operators, and computes only there.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None

    def __init__(self, layer: Layer, input_scale: Tensor | None = None) -> None:
        super().__init__()
        scale, bias = weight_scale(layer.weight), layer.bias
        if bias is not None and input_scale is not None:  # its steps in int32 must not overflow
            scale = torch.maximum(scale, bias.detach().abs() / (input_scale * 2**30))
        per_channel = scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
        rounded = (layer.weight.detach() / per_channel).round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros_like(scale, dtype=torch.int8))
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("bias_scale", None)
        if bias is not None and input_scale is not None:
            self.bias_scale = scale * input_scale
            self.bias = (bias.detach() / self.bias_scale).round().int()
        self.layer = copy.copy(layer)  # for its stride, padding, ...
        self.layer._parameters = {}

    def forward(self, x: Tensor) -> Tensor:
        # Weight and bias are made float first; the runtime merges that.
        weight, bias = _dequantize(self.weight, self.scale, self.zero, axis=0), self.bias
        if bias is not None and self.bias_scale is not None:
            bias = _dequantize(bias, self.bias_scale, axis=0)
        if isinstance(self.layer, nn.Conv2d):
            return self.layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
        return functional.linear(x, weight, bias)


class _DynamicLinear(_Int8Layer):
    """A dense layer that multiplies int8 by int8; its input is quantized by the range that it has in each call."""

    def forward(self, x: Tensor) -> Tensor:
        one = torch.Size(())
        rounded, scale, zero = symbolic_multi_out(
            "DynamicQuantizeLinear", (x,), dtypes=(torch.uint8, torch.float32, torch.uint8), shapes=(x.shape, one, one)
        )
        weight, shape = self.weight.t().contiguous(), (*x.shape[:-1], len(self.weight))
        product = symbolic("MatMulInteger", (rounded, weight, zero), dtype=torch.int32, shape=shape)
        result: Tensor = product.float() * (scale * self.scale)
        return result if self.bias is None else result + self.bias


class _Rounding(nn.Module):
    """What FakeQuantize does, as ONNX' pair of operators."""

    scale: Tensor
    zero: Tensor

    def __init__(self, place: FakeQuantize) -> None:
        super().__init__()
        scale, zero = place.scale()
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero.to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        rounded = symbolic("QuantizeLinear", (x, self.scale, self.zero), dtype=torch.uint8, shape=x.shape)
        return _dequantize(rounded, self.scale, self.zero)


def _dequantize(*tensors: Tensor, **attributes: int) -> Tensor:
    return symbolic("DequantizeLinear", tensors, {**attributes}, dtype=torch.float32, shape=tensors[0].shape)
