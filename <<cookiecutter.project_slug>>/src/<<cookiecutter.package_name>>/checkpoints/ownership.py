"""Whose a folder is: its kind, the lock that one run holds, and names for temporaries that tell whose they are."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UserError
from ..files import NotAFileError, kind, open_file

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-(.+)-(\d+)-(\d+)-\d+")
_FOREIGN_AGE = 24 * 3600.0  # seconds until another host's leftovers count as abandoned
_counter = itertools.count()
_locked_here: set[Path] = set()

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


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; it dies with the process, even if the process's children live on.

    Over NFS it holds between hosts, unless the mount says nolock or local_lock.

    Raises:
        UserError: if another job has it; the sentence names its host and process.
        OSError: if the folder cannot be written.
    """
    file = folder.resolve() / ".lock"
    if file in _locked_here:  # POSIX locks do not hold against the own process, and closing the file would drop ours
        raise _in_use(folder, "this process")
    try:
        handle = open_file(file, os.O_RDWR | os.O_CREAT)
    except NotAFileError as error:
        raise UserError(f"{file} cannot be the lock of a run, since {error.strerror}: remove it") from error
    try:
        _take(handle, folder)
        _locked_here.add(file)
        yield
    finally:
        _locked_here.discard(file)
        os.close(handle)


def own_name(kind: str) -> str:
    """A new name for a temporary (`tmp`) or for what is being deleted (`trash`)."""
    pid = os.getpid()
    return f".{kind}-{socket.gethostname()}-{pid}-{_start_of(pid)}-{next(_counter)}"


def sweep(folder: Path) -> list[str]:
    """Remove temporaries that no live process owns, those of other hosts after a day; returns their names."""
    swept = [path for path in folder.glob(".t*") if _is_abandoned(path)]
    for path in swept:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in swept]


def _take(handle: int, folder: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # what POSIX lets a taken lock answer
        owner = os.pread(handle, 1024, 0).decode(errors="replace").strip()
        raise _in_use(folder, owner or "another job") from None
    except OSError as error:
        log.warning("%s has no locks (%s): a second job on this run would go unnoticed", folder, error.strerror)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)


def _in_use(folder: Path, owner: str) -> UserError:
    return UserError(f"{folder} is in use by {owner}: wait for that job, stop it, or choose another name=...")


def _is_abandoned(path: Path) -> bool:
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return False
    if match[1] == socket.gethostname():
        return not _is_alive(int(match[2]), int(match[3]))
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > _FOREIGN_AGE
    return False


def _is_alive(pid: int, start: int) -> bool:
    if start:  # a later process may have the same number, but not the same start
        return _start_of(pid) == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_of(pid: int) -> int:
    """When a process started, in ticks since boot; 0 if it is dead, or where /proc does not say."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])
