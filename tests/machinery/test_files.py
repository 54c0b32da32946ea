"""Files that are no files, in each place of a store and model folder: nothing waits, follows or reads without end.

And the rights of those that are written.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import compose_config, environment
from store_helpers import publish

from my_training.checkpoints import manifest
from my_training.checkpoints.command import main
from my_training.checkpoints.mirror import download
from my_training.checkpoints.store import Store
from my_training.errors import UserError
from my_training.export import model_folder
from my_training.export.command import export
from my_training.train import train
from my_training.train_state import read_train_state
from my_training.trust import read_config

Maker = Callable[[Path], object]


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        pytest.skip("only root may make a device")


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def link(path: Path) -> None:
    """To what was there, so that only following it gives it away."""
    path.symlink_to(path.with_name(f"{path.name}-before").resolve())


KINDS: dict[str, Maker] = {
    "FIFO": os.mkfifo,
    "device": device,
    "socket": bind,
    "link": link,
    "endless link": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
}


def replace(path: Path, make: Maker, keep: Path) -> Path:
    """Put something else in the place of a file or folder; returns where that lies now."""
    before = keep / f"{path.name}-before"
    path.rename(before)
    if make is link:
        path.symlink_to(before)
    else:
        make(path)
    return before


def ends(action: Callable[[], object], seconds: float = 10) -> None:
    """Run in a process of its own; what has not ended well by then fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.005)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail(f"it still ran after {seconds} s")
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def refused(action: Callable[[], object], words: str = "") -> None:
    with pytest.raises(UserError, match=words) as caught:
        action()
    assert "\n" not in str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run" / "checkpoints", metric="val/accuracy")
    for step, accuracy in ((10, 0.9), (20, 0.8)):
        store.tag("good", publish(store, step, accuracy))
    return tmp_path / "run"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["MANIFEST.json", "meta.json", "model.bin", "rng/rank-0.bin", "rng", "extra", ""])
def test_a_checkpoint_with_it_is_damaged(run: Path, kind: str, name: str, tmp_path: Path) -> None:
    store = Store(run / "checkpoints", metric="val/accuracy")
    place = store.folder / "step-00000020" / name
    if (kind, name) in (("folder", "extra"), ("folder", "rng")):
        return  # an empty folder says nothing
    if name == "extra":
        place.touch()
    replace(place, KINDS[kind], tmp_path)

    def check() -> None:
        listed = bool(name) or kind in ("link", "folder")  # what is no folder is no checkpoint
        for command in (["list"], ["list", "--verify"], ["show"], ["verify"], ["diff"], ["push"], ["tag"]):
            extra = {"diff": ["10", "20"], "push": [f"file://{tmp_path}/mirror", "20"], "tag": ["new", "20"]}
            try:
                code = main([command[0], str(run), *command[1:], *extra.get(command[0], [])])
            except UserError as error:
                code = error.code
            wanted = {"verify": 1, "diff": 2, "push": 2, "tag": 2}.get(command[0], 0)
            assert not listed or code == wanted, (command, code)
        refused(lambda: store.find_good(20), "damaged|there is no")
        newest = store.newest_good()
        assert newest is not None and newest.step == 10
        with store.lock():
            publish(store, 30)
            assert store.newest_good() == store.find("latest") == store.find(30)

    ends(check)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["latest", "best", "tags/good", "tags", ".lock", ".change"])
