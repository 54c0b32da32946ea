"""The report of a compression: figures of the source and what was made of it, as a file, a table and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.manifest import write_durably
from ..errors import UserError
from ..tables import print_table
from ..trust import read_json

FIGURES = "report.json"

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """Figures of a source and what was made of it.

    Attributes:
        models: Rows by name; the first is the source.
        setting: How they were measured.
        lineage: Parent checkpoint, its SHA-256 and the recipe.
        remarks: What else to know.
        missed: What compress.require asks for and the result does not have, as a sentence; empty if nothing.
    """

    models: dict[str, Row]
    setting: dict[str, Any]
    lineage: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    missed: str = ""

    @classmethod
    def read(cls, folder: Path) -> Report | None:
        """The report in a folder, if there is one.

        Raises:
            UserError: if it is of another version of this project.
        """
        file = folder / FIGURES
        try:
            return cls(**read_json(file)) if os.path.lexists(file) else None
        except TypeError as error:
            raise UserError(
                f"{file} is of another version of this project, or damaged: use another name=..."
            ) from error

    def write(self, folder: Path) -> None:
        """Write report.json and report.png, and print the table."""
        draw(self, folder / "report.png")
        write_durably(folder / f"{FIGURES}.tmp", json.dumps(vars(self), indent=2))
        os.replace(folder / f"{FIGURES}.tmp", folder / FIGURES)
        show(self)


LINES: tuple[tuple[str, str, str], ...] = (
    ("runs in", "runtime", "{}"),
    ("accuracy", "accuracy", "{:.2%}"),
    ("same answer", "agreement", "{:.2%}"),
    ("bytes", "bytes", "{:,}"),
    ("gzipped", "gzipped", "{:,}"),
    ("parameters", "parameters", "{:,}"),
    ("MACs", "macs", "{:,}"),
    ("zeros", "sparsity", "{:.2%}"),
    ("p50 ms", "p50_ms", "{:.3f}"),
    ("p95 ms", "p95_ms", "{:.3f}"),
)


def show(report: Report) -> None:
    """Print the table."""
    setting = report.setting
    title = f"batch {setting['batch']}, {setting['threads']} threads, {setting['processor']}"
    rows = (
        (name, *("" if row[key] is None else form.format(row[key]) for row in report.models.values()))
        for name, key, form in LINES
    )
    print_table(("", *report.models), rows, title)
    for remark in report.remarks:
        print(remark)


def draw(report: Report, picture: Path) -> None:
    """Accuracy over size and over time; the line joins those that no other one beats in both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (("gzipped", "kB gzipped", 1e-3), ("macs", "thousand MACs", 1e-3), ("p50_ms", "ms per call (median)", 1.0))
    for axes, (key, label, factor) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        points = [(row[key] * factor, 100 * row["accuracy"]) for row in report.models.values()]
        dots = [axes.plot(x, y, "o")[0] for x, y in points]
        axes.plot(*zip(*front(points), strict=True), color="gray", zorder=0)
        axes.set(xlabel=label, xlim=(0, None))
        axes.grid(alpha=0.3)
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    figure.axes[0].set(ylabel="validation accuracy, %", ylim=(lowest - 0.5, highest + 0.5))  # a small step stays small
    figure.legend(dots, [*report.models], loc="outside lower center", ncols=len(dots))
    figure.savefig(picture, dpi=120)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of which no other has both a smaller first and a larger second value (Pareto)."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return kept
