"""Hosts for tests: namespaces of this machine, each with a network, a name, processes and an sshd of its own.

All are on one switch and share this machine's files. What is planted on a host with `run` (a mount, an address, a
limit) is gone with it.
"""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, environment
from needs import need

NEEDS_ROOT = pytest.mark.root

SUBNET, DECOY = "10.77.0", "192.168.50"  # the first three numbers of addresses; the fourth is the host's
DOCKER = "172.17.0.1/16"

SSH_CONFIG = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
"""
SSHD_CONFIG = """
HostKey {folder}/{host}.key
AuthorizedKeysFile {folder}/key.pub
PidFile /run/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv TMPDIR=/run
"""
BOOT = """
set -e
hostname {host}
mount --bind {folder}/hosts /etc/hosts
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir /run/sshd
ip link set lo up
ip link add docker0 type bridge
ip addr add {docker} dev docker0
ip link add veth0 type veth peer name veth1
ip link set veth0 master docker0
for card in docker0 veth0 veth1; do ip link set $card up; done
echo ready
while sleep 1000; do :; done
"""


class Hosts:
    """So many hosts, called node1, node2, ..., at 10.77.0.1, ...; `folder` takes their keys."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder = folder
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._holders: dict[str, subprocess.Popen[str]] = {}
        try:
            self._write_files()
            self._boot("switch", "echo ready; while sleep 1000; do :; done")
            self._inside("switch", "ip", "link", "add", "switch", "type", "bridge")
            self._inside("switch", "ip", "link", "set", "switch", "up")
            for name in self.names:
                self._boot(name, BOOT.format(host=name, folder=folder, docker=DOCKER))
                self._plug_in(name)
                self.start_sshd(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def address(self, host: str) -> str:
        """Where the others reach a host."""
        return f"{SUBNET}.{self.names.index(host) + 1}"

    def command(self, host: str, *words: str | Path, folder: Path = ROOT) -> list[str]:
        """The command that runs words on a host; with `environment`, ssh and mpirun find the other hosts."""
        enter = ["nsenter", "--target", str(self._pid(host)), "--net", "--mount", "--uts", "--pid"]
        return [*enter, "env", f"--chdir={folder}", *map(str, words)]

    def environment(self, **settings: str) -> dict[str, str]:
        """For commands on a host: as other tests have it, and a key that every host takes."""
        own = {"OMPI_MCA_plm_rsh_args": f"-F {self.folder}/config", "TMPDIR": "/run"}  # Open MPI's names there are PIDs
        return {**environment(), **own, **settings}

    def run(self, host: str, *words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        command = self.command(host, *words)
        pipes = {"capture_output": True, "stdin": subprocess.DEVNULL, "timeout": 180}
        return subprocess.run(command, env=self.environment(**settings), text=True, check=False, **pipes)  # type: ignore[call-overload,no-any-return]

    def check(self, host: str, *words: str | Path) -> str:
        """Run a command on a host that must succeed; what it printed."""
        done = self.run(host, *words)
        assert done.returncode == 0, f"{host}: {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, host: str, *words: str | Path, into: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a command on a host; what it prints goes into a pipe or a file."""
        pipes = {"stdout": into, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        command = self.command(host, *words)
        return subprocess.Popen(command, env=self.environment(), text=True, **pipes)

    def cut(self, host: str) -> None:
        """Pull the host's cable out."""
        self._inside("switch", "ip", "link", "set", host, "down")

    def mend(self, host: str) -> None:
        """Put the host's cable back."""
        self._inside("switch", "ip", "link", "set", host, "up")

    def shape(self, host: str, rate: str) -> None:
        """Let a host send no faster than so much (`100mbit`) from now on."""
        bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        self.check(host, "tc", "qdisc", "add", "dev", "eth0", "root", *bucket)

    def free(self, host: str) -> None:
        """Take that limit away."""
        self.check(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def power_off(self, host: str) -> None:
        """End every process of a host at once; it does not come back."""
        holder = self._holders.pop(host)
        holder.kill()
        holder.communicate()

    def add_decoy_network(self) -> None:
        """Give every host a second card with an address in one subnet, that leads nowhere."""
        for number, name in enumerate(self.names, 1):
            self.check(name, "ip", "link", "add", "decoy0", "type", "veth", "peer", "name", "nowhere")
            self.check(name, "ip", "addr", "add", f"{DECOY}.{number}/28", "dev", "decoy0")
            for card in ("decoy0", "nowhere"):
                self.check(name, "ip", "link", "set", card, "up")

    def remove_decoy_network(self) -> None:
        """Take these cards out."""
        for name in self.names:
            self.check(name, "ip", "link", "del", "decoy0")

    def start_sshd(self, host: str, *options: str) -> None:
        """Start a host's sshd and return when it listens."""
        self.check(host, "/usr/sbin/sshd", "-f", self.folder / f"{host}.sshd", *options)
        for _ in range(100):
            if self.run(host, "bash", "-c", f": < /dev/tcp/{self.address(host)}/22").returncode == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"no sshd on {host}")

    def stop_sshd(self, host: str) -> None:
        """Stop a host's sshd; sessions go on."""
        gone = "for _ in {1..200}; do [ -e /run/sshd.pid ] || exit 0; sleep 0.05; done; exit 1"
        self.check(host, "bash", "-c", f"kill $(cat /run/sshd.pid); {gone}")

    def close(self) -> None:
        """End all hosts with every process on them."""
        for host in list(self._holders):
            self.power_off(host)

    def _write_files(self) -> None:
        folder, names = self.folder, self.names
        need("ip", "nsenter", "ps", "ssh", "ssh-keygen", "sshd", "tc")
        for key in ("key", *(f"{name}.key" for name in names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "config").write_text(SSH_CONFIG.format(folder=folder))
        addresses = {name: self.address(name) for name in names}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        known = [f"{name},[{name}]:2222,{addresses[name]} {(folder / f'{name}.key.pub').read_text()}" for name in names]
        (folder / "known_hosts").write_text("".join(known))
        for name in names:
            (folder / f"{name}.sshd").write_text(SSHD_CONFIG.format(folder=folder, host=name))

    def _boot(self, name: str, script: str) -> None:
        unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        self._holders[name] = holder = subprocess.Popen([*unshare, "sh", "-c", script], text=True, **pipes)  # type: ignore[call-overload]
        said = holder.stdout.readline()
        assert said == "ready\n", f"{name} does not start: {said}"

    def _plug_in(self, name: str) -> None:
        """A cable from the switch to the host's eth0."""
        peer = ["peer", "name", "eth0", "netns", str(self._pid(name))]
        self._inside("switch", "ip", "link", "add", name, "type", "veth", *peer)
        self._inside("switch", "ip", "link", "set", name, "master", "switch", "up")
        self.check(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self.check(name, "ip", "link", "set", "eth0", "up")

    def _inside(self, name: str, *words: str) -> None:
        enter = ["nsenter", "--target", str(self._pid(name)), "--net"]
        done = subprocess.run([*enter, *words], text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stderr}"

    def _pid(self, name: str) -> int:
        """The first process of a host, as this machine numbers it."""
        holder = self._holders[name].pid
        return int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])
