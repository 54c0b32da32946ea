"""Opens files that others may have put there: regular ones only, without waiting, not through a link, not without end.

Links on the way to a folder that the user names are followed; inside of a store or a model folder nothing is a link.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

LIMIT = 64 * 1024 * 1024  # bytes of a file that is read whole, such as a manifest or a config

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# What is wrong with the reader, or for a moment, and says nothing of the file.
_NO_RIGHT = (errno.EACCES, errno.EPERM)
_NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)


class AccessError(UserError):
    """A file cannot be read for its reader's sake, such as a right that lacks; it may well be whole."""


class NotAFileError(OSError):
    """Something else than a regular file, or one that is too large to be read whole."""


def open_file(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; nothing else is opened, since that may wait, act, or lead elsewhere.

    Raises:
        NotAFileError: if it is something else.
        OSError: if it cannot be opened.
    """
    try:
        check_kind(path, os.lstat(path).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    handle = os.open(path, flags | _FLAGS, 0o666)
    try:
        check_kind(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def check_kind(path: str | Path, mode: int) -> None:
    """Refuse what is not a regular file.

    Raises:
        NotAFileError: says what it is.
    """
    if not stat.S_ISREG(mode):
        raise NotAFileError(errno.EINVAL, f"it is {kind(mode)}, not a file", str(path))


def kind(mode: int) -> str:
    """What something is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")


def read_bytes(path: str | Path, limit: int = LIMIT) -> bytes:
    """All of a regular file of at most `limit` bytes.

    Raises:
        NotAFileError: if it is no such file.
        OSError: if it cannot be read.
    """
    handle = open_file(path)
    try:
        size = os.fstat(handle).st_size
        content = b"" if size > limit else os.read(handle, size)
    finally:
        os.close(handle)
    if size > limit:
        raise NotAFileError(errno.EFBIG, f"it has {size} bytes, and more than {limit} are not read", str(path))
    return content


def read_json(path: str | Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_folder(path: str | Path) -> None:
    """Refuse what is not a folder itself.

    Raises:
        OSError: if it is something else, or is not there.
    """
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise NotAFileError(errno.ENOTDIR, f"{path} is {kind(mode)}, not a folder", str(path))


def walk(folder: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """All that a folder holds at any depth, by its path in it, but the folders themselves; links are not followed.

    Raises:
        OSError: if a folder cannot be read.
    """
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(f"{folder}/{prefix}") as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False)


def access_error(error: OSError) -> AccessError | None:
    """The sentence for an error that says nothing of the file, only of its reader or this moment; None for others."""
    path = Path(error.filename or ".").absolute()
    if error.errno in _NOT_NOW:
        return AccessError(f"{path} cannot be read now: {error.strerror}; try again")
    if error.errno not in _NO_RIGHT:
        return None
    closed = next((folder for folder in reversed(path.parents) if not _may(folder, os.X_OK)), None)
    wanted = f"enter {closed}" if closed else "read it"
    return AccessError(f"{path} cannot be read: user {os.geteuid()} has no right to {wanted}; ask its owner for it")


def _may(path: Path, what: int) -> bool:
    return os.access(path, what, effective_ids=os.access in os.supports_effective_ids)


def follow_umask(folder: Path) -> None:
    """Give every file the rights that a new one gets here: some libraries write theirs for their owner alone.

    Raises:
        OSError: if they cannot be changed.
    """
    probe = folder / ".rights"
    handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        usual = stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)
        probe.unlink()
    for name, about in walk(folder):
        if stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) != usual:
            os.chmod(folder / name, usual)
