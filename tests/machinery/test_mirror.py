"""The mirror: uploads that are whole or invisible, and downloads that are verified."""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from jobs import environment
from moto.server import ThreadedMotoServer
from omegaconf import OmegaConf
from store_helpers import content, edit_manifest, flip_byte, names, publish
from waiting import wait_until

from my_training.addresses import check_address, is_url
from my_training.checkpoints import mirror as module
from my_training.checkpoints.command import main
from my_training.checkpoints.mirror import Mirror, Remote, download
from my_training.checkpoints.store import DamagedError, Store
from my_training.errors import UserError
from my_training.options import check_options

_number = itertools.count()


class Unreliable(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose uploads fail, or wait, as a test wishes; its files are memory://'s."""

    protocol = "unreliable"
    before_upload: Callable[[str], None] = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("unreliable://", "memory://")))

    def put_file(self, local: str, remote: str, **options: Any) -> None:
        type(self).before_upload(remote)
        super().put_file(local, remote, **options)


class Connecting(Unreliable):
    """It connects when it is opened, as those of FTP and SFTP do."""

    protocol = "connecting"
    connect: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        type(self).connect()
        super().__init__(*arguments, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return Unreliable._strip_protocol(path.replace("connecting://", "memory://"))


fsspec.register_implementation("unreliable", Unreliable)
fsspec.register_implementation("connecting", Connecting)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A real S3 server on this machine, reached by HTTP."""
    server = ThreadedMotoServer(port=0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Addresses at which nothing is yet."""
    if request.param == "file":
        return f"file://{tmp_path}/the mirror ü"
    if request.param == "memory":
        return f"memory://mirror-{next(_number)}/run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{next(_number)}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/runs/erster lauf"


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(lambda path: None))
    return f"unreliable://mirror-{next(_number)}/run"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", metric="val/accuracy")


