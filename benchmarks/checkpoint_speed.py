"""How fast the checkpoint store is, as ratios to plain reads and writes of the same bytes.

    python benchmarks/checkpoint_speed.py [--folder /disk/to/measure] [--package src/my_training]

It needs a project's packages.

The kinds of work alternate in random order, each on a disk that has nothing else to write; the best time of each
counts, since a shared disk only ever adds to it. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

TEMPLATE = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>"
PACKAGE = TEMPLATE / "src" / "<<cookiecutter.package_name>>"
BLOCK = 4 * 1024 * 1024
FILES = 3  # as a checkpoint has: weights, and twice as much of the optimizer's


def main() -> int:
    """Measure, print, judge."""
    options = _options()
    store_module = _load(options.package, "checkpoints.store")
    saving_module = _load(options.package, "saving")
    data = memoryview(os.urandom(options.megabytes * 1_000_000))
    copy = bytearray(data)  # of the engine's, which keeps its memory between snapshots
    seconds: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        os.sync()
        began = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    def snapshot() -> Callable[[Path], None]:
        memoryview(copy)[:] = data
        return _writer(copy)

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain, store = Path(folder, "plain"), store_module.Store(Path(folder, "store"))
        publisher = saving_module.Publisher(store)
        for _ in range(options.repeats):
            writes = {
                "plain write": lambda: _write_plain(plain, data),
                "publish": lambda: store.publish(1, _writer(data), {}),
                "stand still": lambda: publisher.save(2, snapshot, {}),
            }
            for name in random.sample(list(writes), len(writes)):
                measure(name, writes[name])
                publisher.close()
            checkpoint = store.find(1)
            _forget(plain, *checkpoint.folder.iterdir())
            measure("plain read", lambda: _read(plain))
            measure("verify", partial(store.check, checkpoint))
            measure("SHA-256", lambda: hashlib.sha256(data).digest())
            plain.unlink()
            shutil.rmtree(store.folder)
    return _report({name: min(times) for name, times in seconds.items()}, options)


def _report(best: dict[str, float], options: argparse.Namespace) -> int:
    possible = max(best["plain read"], best["SHA-256"])
    ratios = {
        "write: plain / publish, at least 0.8": (best["plain write"] / best["publish"], 0.8),
        "verify: disk or SHA-256 / verify, at least 0.8": (possible / best["verify"], 0.8),
        "no stall: 1 - stand still / plain write, at least 0.9": (
            1 - best["stand still"] / best["plain write"],
            0.9,
        ),
    }
    rates = {name: options.megabytes / value for name, value in best.items()}
    if options.json:
        print(json.dumps({"MB/s": rates, "ratios": {key: got for key, (got, _) in ratios.items()}}))
    else:
        for name, rate in rates.items():
            print(f"{name:12} {best[name]:7.3f} s {rate:8.0f} MB/s")
        for name, (got, _) in ratios.items():
            print(f"{name}: {got:.2f}")
    return int(any(got < least for got, least in ratios.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, default=PACKAGE, help="the package's folder")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary files)")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _load(package: Path, module: str) -> ModuleType:
    """Import a module of the package, whose folder need not be called what Python accepts."""
    if "measured" not in sys.modules:
        spec = importlib.util.spec_from_file_location("measured", package / "__init__.py")
        assert spec and spec.loader
        sys.modules["measured"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["measured"])
    return importlib.import_module(f"measured.{module}")


def _writer(data: memoryview | bytearray) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        part = len(data) // FILES + 1
        for number in range(FILES):
            with open(folder / f"{number}.bin", "wb", buffering=0) as file:
                _copy(file.write, memoryview(data)[number * part : (number + 1) * part])

    return write


def _write_plain(path: Path, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        _copy(file.write, data)
        os.fsync(file.fileno())


def _copy(write: Callable[[memoryview], object], data: memoryview) -> None:
    for start in range(0, len(data), BLOCK):
        write(data[start : start + BLOCK])


def _read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(*files: Path) -> None:
    """Drop files from the page cache, so that the disk is read."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
