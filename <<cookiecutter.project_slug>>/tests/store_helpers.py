"""What the tests of the store, the saver, the mirror and the command share."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from needs import need_root

from << cookiecutter.package_name >>.checkpoints.checkpoint import Checkpoint
from << cookiecutter.package_name >>.checkpoints.store import Store, Writer


def content(size: int = 2000, byte: bytes = b"w") -> Writer:
    """Writes what an engine would: a big file, a small one, and one in a folder."""

    def write(folder: Path) -> None:
        (folder / "model.bin").write_bytes(byte * size)
        (folder / "train_state.json").write_text('{"position": 3}')
        (folder / "rng").mkdir()
        (folder / "rng" / "rank-0.bin").write_bytes(b"r" * 100)

    return write


def publish(store: Store, step: int, accuracy: float | None = None, write: Writer | None = None) -> Checkpoint:
    metrics = {} if accuracy is None else {"val/accuracy": accuracy}
    return store.publish(step, write or content(), {"epoch": step // 10, "metrics": metrics})


def names(store: Store) -> list[str]:
    return [checkpoint.name for checkpoint in store.checkpoints()]


def steps(store: Store) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def hidden(store: Store) -> list[str]:
    """The temporaries that are left, and what is being deleted."""
    return sorted(path.name for path in store.folder.glob(".t*"))


def check_invariants(store: Store) -> None:
    """What holds at every moment: all that is listed is whole, and every pointer points to something listed."""
    for checkpoint in store.checkpoints():
        assert store.verify(checkpoint) == [], checkpoint.name
    assert set(store.pointers().values()) <= set(names(store))


def in_child(action: Callable[[], object]) -> int:
    """Run in a forked process; returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flip_byte(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit_manifest(folder: Path, **changes: object) -> None:
    file = folder / "MANIFEST.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Bomb:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.file,))


def bomb(file: Path) -> bytes:
    return pickle.dumps(Bomb(file))


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A real file system of its own in memory, which can fill up and be made read-only."""
    need_root()
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
