"""Run on 2 ranks by test_two_ranks.py: what the communicator promises, checked on every rank."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from jobs import current_engine

from << cookiecutter.package_name >> import ranks as module
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Bytes, Communicator, open_communicator


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
    assert ranks.gather((None, [ranks.rank, 0.1]), "tuples") == [(None, [0, 0.1]), (None, [1, 0.1])]
    arrays = ranks.gather({"a": np.full(ranks.rank, np.nan, np.float16)}, "arrays")
    assert [(str(one["a"].dtype), one["a"].size) for one in arrays] == [("float16", 0), ("float16", 1)]
    assert ranks.threads_per_rank() == max(1, len(os.sched_getaffinity(0)) // 2)


def check_parts(ranks: Communicator) -> None:
    """Bytes reach the writing rank alone, in rank order and in blocks, however large each rank's part is."""
    for block, sizes in ((2**25, (5, 0)), (4, (10, 7)), (4, (0, 9)), (4, (0, 0)), (1000, (3, 8))):
        module.BLOCK = block
        whole = np.arange(sum(sizes), dtype=np.uint8)
        mine = whole[: sizes[0]] if ranks.rank == 0 else whole[sizes[0] :]
        blocks: list[Bytes] = []
        assert ranks.hand_over(mine, blocks.append, "parts") == [*sizes]
        assert all(len(one) <= block for one in blocks)
        assert b"".join(one.tobytes() for one in blocks) == (whole.tobytes() if ranks.rank == 0 else b"")


def check_foreign(ranks: Communicator) -> None:
    """What is no message ends all ranks with the name of the one that sent it; a pickle does not run."""
    room = vars(module)
    encode, harmful = room["encode"], np.frombuffer(pickle.dumps(Harmful()), np.uint8)
    for stranger in (1, 0):
        room["encode"] = (lambda value: harmful) if ranks.rank == stranger else encode
        sentence = f"what rank {stranger} sent as 'foreign' is no message of this project"
        expect(RuntimeError, lambda: ranks.gather(0, "foreign"), sentence)
    if ranks.rank == 1:  # rank 0 has nothing to read
        expect(RuntimeError, lambda: ranks.broadcast(0, "foreign"), "what rank 0 sent as 'foreign' is no message")
    else:
        ranks.broadcast(0, "foreign")
    room["encode"] = encode
    assert not Harmful.ran


class Harmful:
    """Says so when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


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
    check_parts(ranks)
    check_foreign(ranks)
    check_failures(ranks)
    print(f"rank {ranks.rank} passed")


if __name__ == "__main__":
    main()
