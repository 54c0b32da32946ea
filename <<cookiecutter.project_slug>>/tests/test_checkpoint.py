"""The store: publishing, crashes, damage, retention, pointers, locks."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from store_helpers import (
    bomb,
    check_invariants,
    content,
    die,
    edit_manifest,
    flip_byte,
    hidden,
    in_child,
    names,
    publish,
    small_disk,
    steps,
)

from << cookiecutter.package_name >>.checkpoints import provenance
from << cookiecutter.package_name >>.checkpoints.command import main
from << cookiecutter.package_name >>.checkpoints.disk_errors import StoreError
from << cookiecutter.package_name >>.checkpoints.provenance import describe
from << cookiecutter.package_name >>.checkpoints.store import DamagedError, Store
from << cookiecutter.package_name >>.errors import UserError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", metric="val/accuracy")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that publish a hundred times."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def fast(memory: Path) -> Store:
    return Store(memory / "checkpoints", metric="val/accuracy")


# Publishing


def test_a_checkpoint_has_its_files_its_meta_and_a_manifest(store: Store) -> None:
    checkpoint = store.publish(1000, content(), {"epoch": 2, "metrics": {"val/accuracy": 0.5, "val/loss": 1.0}})

    assert checkpoint.folder == store.folder / "step-00001000"
    manifest = json.loads((checkpoint.folder / "MANIFEST.json").read_text())
    assert set(manifest["files"]) == {"model.bin", "train_state.json", "rng/rank-0.bin", "meta.json"}
    assert manifest["files"]["model.bin"]["size"] == 2000
    assert checkpoint.meta["epoch"] == 2
    assert checkpoint.meta["step"] == 1000
    assert checkpoint.meta["parent"] is None
    assert datetime.fromisoformat(checkpoint.meta["created"]).utcoffset() is not None
    assert store.verify(checkpoint) == []
    assert hidden(store) == []


def test_steps_are_sorted_as_numbers(store: Store) -> None:
    for step in (9, 100_000_000, 10, 99_999_999, 1_000_000_000):
        publish(Store(store.folder, keep_last=9), step)
    assert steps(store) == [9, 10, 99_999_999, 100_000_000, 1_000_000_000]


def test_a_step_saved_again_never_touches_the_first_one(store: Store) -> None:
    first = publish(store, 10)
    before = (first.folder / "model.bin").stat()
    again = publish(store, 10, write=content(byte=b"x"))

    assert again.name == "step-00000010.1"
    assert (first.folder / "model.bin").stat() == before
    assert store.find(10) == again == store.newest_good()
    assert store.find("step-00000010") == first


def test_the_newest_is_the_last_published_whatever_its_step(store: Store) -> None:
    for step in (10, 20, 30, 40):
        publish(store, step)
    other = Store(store.folder, keep_last=2)
    other.resumed_from(store.find(20))
    publish(other, 25)

    newest = other.newest_good()
    assert newest is not None
    assert newest.step == 25
    assert steps(other) == [20, 25, 40]  # 20 is what the run goes on from


def test_the_clock_may_go_backwards(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    years, gmtime = iter(range(60, 0, -1)), time.gmtime
    monkeypatch.setattr(time, "gmtime", lambda: gmtime(next(years) * 365 * 24 * 3600))
    for step in (10, 20, 30, 40, 50):
        publish(store, step)
    assert steps(store) == [30, 40, 50]
    assert store.pointers()["latest"] == "step-00000050"
    assert store.find(50).meta["created"] < store.find(40).meta["created"]


def test_a_path_may_have_spaces_and_any_letters(tmp_path: Path) -> None:
    store = Store(tmp_path / "mein Lauf 実験 é" / "checkpoints")
    checkpoint = publish(store, 1, write=lambda folder: (folder / "gewichte ü 重み.bin").write_bytes(b"1"))
    with store.lock():
        store.tag("für-später", checkpoint)
    assert store.verify(store.find("für-später")) == []


def test_lineage(store: Store) -> None:
    first, second = publish(store, 10), publish(store, 20)
    resumed = Store(store.folder)
    resumed.resumed_from(first)
    branch = publish(resumed, 20)
    elsewhere = Store(store.folder.parent / "other")
    elsewhere.resumed_from(first)

    assert second.meta["parent"] == branch.meta["parent"] == "step-00000010"
    assert publish(elsewhere, 30).meta["parent"] == str(first.folder.resolve())


@pytest.mark.needs("git")
def test_describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    outside = describe("a: 1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    clean = describe("a: 1")
    (tmp_path / "new.py").touch()
    dirty = describe("a: 2")

    assert outside["git_commit"] is outside["git_dirty"] is None
    assert len(clean["git_commit"]) == 40
    assert (clean["git_dirty"], dirty["git_dirty"]) == (False, True)
    assert clean["config_hash"] != dirty["config_hash"]
    assert "numpy" in clean["versions"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_every_file_and_folder_follows_the_umask(umask: int, store: Store) -> None:
    """Some libraries make theirs for the owner alone, or for all."""

    def write(folder: Path) -> None:
        content()(folder)
        (folder / "model.bin").chmod(0o600)
        (folder / "rng" / "rank-0.bin").chmod(0o666)

    before = os.umask(umask)
    try:
        with store.lock():
            store.tag("good", publish(store, 10, 0.5, write))
    finally:
        os.umask(before)
    for path in (store.folder, *store.folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


# Crashes


def count_down(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Kill this process just before its n-th call of one of these."""
    left = iter(range(calls, -1, -1))

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) == 0:
                die()
            return function(*arguments, **options)

        return call

    for name in ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink"):
        patch.setattr(os, name, deadly(getattr(os, name)))


