"""Addresses of other places, as fsspec has them: which text is one, and that it holds no secret."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl

from .errors import UserError

_URL = re.compile(r"[A-Za-z][\w+.-]*://")
_SECRET = re.compile(r"pass|pwd|secret|token|sig|key|cred|auth", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Whether this is an address for fsspec, such as s3://bucket/run, and not a path."""
    return _URL.match(text.rpartition("::")[2]) is not None


def check_address(text: str) -> None:
    """Refuse an address with a password or token in it, which would be saved with the config and shown in logs.

    Raises:
        UserError: says where credentials belong, without repeating them.
    """
    for scheme, rest in re.findall(r"([A-Za-z][\w+.-]*)://(.*?)(?=::|$)", text):
        if _has_secret(scheme.lower(), rest):
            raise UserError(
                f"an address of {scheme}:// holds a password or token, which would be saved with the run: take it out"
                f" and set FSSPEC_{scheme.upper()}_PASSWORD, or what its file system reads credentials from",
                agreed=True,
            )


def check_addresses(texts: Iterable[str]) -> None:
    """The same for each of some texts, such as a command line.

    Raises:
        UserError: for the first that has one.
    """
    for text in texts:
        check_address(text)


def guarded(command: Callable[[], object]) -> Callable[[], object]:
    """A command that looks at its own line first: Hydra writes lines down before it calls a program."""

    def run() -> object:
        check_addresses(sys.argv[1:])
        return command()

    return run


def _has_secret(scheme: str, rest: str) -> bool:
    """A user's name is none, but where web servers take a token for one."""
    place, _, query = rest.partition("?")
    host, _, path = place.partition("/")
    user, at, _ = host.rpartition("@")
    if not at and "@" in path and re.search(r":(?!\d+$)", host):  # a password with a slash in it
        return True
    if at and (":" in user or scheme in ("http", "https")):
        return True
    return any(_SECRET.search(name) for name, _ in parse_qsl(query.partition("#")[0], keep_blank_values=True))
