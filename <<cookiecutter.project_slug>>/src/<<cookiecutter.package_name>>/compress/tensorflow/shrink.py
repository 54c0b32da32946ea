"""Smaller layers: fewer channels, or two thin layers for a thick one; described in plain values and built again.

A change is {"layers": {name: options}} with a `kind`; the model folder holds the list, and the model it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import layers

from ...errors import UserError
from ..layer_names import select
from ..low_rank import Matrix, factorize
from ..pruning import smallest_off
from ..wing import Choice
from .pruning import PRUNABLE

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]  # of channels: true where one stays
Norms = npt.NDArray[np.float64]


def shrunk(base: keras.Model, changes: Sequence[Mapping[str, Any]]) -> keras.Model:
    """The architecture `base` after these changes, as a functional model with weights of no meaning.

    Args:
        base: The model as it was.
        changes: What fewer_channels() and low_rank() described, in their order.

    Raises:
        UserError: if the model cannot be built again.
    """
    for change in changes:
        base = _MAKERS[str(change["kind"])](base, change["layers"])
    return base


def _copy(model: keras.Model, clone: Callable[..., Any] | None, call: Callable[..., Any] | None) -> keras.Model:
    """A functional model of new layers; see keras.models.clone_model."""
    try:
        if isinstance(model, keras.Sequential):
            model = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        return keras.models.clone_model(model, clone_function=clone, call_function=call)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            "channels and low_rank need a functional model, or a Sequential one with an Input, whose layers have"
            f" get_config ({' '.join(str(error).split())[:200]}): use compress=prune"
        ) from error


def _with_widths(base: keras.Model, changed: Mapping[str, Mapping[str, int]]) -> keras.Model:
    """Some layers of other widths; those after them follow.

    Raises:
        ValueError: if a file asks for more than that; Keras would build what other options name.
    """
    for widths in changed.values():
        if not {*widths} <= {"units", "filters"} or not all(type(value) is int for value in widths.values()):
            raise ValueError(f"{dict(widths)} are no widths")
    return _copy(
        base, lambda layer: type(layer).from_config({**layer.get_config(), **changed.get(layer.name, {})}), None
    )


def _with_factors(base: keras.Model, changed: Mapping[str, Mapping[str, int]]) -> keras.Model:
    """Two layers through `rank` channels in place of one; the second has its name, bias and activation."""
    thin: dict[str, Any] = {}

    def clone(layer: Any) -> Any:
        config = layer.get_config()
        if layer.name in changed:
            first, config = _thin(config, int(changed[layer.name]["rank"]))
            thin[layer.name] = type(layer).from_config(first)
        return type(layer).from_config(config)

    def call(layer: Any, *args: Any, **options: Any) -> Any:
        return layer(thin[layer.name](*args)) if layer.name in thin else layer(*args, **options)

    return _copy(base, clone, call)


def _thin(config: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    width = "units" if "units" in config else "filters"
    first = {**config, "name": _inner(config["name"]), width: rank, "use_bias": False, "activation": None}
    point: dict[str, Any] = {option: 1 for option in ("kernel_size", "strides", "dilation_rate") if option in config}
    return first, {**config, **point}


def _inner(name: str) -> str:
    return f"{name}_thin"


_MAKERS: dict[str, Callable[..., keras.Model]] = {"widths": _with_widths, "factors": _with_factors}


def _fill(model: keras.Model, old: keras.Model, weights: Mapping[str, list[Array]]) -> None:
    """Give each layer the weights that were made for it, or those that it had."""
    for layer in model.layers:
        if layer.weights:
            layer.set_weights(weights.get(layer.name) or old.get_layer(layer.name).get_weights())


def _prunable(model: keras.Model) -> dict[str, Any]:
    return {layer.name: layer for layer in model.layers if type(layer) in PRUNABLE}


def low_rank(model: keras.Model, options: Any) -> Choice:
    """Factor convolutions and dense layers; see low_rank.factorize.

    A k x k convolution becomes one of `rank` channels and a 1 x 1 one. A layer that would not get smaller stays.

    Args:
        model: It stays as it is, and so do the models in it.
        options: compress: rank or energy; layers, skip.
    """
    found = _prunable(model)
    pairs, changes, remarks = factorize({name: _matrix(layer) for name, layer in found.items()}, options)
    weights: dict[str, list[Array]] = {}
    for name, (first, second) in pairs.items():
        kernel, *bias = found[name].get_weights()
        weights[_inner(name)] = [first.T.reshape(*kernel.shape[:-1], -1)]
        weights[name] = [second.T.reshape(*(1,) * (kernel.ndim - 2), *second.T.shape), *bias]
    new = shrunk(model, changes)
    _fill(new, model, weights)
    return new, changes, remarks


def _matrix(layer: Any) -> Matrix | None:
    if getattr(layer, "groups", 1) != 1:
        return None
    kernel = layer.get_weights()[0]
    matrix: Matrix = kernel.reshape(-1, kernel.shape[-1]).T
    return matrix


def fewer_channels(model: keras.Model, options: Any) -> Choice:
    """Remove the channels of smallest norm, with all that depends on them (Fang et al. 2023, arXiv:2301.12900).

    Channels that the graph ties together, as those of two layers that are added, stay or go as one.

    Args:
        model: It stays as it is.
        options: compress: sparsity (the fraction of channels), layers, skip, scope.
    """
    found = _prunable(model)
    graph = _Graph(model, select([*found], list(options.layers), list(options.skip)))
    stays = graph.staying(model, float(options.sparsity), options.scope)
    widths = {
        name: {"units" if isinstance(found[name], layers.Dense) else "filters": int(stays[outputs].sum())}
        for name, (_, outputs) in graph.cuts.items()
        if name in found and not stays[outputs].all()
    }
    if not widths:
        why = "".join(f" ({remark})" for remark in graph.remarks())
        raise UserError(
            f"compress.sparsity={options.sparsity} removes no channel{why}: choose more, or skip fewer layers"
        )
    weights = {
        name: [_cut(array, _axes(array.ndim, *ids), stays) for array in model.get_layer(name).get_weights()]
        for name, ids in graph.cuts.items()
    }
    changes = [{"kind": "widths", "layers": widths}]
    new = shrunk(model, changes)
    _fill(new, model, weights)
    return new, changes, graph.remarks()


def _axes(dimensions: int, inputs: Ids, outputs: Ids) -> dict[int, Ids]:
    """Which channels lie along which axis of a weight; a depthwise kernel has one output per input."""
    if dimensions == 1:
        return {-1: outputs}
    return {-2: inputs} if inputs is outputs else {-2: inputs, -1: outputs}


def _cut(array: Array, axes: Mapping[int, Ids], stays: Mask) -> Array:
    for axis, ids in axes.items():
        array = array.compress(stays[ids], axis)
    return array


class _Graph:
    """Which channels of a functional model stay or go together.

    Each channel has a number. 0 stands for all that stay: of the inputs, of the answers, of layers that were not
    chosen, and of those whose kind is not known.

    Args:
        model: Followed from layer to layer.
        chosen: Convolutions and dense layers that may lose channels.
    """

    def __init__(self, model: keras.Model, chosen: Collection[str]) -> None:
        self.cuts: dict[str, tuple[Ids, Ids]] = {}  # inputs and outputs of layers whose weights may be cut
        self._chosen = chosen
        self._unknown: dict[str, list[str]] = {}
        self._parents = [0]  # union-find (Tarjan 1975)
        self._ids: dict[int, Ids] = {}
        copy = _copy(model, None, self._follow)
        for output in copy.outputs:
            self._fix(self._of(output))

    def _of(self, tensor: Any) -> Ids:
        return self._ids.get(id(tensor), np.zeros(tensor.shape[-1] or 0, np.int64))

    def _follow(self, layer: Any, *args: Any, **options: Any) -> Any:
        output = layer(*args, **options)
        tensors = [one for one in keras.tree.flatten((args, options)) if isinstance(one, keras.KerasTensor)]
        inputs = [self._of(tensor) for tensor in tensors]
        rule = _RULES.get(type(layer))
        found = rule(self, layer, inputs, output) if rule and _is_usual(layer, output) else None
        if found is not None:
            self._ids[id(output)] = found
            return output
        if getattr(layer, "weights", ()) or any(ids.any() for ids in inputs):
            self._unknown.setdefault(type(layer).__name__, []).append(layer.name)
        for ids in inputs:
            self._fix(ids)
        return output

    # Rules: from the channels of the inputs of a layer to those of its output, None if they cannot be told.

    def _kernel(self, layer: Any, inputs: list[Ids], output: Any) -> Ids:
        width = output.shape[-1]
        new = np.arange(width) + len(self._parents) if layer.name in self._chosen else np.zeros(width, np.int64)
        self._parents.extend(new[new > 0].tolist())
        return self._record(layer, inputs[0], new)

    def _channelwise(self, layer: Any, inputs: list[Ids], output: Any) -> Ids:
        return self._record(layer, inputs[0], inputs[0])

    def _record(self, layer: Any, inputs: Ids, outputs: Ids) -> Ids:
        """A layer that is called twice has the same channels both times."""
        first, outputs = self.cuts.setdefault(layer.name, (inputs, outputs))
        self._tie(first, inputs)
        return outputs

    def _elementwise(self, layer: Any, inputs: list[Ids], output: Any) -> Ids | None:
        if len({len(ids) for ids in inputs}) > 1:
            return None
        for other in inputs[1:]:
            self._tie(inputs[0], other)
        return inputs[0]

    def _same(self, layer: Any, inputs: list[Ids], output: Any) -> Ids:
        return inputs[0]

    def _flat(self, layer: Any, inputs: list[Ids], output: Any) -> Ids:
        return np.tile(inputs[0], output.shape[-1] // len(inputs[0]))

    def _side_by_side(self, layer: Any, inputs: list[Ids], output: Any) -> Ids:
        return np.concatenate(inputs)

    def _tie(self, some: Ids, others: Ids) -> None:
        for pair in zip(some.tolist(), others.tolist(), strict=True):
            low, high = sorted(map(self._root, pair))
            self._parents[high] = low

    def _fix(self, ids: Ids) -> None:
        self._tie(ids, np.zeros_like(ids))

    def _root(self, one: int) -> int:
        while self._parents[one] != one:
            self._parents[one] = one = self._parents[self._parents[one]]
        return one

    def remarks(self) -> list[str]:
        """Which kinds of layers are not known."""
        kinds = [f"{kind} ({', '.join(names)})" for kind, names in self._unknown.items()]
        return [f"channels stay that reach layers of kinds that are not known: {', '.join(kinds)}"] if kinds else []

    def staying(self, model: keras.Model, sparsity: float, scope: str) -> Mask:
        """Whether the channel of each number stays; at least one of 20 does.

        Those that are tied together are judged by the squares of all their weights, relative to the mean over
        channels tied between the same layers.
        """
        roots: Ids = np.array([self._root(one) for one in range(len(self._parents))])
        norms = self._norms(model, roots)
        sets = self._sets(roots)
        scores = {name: _relative(norms[channels]) for name, channels in sets.items()}
        masks = smallest_off(scores, sparsity, scope) if scores else {}
        stays: Mask = np.ones(len(roots), np.bool_)
        for name, channels in sets.items():
            stays[channels] = masks[name] | np.isinf(scores[name])
        return stays[roots]

    def _norms(self, model: keras.Model, roots: Ids) -> Norms:
        norms = np.zeros(len(roots))
        for name, ids in self.cuts.items():
            for weight in model.get_layer(name).weights:
                if weight.name not in ("kernel", "gamma"):
                    continue
                for axis, channels in _axes(len(weight.shape), *ids).items():
                    squares = np.moveaxis(np.square(weight.numpy()), axis, 0)
                    np.add.at(norms, roots[channels], squares.reshape(len(channels), -1).sum(1))
        return norms

    def _sets(self, roots: Ids) -> dict[str, Ids]:
        """The channels that may go, by the layers that make them."""
        makers: dict[int, list[str]] = {}
        for name in [name for name in self._chosen if name in self.cuts]:
            for root in roots[self.cuts[name][1]].tolist():
                makers.setdefault(root, []).append(name)
        makers.pop(0, None)
        sets: dict[str, list[int]] = {}
        for root, names in makers.items():
            sets.setdefault(", ".join(names), []).append(root)
        return {name: np.array(channels) for name, channels in sets.items()}


def _relative(norms: Norms) -> Norms:
    """Norms over their mean; the largest, one of 20, are infinite."""
    scores: Norms = norms / max(norms.mean(), np.finfo(np.float64).tiny)
    scores[np.argsort(-norms, kind="stable")[: -(-len(norms) // 20)]] = np.inf
    return scores


def _is_usual(layer: Any, output: Any) -> bool:
    """Whether channels come last and each of the output is made of all, or of its own one."""
    last = (-1, len(output.shape) - 1)
    usual = {"data_format": ("channels_last",), "groups": (1,), "depth_multiplier": (1,), "axis": last}
    return all(getattr(layer, option, values[0]) in values for option, values in usual.items())


_RULES: dict[type, Callable[..., Ids | None]] = {
    **dict.fromkeys(PRUNABLE, _Graph._kernel),
    **dict.fromkeys((layers.BatchNormalization, layers.DepthwiseConv1D, layers.DepthwiseConv2D), _Graph._channelwise),
    **dict.fromkeys((layers.Add, layers.Subtract, layers.Multiply, layers.Average), _Graph._elementwise),
    **dict.fromkeys((layers.Maximum, layers.Minimum), _Graph._elementwise),
    layers.Flatten: _Graph._flat,
    layers.Concatenate: _Graph._side_by_side,
    **dict.fromkeys((layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU), _Graph._same),
    **dict.fromkeys((layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D), _Graph._same),
    **dict.fromkeys((layers.ZeroPadding1D, layers.ZeroPadding2D, layers.UpSampling2D), _Graph._same),
    **dict.fromkeys((layers.MaxPooling1D, layers.MaxPooling2D), _Graph._same),
    **dict.fromkeys((layers.AveragePooling1D, layers.AveragePooling2D), _Graph._same),
    **dict.fromkeys((layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D), _Graph._same),
    **dict.fromkeys((layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D), _Graph._same),
}
