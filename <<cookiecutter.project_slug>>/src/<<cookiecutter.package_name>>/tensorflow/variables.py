"""The variables of Keras models and optimizers by name, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import UserError
from ..weights import check_shapes

OPTIMIZER = "optimizer.safetensors"

Arrays = dict[str, npt.NDArray[Any]]


def named(model: keras.Model) -> dict[str, Any]:
    """The weights of a model, with batch-norm statistics, by layer and name, such as "logits/kernel"."""
    return _by_path(model.weights)


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """All variables of a built optimizer by name, such as "sgd/iteration"."""
    return _by_path(optimizer.variables)


def is_generator(variable: Any) -> bool:
    """Whether a variable is the state of a random generator, as of dropout."""
    return bool(variable.name.endswith("seed_generator_state"))


def local_variables(model: keras.Model) -> dict[str, Any]:
    """What training changes on each rank by itself: batch-norm statistics and random generators."""
    return _by_path(
        variable for layer in leaves(model) if layer.trainable for variable in layer.non_trainable_variables
    )


def statistics(model: keras.Model) -> dict[str, Any]:
    """The batch-norm statistics, and what else of local_variables() is no random generator."""
    return {name: variable for name, variable in local_variables(model).items() if not is_generator(variable)}


def leaves(layer: Any) -> Iterator[Any]:
    """The layers of a model, with those of the models in it."""
    inner = getattr(layer, "layers", None)
    if inner is None:
        yield layer
    for one in inner or ():
        yield from leaves(one)


def _by_path(variables: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable in variables:
        path, number = variable.path, 1
        while path in found:  # Keras allows two layers of one name in nested models
            number += 1
            path = f"{variable.path}#{number}"
        found[path] = variable
    return found


def shapes(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each."""
    return {name: tuple(value.shape) for name, value in values.items()}


def copies(variables: Mapping[str, Any]) -> Arrays:
    """The values as they are now, in memory of their own."""
    return {name: np.array(variable.numpy()) for name, variable in variables.items()}


def assign(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set each variable to the value of its name."""
    for name, variable in variables.items():
        variable.assign(values[name])


def write(arrays: Arrays, file: Path) -> None:
    """Save arrays as safetensors."""
    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, file)


def read(file: Path) -> Arrays:
    """The arrays in a safetensors file.

    Raises:
        UserError: if it is no such file.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is no safetensors file ({error}): use another checkpoint") from error


def load(variables: Mapping[str, Any], file: Path) -> None:
    """Set variables to the arrays in a safetensors file.

    Raises:
        UserError: if it is no such file, or a name or a shape differs; nothing is set then.
    """
    saved = read(file)
    check_shapes(shapes(variables), shapes(saved))
    assign(variables, saved)
