"""Measures an allreduce as a rank of a job, for the doctor: launch --module cluster.allreduce -- ENGINE."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from importlib.util import find_spec

from ..errors import Parser, end_well

ALLREDUCE_BYTES = 64 * 2**20


def main() -> None:
    """Measure one by the engine that the command line names."""
    parser = Parser(prog="allreduce", description=__doc__)
    parser.add_argument("engine", choices=engines())
    measure_allreduce(parser.parse_args().engine)


def engines() -> list[str]:
    """Those of this project."""
    return [name for name in ("torch", "tensorflow") if find_spec(f"..{name}", __package__)]


def measure_allreduce(engine: str) -> None:
    """Print the algorithm bandwidth of allreduces: bytes of the tensor by the median time, as nccl-tests has it."""
    from ..ranks import open_communicator

    communicator = open_communicator(engine)
    hvd = communicator.hvd
    tensor = importlib.import_module(engine).ones([ALLREDUCE_BYTES // 4])  # float32
    times = []
    for number in range(6):
        start = time.monotonic()
        total = hvd.allreduce(tensor, op=hvd.Sum, name=f"measured.{number}")
        times.append(time.monotonic() - start)
        if float(total[0]) != communicator.size or float(total[-1]) != communicator.size:
            raise RuntimeError(f"an allreduce of ones over {communicator.size} ranks gave {float(total[0])}")
    if communicator.writes:
        seconds = statistics.median(times[1:])  # the first one opens the connections
        print(json.dumps({"ranks": communicator.size, "megabytes_per_s": ALLREDUCE_BYTES / seconds / 1e6}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    end_well(main, lambda: 0)  # any rank says what it misses
