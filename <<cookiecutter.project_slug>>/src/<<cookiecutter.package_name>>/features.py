"""Layers inside a network whose outputs a student is to have like its teacher."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .errors import UserError


def check_layers(wanted: Iterable[str], there: Collection[str], whose: str) -> None:
    """Refuse names of layers that a model does not have.

    Raises:
        UserError: for the first such name.
    """
    for name in wanted:
        if name not in there:
            raise UserError(f"compress.features: the {whose} has no layer {name}: there are {', '.join(there)}")


def same_shape(name: str, student: Sequence[int | None], teacher: Sequence[int | None], channels: int) -> bool:
    """Whether outputs can be compared value by value; else they have only other numbers of channels.

    Args:
        name: Of the layer.
        student: The shape of its output there, samples first.
        teacher: The same there.
        channels: Which dimension has the channels.

    Raises:
        UserError: if they differ in more.
    """
    if tuple(student[1:]) == tuple(teacher[1:]):
        return True
    places = [[size for axis, size in enumerate(shape) if axis not in (0, channels)] for shape in (student, teacher)]
    if places[0] and places[0] == places[1]:
        return False
    raise UserError(
        f"compress.features: {name} gives {tuple(student[1:])} in the student and {tuple(teacher[1:])} in the teacher:"
        " name layers that differ in channels only"
    )
