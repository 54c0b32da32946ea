"""What tests need beyond Python: skipped where it is missing, with the way to get it; in CI that is a failure."""

import functools
import os
import shutil
import subprocess
from typing import NoReturn

import pytest

HOROVOD_MPI = "Horovod with MPI"
PACKAGES = {  # Debian's and Ubuntu's, of programs that are called otherwise
    HOROVOD_MPI: "openmpi-bin libopenmpi-dev, then nox",
    "git": "git",
    "ip": "iproute2",
    "mount": "mount",
    "mpirun": "openmpi-bin libopenmpi-dev",
    "munged": "munge",
    "nsenter": "util-linux",
    "pgrep": "procps",
    "ps": "procps",
    "sbatch": "slurm-client",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def need(*programs: str) -> None:
    """Ends the test unless all these are on PATH, or where Debian has daemons."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for program in programs:
        if not shutil.which(program, path=places):
            miss(f"{program} is missing: apt-get install {PACKAGES.get(program, program)}")


def need_root() -> None:
    """Ends the test unless it may mount, and make networks and hosts."""
    need("unshare", "mount")
    if not may_make_namespaces():
        miss("mounting and making networks needs root, and a container that allows it: leave it out by -m 'not root'")


@functools.cache
def may_make_namespaces() -> bool:
    """Whether this user, here, may make a network and mount in it."""
    words = ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True, check=False).returncode == 0


def miss(what: str) -> NoReturn:
    """Skips for a newcomer; in CI nothing may be left out in silence."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Looks at the marks `needs` and `root` before any fixture is made."""
    for mark in item.iter_markers("needs"):
        need(*mark.args)
    if item.get_closest_marker("root"):
        need_root()
