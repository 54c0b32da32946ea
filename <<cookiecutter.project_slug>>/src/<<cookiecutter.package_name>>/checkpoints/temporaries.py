"""Names for what is being written or deleted that tell whose it is, so that what dead processes left can go."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-(.+)-(\d+)-(\d+)-\d+")
_FOREIGN_AGE = 24 * 3600.0  # seconds until another host's leftovers count as abandoned
_counter = itertools.count()


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