def publish_and_die(store: Store, calls: int) -> int:
    def action() -> None:
        with pytest.MonkeyPatch.context() as patch:
            count_down(patch, calls)
            publish(store, 40, accuracy=0.4)

    return in_child(action)


def test_killed_before_every_single_operation(memory: Path) -> None:
    """The best (10), the tagged (20) and the newest (30) survive; 40 is whole or does not exist; then all goes on."""
    prepared = Store(memory / "prepared", keep_last=1, metric="val/accuracy")
    for step, accuracy in ((10, 0.9), (20, 0.1), (30, 0.2)):
        publish(prepared, step, accuracy)
        if step == 20:
            prepared.tag("production", prepared.find(20))

    seen = set()
    for calls in range(1000):
        folder = memory / f"killed-{calls}"
        shutil.copytree(prepared.folder, folder)
        store = Store(folder, keep_last=1, metric="val/accuracy")
        code = publish_and_die(store, calls)
        check_invariants(store)
        newest = store.newest_good()
        assert newest is not None
        assert {"step-00000010", "step-00000020", newest.name} <= set(names(store))
        assert newest.step in (30, 40)
        seen.add((newest.step, len(names(store)), bool(hidden(store)), store.pointers()["latest"]))
        with store.lock():
            assert hidden(store) == []
            assert store.pointers()["latest"] == newest.name
            assert store.pointers()["best"] == "step-00000010"
            publish(store, 50, accuracy=0.5)
            assert steps(store) == [10, 20, 50]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert calls > 20
    assert len(seen) >= 5  # the stages: writing, published, pointed to, the old one renamed, gone


@pytest.mark.slow
def test_killed_at_fifty_random_moments(store: Store) -> None:
    def publish_for_ever() -> None:
        with store.lock():
            newest = store.newest_good()
            step = newest.step if newest else 0
            while True:
                step += 1
                publish(store, step, accuracy=step % 7 / 7, write=content(size=2_000_000))

    dice = random.Random(0)
    reached = 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            publish_for_ever()
        time.sleep(dice.uniform(0.05, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_invariants(store)
        newest = store.newest_good()
        assert (newest.step if newest else 0) >= reached
        reached = newest.step if newest else 0
    assert reached > 20
    with store.lock():
        assert hidden(store) == []


def test_two_writers_without_a_lock_lose_nothing(fast: Store) -> None:
    keep_all = Store(fast.folder, keep_last=1000)

    def write_twenty() -> None:
        for step in range(20):
            publish(keep_all, step)

    child = os.fork()
    if child == 0:
        os._exit(in_child(write_twenty))
    write_twenty()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps(fast) == [step for step in range(20) for _ in range(2)]
    check_invariants(fast)


def test_a_reader_beside_a_writer_always_finds_a_good_one(fast: Store) -> None:
    publish(fast, 0)
    writer = Thread(target=lambda: [publish(fast, step, 1.0) for step in range(1, 60)])
    writer.start()
    found = []
    while writer.is_alive():
        newest = fast.newest_good()
        assert newest is not None
        found.append(newest.step)
        fast.find("latest")
    writer.join()
    assert found == sorted(found)


# Disks


@pytest.mark.root
def test_a_full_disk_keeps_the_old_ones_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        store = Store(disk / "checkpoints")
        publish(store, 10, write=content(size=1_500_000))
        with pytest.raises(StoreError, match=r"step 20 could not be saved in .*: No space left on device$"):
            publish(store, 20, write=content(size=3_000_000))
        assert hidden(store) == []

        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1_500_000))
        with pytest.raises(StoreError, match="2 MB are needed and 1 MB are free; free some space"):
            publish(store, 20, write=lambda folder: pytest.fail("it was known not to fit"))
        check_invariants(store)
        assert steps(store) == [10]

        ballast.unlink()
        publish(store, 20, write=content(size=1_500_000))
        assert steps(store) == [10, 20]


