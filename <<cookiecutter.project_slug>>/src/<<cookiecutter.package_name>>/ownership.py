"""Who works in a folder: the lock that one run holds, and names for temporaries that tell whose they are."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError
from .files import NotAFileError, open_file

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-(.+)-(\d+)-(\d+)-\d+")
_FOREIGN_AGE = 24 * 3600.0  # seconds until another host's leftovers count as abandoned
_counter = itertools.count()
_locked_here: set[Path] = set()


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
