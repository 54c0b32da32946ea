"""What the communicator promises, checked on every rank."""

import os
import pickle
from typing import Any

import numpy as np
import pytest

from << cookiecutter.package_name >> import ranks as module
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Bytes, Communicator


def test_talk(ranks: Communicator) -> None:
    assert ranks.size == 2
    assert ranks.gather({"rank": ranks.rank}, "a") == [{"rank": 0}, {"rank": 1}]
    assert ranks.broadcast(ranks.rank + 5, "b") == 5
    assert ranks.sum([1.0, float(ranks.rank)], "c") == [2.0, 1.0]
    assert ranks.together(lambda: ranks.rank, "d") == ranks.rank
    assert ranks.gather((None, [ranks.rank, 0.1]), "tuples") == [(None, [0, 0.1]), (None, [1, 0.1])]
    arrays = ranks.gather({"a": np.full(ranks.rank, np.nan, np.float16)}, "arrays")
    assert [(str(one["a"].dtype), one["a"].size) for one in arrays] == [("float16", 0), ("float16", 1)]
    assert ranks.threads_per_rank() == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize(("block", "sizes"), [(2**25, (5, 0)), (4, (10, 7)), (4, (0, 9)), (4, (0, 0)), (1000, (3, 8))])
def test_parts(ranks: Communicator, monkeypatch: pytest.MonkeyPatch, block: int, sizes: tuple[int, int]) -> None:
    """Bytes reach the writing rank alone, in rank order and in blocks, however large each rank's part is."""
    monkeypatch.setattr(module, "BLOCK", block)
    whole = np.arange(sum(sizes), dtype=np.uint8)
    mine = whole[: sizes[0]] if ranks.rank == 0 else whole[sizes[0] :]
    blocks: list[Bytes] = []
    assert ranks.hand_over(mine, blocks.append, "parts") == [*sizes]
    assert all(len(one) <= block for one in blocks)
    assert b"".join(one.tobytes() for one in blocks) == (whole.tobytes() if ranks.rank == 0 else b"")


class Harmful:
    """Says so when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


@pytest.mark.parametrize("stranger", [1, 0])
def test_what_is_no_message_names_the_one_that_sent_it(
    ranks: Communicator, monkeypatch: pytest.MonkeyPatch, stranger: int
) -> None:
    """On all ranks; and a pickle does not run."""
    harmful = np.frombuffer(pickle.dumps(Harmful()), np.uint8)
    if ranks.rank == stranger:
        monkeypatch.setattr(module, "encode", lambda value: harmful)
    with pytest.raises(RuntimeError, match=f"what rank {stranger} sent as 'foreign' is no message of this project"):
        ranks.gather(0, "foreign")
    if stranger == 0 == ranks.rank:  # it has nothing to read
        ranks.broadcast(0, "foreign")
    elif stranger == 0:
        with pytest.raises(RuntimeError, match="what rank 0 sent as 'foreign' is no message"):
            ranks.broadcast(0, "foreign")
    assert not Harmful.ran


def test_failures(ranks: Communicator) -> None:
    def fail_on_rank_1() -> None:
        if ranks.rank == 1:
            raise UserError("no such file")

    def crash_on_rank_1() -> None:
        if ranks.rank == 1:
            raise ZeroDivisionError("by zero")

    def fail() -> None:
        raise UserError("the same everywhere")

    with pytest.raises(UserError, match="rank 1: no such file"):
        ranks.together(fail_on_rank_1, "e")
    with pytest.raises(RuntimeError, match="rank 1: ZeroDivisionError: by zero"):
        ranks.together(crash_on_rank_1, "f")
    with pytest.raises(UserError, match="the same everywhere"):
        ranks.together(fail, "g")
    with pytest.raises(UserError, match="the same everywhere"):
        ranks.on_writer(fail, "h")
    assert ranks.on_writer(lambda: ranks.rank, "i") == 0
    ranks.check_equal("same", "hashes")
    with pytest.raises(RuntimeError, match="hashes of rank 1 differ"):
        ranks.check_equal(str(ranks.rank), "hashes")
