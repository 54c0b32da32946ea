"""The lock that one job holds on a run's folder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..files import NotAFileError, open_file

log = logging.getLogger(__name__)

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