def test_a_pointer_or_lock_of_it_is_refused_and_what_it_leads_to_stays(
    run: Path, kind: str, name: str, tmp_path: Path
) -> None:
    store = Store(run / "checkpoints", metric="val/accuracy")
    with store.lock():
        pass
    if (kind, name) == ("folder", "tags"):
        return
    before = replace(store.folder / name, KINDS[kind], tmp_path)
    there = [] if before.is_dir() else [before.read_bytes()]

    def check() -> None:
        if name == "tags":
            refused(lambda: store.find("good"), "no tag can be used")
            refused(lambda: store.lock().__enter__())
            return
        assert main(["list", str(run)]) == 0
        assert main(["verify", str(run)]) == 0
        if name in ("latest", "best", "tags/good"):
            refused(lambda: store.find(Path(name).name), "there is no checkpoint")
        if name == ".lock":
            refused(lambda: store.lock().__enter__(), r"\.lock cannot be the lock of a run")
        elif name == ".change":
            refused(lambda: store.tag("good", store.find(10)), "in the way")
        elif kind == "folder" and name in ("latest", "best"):
            refused(lambda: store.lock().__enter__(), "could not be written")
        else:
            with store.lock():
                assert store.find("latest").step == 20
        newest = store.newest_good()
        assert newest is not None and newest.step == 20

    ends(check)
    assert there == ([] if before.is_dir() else [before.read_bytes()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_mirror_on_this_machine_is_no_better(run: Path, kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    assert main(["push", str(run), url, "10"]) == 0
    shutil.copytree(tmp_path / "mirror", tmp_path / "other")
    (tmp_path / "kept").mkdir()
    for number, name in enumerate(("step-00000020/MANIFEST.json", "step-00000020/model.bin")):
        mirror = tmp_path / f"mirror-{number}"
        shutil.copytree(tmp_path / "mirror", mirror)
        replace(mirror / name, KINDS[kind], tmp_path / "kept")

        def check(mirror: Path = mirror) -> None:
            refused(lambda: download(f"file://{mirror}", tmp_path / "new", "20"))
            assert download(f"file://{mirror}", tmp_path / "newest").step == 10

        ends(check)
        shutil.rmtree(tmp_path / "newest")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_folder_and_single_files(kind: str, tmp_path: Path) -> None:
    for name in ("model.json", "model.safetensors", "MANIFEST.json"):
        folder = tmp_path / name
        folder.mkdir()
        description = {"format": 1, "model": {"_target_": "x"}, "data": {"shape": [1]}}
        (folder / "model.json").write_text(json.dumps(description))
        (folder / "model.safetensors").write_bytes(b"w")
        manifest.seal(folder)
        assert model_folder.data_shape(folder) == (1,)
        replace(folder / name, KINDS[kind], tmp_path)
        ends(lambda folder=folder: refused(lambda: model_folder.data_shape(folder), "is damaged"))  # type: ignore[misc]
    for name, read in (("config.yaml", read_config), ("train_state.json", lambda file: read_train_state(file.parent))):
        (tmp_path / name).write_text("{}")
        replace(tmp_path / name, KINDS[kind], tmp_path)
        ends(lambda name=name, read=read: refused(lambda: read(tmp_path / name)))  # type: ignore[misc]


def test_a_store_may_be_reached_by_a_link_but_has_none_inside(run: Path, tmp_path: Path) -> None:
    """Runs are linked to other disks; a link inside would lead a reader or a push out of the store."""
    (tmp_path / "linked").symlink_to(run)
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert main(["verify", str(tmp_path / "linked")]) == 0
    store = Store(tmp_path / "linked" / "checkpoints")
    with store.lock():
        publish(store, 30)
    (tmp_path / "favourite").symlink_to(store.folder / "step-00000010")
    assert store.verify(store.find(str(tmp_path / "favourite"))) == []

    (store.folder / "step-00000040").symlink_to(tmp_path / "scratch" / "step-00000010")
    problem = "is a link, not a folder"
    assert problem in str(store.verify(store.find(40)))
    newest = store.newest_good()
    assert newest is not None and newest.step == 30


def test_what_is_read_whole_has_a_limit(run: Path) -> None:
    """Sparse files cost a stranger nothing."""
    store = Store(run / "checkpoints")
    for name in ("MANIFEST.json", "meta.json", "latest"):
        folder = store.folder if name == "latest" else store.find(20).folder
        os.truncate(folder / name, 2**40)
        if name == "meta.json":
            entry = {"size": 2**40, "sha256": "0" * 64}
            sealed = json.loads((folder / "MANIFEST.json").read_text())
            (folder / "MANIFEST.json").write_text(json.dumps({**sealed, "files": {**sealed["files"], name: entry}}))
        ends(lambda: main(["list", str(run)]) and pytest.fail())
        shutil.rmtree(run)
        for step in (10, 20):
            publish(store, step)
    config = run / "config.yaml"
    config.write_text("a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdef")))
    refused(lambda: read_config(config), "is no readable config")
    os.truncate(config, 2**40)
    ends(lambda: refused(lambda: read_config(config), "cannot be read: it has"))


def test_a_manifest_names_only_what_lies_inside(run: Path) -> None:
    store = Store(run / "checkpoints")
    folder = store.find(20).folder
    sealed = json.loads((folder / "MANIFEST.json").read_text())
    for name in ("../latest", "/etc/passwd", "rng/../../latest", "", ".", "rng/", "a//b", "./model.bin", "a\0b"):
        files = {**sealed["files"], name: {"size": 1, "sha256": ""}}
        (folder / "MANIFEST.json").write_text(json.dumps({**sealed, "files": files}))
        assert f"it names {name!r}, which lies outside" in str(store.verify(store.find(20))).replace("\\\\", "\\")


def test_a_pointer_leads_nowhere_but_into_the_store(run: Path, tmp_path: Path) -> None:
    """A push sends what tags name: not another run's checkpoint."""
    secret = Store(tmp_path / "secret" / "checkpoints")
    publish(secret, 70)
    store = Store(run / "checkpoints")
    for target in (f"{secret.folder}/step-00000070", "../../secret/checkpoints/step-00000070"):
        (store.folder / "tags" / "good").write_text(target)
        refused(lambda: store.find("good"), "which is gone")
        assert main(["push", str(run), f"file://{tmp_path}/mirror"]) == 0
        assert not list((tmp_path / "mirror").rglob("*70*"))


def test_the_command_ends_on_a_fifo(run: Path) -> None:
    file = run / "checkpoints" / "step-00000020" / "MANIFEST.json"
    file.unlink()
    os.mkfifo(file)
    module = "my_training.checkpoints"
    command = [sys.executable, "-m", module, "verify", str(run)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "MANIFEST.json cannot be read: it is a FIFO, not a file" in done.stdout


def test_a_run_and_its_export_follow_the_umask(tmp_path: Path) -> None:
    """Libraries write weights for their owner alone, and a temporary folder is one's own too."""
    before = os.umask(0o027)
    try:
        train(compose_config("epochs=1", "model.hidden=[4]", "tracking.tensorboard=false"), tmp_path / "run")
        export(tmp_path / "run", "best", tmp_path / "model", "folder")
    finally:
        os.umask(before)
    made = [*tmp_path.rglob("*")]
    assert [path.name for path in made].count("model.safetensors") == 2
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
