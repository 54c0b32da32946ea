"""Which layers of a model the names and patterns of an option mean."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from ..errors import UserError


def matched(names: Sequence[str], patterns: Sequence[str], fault: str = "no layer is called {}") -> list[str]:
    """The layers that one of the patterns matches.

    Raises:
        UserError: if a pattern matches none; it begins with `fault`.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserError(f"{fault.format(pattern)}: there are {', '.join(names)}")
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def select(names: list[str], wanted: list[str], skip: list[str]) -> list[str]:
    """The layers that a pattern of `wanted` matches and none of `skip`.

    Raises:
        UserError: if a pattern matches no layer, or nothing is left.
    """
    found, left_out = matched(names, wanted), matched(names, skip)
    chosen = [name for name in found if name not in left_out]
    if not chosen:
        raise UserError(f"compress.skip={skip} leaves no layer: there are {', '.join(names)}")
    return chosen
