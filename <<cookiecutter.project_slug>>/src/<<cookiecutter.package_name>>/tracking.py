"""What a run leaves to look at: progress on the console, metrics.jsonl, TensorBoard, logs and curves.png."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import UserError
from .tables import print_table

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
METRICS = "metrics.jsonl"


def open_log(folder: Path, rank: int) -> None:
    """Send this rank's log to `folder`/logs/rank-N.log and its warnings to the terminal too."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / "logs" / f"rank-{rank}.log", encoding="utf-8")
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.addFilter(lambda record: record.levelno < logging.ERROR)  # the command's end prints errors itself
    _close_log()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[file, console])
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported once, by whoever needs the space


def _close_log() -> None:
    """An earlier run's, in the same process; its disk may be full."""
    root = logging.getLogger()
    for handler in [*root.handlers]:
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class Tracker:
    """The records of one run; on ranks that do not write, every call does nothing."""

    def __init__(self, folder: Path, *, writes: bool, epochs: int, start: float, step: int, tensorboard: bool) -> None:
        self._writes = writes
        self._folder = folder
        self._epochs = epochs
        self._board: Any = None
        if not writes:
            return
        _drop_after(folder / METRICS, step)
        self._lines = _Lines(folder / METRICS)
        if tensorboard:
            # Its writer would import TensorFlow where that is installed; by this name it knows that it must not.
            sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
            from tensorboard.summary import Writer

            self._board = Writer(str(folder / "tensorboard"))
        self._bar = _progress_bar()
        self._task = self._bar.add_task("training", total=epochs, text="")
        self._bar.update(self._task, completed=start)
        self._terminal = _is_watched()
        if self._terminal:
            self._bar.start()
        self._began = (time.monotonic(), start)

    def log(self, step: int, progress: float, metrics: Metrics) -> None:
        """Record metrics of a step after `progress` epochs."""
        if not self._writes:
            return
        self._lines.write(json.dumps({"step": step, "epoch": round(progress, 6), **metrics}))
        self._draw(step, metrics)
        self._show(step, progress, metrics)

    def _draw(self, step: int, metrics: Metrics) -> None:
        if not self._board:
            return
        try:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:  # its writer does not recover from a full disk
            log.warning(f"TensorBoard's events end here ({error.strerror}): metrics.jsonl goes on")
            self._board = None

    def _show(self, step: int, progress: float, metrics: Metrics) -> None:
        text = "  ".join(f"{name} {value:,.4g}" for name, value in metrics.items())
        if self._terminal:
            self._bar.update(self._task, completed=progress, text=f"step {step}  {text}")
            return
        began, start = self._began
        left = (time.monotonic() - began) / max(progress - start, 1e-9) * (self._epochs - progress)
        print(f"epoch {progress:.2f}/{self._epochs}  step {step}  {text}  left {_clock(left)}", flush=True)

    def close(self, summary: Mapping[str, str] | None = None) -> None:
        """Draw curves.png and print the table of a finished run; without a summary only close the files."""
        if not self._writes:
            return
        self._bar.stop()
        self._lines.close()
        if self._board:
            self._board.close()
        if summary is not None:
            draw_curves(self._folder / METRICS, self._folder / "curves.png")
            print_table(("training finished", ""), summary.items())


class _Lines:
    """Appends lines to a file; what a full disk refuses is kept and written when there is space again."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)
        self._waiting = b""

    def write(self, line: str) -> None:
        full = bool(self._waiting)
        self._waiting += line.encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not full:
                log.warning(f"{self._file.name} has to wait for space ({error.strerror}): the training goes on")

    def close(self) -> None:
        if self._waiting:
            log.warning(f"{self._file.name} lacks its last lines: there was no space for them")
        self._file.close()


def _is_watched() -> bool:
    """Whether a person sees the output: mpirun gives ranks a terminal of no width, even into a file."""
    return sys.stdout.isatty() and shutil.get_terminal_size(fallback=(0, 0)).columns > 0


def _progress_bar() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed:.2f}/{task.total:.0f} epochs  {task.fields[text]}"))
    return Progress(*columns, TimeRemainingColumn())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; a last line cut short by a kill is left out.

    Raises:
        UserError: if a line is another record than a training writes.
    """
    if not file.exists():
        return []
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if texts and texts[-1][:1] in "{\0" and not texts[-1].endswith("}"):
        del texts[-1]
    lines = [_parsed(text) for text in texts]
    if strange := [number for number, line in enumerate(lines, 1) if not _is_record(line)]:
        raise UserError(
            f"line {strange[0]} of {file} is no record of a training: move it away, or use another name=..."
        )
    return lines


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _is_record(line: Any) -> bool:
    return isinstance(line, dict) and all(isinstance(line.get(key), int | float) for key in ("step", "epoch"))


def _drop_after(file: Path, step: int) -> None:
    kept = [json.dumps(line) + "\n" for line in read_metrics(file) if line["step"] <= step]
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, file)


def draw_curves(metrics: Path, picture: Path) -> None:
    """Loss, accuracy and learning rate over epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (("loss", ("train/loss", "val/loss")), ("accuracy", ("val/accuracy",)), ("learning rate", ("lr",)))
    for axes, (title, names) in zip(figure.subplots(1, 3), panels, strict=True):
        for name in names:
            axes.plot(*_curve(lines, name), label=name)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


def _curve(lines: Iterable[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["epoch"], line[name]) for line in lines if name in line]
    return [x for x, _ in points], [y for _, y in points]
