"""What several ranks do together: all of ranks/test_*.py, in one session for each engine and number of ranks."""

import re
import sys
from pathlib import Path

import pytest
from jobs import RANK_SESSION, run_ranks


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_of_these_pass_on_every_rank(ranks: int) -> None:
    done = run_ranks(ranks, str(RANK_SESSION), "--durations=5", timeout=800)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


FAULTY = """
def test_first(ranks):
    assert ranks.rank == 0

def test_second(ranks):
    assert ranks.sum([1.0], "one") == [2.0]

def test_third(ranks):
    assert ranks.rank == 0
    ranks.gather("waits in vain", "vain")

def test_fourth(ranks):
    raise ValueError("nobody comes here")
"""


@pytest.mark.slow
def test_what_fails_on_one_rank_is_named_and_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """The tests go on after the first, and not after the third."""
    (tmp_path / "test_faulty.py").write_text(FAULTY)
    done = run_ranks(2, str(RANK_SESSION), str(tmp_path))
    assert done.returncode == 1
    failed = re.findall(r"(rank \d): .*::(test_\w+) failed in its call", done.stdout)
    assert failed[:2] == [("rank 1", "test_first"), ("rank 1", "test_third")], done.stdout + done.stderr
    assert "rank 1: test_third has failed on one rank and has not ended on another" in done.stdout
    assert "test_fourth" not in done.stdout
