"""Networks that round as int8 does while they still compute in float32, to calibrate or to train them.

Weights have one scale per output channel and no offset, activations one range per tensor; gradients pass the rounding
unchanged (Jacob et al. 2018, arXiv:1712.05877). Batch-norm stays as it is while training: folding it later multiplies
each output channel by a constant, and the channel's scale with it, so the rounded weights are the same ones.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...errors import UserError
from ...ranks import Communicator
from ...weights import hash_arrays
from ..layer_names import matched

STEPS = 255  # of an activation, in uint8
# Of a weight on each side of 0, in int8: 7 bits, since CPUs without VNNI add two products in 16 bits, which overflow
# with 8 (ONNX Runtime calls it reduce_range). Where all have VNNI or it is an ARM, 127 is more exact.
WEIGHT_STEPS = 63
MOMENTUM = 0.01  # of the running range, while training
RELUS = (nn.ReLU, nn.ReLU6)
RELU_CALLS = (torch.relu, functional.relu, functional.relu6)
KEEP_RANGE = (nn.MaxPool2d, nn.Flatten, nn.Identity, nn.Dropout)  # what comes out lies within what went in
ENDS: dict[str, Callable[[Tensor], Tensor]] = {"lowest": torch.amin, "highest": torch.amax}  # over ranks
ADDITIONS = (operator.add, operator.iadd, torch.add)

Layer = nn.Conv2d | nn.Linear


class FakeQuantize(nn.Module):
    """Rounds a tensor to the 256 steps of its range, which it learns: always around 0, so that 0 is exact."""

    lowest: Tensor
    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.zeros(()))
        self.register_buffer("highest", torch.zeros(()))
        self.calibrating = False

    @staticmethod
    def merged_buffers(model: nn.Module, communicator: Communicator) -> dict[str, Tensor]:
        """The widest ranges of all ranks by the names of the buffers, for checkpoints too: see torch/engine.py."""
        places = [(f"{name}.{end}", getattr(place, end)) for name, place in quantizers(model).items() for end in ENDS]
        ranks = communicator.gather({name: buffer.cpu().numpy() for name, buffer in places}, "ranges")
        found = {name: torch.stack([torch.from_numpy(rank[name]) for rank in ranks]) for name, _ in places}
        return {name: ENDS[name.rpartition(".")[2]](ends) for name, ends in found.items()}

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; unrounded while calibrating."""
        if self.calibrating or self.training:
            self._observe(x.detach())
        if self.calibrating:
            return x
        rounded: Tensor = torch.fake_quantize_per_tensor_affine(x, *self.scale(), 0, STEPS)
        return rounded

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        low, high = torch.aminmax(x.float())
        if self.calibrating:
            self.lowest.copy_(torch.minimum(self.lowest, low))
            self.highest.copy_(torch.maximum(self.highest, high))
        else:
            weight = torch.where(self.highest > self.lowest, MOMENTUM, 1.0)  # the first batch counts fully
            self.lowest.lerp_(low.clamp(max=0), weight)
            self.highest.lerp_(high.clamp(min=0), weight)

    def scale(self) -> tuple[Tensor, Tensor]:
        """The size of a step, and the step that stands for 0."""
        scale = _or_one((self.highest - self.lowest) / STEPS)
        return scale, (-self.lowest / scale).round().clamp(0, STEPS).int()


def weight_scale(weight: Tensor) -> Tensor:
    """The size of a weight's step, one for each output channel, the first axis."""
    return _or_one(weight.detach().flatten(1).abs().amax(1) / WEIGHT_STEPS)


def _or_one(scale: Tensor) -> Tensor:
    """What is always 0, as a pruned channel, may have any step."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _rounded(weight: Tensor) -> Tensor:
    scale = weight_scale(weight)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    rounded: Tensor = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -WEIGHT_STEPS, WEIGHT_STEPS)
    return rounded


class _RoundedConv2d(nn.Conv2d):
    """A convolution whose weight is rounded in each call."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(x, _rounded(self.weight), self.bias)
        return result


