"""The store where the ranks of a job over Gloo meet: what it keeps, and whom it does not answer."""

import os
import socket
from collections.abc import Iterator

import pytest
from stranger import GARBAGE, HEADS, HUGE, ask

from my_training.launch import rendezvous
from my_training.launch.rendezvous import MOST_CALLS, Rendezvous
from my_training.ranks import SETTINGS

HERE = "127.0.0.1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(rendezvous, "POLL_S", 0.01)
    made = Rendezvous(HERE, 3, ["global", "local_node-1", "cross_0"])
    yield made
    made.stop()


def ask_as_rank(store: Rendezvous, request: str, value: bytes = b"") -> tuple[int, bytes]:
    """The status and the value; 0 where nobody answers."""
    token = store.secrets["HOROVOD_GLOO_TOKEN"]
    head = f"{request} HTTP/1.1\r\nJob-Token: {token}\r\nHost: {HERE}\r\nContent-Length: {len(value)}\r\n\r\n"
    said, _, answer = bytes.fromhex(ask(HERE, store.port, head.encode() + value)).partition(b"\r\n\r\n")
    return int(said.split()[1]) if said else 0, answer


def test_ranks_put_get_and_delete(store: Rendezvous) -> None:
    assert ask_as_rank(store, "GET /global/1") == (404, b"")
    assert ask_as_rank(store, "PUT /global/1", b"\0\r\n\r\n address") == (200, b"")
    assert ask_as_rank(store, "GET /global/1") == (200, b"\0\r\n\r\n address")
    assert ask_as_rank(store, "GET /local_node-1/1") == (404, b"")
    assert ask_as_rank(store, "PUT /cross_0_process_set_hash_7fa0/rank_2", b"") == (200, b"")
    assert ask_as_rank(store, "DELETE /global/1") == (200, b"")
    assert ask_as_rank(store, "GET /global/1") == (404, b"")


def test_a_value_is_kept_as_it_is(store: Rendezvous) -> None:
    assert ask_as_rank(store, "PUT /global/0", b"first") == (200, b"")
    assert ask_as_rank(store, "PUT /global/0", b"first") == (200, b"")
    assert ask_as_rank(store, "PUT /global/0", b"other") == (409, b"")
    assert ask_as_rank(store, "GET /global/0") == (200, b"first")
    assert ask_as_rank(store, "DELETE /global/0")[0] == 200  # all have met, and may meet again
    assert ask_as_rank(store, "PUT /global/0", b"other") == (200, b"")


@pytest.mark.parametrize(
    "wish",
    ["GET /global/3", "GET /global/x", "GET /else/0", "GET /global/0/1", "GET /global/0?", "POST /global/0", "HEAD /"],
)
def test_names_and_verbs_of_horovod_alone(store: Rendezvous, wish: str) -> None:
    assert ask_as_rank(store, wish) == (400, b"")


def test_sizes_have_limits(store: Rendezvous) -> None:
    assert ask_as_rank(store, "PUT /global/0", bytes(4096)) == (200, b"")
    assert ask_as_rank(store, "PUT /global/1", bytes(10**6))[0] in (0, 413)  # it may hang up before all is said
    names = [f"/global_process_set_hash_{number:x}/0" for number in range(99)]
    statuses = [ask_as_rank(store, f"PUT {name}", bytes(4096))[0] for name in names]
    assert [statuses[0], statuses[-1]] == [200, 413]
    assert ask_as_rank(store, "GET /global/1") == (404, b"")


def test_a_stranger_is_told_nothing(store: Rendezvous) -> None:
    ask_as_rank(store, "PUT /global/0", b"secret")
    for head in HEADS:
        assert ask(HERE, store.port, f"{head}\r\n\r\n".encode(), HUGE if "PUT" in head else 0) == ""
    assert [ask(HERE, store.port, garbage) for garbage in GARBAGE] == [""] * len(GARBAGE)
    assert ask_as_rank(store, "GET /global/0") == (200, b"secret")


def test_it_listens_at_its_own_address_alone(store: Rendezvous) -> None:
    with pytest.raises(ConnectionRefusedError):
        ask("127.0.0.2", store.port, b"")


def test_silent_connections_keep_nobody_out_and_end(store: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [socket.create_connection((HERE, store.port), timeout=30) for _ in range(MOST_CALLS + 50)]
    silent[-1].send(b"GET /global")
    assert ask_as_rank(store, "GET /global/0") == (404, b"")
    monkeypatch.setattr(rendezvous, "IDLE_S", 0.1)
    for call in silent:
        assert call.recv(1) == b""
        call.close()


def test_nothing_is_left_of_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        store = Rendezvous(HERE, 2, ["global"])
        with socket.create_connection((HERE, store.port)):
            store.stop()
        with pytest.raises(ConnectionRefusedError):
            ask(HERE, store.port, b"")
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_knows_who_is_missing(store: Rendezvous) -> None:
    assert store.absent() == []  # nobody has come: these ranks may do without Horovod
    ask_as_rank(store, "PUT /global/2", b"here")
    assert store.absent() == [0, 1]
    ask_as_rank(store, "DELETE /global/2")
    assert store.absent() == [0, 1]


def test_gloo_waits_as_long_as_the_option_says() -> None:
    (convert,) = (convert for _, name, convert in SETTINGS if name == "HOROVOD_GLOO_TIMEOUT_SECONDS")
    assert [convert(300), convert(3), convert(0)] == [300, 30, 30 * 86400]  # no less than its own limit; 0: never
