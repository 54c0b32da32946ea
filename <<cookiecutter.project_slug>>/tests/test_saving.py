"""Saving: what happens beside the training, in which order, and what a failure does."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event, current_thread, main_thread

import numpy as np
import pytest
from jobs import current_engine
from store_helpers import check_invariants, content, small_disk, steps

from << cookiecutter.package_name >> import saving
from << cookiecutter.package_name >>.checkpoints.checkpoint import Checkpoint
from << cookiecutter.package_name >>.checkpoints.disk_errors import StoreError
from << cookiecutter.package_name >>.checkpoints.store import Store, Writer
from << cookiecutter.package_name >>.engine import rank_file
from << cookiecutter.package_name >>.ranks import open_communicator
from << cookiecutter.package_name >>.saving import Publisher


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def failing(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def test_training_goes_on_while_it_writes_one_save_at_a_time(store: Store) -> None:
    saver, may_write = Publisher(store), Event()
    log: list[str] = []

    def slow(folder: Path) -> None:
        assert current_thread() is not main_thread()
        may_write.wait(10)
        content()(folder)
        log.append("first written")

    def second_snapshot() -> Writer:
        log.append("second snapshot")
        return content()

    saver.save(10, lambda: slow, {})
    assert steps(store) == []
    log.append("training")
    may_write.set()
    saver.save(20, second_snapshot, {})
    saver.close()
    saver.close()
    assert log == ["training", "first written", "second snapshot"]
    assert steps(store) == [10, 20]


def test_synchronous(store: Store) -> None:
    saver = Publisher(store, asynchronous=False)
    saver.save(10, content, {})
    assert steps(store) == [10]


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    folders = []
    for asynchronous in (True, False):
        saver = Publisher(Store(tmp_path / str(asynchronous)), asynchronous=asynchronous)
        saver.save(10, content, {"epoch": 1})
        saver.close()
        folders.append(tmp_path / str(asynchronous) / "step-00000010")
    for file in ("model.bin", "train_state.json", "rng/rank-0.bin"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()


def test_the_snapshot_is_of_now(store: Store) -> None:
    weights = [1.0]

    def snapshot() -> Writer:
        copy = str(weights)
        return lambda folder: (folder / "weights.txt").write_text(copy)

    saver = Publisher(store)
    for step in (1, 2):
        saver.save(step, snapshot, {})
        weights[0] += 1
    saver.close()
    assert [(item.folder / "weights.txt").read_text() for item in store.checkpoints()] == ["[1.0]", "[2.0]"]


def test_meta_is_of_now_too(store: Store) -> None:
    saver, meta, may_write = Publisher(store), {"epoch": 1}, Event()
    saver.save(1, lambda: lambda folder: may_write.wait(10), meta)
    meta["epoch"] = 2
    may_write.set()
    saver.close()
    assert store.find(1).meta["epoch"] == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failures_in_a_row_end_the_job(store: Store, asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    saver = Publisher(store, asynchronous=asynchronous, max_failures=2)
    for write in (failing, content(), failing):
        saver.save(10, lambda write=write: write, {})  # type: ignore[misc]
        saver.wait()
    assert "step 10 could not be saved in" in caplog.text
    assert "No space left on device (failure 1 of 2 in a row)" in caplog.text
    with pytest.raises(StoreError, match="No space left"):
        for _ in range(2):
            saver.save(20, lambda: failing, {})
    with pytest.raises(StoreError, match="No space left"):  # it tries once more
        saver.close()
    assert steps(store) == [10]


def test_a_last_save_that_failed_is_made_at_the_close(store: Store, tmp_path: Path) -> None:
    space = tmp_path / "there is space"

    def write(folder: Path) -> None:
        (content() if space.exists() else failing)(folder)

    saver = Publisher(store, max_failures=9)
    saver.save(10, lambda: write, {})
    saver.wait()
    assert steps(store) == []
    space.touch()
    saver.close()
    assert steps(store) == [10]


def test_an_error_of_the_program_is_raised_at_the_next_call(store: Store) -> None:
    def wrong(folder: Path) -> None:
        raise ZeroDivisionError

    saver = Publisher(store)
    saver.save(10, lambda: wrong, {})
    with pytest.raises(ZeroDivisionError):
        saver.save(20, content, {})
    saver.save(30, lambda: wrong, {})
    with pytest.raises(ZeroDivisionError):
        saver.close()


def test_whoever_wants_to_know_is_told(store: Store) -> None:
    told: list[Checkpoint] = []
    saver = Publisher(store, published=told.append)
    saver.save(10, content, {})
    saver.close()
    assert told == store.checkpoints()


def test_it_says_how_long_training_stood_still(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    saver = Publisher(store)
    with caplog.at_level(logging.INFO):
        saver.save(10, content, {})
        saver.close()
    assert "step 10: training stood still for 0." in caplog.text
    assert "step-00000010: 0.0 MB in " in caplog.text
    assert "MB/s" in caplog.text


@pytest.mark.root
def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        store = Store(disk / "checkpoints")
        saver = Publisher(store, max_failures=3)
        ballast = disk / "ballast"
        for step in range(1, 7):
            if step == 3:
                ballast.write_bytes(bytes(2_000_000))
            if step == 5:
                ballast.unlink()
            saver.save(step, lambda: content(size=900_000), {})
            saver.wait()
        saver.close()
        check_invariants(store)
        assert steps(store) == [2, 5, 6]
        assert "(failure 2 of 3 in a row)" in caplog.text


def test_states_of_ranks_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie beside the checkpoints under no name; a disk that they fill fails the save when it is written."""
    monkeypatch.setattr(saving, "BLOCK", 1000)
    own = np.arange(5000, dtype=np.uint16).view(np.uint8)
    (tmp_path / "target").mkdir()
    states = saving.RankStates(open_communicator(current_engine()), own, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]
    for _ in range(2):  # a save that failed is tried again
        states.write(tmp_path / "target")
        assert rank_file(tmp_path / "target", 0).read_bytes() == own.tobytes()
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        full = saving.RankStates(open_communicator(current_engine()), np.zeros(2**22, np.uint8), disk)
        with pytest.raises(OSError, match="No space left"):
            full.write(tmp_path / "target")
