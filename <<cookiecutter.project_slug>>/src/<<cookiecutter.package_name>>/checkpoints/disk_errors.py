"""Errors of the disk as one sentence, however a library tells them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import files
from ..errors import UserError


class StoreError(UserError):
    """The store cannot be written or read (space, rights, disk); its earlier checkpoints stay usable."""


@contextmanager
def storage_errors(sentence: str, disk: Path | None = None) -> Iterator[None]:
    """Turn an error of the disk into a StoreError; every other one passes."""
    try:
        yield
    except files.AccessError as error:
        raise StoreError(str(error)) from error
    except UserError:
        raise
    except Exception as error:
        if not _is_storage(error, disk):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        if isinstance(error, files.NotAFileError):
            reason = f"{error.filename} is in the way: {reason}"
        if _is_full(disk):
            reason = "No space left on device"  # what the libraries say is less clear
        raise StoreError(f"{sentence}: {reason}") from error


def _is_storage(error: Exception, disk: Path | None) -> bool:
    """Libraries hide a full disk in exceptions of their own, so look at their text and at the disk too."""
    if isinstance(error, OSError) or re.search(r"os error \d|No space left|file write failed", str(error)):
        return True
    return _is_full(disk)


def _is_full(disk: Path | None) -> bool:
    with suppress(OSError):
        return disk is not None and shutil.disk_usage(disk).free < 1024 * 1024
    return False
