"""Run on 2 ranks by test_supervise.py: does what its first argument says, on rank 1 alone, without Horovod."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from waiting import wait_until

from my_training.ranks import launched_rank


def main(what: str, folder: Path) -> None:
    rank = launched_rank()
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    wait_until(lambda: len(list(folder.glob("process-*"))) == 2, "the other rank")
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if what.startswith("saves"):
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    if what == "holds":
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (folder / f"child-{rank}").write_text(str(child.pid))
    (folder / f"ready-{rank}").touch()
    if rank == 1 and what == "exits":
        sys.exit(7)
    if rank == 1 and what == "child":
        child = subprocess.Popen(["sleep", "300"])  # holds this rank's output open
        (folder / "child").write_text(str(child.pid))
        sys.exit(7)
    if rank == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
