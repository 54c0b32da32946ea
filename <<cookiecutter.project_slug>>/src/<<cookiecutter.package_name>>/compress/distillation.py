"""Distillation: a student learns from the answers of a trained teacher besides the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from ..engine import Engine, Hooks
from ..errors import UserError
from .wing import Wing


def open_distillation(
    wing: Wing, engine: Engine, source: Path, options: Any, data: Any, trusted: Sequence[str]
) -> Hooks:
    """The loss of a student, the engine's model; its teacher is options.teacher, or the model in the folder `source`.

    Raises:
        UserError: if the two answer with different numbers of classes.
    """
    teacher = instantiate(options.teacher) if options.get("teacher") else wing.load_model(source, trusted)
    own, wanted = (wing.classes_of(model, engine, data.shape) for model in (engine.model, teacher))
    if own != wanted:
        raise UserError(f"the student answers with {own} classes and its teacher with {wanted}: make them equal")
    return wing.Distillation(teacher, engine.model, options)


class Distillation(Hooks):
    """weight x T^2 x KL(teacher || student) + (1 - weight) x cross-entropy (Hinton et al. 2015, arXiv:1503.02531).

    With `features` the mean squared difference of the named layers' outputs is added (Romero et al. 2014,
    arXiv:1412.6550); where the student's has other channels, that of the normalized sums of squares over channels
    (attention: Zagoruyko & Komodakis 2017, arXiv:1612.03928, without its root). A wing computes each part.

    Args:
        teacher: On every rank, on the student's device; not trained.
        student: The engine's model.
        options: compress: temperature, weight, features, feature_weight.

    Raises:
        UserError: if one of the two lacks a layer of `features`.
    """

    places = slice(1, -1)  # the dimensions of an output that are neither samples nor channels

    def __init__(self, teacher: Any, student: Any, options: Any) -> None:
        self._teacher = teacher
        self._temperature = float(options.temperature)
        self._weight = float(options.weight)
        self._feature_weight = float(options.feature_weight)
        self._taught = self._listen(teacher, "teacher", list(options.features))
        self._learned = self._listen(student, "student", list(options.features))

    def _listen(self, model: Any, whose: str, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
        there = self._layers(model)
        for name in names:
            if name not in there:
                raise UserError(f"compress.features: the {whose} has no layer {name}: there are {', '.join(there)}")
        return {name: self._outputs(there[name]) for name in names}

    def loss(self, plain: Any, inputs: Any, outputs: Any) -> Any:
        """Summed over the batch, as the cross-entropy is."""
        soft = self._divergence(inputs, outputs) * self._temperature**2
        different = sum((self._difference(name) for name in self._learned), 0.0)
        return self._weight * soft + (1 - self._weight) * plain + self._feature_weight * different

    def _difference(self, name: str) -> Any:
        have, want = self._learned[name](), self._taught[name]()
        student, teacher = tuple(have.shape), tuple(want.shape)
        if student[1:] == teacher[1:]:
            return self._value_difference(have, want)
        if student[self.places] and student[self.places] == teacher[self.places]:
            return self._attention_difference(have, want)
        raise UserError(
            f"compress.features: {name} gives {student[1:]} in the student and {teacher[1:]} in the teacher:"
            " name layers that differ in channels only"
        )

    # What a wing adds

    def _layers(self, model: Any) -> Mapping[str, Any]:
        """The layers of a model by name."""
        raise NotImplementedError

    def _outputs(self, layer: Any) -> Callable[[], Any]:
        """A function that gives what the layer last put out, in float32."""
        raise NotImplementedError

    def _divergence(self, inputs: Any, outputs: Any) -> Any:
        """KL(teacher || student) of the answers at the temperature, summed over the batch."""
        raise NotImplementedError

    def _value_difference(self, have: Any, want: Any) -> Any:
        """Mean squared difference of outputs of one shape, summed over the batch."""
        raise NotImplementedError

    def _attention_difference(self, have: Any, want: Any) -> Any:
        """Squared difference of the attentions, each of length 1, summed over places and the batch."""
        raise NotImplementedError
