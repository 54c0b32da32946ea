"""A second home for checkpoints at any address that fsspec knows: S3, another disk, a server.

It is laid out as the store is. The manifest is uploaded last, and a folder without one is no checkpoint: so a
half upload is never taken for one. Nothing at the mirror is ever deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import fsspec

from .. import files
from ..addresses import check_address
from ..errors import UserError
from .checkpoint import META, Checkpoint, is_name, order
from .manifest import MANIFEST, read_manifest, verify
from .store import POINTERS, DamagedError, Store

log = logging.getLogger(__name__)

CONNECT_S = 60.0  # seconds that a file system may take to be opened; some connect then


class Mirror:
    """Uploads published checkpoints in a thread of its own; its failures are warnings and never stop training.

    Args:
        url: Where to, such as `s3://bucket/runs/first`.
        store: Whose checkpoints; retention leaves alone what is being uploaded.
        attempts: How often an upload is tried; what fails is tried again with the next checkpoint and at the end.
        pause: Seconds between the first two attempts, doubled each time.

    Raises:
        UserError: if no file system is installed for such an address, or it holds a password; the network is not
            touched yet.
    """

    def __init__(self, url: str, store: Store, *, attempts: int = 5, pause: float = 1.0) -> None:
        self._remote = Remote(url)
        self._store = store
        self._attempts, self._pause = attempts, pause
        self._waiting: Checkpoint | None = None
        self._failed: Checkpoint | None = None
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def upload(self, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint soon; returns at once. While one is uploaded only the newest waits."""
        with self._changed:
            if self._waiting:
                log.warning("the mirror is behind: %s gives way to %s", self._waiting.name, checkpoint.name)
                self._store.pinned.discard(self._waiting.name)
            self._store.pinned.add(checkpoint.name)
            self._waiting = checkpoint
            self._changed.notify()

    def close(self, timeout: float = 600.0) -> None:
        """Wait until all is uploaded, at most `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("not everything reached %s within %.0f s: push it by hand", self._remote.url, timeout)

    def _work(self) -> None:
        while checkpoint := self._next():
            if self._try(checkpoint) or self._closing:
                self._store.pinned.discard(checkpoint.name)
            else:
                self._failed = checkpoint

    def _next(self) -> Checkpoint | None:
        """What waits; at the end once more what failed last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            failed, self._failed = self._failed, None
            checkpoint, self._waiting = self._waiting or failed, None
            if failed and failed != checkpoint:
                self._store.pinned.discard(failed.name)
            return checkpoint

    def _try(self, checkpoint: Checkpoint) -> bool:
        for attempt in range(1, self._attempts + 1):
            try:
                self._remote.push(self._store, checkpoint)
                return True
            except Exception as error:  # of any library: a mirror must not stop the training
                log.warning("%s, attempt %d of %d", error, attempt, self._attempts)
                if attempt < self._attempts:
                    time.sleep(self._pause * 2 ** (attempt - 1))
        return False


