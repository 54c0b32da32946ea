"""What somebody tries who is no rank: python stranger.py ADDRESS PORT ... prints what it was told, as JSON.

What it holds open stays open until its input ends.
"""

import json
import os
import socket
import sys

NOBODY = 65534
HUGE = 400 * 10**6
HEADS = [
    "GET /global/0 HTTP/1.1",
    "GET /global/rank_0 HTTP/1.1\r\nJob-Token: 00000000000000000000000000000000",
    "DELETE /global/0 HTTP/1.1\r\nJob-Token: ",
    "HEAD / HTTP/1.1",
    "GET /../../etc/passwd HTTP/1.0",
    f"PUT /global/0 HTTP/1.1\r\nContent-Length: {HUGE}",
]
GARBAGE = [b"\0" * 48, b"\xff" * 100_000, b"\0" * 24, b"\r\n\r\n", b"x", b""]
HELD = 40


def ask(address: str, port: int, said: bytes, more: int = 0) -> str:
    """Say something, then so many bytes more while they are taken; what the answer is, in hexadecimal digits."""
    with socket.create_connection((address, port), timeout=2) as call:
        try:
            call.sendall(said)
            while more > 0:
                more -= call.send(bytes(2**16))
            call.shutdown(socket.SHUT_WR)
            return call.recv(65536).hex()
        except OSError as error:
            assert more != 0 or not isinstance(error, TimeoutError), f"{said[:50]!r} holds the line"
            return ""


def attack(address: str, ports: list[int]) -> tuple[list[str], list[socket.socket]]:
    """All answers, and the connections that are left open."""
    answers, held = [], []
    for port in ports:
        try:
            held += [socket.create_connection((address, port), timeout=2) for _ in range(HELD)]
            for call in held[-HELD // 2 :]:
                call.send(b"half a nonce"[:7])
            for head in HEADS:
                answers.append(ask(address, port, f"{head}\r\n\r\n".encode(), HUGE if "PUT" in head else 0))
            answers += [ask(address, port, garbage) for garbage in GARBAGE]
        except OSError:  # not reached, or closed by now
            continue
    return answers, held


def main(address: str, *ports: str) -> None:
    """Attack as nobody, where that is possible."""
    if os.geteuid() == 0:
        socket.getaddrinfo(address, 0)  # what it imports may be readable by root alone
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    answers, held = attack(address, [int(port) for port in ports])
    print(json.dumps([answers, len(held)]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
