"""Smaller layers: fewer channels, or two thin layers for a thick one; described in plain values and built again.

A change is {"layers": {name: options}} with a `kind`; the model folder holds the list, so that it loads anywhere
without the library that chose it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..layer_names import select
from ..low_rank import Matrix, factorize
from ..wing import Choice

WIDTHS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv1d: ("in_channels", "out_channels", "groups"),
    nn.Conv2d: ("in_channels", "out_channels", "groups"),
    nn.Linear: ("in_features", "out_features"),
    nn.BatchNorm1d: ("num_features",),
    nn.BatchNorm2d: ("num_features",),
}


def shrunk(base: nn.Module, changes: Sequence[Mapping[str, Any]]) -> nn.Module:
    """The architecture `base` after these changes, with weights of no meaning.

    Args:
        base: The model as it was.
        changes: What fewer_channels() and low_rank() described, in their order.
    """
    for change in changes:
        for name, options in change["layers"].items():
            _replace(base, name, _MAKERS[str(change["kind"])](base.get_submodule(name), **options))
    return base


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def _with_widths(layer: nn.Module, **widths: int) -> nn.Module:
    """A layer of the same kind and options, of other widths.

    Raises:
        ValueError: if a file asks for more than that.
    """
    new = copy.deepcopy(layer)
    if not {*widths} <= {*_widths(layer)} or not all(type(value) is int for value in widths.values()):
        raise ValueError(f"{widths} are no widths of a {type(layer).__name__}")
    for option, value in widths.items():
        setattr(new, option, value)
    for name, tensor in (*new.named_parameters(recurse=False), *new.named_buffers(recurse=False)):
        shape = _shape(new, name, tensor)
        fresh = torch.zeros(shape, dtype=tensor.dtype)
        setattr(new, name, nn.Parameter(fresh) if isinstance(tensor, nn.Parameter) else fresh)
    return new


def _shape(layer: nn.Module, name: str, tensor: Tensor) -> tuple[int, ...]:
    if tensor.dim() == 0:
        return ()
    outputs, *inputs = (int(getattr(layer, width)) for width in _outputs_first(layer))
    if tensor.dim() == 1:
        return (outputs,)
    groups = int(getattr(layer, "groups", 1))
    return (outputs, inputs[0] // groups, *tensor.shape[2:])


def _outputs_first(layer: nn.Module) -> tuple[str, ...]:
    names = tuple(name for name in _widths(layer) if name != "groups")
    return names[::-1]


def _widths(layer: nn.Module) -> tuple[str, ...]:
    return next((names for kind, names in WIDTHS.items() if isinstance(layer, kind)), ())


def fewer_channels(model: nn.Module, options: Any, inputs: Tensor, classes: int) -> Choice:
    """Remove the channels of smallest norm, with all that depends on them (Fang et al. 2023, arXiv:2301.12900).

    Args:
        model: On the CPU; it is changed.
        options: compress: sparsity (the fraction of channels), layers, skip, scope.
        inputs: (2, ...) as the model takes them, to follow its graph.
        classes: The last layer's width, which stays.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise UserError("compress=channels needs torch-pruning: install this project's extra 'compress'") from error
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    chosen = select([*layers], list(options.layers), list(options.skip))
    last = [name for name in _called(model, layers, inputs) if getattr(layers[name], "out_features", 0) == classes][-1:]
    before, shapes = _all_widths(model), _shapes(model)
    pruner = torch_pruning.pruner.BasePruner(
        model.eval(),
        inputs,
        torch_pruning.importance.GroupMagnitudeImportance(p=2),
        global_pruning=options.scope == "global",
        pruning_ratio=float(options.sparsity),
        max_pruning_ratio=0.95,  # leaves something of every layer
        ignored_layers=[module for name, module in layers.items() if name not in chosen or name in last],
    )
    pruner.step()
    _check_pruned(model, shapes, inputs, classes)
    after = {name: widths for name, widths in _all_widths(model).items() if widths != before[name]}
    if not after:
        raise UserError(f"compress.sparsity={options.sparsity} removes no channel: choose more, or skip fewer layers")
    return model, [{"kind": "widths", "layers": after}], []


def _called(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Tensor) -> list[str]:
    """The layers in the order in which the model calls them, which need not be that of their names."""
    called: list[str] = []
    handles = [layer.register_forward_hook(lambda *_, name=name: called.append(name)) for name, layer in layers.items()]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return called


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _check_pruned(model: nn.Module, before: Mapping[str, torch.Size], inputs: Tensor, classes: int) -> None:
    """Refuse a model that no longer answers for its classes, or that could not be rebuilt from its widths.

    Raises:
        UserError: names a layer that stands in the way.
    """
    for name, shape in _shapes(model).items():
        layer = name.rpartition(".")[0]
        if shape != before[name] and not _widths(model.get_submodule(layer)):
            kind = type(model.get_submodule(layer)).__name__
            raise UserError(
                f"compress=channels cannot rebuild {layer}, a {kind}: name the layers before it in compress.skip"
            )
    try:
        with torch.inference_mode():
            width = model(inputs).shape[-1]
    except RuntimeError as error:
        raise UserError(f"compress=channels breaks this model ({error}): use compress=low_rank or prune") from error
    if width != classes:
        raise UserError("compress=channels cuts what this model answers with: name its last layer in compress.skip")


def _all_widths(model: nn.Module) -> dict[str, dict[str, int]]:
    found = {name: {width: int(getattr(layer, width)) for width in _widths(layer)} for name, layer in _named(model)}
    return {name: widths for name, widths in found.items() if widths}


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


def low_rank(model: nn.Module, options: Any) -> Choice:
    """Factor convolutions and linear layers; see low_rank.factorize.

    A k x k convolution becomes one of `rank` channels and a 1 x 1 one. A layer that would not get smaller stays.

    Args:
        model: On the CPU; it is changed.
        options: compress: rank or energy; layers, skip.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    pairs, changes, remarks = factorize({name: _matrix(layer) for name, layer in layers.items()}, options)
    for name, pair in pairs.items():
        _replace(model, name, _factored(layers[name], *pair))
    return model, changes, remarks


def _matrix(layer: nn.Module) -> Matrix | None:
    if getattr(layer, "groups", 1) != 1:
        return None
    return layer.weight.detach().flatten(1).float().numpy()  # type: ignore[operator]


def _thin(layer: nn.Module, rank: int) -> nn.Sequential:
    """Two layers through `rank` channels in place of one."""
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Sequential(
            nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=bias)
        )
    assert isinstance(layer, nn.Conv2d)
    first = nn.Conv2d(
        layer.in_channels,
        rank,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        bias=False,
        padding_mode=layer.padding_mode,
    )
    return nn.Sequential(first, nn.Conv2d(rank, layer.out_channels, 1, bias=bias))


@torch.no_grad()
def _factored(layer: nn.Module, first: Matrix, second: Matrix) -> nn.Sequential:
    pair = _thin(layer, len(first))
    weights: dict[str, Any] = {
        "0.weight": torch.from_numpy(first),
        "1.weight": torch.from_numpy(second),
        "1.bias": layer.bias,
    }
    for name, parameter in pair.named_parameters():
        parameter.copy_(weights[name].reshape(parameter.shape))
    return pair


_MAKERS: dict[str, Callable[..., nn.Module]] = {"widths": _with_widths, "factors": _thin}
