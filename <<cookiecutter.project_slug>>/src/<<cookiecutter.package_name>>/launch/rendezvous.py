"""Where the ranks of a job over Gloo learn each other's addresses: a store for them alone.

Horovod's C++ speaks to it by HTTP, one request a connection: GET, PUT and DELETE of /scope/key, with the job's token in
a header (scripts/build_horovod.py adds that). Whoever does not know the token is hung up on without a word.
"""

from __future__ import annotations

import hmac
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

POLL_S = 0.1
IDLE_S = 5.0  # for a whole request
MOST_CALLS = 256  # at a time: one more, and the first one is hung up on
MOST_HEAD = 4096  # bytes of a request before its value
MOST_VALUES = 16  # for each rank

_TOKEN = re.compile(rb"\r\nJob-Token: ([0-9a-f]+)\r\n")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,9})(?:\r\n|$)")
_REQUEST = re.compile(rb"(GET|PUT|DELETE) /([^/ ]+)/((?:rank_)?(\d{1,6})) HTTP/1\.1\r\n")
_PROCESS_SET = re.compile("_process_set_hash_[0-9a-f]{1,16}$")


@dataclass
class _Call:
    """A connection: what was heard on it since when, and what is still to be said."""

    socket: socket.socket
    since: float
    heard: bytes = b""
    reply: bytes = b""


class Rendezvous:
    """The store of one job, at `address` and `port`; its ranks need the variables `secrets`.

    Args:
        address: An IPv4 address of this host.
        size: The number of ranks.
        scopes: The groups that they meet in, as Horovod names them; `global` is that of all.
    """

    def __init__(self, address: str, size: int, scopes: Iterable[str]) -> None:
        self.address, self._token = address, secrets.token_hex(16)
        # The token goes over the network as it is. The ranks' connections have a key that never does.
        self.secrets = {"HOROVOD_GLOO_TOKEN": self._token, "HOROVOD_GLOO_KEY": secrets.token_hex(16)}
        self._size, self._scopes = size, set(scopes)
        self._most = 4096 + 256 * size  # bytes of a value: an address of 136 bytes for each other rank
        self._values: dict[tuple[str, str], bytes] = {}
        self._arrived: set[int] = set()
        self._calls: dict[int, _Call] = {}  # by file descriptor, the first one first
        self._stopped = threading.Event()
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def absent(self) -> list[int]:
        """The ranks that others wait for: none as long as nobody has come, since a job may do without Horovod."""
        arrived = self._arrived.copy()
        return [rank for rank in range(self._size) if arrived and rank not in arrived]

    def stop(self) -> None:
        """Hang up on everyone and give the port back."""
        self._stopped.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            for event, _ in self._selector.select(POLL_S):
                if event.fileobj is self._listener:
                    self._accept()
                elif event.fd in self._calls:
                    self._attend(self._calls[event.fd])
            now = time.monotonic()
            for call in [call for call in self._calls.values() if now - call.since > IDLE_S]:
                self._hang_up(call)
        for call in list(self._calls.values()):
            self._hang_up(call)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            caller = self._listener.accept()[0]
        except OSError:  # gone again, or this process has no file descriptor left
            caller = None
        if self._calls and (caller is None or len(self._calls) >= MOST_CALLS):
            self._hang_up(next(iter(self._calls.values())))
        if caller is not None:
            caller.setblocking(False)
            self._calls[caller.fileno()] = _Call(caller, time.monotonic())
            self._selector.register(caller, selectors.EVENT_READ)

    def _hang_up(self, call: _Call) -> None:
        del self._calls[call.socket.fileno()]
        self._selector.unregister(call.socket)
        call.socket.close()

    def _attend(self, call: _Call) -> None:
        """Go on with a call as far as it goes now."""
        try:
            if not call.reply:
                self._listen(call)
            if call.reply:
                call.reply = call.reply[call.socket.send(call.reply) :]
                if not call.reply:
                    raise ConnectionError("all is said")
                self._selector.modify(call.socket, selectors.EVENT_WRITE)
        except BlockingIOError:
            return
        except (ConnectionError, OSError):
            self._hang_up(call)

    def _listen(self, call: _Call) -> None:
        """Hear more of a request, and prepare the reply once it is whole.

        Raises:
            ConnectionError: if there is nobody to answer.
        """
        chunk = call.socket.recv(65536)
        call.heard += chunk
        head, end, value = call.heard.partition(b"\r\n\r\n")
        if not chunk or len(head) > MOST_HEAD:
            raise ConnectionError("no request")
        if not end:
            return
        token, length = _TOKEN.search(head), _LENGTH.search(head)
        if token is None or not hmac.compare_digest(token[1], self._token.encode()):
            raise ConnectionError("a stranger")
        size = int(length[1]) if length else 0
        if size > self._most or len(value) >= size:
            status, answer = self._answer(head, value) if size <= self._most else (413, b"")
            call.reply = f"HTTP/1.1 {status} -\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer

    def _answer(self, head: bytes, value: bytes) -> tuple[int, bytes]:
        """The status and the value for a request of a rank."""
        request = _REQUEST.match(head)
        if request is None:
            return 400, b""
        verb, scope, key, rank = (part.decode(errors="replace") for part in request.groups())
        if _PROCESS_SET.sub("", scope) not in self._scopes or int(rank) >= self._size:
            return 400, b""
        if verb == "GET":
            found = self._values.get((scope, key))
            return (404, b"") if found is None else (200, found)
        if verb == "DELETE":  # Horovod deletes a rank once all have met, and the rank may come again later
            for name in (rank, f"rank_{rank}"):
                self._values.pop((scope, name), None)
            return 200, b""
        return self._keep((scope, key), value), b""

    def _keep(self, name: tuple[str, str], value: bytes) -> int:
        """Keep a value, which nobody may change; the status."""
        if self._values.get(name, value) != value:
            return 409
        if sum(map(len, self._values.values())) + len(value) > MOST_VALUES * self._size * self._most:
            return 413
        self._values[name] = value
        if name[0] == "global" and name[1].isdecimal():
            self._arrived.add(int(name[1]))
        return 200