def files(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    found = system.find(root) if system.exists(root) else []
    return {path.removeprefix(root).lstrip("/"): system.cat_file(path) for path in found}


def corrupt(url: str, name: str) -> None:
    system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    system.pipe_file(f"{root}/{name}", b"x" * system.info(f"{root}/{name}")["size"])


def test_there_and_back(store: Store, url: str, tmp_path: Path) -> None:
    mirror = Mirror(url, store)
    for step, accuracy in ((10, 0.9), (20, 0.5)):
        checkpoint = publish(store, step, accuracy)
        store.tag("production", checkpoint)
        mirror.upload(checkpoint)
        wait_until(lambda: not store.pinned, "the end of an upload")
    mirror.close()
    assert Remote(url).names() == ["step-00000010", "step-00000020"]

    for number, (which, step) in enumerate(
        {"latest": 20, "best": 10, "production": 20, "10": 10, "step-00000010": 10}.items()
    ):
        folder = tmp_path / f"other machine {number}"
        fetched = download(url, folder, which)
        assert fetched.step == step
        assert Store(folder).verify(fetched) == []
        assert Store(folder).newest_good() == fetched
        assert (fetched.folder / "rng" / "rank-0.bin").read_bytes() == b"r" * 100
        assert fetched.meta == store.find(step).meta
    assert download(f"{url}/best", tmp_path / "a").step == 10
    assert download(f"{url}/tags/production", tmp_path / "b").step == 20
    assert download(f"{url}/step-00000010", tmp_path / "c").step == 10
    assert download(f"{url}/", tmp_path / "d").step == 20
    with pytest.raises(UserError, match=r"no good checkpoint '30' at .*: there are step-00000010, step-00000020$"):
        download(url, tmp_path / "e", "30")


def test_what_is_there_is_not_fetched_or_sent_again(store: Store, url: str) -> None:
    checkpoint = publish(store, 10)
    Remote(url).push(store, checkpoint)
    before = files(url)
    Remote(url).push(store, checkpoint)
    assert files(url) == before
    assert download(url, store.folder) == checkpoint
    assert names(store) == ["step-00000010"]
    flip_byte(checkpoint.folder / "model.bin")
    assert download(url, store.folder).name == "step-00000010.1"


def test_a_damaged_download_is_noticed_and_the_one_before_taken(
    store: Store, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        Remote(url).push(store, publish(store, step))
    corrupt(url, "step-00000020/model.bin")
    with pytest.raises(DamagedError, match=r"step-00000020 arrived damaged .model.bin was altered"):
        download(url, tmp_path / "other", "20")
    assert download(url, tmp_path / "other").step == 10
    assert "step-00000020 arrived damaged" in caplog.text
    assert names(Store(tmp_path / "other")) == ["step-00000010"]
    corrupt(url, "step-00000010/model.bin")
    with pytest.raises(UserError, match="no good checkpoint 'latest'"):
        download(url, tmp_path / "third")


def test_nothing_there(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no good checkpoint 'latest' at .*: there are none"):
        download(url, tmp_path / "other")


def test_a_half_upload_is_no_checkpoint(store: Store, unreliable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(path: str) -> None:
        if path.endswith("train_state.json"):
            raise ConnectionError("cut")

    Remote(unreliable).push(store, publish(store, 10))
    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(cut))
    with pytest.raises(UserError, match="could not be written: cut"):
        Remote(unreliable).push(store, publish(store, 20))
    assert "step-00000020/model.bin" in files(unreliable)
    assert Remote(unreliable).names() == ["step-00000010"]
    assert files(unreliable)["latest"] == b"step-00000010\n"


def test_the_manifest_comes_after_the_files_and_the_pointers_last(
    store: Store, unreliable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(lambda path: seen.append(set(files(unreliable)))))
    Remote(unreliable).push(store, publish(store, 10))
    assert len(seen) == 4
    assert not any(name.endswith(("MANIFEST.json", "latest")) for there in seen for name in there)
    assert {"latest", "step-00000010/MANIFEST.json"} <= set(files(unreliable))


def test_it_tries_again_and_never_stops_the_training(
    store: Store, unreliable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([ConnectionError("no route")] * 3)

    def fail_thrice(path: str) -> None:
        for error in failures:
            raise error

    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(fail_thrice))
    mirror = Mirror(unreliable, store, attempts=2, pause=0.01)
    mirror.upload(publish(store, 10))
    wait_until(lambda: "attempt 2 of 2" in caplog.text, "a second attempt")
    mirror.upload(publish(store, 20))
    mirror.close()
    assert "no route, attempt 1 of 2" in caplog.text
    assert Remote(unreliable).names() == ["step-00000020"]


def test_one_that_cannot_be_opened_is_a_warning_and_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With each next checkpoint, and once more at the end; opening it is part of each attempt."""
    down = Event()
    down.set()

    def connect() -> None:
        if down.is_set():
            raise ConnectionRefusedError("nobody answers")

    monkeypatch.setattr(Connecting, "connect", staticmethod(connect))
    url = f"connecting://mirror-{next(_number)}/run"
    mirror = Mirror(url, store, attempts=2, pause=0.01)
    for step in (10, 20):
        mirror.upload(publish(store, step))
        wait_until(lambda: "nobody answers, attempt 2 of 2" in caplog.text, "a last attempt")
        caplog.clear()
    down.clear()
    mirror.close()
    assert Remote(url).names() == ["step-00000020"]
    assert store.pinned == set()


def test_one_that_never_answers_holds_nothing_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = Event()
    monkeypatch.setattr(Connecting, "connect", staticmethod(lambda: answer.wait(30)))
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    url = f"connecting://mirror-{next(_number)}/run"
    mirror = Mirror(url, store, attempts=2, pause=0.01)
    mirror.upload(publish(store, 10))
    wait_until(lambda: "no answer within 0 s, attempt 2 of 2" in caplog.text, "a second attempt")
    with pytest.raises(UserError, match="could not be read: no answer within"):
        download(url, store.folder.parent / "other")
    answer.set()
    mirror.close()
    assert Remote(url).names() == ["step-00000010"]


def test_it_falls_behind_without_blocking_or_losing_what_it_uploads(
    store: Store, unreliable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, started = Event(), Event()

    def wait(path: str) -> None:
        started.set()
        go_on.wait(10)

    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(wait))
    mirror = Mirror(unreliable, store)
    for step in (10, 20, 30, 40, 50, 60):
        mirror.upload(publish(store, step))
        started.wait(10)
    assert "the mirror is behind: step-00000020 gives way to step-00000030" in caplog.text
    assert names(store) == ["step-00000010", "step-00000040", "step-00000050", "step-00000060"]
    go_on.set()
    mirror.close()
    assert Remote(unreliable).names() == ["step-00000010", "step-00000060"]
    assert store.pinned == set()


def test_closing_waits_only_so_long(
    store: Store, unreliable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = Event()
    monkeypatch.setattr(Unreliable, "before_upload", staticmethod(lambda path: go_on.wait(10)))
    mirror = Mirror(unreliable, store)
    mirror.upload(publish(store, 10))
    mirror.close(timeout=0.1)
    assert "not everything reached unreliable://" in caplog.text
    go_on.set()
    mirror.close()


def test_the_best_is_uploaded_even_if_it_was_skipped(store: Store, url: str) -> None:
    publish(store, 10, 0.9)
    Remote(url).push(store, publish(store, 20, 0.1))
    assert Remote(url).names() == ["step-00000010", "step-00000020"]


def test_another_runs_checkpoints_are_left_alone(store: Store, url: str, tmp_path: Path) -> None:
    Remote(url).push(store, publish(store, 10))
    other = Store(tmp_path / "other")
    before = files(url)
    with pytest.raises(UserError, match="holds another run's step-00000010: give each run an address of its own"):
        Remote(url).push(other, publish(other, 10, write=content(byte=b"z")))
    assert files(url) == before


def test_a_manifest_cannot_write_outside(store: Store, tmp_path: Path) -> None:
    evil = publish(store, 10)
    edit_manifest(evil.folder, files={"../../evil": {"size": 1, "sha256": ""}})
    shutil.copytree(evil.folder, tmp_path / "mirror" / evil.name)
    (tmp_path / "evil").write_text("x")
    with pytest.raises(DamagedError, match="which lies outside"):
        download(f"file://{tmp_path}/mirror", tmp_path / "a" / "b", "10")
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b"]


def test_addresses_are_checked_before_the_network(store: Store) -> None:
    with pytest.raises(UserError, match="nonsense://x cannot be used: Protocol not known"):
        Mirror("nonsense://x", store)
    fsspec.register_implementation("absent", "no_such_module.System", errtxt="Install no-such-module", clobber=True)
    with pytest.raises(UserError, match="absent://x cannot be used: Install no-such-module"):
        Mirror("absent://x", store)
    assert is_url("s3://x") and is_url("file:///x")
    assert not is_url("runs/first") and not is_url("latest")


SECRETS = (
    "ftp://user:geheim@host/x",
    "sftp://user:ge/heim@host/x",
    "https://geheim@host/x",
    "https://host/x?token=geheim",
    "https://host/x?v=1&X-Amz-Signature=geheim",
    "abfs://box@account/x?sig=geheim",
    "simplecache::ftp://user:geheim@host/x",
    "s3://KEY:geheim@bucket/x",
    "s3://bucket/x?api_key=geheim",
)
FINE = ("s3://bucket/run", "sftp://user@host:22/run", "file:///a/b:c@d", "abfs://box@account/run", "http://h/x?v=2")


@pytest.mark.parametrize("url", SECRETS)
def test_an_address_with_a_secret_is_refused_before_it_is_written_anywhere(
    url: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = publish(store, 10)
    run = str(store.folder)
    actions: list[Callable[[], object]] = [
        lambda: Mirror(url, store),
        lambda: Remote(url).push(store, checkpoint),
        lambda: download(url, store.folder),
        lambda: check_options(OmegaConf.create({"checkpoint": {"mirror": url}})),
        lambda: check_options(OmegaConf.create({"resume": url})),
        lambda: check_options(OmegaConf.create({"list": [{"of": url}]})),
    ]
    for action in actions:
        with pytest.raises(UserError, match=r"password or token.*: take it out and set FSSPEC_") as caught:
            action()
        assert "geheim" not in str(caught.value)
    for command in (["push", run, url], ["pull", url, run]):
        with pytest.raises(UserError) as caught:
            main(command)
        assert "geheim" not in "".join([*capsys.readouterr(), str(caught.value)])


@pytest.mark.parametrize("url", FINE)
def test_other_addresses_pass(url: str) -> None:
    check_address(url)


@pytest.mark.parametrize("options", [[], ["--multirun"]])
def test_hydra_does_not_write_it_down_either(options: list[str], tmp_path: Path) -> None:
    module = "my_training.train"
    command = [sys.executable, "-m", module, *options, f"resume={SECRETS[0]}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: an address of ftp:// holds a password")
    assert "geheim" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match="s3://bucket/run could not be read: "):
        download("s3://bucket/run", tmp_path)