class Remote:
    """The mirror's side, reached through fsspec when it is first used.

    Raises:
        UserError: if no file system is installed for such an address, or it holds a password.
    """

    def __init__(self, url: str) -> None:
        check_address(url)
        self.url = url
        self._opened: tuple[Any, str] | None = None
        try:
            for part in url.split("::"):
                fsspec.get_filesystem_class(fsspec.utils.get_protocol(part) if "://" in part else part)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url} cannot be used: {error}") from error

    def _open(self) -> tuple[Any, str]:
        """The file system and the root in it; opened in a thread of its own, since some connect without a limit."""
        found: list[Any] = []

        def connect() -> None:
            try:
                found.append(fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True))
            except Exception as error:
                found.append(error)

        thread = Thread(target=connect, name="connect", daemon=True)
        thread.start()
        thread.join(CONNECT_S)
        if not found:
            raise TimeoutError(f"no answer within {CONNECT_S:.0f} s")
        if isinstance(found[0], Exception):
            raise found[0]
        system, root = found[0]
        return system, root.rstrip("/")

    def push(self, store: Store, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint, then the pointers, and what they point to if it is missing there.

        Raises:
            UserError: if it fails, or if another run's checkpoint of this name is there.
        """
        with self._errors("written"):
            self._send(checkpoint)
            there = store.names()
            for pointer, name in store.pointers().items():
                if name in there:
                    self._send(store.find(name))
                    self._put(_pointer_path(pointer), f"{name}\n".encode())

    def pull(self, store: Store, which: str = "latest") -> Checkpoint:
        """Download a checkpoint into a store and verify it; for `latest` a damaged one gives way to the one before.

        Raises:
            UserError: if there is none, it is damaged, or it cannot be read.
        """
        for name in self._candidates(which):
            try:
                return self._receive(store, name)
            except DamagedError as error:
                if which != "latest":
                    raise
                log.warning("%s", error)
        there = ", ".join(self.names()) or "none"
        raise UserError(f"there is no good checkpoint {which!r} at {self.url}: there are {there}")

    def names(self) -> list[str]:
        """The names of the checkpoints there, by step."""
        with self._errors("read"):
            try:
                paths = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            names = {str(path).rstrip("/").rpartition("/")[2] for path in paths}
            return sorted((name for name in names if is_name(name) and self._has(f"{name}/{MANIFEST}")), key=order)

    def _candidates(self, which: str) -> list[str]:
        names = self.names()
        if which.isdecimal():
            return [name for name in names if order(name)[0] == int(which)][-1:]
        with self._errors("read"):
            pointed = (self._get(_pointer_path(which)) or b"").decode(errors="replace").strip()
        if which != "latest":
            return [name for name in names if name in (which, pointed)]
        return sorted(reversed(names), key=lambda name: name != pointed)

    def _send(self, checkpoint: Checkpoint) -> None:
        if problems := verify(checkpoint.folder, {META}):  # what is sent is a file, and its own
            raise UserError(f"{checkpoint.folder} is damaged ({'; '.join(problems)}) and is not sent")
        commit = files.read_bytes(checkpoint.folder / MANIFEST)
        there = self._get(f"{checkpoint.name}/{MANIFEST}")
        if there == commit:
            return
        if there is not None:
            raise UserError(f"{self.url} holds another run's {checkpoint.name}: give each run an address of its own")
        for name, (size, _) in read_manifest(checkpoint.folder).items():
            path = self._path(f"{checkpoint.name}/{name}")
            self._make_folder(path)
            self._fs.put_file(str(checkpoint.folder / name), path)
            if self._fs.info(path)["size"] != size:
                raise UserError(f"{path} did not arrive whole")
        self._put(f"{checkpoint.name}/{MANIFEST}", commit)

    def _receive(self, store: Store, name: str) -> Checkpoint:
        def write(folder: Path) -> None:
            with self._errors("read"):
                (folder / MANIFEST).write_bytes(self._get(f"{name}/{MANIFEST}") or b"")
                for file in _manifest_files(folder):
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    if self._has(f"{name}/{file}"):  # else verification says so
                        self._fs.get_file(self._path(f"{name}/{file}"), str(folder / file))

        here = store.folder / name / MANIFEST
        if _content(here) == self._get(f"{name}/{MANIFEST}"):
            found = store.find(name)
            if not store.verify(found):
                return found
        return store.adopt(name, write)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def _fs(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened[0]

    @property
    def _root(self) -> str:
        assert self._fs is not None
        return self._opened[1] if self._opened else ""

    def _look_at(self, name: str) -> int:
        """The size of a file there; what a server on this machine has under its name may be a FIFO or a link."""
        path = self._path(name)
        about = self._fs.info(path)
        if about.get("type") != "file" or about.get("islink"):
            raise UserError(f"{path} is no file: nothing else is fetched")
        return int(about.get("size") or 0)

    def _has(self, name: str) -> bool:
        try:
            return self._look_at(name) >= 0
        except (FileNotFoundError, UserError):
            return False

    def _get(self, name: str) -> bytes | None:
        try:
            size = self._look_at(name)
            if size > files.LIMIT:
                raise UserError(f"{self._path(name)} has {size} bytes, which is too much for what it should be")
            content: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def _put(self, name: str, content: bytes) -> None:
        """Write a small file in one piece: a reader sees all of it or what was there before."""
        self._make_folder(self._path(name))
        with self._fs.transaction, self._fs.open(self._path(name), "wb") as file:
            file.write(content)

    def _make_folder(self, path: str) -> None:
        if not self._fs.async_impl:  # object stores have no folders, and making one could make a bucket
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # each file system raises its own
            raise UserError(f"{self.url} could not be {verb}: {error or type(error).__name__}") from error


def download(url: str, folder: str | Path, which: str = "latest") -> Checkpoint:
    """Download a checkpoint into a store's folder, verified.

    Args:
        url: The mirror's address; it may end in a checkpoint's name or a pointer: /step-00001000, /best, /tags/good.
        folder: The store's folder, made if needed.
        which: `latest` (the newest good one), `best`, a step, a tag or a checkpoint's name.

    Raises:
        UserError: if there is none, it is damaged, or it cannot be read.
    """
    check_address(url)
    address, _, last = url.rstrip("/").rpartition("/")
    if address.endswith("/tags"):
        return Remote(address.removesuffix("/tags")).pull(Store(folder), last)
    if last in POINTERS or is_name(last):
        return Remote(address).pull(Store(folder), last)
    return Remote(url).pull(Store(folder), which)


def _pointer_path(pointer: str) -> str:
    return pointer if pointer in POINTERS else f"tags/{pointer}"


def _content(file: Path) -> bytes | None:
    try:
        return files.read_bytes(file)
    except OSError:
        return None  # it is fetched then


def _manifest_files(folder: Path) -> list[str]:
    try:
        return list(read_manifest(folder))
    except (OSError, ValueError):
        return []  # verification says so
