"""What makes a folder of files whole: a manifest of their sizes and hashes, written last and checked before use."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

FORMAT = 1
MANIFEST = "MANIFEST.json"

_THREADS = min(8, os.cpu_count() or 1)


def seal(folder: Path) -> None:
    """Make every file durable, then write the manifest that commits them; hashing hides behind the disk.

    Raises:
        OSError: if a file cannot be read or made durable.
    """
    files = _files(folder)
    with ThreadPoolExecutor(_THREADS) as syncing, ThreadPoolExecutor(_THREADS) as hashing:
        synced = syncing.map(sync, files.values())
        hashes = hashing.map(sha256, files.values())
        entries = {
            name: {"size": file.stat().st_size, "sha256": digest}
            for (name, file), digest in zip(files.items(), hashes, strict=True)
        }
        list(synced)
    write_durably(folder / MANIFEST, json.dumps({"format": FORMAT, "files": entries}, indent=2))
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)


def sync_all(folder: Path) -> None:
    """Make a folder durable with everything in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """The size and SHA-256 of each file, by its path in the folder.

    Raises:
        OSError: if the manifest cannot be read.
        ValueError: if it is not a manifest, or one of a newer format.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        if content["format"] > FORMAT:
            raise ValueError(f"its format {content['format']} is newer than this program's {FORMAT}")
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("it is not a manifest") from error
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it names {name!r}, which lies outside")
    return files


def verify(folder: Path, hashed: set[str] | None = None) -> list[str]:
    """Every problem of a folder, a sentence each: files missing, extra, of another size, altered, unreadable.

    Args:
        folder: A folder that was sealed.
        hashed: The files whose content is hashed; None for all, which reads every byte.
    """
    try:
        manifest = read_manifest(folder)
        present = _files(folder)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"{MANIFEST} cannot be used: {error}"]
    problems = [f"{name} is missing" for name in manifest if name not in present]
    problems += [f"{name} is not in the manifest" for name in present if name not in manifest]

    def compare(name: str) -> str:
        return _compare(folder / name, name, *manifest[name], hashed is None or name in hashed)

    with ThreadPoolExecutor(_THREADS) as pool:
        both = sorted(manifest.keys() & present)
        found = list(pool.map(compare, both) if hashed is None else map(compare, both))
    return problems + [problem for problem in found if problem]


def sync(path: Path) -> None:
    """Make a file or folder durable; some file systems cannot for folders and say EINVAL."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a small text file that outlives a power cut."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; lets other threads run meanwhile."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1024 * 1024))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MANIFEST}


def _compare(path: Path, name: str, size: int, digest: str, hashed: bool) -> str:
    try:
        actual = path.stat().st_size
        if actual != size:
            return f"{name} has {actual} bytes instead of {size}"
        if hashed and sha256(path) != digest:
            return f"{name} was altered: its SHA-256 is another one"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""
