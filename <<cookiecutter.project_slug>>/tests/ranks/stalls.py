"""Run on 2 ranks by test_two_ranks.py: a long piece of work on rank 0 is no stall, a rank that does not come is one."""

import time

from jobs import compose_config, current_engine

from << cookiecutter.package_name >> import ranks as module

if __name__ == "__main__":
    module.ASK_AGAIN_S = 0.5
    settings = compose_config("horovod.stall_check_s=1", "horovod.stall_shutdown_s=3").horovod
    ranks = module.open_communicator(current_engine(), settings)
    ranks.on_writer(lambda: time.sleep(6), "long")
    print(f"rank {ranks.rank} is through", flush=True)
    if ranks.rank == 1:
        time.sleep(120)
        print("rank 1 had time to come", flush=True)
    ranks.gather(ranks.rank, "one")
