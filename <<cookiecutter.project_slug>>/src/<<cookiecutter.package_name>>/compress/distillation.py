"""Distillation: a student learns from the answers of a trained teacher besides the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine import Hooks
from ..errors import UserError


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
        there = self.layers(model)
        for name in names:
            if name not in there:
                raise UserError(f"compress.features: the {whose} has no layer {name}: there are {', '.join(there)}")
        return {name: self.listen(there[name]) for name in names}

    def loss(self, plain: Any, inputs: Any, outputs: Any) -> Any:
        """Summed over the batch, as the cross-entropy is."""
        soft = self.divergence(inputs, outputs) * self._temperature**2
        different = sum((self._difference(name) for name in self._learned), 0.0)
        return self._weight * soft + (1 - self._weight) * plain + self._feature_weight * different

    def _difference(self, name: str) -> Any:
        have, want = self._learned[name](), self._taught[name]()
        alike = same_shape(name, have.shape, want.shape, self.places)
        return self.value_difference(have, want) if alike else self.attention_difference(have, want)

    # What a wing adds

    def layers(self, model: Any) -> Mapping[str, Any]:
        """The layers of a model by name."""
        raise NotImplementedError

    def listen(self, layer: Any) -> Callable[[], Any]:
        """A function that gives what the layer last put out, in float32."""
        raise NotImplementedError

    def divergence(self, inputs: Any, outputs: Any) -> Any:
        """KL(teacher || student) of the answers at the temperature, summed over the batch."""
        raise NotImplementedError

    def value_difference(self, have: Any, want: Any) -> Any:
        """Mean squared difference of outputs of one shape, summed over the batch."""
        raise NotImplementedError

    def attention_difference(self, have: Any, want: Any) -> Any:
        """Squared difference of the attentions, each of length 1, summed over places and the batch."""
        raise NotImplementedError


def same_shape(name: str, student: Sequence[int | None], teacher: Sequence[int | None], places: slice) -> bool:
    """Whether outputs can be compared value by value; else they have only other numbers of channels.

    Args:
        name: Of the layer.
        student: The shape of its output there, samples first.
        teacher: The same there.
        places: The dimensions that are neither samples nor channels.

    Raises:
        UserError: if they differ in more.
    """
    have, want = tuple(student), tuple(teacher)
    if have[1:] == want[1:]:
        return True
    if have[places] and have[places] == want[places]:
        return False
    raise UserError(
        f"compress.features: {name} gives {have[1:]} in the student and {want[1:]} in the teacher:"
        " name layers that differ in channels only"
    )
