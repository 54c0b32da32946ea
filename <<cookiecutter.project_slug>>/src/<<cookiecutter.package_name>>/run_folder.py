"""Whose a run's folder is: each command writes only into those of its own kind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import UserError
from .files import kind

NEW, TRAINING, COMPRESSION, SERIES = "new", "a training run", "a compression", "a series of compressions"
MODEL, FOREIGN = "a model folder", "a folder with files of something else"
_BEGUN = {"logs", ".lock"}  # what a start leaves that was refused
_FOLDERS = (".hydra", "checkpoints", "logs", "tensorboard", "source", "start", "artefact", "rejected")
_FILES = (".lock", "metrics.jsonl", "curves.png", "plan.json", "report.json", "report.png", "quantized.json")


def check_folder(folder: Path, *kinds: str) -> None:
    """Refuse a folder that is another command's, or in which another thing lies where a run writes; writes nothing.

    Args:
        folder: Where a command is going to write.
        kinds: What may be there; nothing at all, or what a refused start has left, always may.

    Raises:
        UserError: names the folder and what it is.
    """
    found = kind_of(folder)
    if found not in (NEW, *kinds):
        raise UserError(f"{folder} is {found}, and {kinds[0]} is to be written: use another name=...", agreed=True)
    for path in (folder / name for name in _FOLDERS):
        if os.path.lexists(path) and not path.is_dir():  # a link to a folder elsewhere is the user's choice
            raise _misplaced(path, "a folder")
    for path in (*(folder / name for name in _FILES), *folder.glob("logs/rank-*.log"), *folder.glob(".hydra/*.yaml")):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise _misplaced(path, "a file of its own")


def kind_of(folder: Path, depth: int = 1) -> str:
    """What a folder holds, by the names in it; folders in it are looked at `depth` levels deep."""
    inside = [*folder.iterdir()] if folder.is_dir() else []
    names = {path.name for path in inside}
    if "model.json" in names:
        return MODEL
    if names & {"plan.json", "source"}:
        return COMPRESSION
    if names & {".hydra", "checkpoints", "metrics.jsonl"}:
        return TRAINING
    others = [path for path in inside if path.name not in _BEGUN]
    kinds = {kind_of(path, depth - 1) if depth and path.is_dir() else FOREIGN for path in others}
    if COMPRESSION in kinds:
        return SERIES
    return FOREIGN if kinds - {NEW} else NEW


def _misplaced(path: Path, wanted: str) -> UserError:
    found = kind(path.lstat().st_mode)
    return UserError(f"{path} is {found}, and the run needs {wanted} there: move it away, or use another name=...")
