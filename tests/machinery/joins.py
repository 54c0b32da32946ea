"""Run by test_strangers.py: ranks that join when they are told to, and talk until they are told to stop.

Arguments: a folder, and what the last rank does: joins | late | leaves | quits | silent.
"""

import os
import signal
import sys
import time
from pathlib import Path

from jobs import current_engine
from waiting import wait_until

from my_training.ranks import launched_rank, open_communicator


def main(folder: Path, what: str) -> None:
    rank, last = launched_rank(), launched_rank() == int(os.environ["HOROVOD_SIZE"]) - 1
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    if last and what == "leaves":
        wait_until((folder / "join").exists, "the word to join", 300)
        return
    if last and what == "late":
        wait_until((folder / "join").exists, "the word to join", 300)
    ranks = open_communicator(current_engine())
    total, rounds, done = 0.0, 0, False
    while not done:
        total += ranks.sum([float(ranks.rank + rounds % 3)], f"round.{rounds}")[0]
        rounds += 1
        (folder / f"talks-{rank}").touch()
        if last and what == "quits":
            os._exit(0)
        if last and what == "silent":
            os.kill(os.getpid(), signal.SIGSTOP)
        done = ranks.broadcast(rounds % 3 == 0 and (folder / "stop").exists(), f"done.{rounds}")
        time.sleep(0.02)
    print(f"rank {rank} ends with {total / rounds:g}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
