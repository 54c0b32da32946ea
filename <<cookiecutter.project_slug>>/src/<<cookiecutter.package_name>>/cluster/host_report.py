"""What a host says of itself, as JSON: python -m <package>.cluster.host_report; the doctor starts it by ssh."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import Parser, end_well
from ..gpus import count_gpus, output_of
from .network import own_interfaces

CONNECT_S = 3.0


@dataclass(frozen=True)
class HostReport:
    """A host as the ranks on it will find it: no framework was imported for this.

    `code` is a hash of this package's sources, `reached` the address that ssh connected to if it did, `cuda` what the
    framework brings and `driver_cuda` what the driver supports, `memlock` None if unlimited, `sees` whether the file
    that was asked for is in `folder`, `port` one on which this host listens; `mtus` are by card. Sizes are in bytes,
    `time` is in seconds since 1970.
    """

    hostname: str
    python: str
    code: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    mpi: str | None
    interfaces: list[dict[str, Any]]
    mtus: dict[str, int]
    reached: str | None
    gpus: int
    driver_cuda: str | None
    cuda: str | None
    shm: int
    memlock: int | None
    infiniband: bool
    folder: str
    writable: bool
    free: int
    sees: bool
    port: int
    time: float


def main() -> None:
    """Print the report."""
    parser = Parser(prog="host_report", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="of the runs")
    parser.add_argument("--sees", metavar="NAME", help="say whether the folder has this file")
    parser.add_argument("--wait", action="store_true", help="listen until stdin ends; each line there lists addresses")
    options = parser.parse_args()
    with _listen() as server:
        print(json.dumps(asdict(report(options.folder, options.sees, server.getsockname()[1]))), flush=True)
        for line in sys.stdin if options.wait else ():
            print(json.dumps(unreachable(json.loads(line))), flush=True)


def report(folder: Path, wanted: str | None, port: int) -> HostReport:
    """Look at this host."""
    from ..checkpoints.provenance import describe

    about = describe("")
    gpus = count_gpus()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    place = nearest(folder)
    return HostReport(
        hostname=about["host"],
        python=about["python"],
        code=hash_sources(Path(__file__).parents[1]),
        commit=about["git_commit"],
        dirty=about["git_dirty"],
        versions={name: str(version) for name, version in about["versions"].items()},
        mpi=_version_of("mpirun"),
        interfaces=[asdict(interface) for interface in own_interfaces()],
        mtus={card: state.mtu for card, state in psutil.net_if_stats().items()},
        reached=(os.environ.get("SSH_CONNECTION", "").split() + [None] * 3)[2],
        gpus=gpus,
        driver_cuda=_driver_cuda() if gpus else None,
        cuda=_framework_cuda(),
        shm=shutil.disk_usage("/dev/shm").total,
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        infiniband=Path("/dev/infiniband").is_dir(),
        folder=str(place),
        writable=os.access(place, os.W_OK),
        free=shutil.disk_usage(place).free,
        sees=wanted is not None and (folder / wanted).exists(),
        port=port,
        time=time.time(),
    )


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def hash_sources(folder: Path) -> str:
    """A hash of the package's code and settings: it differs also where git sees none, or two kinds of changes."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def unreachable(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """The addresses that this host cannot connect to, each with the reason."""

    def attempt(address: tuple[str, int]) -> str:
        try:
            socket.create_connection((address[0], address[1]), timeout=CONNECT_S).close()
        except OSError as error:
            return error.strerror or "no answer"
        return ""

    with ThreadPoolExecutor(min(64, len(addresses) or 1)) as pool:
        reasons = list(pool.map(attempt, addresses))
    return [(address[0], reason) for address, reason in zip(addresses, reasons, strict=True) if reason]


def _listen() -> socket.socket:
    """A server that the kernel answers for: a connection that nobody takes is open all the same."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver supports."""
    newest = re.search(r"CUDA (?:UMD )?Version: *(\d+\.\d+)", output_of("nvidia-smi"))
    return newest[1] if newest else None


def _framework_cuda() -> str | None:
    """The newest CUDA that came with the framework's wheels."""
    found = [
        distribution.version
        for distribution in importlib.metadata.distributions()
        if (distribution.name or "").startswith("nvidia-cuda-runtime")
    ]
    return max(found, key=lambda version: int(version.partition(".")[0]), default=None)


def _version_of(program: str) -> str | None:
    """The first line of its --version."""
    return output_of(program, "--version").partition("\n")[0].strip() or None


if __name__ == "__main__":
    end_well(main, lambda: 0)
