"""How every command of this project reaches another host."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

# Open MPI's own variable, so that one setting such as "-F file" serves mpirun and this project alike.
ARGUMENTS_VARIABLE = "OMPI_MCA_plm_rsh_args"
CONNECT_TIMEOUT_S = 10

# What a command on another host must find as it is here.
SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


def port_number(text: str) -> int:
    """A port of sshd, as an option's value.

    Raises:
        ArgumentTypeError: if it is none.
    """
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ArgumentTypeError(f"'{text}' is no port, which is a number from 1 to 65535")
    return int(text)


def ssh_arguments(port: int | None = None, options: Sequence[str] = ()) -> list[str]:
    """The arguments for ssh: never ask, give up in time; a port of None leaves it to ssh's own configuration.

    Of a setting that comes twice ssh takes the first, so the variable's come first.
    """
    chosen = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    inherited = shlex.split(os.environ.get(ARGUMENTS_VARIABLE, ""))
    return [*inherited, *chosen, *(["-p", str(port)] if port is not None else []), *options]


def ssh_command(host: str, port: int | None = None, options: Sequence[str] = ()) -> list[str]:
    """The command that opens a session on a host; what to run there follows it, see `remote`."""
    return ["ssh", *ssh_arguments(port, options), host]


def remote(words: Sequence[str]) -> str:
    """One argument for ssh that runs words in the same folder and with the same search paths as here.

    ssh shows it to every user of both hosts, so it holds no secrets.
    """
    settings = [f"{name}={os.environ[name]}" for name in SEARCH_PATHS if name in os.environ]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *settings, *words])}"
