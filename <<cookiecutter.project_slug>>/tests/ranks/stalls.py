"""Run on 2 ranks by test_two_ranks.py: rank 1 does not come to the collective that rank 0 waits in."""

import time

from jobs import compose_config

from << cookiecutter.package_name >>.distributed import open_communicator

if __name__ == "__main__":
    settings = compose_config("horovod.stall_check_s=1", "horovod.stall_shutdown_s=3").horovod
    ranks = open_communicator("torch", settings)
    ranks.gather(ranks.rank, "both")
    if ranks.rank == 1:
        time.sleep(120)
    ranks.gather(ranks.rank, "one")
