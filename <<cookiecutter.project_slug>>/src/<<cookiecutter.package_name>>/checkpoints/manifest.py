"""What makes a folder of files whole: a manifest of their sizes and hashes, written last and checked before use."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

from .. import files

FORMAT = 1
MANIFEST = "MANIFEST.json"

_THREADS = min(8, os.cpu_count() or 1)

Entries = dict[str, tuple[int, str]]  # size and SHA-256 of each file, by its path in the folder


def seal(folder: Path) -> None:
    """Make every file durable, then write the manifest that commits them; hashing hides behind the disk.

    Raises:
        OSError: if a file cannot be read or made durable.
    """
    files.follow_umask(folder)
    sizes = _sizes(folder, [])
    paths = [folder / name for name in sizes]
    with ThreadPoolExecutor(_THREADS) as syncing, ThreadPoolExecutor(_THREADS) as hashing:
        synced = syncing.map(sync, paths)
        hashes = hashing.map(sha256, paths)
        entries = {
            name: {"size": size, "sha256": digest} for (name, size), digest in zip(sizes.items(), hashes, strict=True)
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


def read_manifest(folder: Path) -> Entries:
    """The size and SHA-256 of each file, by its path in the folder.

    Raises:
        OSError: if the manifest cannot be read.
        ValueError: if it is not a manifest, or one of a newer format.
    """
    content = files.read_json(f"{folder}/{MANIFEST}")
    try:
        if content["format"] > FORMAT:
            raise ValueError(f"its format {content['format']} is newer than this program's {FORMAT}")
        entries = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError("it is not a manifest") from error
    for name in entries:
        if not is_inside(name):
            raise ValueError(f"it names {name!r}, which lies outside")
    return entries


def is_inside(name: str) -> bool:
    """Whether a path leads to something in the folder that it is relative to, as a manifest writes it."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def verify(folder: Path, hashed: set[str] | None = None) -> list[str]:
    """Every problem of a folder, a sentence each: files missing, extra, altered, of another size or kind.

    Args:
        folder: A folder that was sealed.
        hashed: The files whose content is compared, small ones; None for all, which reads every byte.

    Raises:
        AccessError: if this process may not read it, or cannot now.
    """
    try:
        files.check_folder(folder)
        entries = read_manifest(folder)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [_told(MANIFEST, error)]
    except ValueError as error:
        return [f"{MANIFEST} cannot be used: {error}"]
    try:
        problems: list[str] = []
        return problems + _compare_all(folder, entries, _sizes(folder, problems), hashed)
    except OSError as error:
        return [_told("a folder in it", error)]


def _compare_all(folder: Path, entries: Entries, sizes: dict[str, int], hashed: set[str] | None) -> list[str]:
    problems = [f"{name} is missing" for name in entries if name not in sizes]
    problems += [f"{name} is not in the manifest" for name in sizes if name not in entries]
    same = []
    for name in sorted(entries.keys() & sizes):
        if sizes[name] == entries[name][0]:
            same.append(name)
        else:
            problems.append(f"{name} has {sizes[name]} bytes instead of {entries[name][0]}")
    return problems + list(filter(None, _altered(folder, entries, same, hashed)))


def _altered(folder: Path, entries: Entries, names: list[str], hashed: set[str] | None) -> Iterable[str]:
    if hashed is not None:
        small = [name for name in names if name in hashed]
        return [_compare(folder, name, entries[name][1], _hash_small) for name in small]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: _compare(folder, name, entries[name][1], sha256), names))


def _compare(folder: Path, name: str, digest: str, read: Callable[[str], str]) -> str:
    try:
        altered = read(f"{folder}/{name}") != digest
    except OSError as error:
        return _told(name, error)
    return f"{name} was altered: its SHA-256 is another one" if altered else ""


def _hash_small(path: str) -> str:
    return hashlib.sha256(files.read_bytes(path)).hexdigest()


def _told(name: str, error: OSError) -> str:
    """What is wrong with a file; raises AccessError where nothing is wrong with the file itself."""
    if refusal := files.access_error(error):
        raise refusal from error
    return f"{name} cannot be read: {error.strerror}"


def _sizes(folder: Path, problems: list[str]) -> dict[str, int]:
    """The size of each regular file but the manifest; what is something else is added to `problems`."""
    sizes = {}
    for name, about in sorted(files.walk(folder), key=itemgetter(0)):
        if stat.S_ISREG(about.st_mode):
            sizes[name] = about.st_size
        else:
            problems.append(f"{name} is {files.kind(about.st_mode)}, not a file")
    sizes.pop(MANIFEST, None)
    return sizes


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


def sha256(path: str | Path) -> str:
    """The SHA-256 of a regular file in hexadecimal; lets other threads run meanwhile.

    Raises:
        OSError: if it cannot be read, or is none.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1024 * 1024))
    with open(files.open_file(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
