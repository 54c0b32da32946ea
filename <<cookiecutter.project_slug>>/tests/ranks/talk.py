"""Run on 2 ranks by test_two_ranks.py: what the communicator promises, checked on every rank."""

import os
from collections.abc import Callable

from jobs import current_engine

from << cookiecutter.package_name >>.distributed import Communicator, open_communicator
from << cookiecutter.package_name >>.errors import UserError


def expect(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")


def check_talk(ranks: Communicator) -> None:
    assert ranks.gather({"rank": ranks.rank}, "a") == [{"rank": 0}, {"rank": 1}]
    assert ranks.broadcast(ranks.rank + 5, "b") == 5
    assert ranks.sum([1.0, float(ranks.rank)], "c") == [2.0, 1.0]
    assert ranks.together(lambda: ranks.rank, "d") == ranks.rank
    assert ranks.threads_per_rank() == max(1, len(os.sched_getaffinity(0)) // 2)


def check_failures(ranks: Communicator) -> None:
    def fail_on_rank_1() -> None:
        if ranks.rank == 1:
            raise UserError("no such file")

    def crash_on_rank_1() -> None:
        if ranks.rank == 1:
            raise ZeroDivisionError("by zero")

    def fail() -> None:
        raise UserError("the same everywhere")

    expect(UserError, lambda: ranks.together(fail_on_rank_1, "e"), "rank 1: no such file")
    expect(RuntimeError, lambda: ranks.together(crash_on_rank_1, "f"), "rank 1: ZeroDivisionError: by zero")
    expect(UserError, lambda: ranks.together(fail, "g"), "the same everywhere")
    expect(UserError, lambda: ranks.on_writer(fail, "h"), "the same everywhere")
    assert ranks.on_writer(lambda: ranks.rank, "i") == 0
    ranks.check_equal("same", "hashes")
    expect(RuntimeError, lambda: ranks.check_equal(str(ranks.rank), "hashes"), "hashes of rank 1 differ")


def main() -> None:
    ranks = open_communicator(current_engine(), {"stall_shutdown_s": 60})
    assert ranks.size == 2
    check_talk(ranks)
    check_failures(ranks)
    print(f"rank {ranks.rank} passed")


if __name__ == "__main__":
    main()
