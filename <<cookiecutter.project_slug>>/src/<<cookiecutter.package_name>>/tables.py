"""Tables of text in plain columns: thousands of rows are there at once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap

NARROWEST = 10  # letters of a column that is to make room for others


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print rows under the names of their columns, each cell on as many lines as it has or the terminal needs."""
    head, *body = cells = [tuple(columns), *map(tuple, rows)]
    widths = _fitted([max(map(_width, column)) for column in zip(*cells, strict=True)])
    if title:
        print(title)
    for row in (head, tuple("-" * width for width in widths), *body):
        parts = (_lines(cell, width) for cell, width in zip(row, widths, strict=True))
        for line in zip_longest(*parts, fillvalue=""):
            print("  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip())


def _width(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _fitted(widths: list[int]) -> list[int]:
    """The widths, the largest of them smaller until all fit the terminal, if there is one."""
    room = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
    while room and sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _lines(cell: str, width: int) -> list[str]:
    """A cell's lines; an empty one is one line."""
    lines = cell.splitlines() or [""]
    return [part for line in lines for part in (wrap(line, width) if len(line) > width else [line])]