class _RoundedLinear(nn.Linear):
    """A dense layer whose weight is rounded in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, _rounded(self.weight), self.bias)


ROUNDED: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: _RoundedConv2d, nn.Linear: _RoundedLinear}


def prepare(model: nn.Module, skip: Sequence[str] = ()) -> fx.GraphModule:
    """A copy of a model that rounds as int8 does; its parameters keep their names. Use it as any other model.

    Calibrate it (see calibrating()) or train it, merge the ranks' ranges, then give it to quantize.convert().

    Args:
        model: Takes (n, channels, height, width), or (n, features).
        skip: Layers, as named_modules() has them, or patterns of their names, that stay in float32.

    Raises:
        UserError: if the model's forward() has control flow that depends on its input, or `skip` names no layer.
    """
    skipped = skipped_layers(model, skip)
    mode = model.training
    try:
        traced = fx.symbolic_trace(copy.deepcopy(model))
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be traced ({error}): use the method dynamic or weight_only, which need not"
        ) from error
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for name, layer in traced.named_modules():
        # One that is used twice would need two scales for its bias.
        if type(layer) in ROUNDED and name not in skipped and calls[name] == 1:
            layer.__class__ = ROUNDED[type(layer)]
    _insert_quantizers(traced)
    return traced.train(mode)


def skipped_layers(model: nn.Module, skip: Sequence[str]) -> list[str]:
    """The layers of a model, prepared or not, that stay in float32.

    Raises:
        UserError: if one of `skip` matches none.
    """
    kinds = (*ROUNDED, *ROUNDED.values())
    names = [name for name, layer in model.named_modules() if type(layer) in kinds]
    return matched(names, skip, "compress.skip={} is no layer to quantize")


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Within it, each call of a prepared model widens the ranges to the lowest and highest values seen."""
    for quantizer in quantizers(model).values():
        quantizer.calibrating = True
    try:
        yield
    finally:
        for quantizer in quantizers(model).values():
            quantizer.calibrating = False


def quantizers(model: nn.Module) -> dict[str, FakeQuantize]:
    """The places of a prepared model where activations are rounded."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantize)}


@torch.no_grad()
def merge_ranges(model: nn.Module, communicator: Communicator) -> None:
    """Give every rank the widest range of all ranks, exactly; weights must be equal already.

    Raises:
        UserError: if a range is not finite, or nothing was ever seen there.
        RuntimeError: if the ranks' models differ.
    """
    buffers = dict(model.named_buffers())
    for name, end in FakeQuantize.merged_buffers(model, communicator).items():
        buffers[name].copy_(end)
    check_ranges(model)
    arrays = (tensor.detach().cpu().numpy() for tensor in model.state_dict().values())
    communicator.check_equal(hash_arrays(arrays), "quantized weights and ranges")


def check_ranges(model: nn.Module) -> None:
    """Refuse a model that was not calibrated, or saw values that are no numbers.

    Raises:
        UserError: agreed by all ranks, if their ranges are merged.
    """
    places = quantizers(model)
    for name, place in places.items():
        if not torch.isfinite(place.highest - place.lowest):
            raise UserError(f"activations at {name} became infinite or NaN: check the calibration data", agreed=True)
    if places and all(place.highest == place.lowest for place in places.values()):
        raise UserError("the model has seen no data: calibrate or train it before it is converted", agreed=True)


def is_call(node: object, model: fx.GraphModule, *kinds: type[nn.Module]) -> TypeGuard[fx.Node]:
    """Whether a node of the graph calls a module of one of these kinds."""
    return isinstance(node, fx.Node) and node.op == "call_module" and isinstance(module_of(node, model), kinds)


def following(node: fx.Node) -> fx.Node | None:
    """The only node that uses this one's result."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def module_of(node: object, model: fx.GraphModule) -> Any:
    """The module that a node of the graph calls."""
    assert isinstance(node, fx.Node)
    return model.get_submodule(str(node.target))


def _insert_quantizers(model: fx.GraphModule) -> None:
    """Before and after each layer with its batch-norm and ReLU, and after each addition; not for the logits."""
    done: dict[fx.Node, str] = {}
    for node in list(model.graph.nodes):
        if is_call(node, model, *ROUNDED.values()):
            _quantize(node.args[0], model, done)
            _quantize(_end(node, model), model, done)
        elif node.op == "call_function" and node.target in ADDITIONS:
            _quantize(_end(node, model), model, done)
    model.graph.lint()
    model.recompile()


def _end(node: fx.Node, model: fx.GraphModule) -> fx.Node:
    """The last of a layer, its batch-norm and its ReLU."""
    after = following(node)
    if is_call(after, model, nn.BatchNorm2d):
        node, after = after, following(after)
    is_relu = is_call(after, model, *RELUS) or (after is not None and after.target in (*RELU_CALLS, "relu"))
    return after if is_relu and after is not None else node


def _quantize(node: object, model: fx.GraphModule, done: dict[fx.Node, str]) -> None:
    """Round a node's result for all that use it, unless it is rounded already or leaves the model."""
    assert isinstance(node, fx.Node)
    if node in done or any(user.op == "output" for user in node.users):
        return
    if is_call(node, model, FakeQuantize):
        return
    name = f"quantize_{node.name}"
    if is_call(node, model, *KEEP_RANGE) and is_call(node.args[0], model, FakeQuantize):
        name = str(node.args[0].target)
    else:
        model.add_submodule(name, FakeQuantize())
    users = list(node.users)
    with model.graph.inserting_after(node):
        rounded = model.graph.call_module(name, (node,))
    for user in users:
        user.replace_input_with(node, rounded)
    done[node] = name