@pytest.mark.root
def test_a_full_disk_is_known_under_other_exceptions(tmp_path: Path) -> None:
    """Safetensors, torch and TensorFlow raise exceptions of their own when a disk is full."""

    def write(folder: Path) -> None:
        try:
            content(size=5_000_000)(folder)
        except OSError:
            raise RuntimeError("unexpected pos 12 vs 10") from None

    with small_disk(tmp_path / "disk", megabytes=2) as disk, pytest.raises(StoreError, match="No space left"):
        publish(Store(disk / "checkpoints"), 10, write=write)

    def write_rust(folder: Path) -> None:
        raise ValueError("I/O error: Disk quota exceeded (os error 122)")

    with pytest.raises(StoreError, match="quota"):
        publish(Store(tmp_path / "checkpoints"), 10, write=write_rust)


@pytest.mark.root
def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        store = Store(disk / "checkpoints")
        publish(store, 10)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for action in (
            lambda: publish(store, 20),
            lambda: store.lock().__enter__(),
            lambda: store.tag("good", store.find(10)),
            store.prune,
        ):
            with pytest.raises(StoreError, match="Read-only file system"):
                action()
        newest = store.newest_good()
        assert newest is not None
        assert newest.step == 10


@contextmanager
def as_nobody() -> Iterator[Path]:
    """A folder that others can reach, and no rights of root's."""
    folder = Path(tempfile.mkdtemp(prefix="nobody-"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    try:
        if root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


def test_a_right_that_lacks_is_no_damage_and_stops() -> None:
    """Older checkpoints are not taken instead; the sentence names the file, the reader and the right."""
    with as_nobody() as folder:
        store = Store(folder / "checkpoints")
        for step in (10, 20):
            publish(store, step)
        newest = store.find(20).folder
        for closed, right in (
            (newest / "model.bin", "read it"),
            (newest / "MANIFEST.json", "read it"),
            (newest / "rng", "read it"),
            (newest, f"enter {newest}"),
            (store.folder, "(read it|enter .*)"),
        ):
            mode = closed.stat().st_mode
            closed.chmod(0)
            for action in (store.newest_good, lambda: store.find_good("latest")):
                with pytest.raises(UserError, match=f"be read: user {os.geteuid()} has no right to {right}; ask"):
                    action()
            closed.chmod(mode)
        (store.folder / "latest").chmod(0)
        with pytest.raises(UserError, match="latest cannot be read: user"):
            store.find("latest")
        store.folder.chmod(0)
        with pytest.raises(StoreError, match=r"could not be saved in .*: .*Permission denied"):
            publish(store, 40)


def test_an_error_that_is_not_the_disks_comes_through(store: Store) -> None:
    def write(folder: Path) -> None:
        raise ZeroDivisionError

    publish(store, 10)
    with pytest.raises(ZeroDivisionError):
        publish(store, 20, write=write)
    assert (steps(store), hidden(store)) == ([10], [])


# Damage


def empty(folder: Path) -> None:
    for file in folder.glob("*.*"):
        file.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (lambda folder: flip_byte(folder / "model.bin", 999), "model.bin was altered"),
    "a flipped byte in meta.json": (lambda folder: flip_byte(folder / "meta.json", 3), "meta.json was altered"),
    "a cut file": (lambda folder: os.truncate(folder / "model.bin", 1999), "model.bin has 1999 bytes instead of 2000"),
    "a missing file": (lambda folder: (folder / "rng" / "rank-0.bin").unlink(), "rng/rank-0.bin is missing"),
    "an extra file": (lambda folder: (folder / "rng" / "b").touch(), "rng/b is not in the manifest"),
    "no manifest": (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    "an empty manifest": (lambda folder: os.truncate(folder / "MANIFEST.json", 0), "MANIFEST.json cannot be used"),
    "a binary manifest": (lambda folder: (folder / "MANIFEST.json").write_bytes(b"\xff"), "cannot be used"),
    "another JSON": (lambda folder: (folder / "MANIFEST.json").write_text("[1]"), "it is not a manifest"),
    "an endless manifest": (lambda folder: (folder / "MANIFEST.json").write_text("[" * 100_000), "cannot be used"),
    "a newer format": (lambda folder: edit_manifest(folder, format=2), "format 2 is newer than this program's 1"),
    "a path outside": (
        lambda folder: edit_manifest(folder, files={"../x": {"size": 1, "sha256": ""}}),
        "it names '../x', which lies outside",
    ),
    "nothing left": (empty, "MANIFEST.json is missing"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_and_passed_over(
    fast: Store, damage: Callable[[Path], object], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = publish(fast, 10), publish(fast, 20)
    damage(bad.folder)

    assert any(sentence in problem for problem in fast.verify(bad))
    assert fast.newest_good() == good
    assert "step-00000020 is damaged and passed over: " in caplog.text
    assert sentence in caplog.text
    with pytest.raises(DamagedError, match="step-00000020 is damaged"):
        fast.check(fast.find(20))

    for step in (30, 40, 50):
        publish(fast, step)
    assert steps(fast) == [20, 30, 40, 50]  # what is damaged neither counts nor is deleted


def test_a_damaged_one_can_be_saved_again(store: Store) -> None:
    publish(store, 10)
    flip_byte(publish(store, 20).folder / "model.bin")
    again = publish(store, 20)
    assert store.newest_good() == again


def test_nothing_is_ever_unpickled(store: Store, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for file in ("model.bin", "train_state.json", "rng/rank-0.bin", "meta.json", "MANIFEST.json"):
        bad = publish(store, 10)
        (bad.folder / file).write_bytes(bomb(canary))
        assert store.verify(bad) != []
        assert store.newest_good() is None
    publish(store, 20, write=lambda folder: (folder / "model.bin").write_bytes(bomb(canary)))
    assert store.newest_good() == store.find(20)
    assert not canary.exists()


def test_all_damaged(store: Store) -> None:
    assert store.newest_good() is None
    flip_byte(publish(store, 10).folder / "model.bin")
    assert store.newest_good() is None


# Finding


def test_find(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint 'latest' in .*: there are none yet"):
        store.find("latest")
    first, second = publish(store, 10, 0.9), publish(store, 20, 0.8)
    store.tag("production", first)

    assert store.find("latest") == store.find(20) == store.find("20") == second
    assert store.find("best") == store.find("production") == store.find("step-00000010") == first
    elsewhere = Store(tmp_path / "other")
    assert elsewhere.find(str(first.folder)) == first
    assert elsewhere.find(str(store.folder)) == second
    with pytest.raises(UserError, match=r"no checkpoint '15' in .*: there are latest, best, production, step-"):
        store.find(15)
    moved = first.folder.rename(tmp_path / "my favourite")
    assert elsewhere.find(str(moved)).step == 10
    with pytest.raises(UserError, match="production points to 'step-00000010', which is gone: there are"):
        store.find("production")


def test_a_run_folder_is_a_path_too(tmp_path: Path) -> None:
    checkpoint = publish(Store(tmp_path / "runs" / "first" / "checkpoints"), 10)
    assert Store(tmp_path / "other").find(str(tmp_path / "runs" / "first")) == checkpoint


@pytest.mark.parametrize("text", ["", "nothing/there", "\x00\xff"])
def test_a_broken_pointer_is_named_and_mended_at_the_next_start(store: Store, text: str) -> None:
    newest = publish(store, 10, 0.5)
    for name in ("latest", "best"):
        (store.folder / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} points to .*, which is gone"):
            store.find(name)
    assert store.newest_good() == newest
    with store.lock():
        assert store.find("latest") == store.find("best") == newest


# Retention, best, tags


def test_what_is_kept(store: Store) -> None:
    policy = Store(store.folder, keep_last=2, keep_best=2, keep_every=40, metric="val/loss", mode="min")
    losses = {10: 0.1, 20: 0.3, 30: 0.2, 40: 0.9, 50: 0.8, 60: 0.7, 70: 0.6}
    for step, loss in losses.items():
        policy.publish(step, content(), {"metrics": {"val/loss": loss}})
        if step == 20:
            policy.tag("keep-me", policy.find(20))
    assert steps(policy) == [10, 20, 30, 40, 60, 70]
    policy.untag("keep-me")
    assert [dropped.step for dropped in policy.prune(dry_run=True)] == [20]
    assert [dropped.step for dropped in policy.prune()] == [20]
    assert steps(policy) == [10, 30, 40, 60, 70]
    assert hidden(policy) == []


def test_nan_is_never_best_and_of_equals_the_first_stays(store: Store) -> None:
    for step, accuracy in ((10, float("nan")), (20, 0.5), (30, 0.5), (40, float("inf")), (50, 0.4)):
        publish(store, step, accuracy)
    assert store.pointers() == {"latest": "step-00000050", "best": "step-00000020"}
    assert store.find(40).meta["metrics"] == {"val/accuracy": None}


def test_a_metric_that_nobody_measures_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.publish(10, content(), {"metrics": {"val/loss": 1.0}})
    assert "no best checkpoint without val/accuracy: the metrics are val/loss" in caplog.text
    assert "best" not in store.pointers()


def test_pinned_ones_stay(store: Store) -> None:
    store.pinned.add(publish(store, 10).name)
    for step in (20, 30, 40, 50):
        publish(store, step)
    assert steps(store) == [10, 30, 40, 50]


def test_tags_move_and_are_checked(store: Store, tmp_path: Path) -> None:
    first, second = publish(store, 10), publish(store, 20)
    store.tag("production", first)
    store.tag("production", second)
    assert store.pointers()["production"] == second.name
    for name in ("latest", "best", "123", "step-00000010", "../up", "a b", "", ".hidden"):
        with pytest.raises(UserError, match="a tag cannot be called"):
            store.tag(name, first)
    with pytest.raises(UserError, match=r"there is no tag 'staging' in .*: there are production"):
        store.untag("staging")
    shutil.rmtree(first.folder)
    with pytest.raises(UserError, match="is not a checkpoint of"):
        store.tag("old", first)


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_best": -1}, {"keep_every": -1}, {"mode": "largest"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be"):
        Store("checkpoints", **options)


def opened(action: Callable[[], object]) -> int:
    """How many files and folders an action opens or lists."""
    before = len(_opened)
    action()
    return len(_opened) - before


_opened: list[str] = []
_watched = ("open", "os.listdir", "os.scandir")


@pytest.fixture(scope="module", autouse=True)
def _audit() -> None:
    sys.addaudithook(lambda event, _: _opened.append(event) if event in _watched else None)


def test_publishing_costs_the_same_however_many_are_kept(memory: Path) -> None:
    costs = []
    for kept in (5, 50):
        store = Store(memory / str(kept), keep_last=kept, keep_best=2, keep_every=7, metric="val/accuracy")
        with store.lock():
            for step in range(kept):
                publish(store, step, accuracy=step / 100)
            costs.append([opened(partial(publish, store, step, 0.5)) for step in range(60, 65)])
            assert len(names(store)) >= kept
    assert costs[0] == costs[1]


def test_listing_opens_few_files_of_each(memory: Path) -> None:
    run = memory / "run"
    store, costs = Store(run / "checkpoints", keep_last=100), []
    for step in range(40):
        publish(store, step)
        if step in (19, 39):
            costs.append(opened(partial(main, ["list", str(run)])))
    assert costs[1] - costs[0] <= 20 * 7  # four files, and three folders


def test_retention_sees_what_others_do(memory: Path) -> None:
    """Tags, hand-deleted and pulled ones, damage: what the store remembers never stands against the disk."""
    store = Store(memory / "checkpoints", keep_last=1, metric="val/accuracy")
    for step, accuracy in ((10, 0.9), (20, 0.8), (30, 0.7)):
        publish(store, step, accuracy)
    other = Store(store.folder)
    assert in_child(lambda: other.tag("mine", other.find(30))) == 0
    publish(store, 40, 0.1)
    publish(store, 50, 0.2)
    assert steps(store) == [10, 30, 50]
    assert in_child(lambda: other.untag("mine")) == 0
    publish(store, 60, 0.3)
    assert steps(store) == [10, 60]

    shutil.rmtree(store.find(10).folder)
    publish(store, 70, 0.2)
    assert steps(store) == [60, 70]
    assert store.find("best").step == 60
    (store.find(60).folder / "model.bin").unlink()  # seen though no name in the store's folder has changed
    publish(store, 80, 0.1)
    assert steps(store) == [60, 70, 80]
    assert store.find("best").step == 70

    elsewhere = Store(memory / "elsewhere")
    pulled = publish(elsewhere, 5, 0.95)

    def pull_meanwhile(folder: Path) -> None:
        content()(folder)
        other.adopt(pulled.name, lambda target: shutil.copytree(pulled.folder, target, dirs_exist_ok=True))

    publish(store, 90, write=pull_meanwhile)
    assert {5, 90} <= set(steps(store))
    assert store.pointers() == {"latest": "step-00000090", "best": "step-00000005"}


@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_events_loses_what_must_stay(memory: Path, seed: int) -> None:
    dice = random.Random(seed)
    folder, best, tagged = memory / "checkpoints", -1.0, dict[str, str]()
    store = Store(folder, metric="val/accuracy")
    for _ in range(100):
        present = store.checkpoints()
        event = dice.choice(["publish", "publish", "publish", "tag", "untag", "resume", "prune"])
        if event == "publish" or not present:
            step = max(0, (present[-1].step if present else 0) + dice.randint(-3, 3))
            accuracy = dice.choice([float("nan"), dice.random()])
            latest = publish(store, step, accuracy)
            best = max(best, accuracy) if accuracy == accuracy else best
        elif event == "tag":
            name = dice.choice("abc")
            tagged[name] = dice.choice(present).name
            store.tag(name, store.find(tagged[name]))
        elif event == "untag" and tagged:
            store.untag(tagged.popitem()[0])
        elif event == "resume":
            start = dice.choice(present)
            store = Store(folder, keep_last=dice.randint(1, 3), keep_every=dice.choice([0, 5]), metric="val/accuracy")
            store.resumed_from(start)
        elif event == "prune":
            store.prune()
        check_invariants(store)
        assert store.newest_good() == latest
        assert {latest.name, *tagged.values()} <= set(names(store))
        assert best < 0 or store.find("best").meta["metrics"]["val/accuracy"] == best


# Locks and leftovers


def hold_lock(store: Store, ready: int) -> None:
    with store.lock():
        if os.fork() == 0:  # a data worker, say, that outlives its parent
            time.sleep(30)
            os._exit(0)
        os.write(ready, b"x")
        time.sleep(30)


def test_a_second_job_is_refused_until_the_first_is_dead(store: Store) -> None:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        hold_lock(store, send)
    try:
        os.read(receive, 1)
        owner = f"host {socket.gethostname()}, process {child}"
        with pytest.raises(UserError, match=f"checkpoints is in use by {owner}: wait for"), store.lock():
            pass
        publish(store, 10)  # it is the run's lock; readers, tags and pulls need none
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with store.lock():
        pass
    os.killpg(child, signal.SIGKILL)


def test_the_lock_holds_within_a_process_and_is_released(store: Store) -> None:
    with store.lock():
        with pytest.raises(UserError, match="in use by this process"), Store(store.folder).lock():
            pass
        assert in_child(lambda: store.lock().__enter__()) == 1
    assert in_child(lambda: store.lock().__enter__()) == 0


def test_only_what_nobody_owns_is_swept(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    publish(store, 10)
    host, pid = socket.gethostname(), os.getpid()
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    long_ago = time.time() - 25 * 3600
    leftovers = {
        f".tmp-{host}-{pid}-{start}-1000": False,  # ours
        f".tmp-{host}-1-0-0": False,  # alive, on a system that does not tell when it started
        f".tmp-{host}-{pid}-1-0": True,  # an earlier process of the same number
        f".trash-{host}-{2**22 + 1}-5-0": True,  # dead
        f".trash-{host}-{2**22 + 1}-0-0": True,
        f".tmp-other-host-{pid}-5-0": False,  # another host's may be alive
        f".tmp-other-host-{pid}-5-1": True,  # but not after a day
        ".trouble": False,  # not ours at all
    }
    for name in leftovers:
        (store.folder / name).mkdir()
        (store.folder / name / "file").touch()
    os.utime(store.folder / f".tmp-other-host-{pid}-5-1", (long_ago, long_ago))
    (store.folder / f".tmp-{host}-{pid}-1-7").touch()  # a pointer that was about to be replaced

    with store.lock():
        assert hidden(store) == sorted(name for name, swept in leftovers.items() if not swept)
    assert steps(store) == [10]


def test_a_file_system_without_locks_is_used_with_a_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with caplog.at_level(logging.WARNING), store.lock():
        publish(store, 10)
    assert "has no locks (No locks available): a second job on this run would go unnoticed" in caplog.text
