"""The hosts of a job and their slots, from a hostfile, from the command line or from a command that lists them."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..launch.transport import Host

DISCOVER_S = 60  # for a command that lists hosts
FORMS = "'host', 'host:4' or 'host slots=4', where 4 is the number of processes that it takes"

_ENTRY = re.compile(r"(?P<where>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def read_hosts(file: Path) -> list[Host]:
    """The hosts of a hostfile, in its order; `#` starts a comment.

    Raises:
        UserError: if the file cannot be read, names no host or one twice, or has a line that is no host.
    """
    try:
        text = file.read_text("utf-8-sig", errors="replace")
    except OSError as error:
        where = file.absolute()  # the scripts in launch/ start in the project's folder
        raise UserError(f"the hostfile {where} cannot be read ({error.strerror}): give another with --hosts") from error
    hosts = parse_lines(text, str(file))
    if not hosts:
        raise UserError(f"the hostfile {file} names no host: write one a line, as {FORMS}")
    return hosts


def parse_lines(text: str, source: str) -> list[Host]:
    """The hosts of lines, which may be none; `source` is what messages call the text.

    Raises:
        UserError: if a line is no host, or one comes twice.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return list(_parse((f"{source}, line {number}: ", line) for number, line in enumerate(lines, 1) if line))


def parse_hosts(text: str) -> list[Host]:
    """The hosts of a list such as `a:4,b:4`.

    Raises:
        UserError: if an entry is no host, or one comes twice.
    """
    return list(_parse((f"-H {text}: ", entry.strip()) for entry in text.split(",")))


def discover_hosts(command: str) -> list[Host]:
    """The hosts that a command of the shell lists, which may be none.

    Raises:
        UserError: if it fails, or lists something else.
    """
    name = f"--discover '{command}'"
    try:
        done = subprocess.run(
            command, shell=True, check=False, timeout=DISCOVER_S, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} took over {DISCOVER_S} s: try it by hand") from None
    if done.returncode != 0:
        said = done.stderr.strip() or "it says nothing"
        raise UserError(f"{name} ended with {done.returncode} ({said}): try it by hand")
    return parse_lines(done.stdout, name)


def allot(hosts: list[Host], processes: int) -> list[Host]:
    """Give processes to hosts in order: the hosts that get any, with how many in `slots`; no number counts as one.

    Raises:
        UserError: if the hosts have fewer slots than there are processes.
    """
    slots = [host.ranks for host in hosts]
    if processes > sum(slots):
        listed = ", ".join(f"{host.name} {count}" for host, count in zip(hosts, slots, strict=True))
        raise UserError(
            f"{processes} processes do not fit the hosts, which have {sum(slots)} slots ({listed}):"
            " start fewer, add hosts, or raise their slots"
        )
    left = [processes - sum(slots[:number]) for number in range(len(hosts))]
    return [
        replace(host, slots=min(count, rest)) for host, count, rest in zip(hosts, slots, left, strict=True) if rest > 0
    ]


def _parse(entries: Iterable[tuple[str, str]]) -> Iterator[Host]:
    """The hosts of entries, each after where it stands."""
    seen: set[str] = set()
    for place, text in entries:
        try:
            host = _host(text)
        except ValueError as error:
            raise UserError(f"{place}'{text}' {error}: write {FORMS}") from None
        if host.name.lower() in seen:
            raise UserError(f"{place}'{text}' names {host.name} a second time: add the slots up in one entry")
        seen.add(host.name.lower())
        yield host


def _host(text: str) -> Host:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError("is no host")
    name, slots = _split(match["where"])
    if slots is not None and match["slots"] is not None:
        raise ValueError("gives its slots twice")
    return Host(_checked_name(name), _checked_slots(match["slots"] if slots is None else slots))


def _split(where: str) -> tuple[str, str | None]:
    """The name, and what stands behind its last colon; an IPv6 address has colons of its own."""
    if ":" not in where or where.endswith("]") or _address(where):
        return where, None
    name, _, slots = where.rpartition(":")
    return name, slots


def _checked_name(name: str) -> str:
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    address = _address(bare)
    if address is None and not (
        _NAME.fullmatch(name) and all(0 < len(part) < 64 for part in name.rstrip(".").split("."))
    ):
        raise ValueError(f"has no valid host name ('{name}')")
    return str(address or name.rstrip("."))


def _checked_slots(slots: str | None) -> int | None:
    if slots is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,5}", slots):
        raise ValueError(f"has {slots or 'no number of'} slots, which must be a whole number from 1 to 999999")
    return int(slots)


def _address(text: str) -> ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(text)
    except ValueError:
        return None
