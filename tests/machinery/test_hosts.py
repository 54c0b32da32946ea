"""Hostfiles, lists of hosts, and processes given to hosts."""

from pathlib import Path

import pytest

from my_training.cluster.hosts import allot, parse_hosts, read_hosts
from my_training.errors import UserError
from my_training.launch.transport import Host

HOSTFILE = """\ufeff# the cluster\r
node-1

node-2:4           # two dots would be an address
node-3   slots=8
node-4 slots = 2\t# trailing
10.0.0.5:1
fe80::1
[::1]:4
::2 slots=4
[::3] slots=1
   # the end"""


def test_every_form_of_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(HOSTFILE, encoding="utf-8")
    assert [(host.name, host.slots) for host in read_hosts(tmp_path / "hosts")] == [
        ("node-1", None),
        ("node-2", 4),
        ("node-3", 8),
        ("node-4", 2),
        ("10.0.0.5", 1),
        ("fe80::1", None),
        ("::1", 4),
        ("::2", 4),
        ("::3", 1),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a:x", "'a:x' has x slots, which must be a whole number from 1 to 999999: write 'host', 'host:4'"),
        ("a:0", "has 0 slots"),
        ("a:", "has no number of slots"),
        ("a slots=-1", "has -1 slots"),
        ("a slots 4", "is no host"),
        ("a:4 slots=4", "gives its slots twice"),
        ("-oProxyCommand=x", "has no valid host name ('-oProxyCommand=x')"),
        ("n::4", "has no valid host name ('n:')"),
        ("[zz]:4", "has no valid host name ('[zz]')"),
        ("NODE:2", "names NODE a second time: add the slots up in one entry"),
    ],
)
def test_an_error_names_file_line_and_text(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"node:1\n\n{line}  # bad\n")
    with pytest.raises(UserError) as caught:
        read_hosts(file)
    assert str(caught.value).startswith(f"{file}, line 3: '{line}' ")
    assert words in str(caught.value)


def test_files_without_hosts(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UserError, match="names no host: write one a line"):
        read_hosts(tmp_path / "empty")
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_hosts(tmp_path / "none")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory"):
        read_hosts(tmp_path)


def test_lists_of_the_command_line() -> None:
    assert parse_hosts("a:4, b,[::1]:2") == [Host("a", 4), Host("b"), Host("::1", 2)]
    for text, words in (("a:4,,b", "-H a:4,,b: '' is no host"), ("a,a", "names a a second time"), ("", "is no host")):
        with pytest.raises(UserError, match=words):
            parse_hosts(text)


def test_processes_fill_hosts_in_order() -> None:
    hosts = [Host("a", 2), Host("b"), Host("c", 4)]
    assert allot(hosts, 7) == [Host("a", 2), Host("b", 1), Host("c", 4)]
    assert allot(hosts, 3) == [Host("a", 2), Host("b", 1)]
    assert allot(hosts, 1) == [Host("a", 1)]
    with pytest.raises(UserError, match=r"8 processes do not fit the hosts, which have 7 slots \(a 2, b 1, c 4\)"):
        allot(hosts, 8)
