"""The doctor finds what is wrong with hosts, and nothing else: faults are planted, one kind after the other."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jobs import ENGINES, PACKAGE, environment
from namespaces import DECOY, NEEDS_ROOT, Hosts
from waiting import wait_until

import my_training
from my_training.cluster import host_sessions
from my_training.cluster.host_sessions import HostSessions
from my_training.gpus import gpu_name

SOURCES = Path(str(my_training.__file__)).parent
FRAMEWORK = {"torch": "torch", "tensorflow": "tensorflow_cpu"}[ENGINES[0]]
BOTH = "node1:1,node2:1"


def metadata(package: str, version: str) -> str:
    """Shell for a package of this version, found before the installed one."""
    folder = f"$PLANT/{package}-{version}.dist-info"
    name = package.replace("_", "-")
    return f"mkdir {folder} && printf 'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n' > {folder}/METADATA"


def program(name: str, text: str) -> str:
    """Shell for a program that comes first on PATH."""
    return f"printf '%s\\n' '#!/bin/sh' {shlex.quote(text)} > $PLANT/{name} && chmod +x $PLANT/{name}"


def nvidia(gpus: int, cuda: str) -> str:
    """Shell for a driver with so many GPUs, as far as it tells."""
    listed = "".join(f"echo GPU {number};" for number in range(gpus))
    return program("nvidia-smi", f'if [ "$1" = --list-gpus ]; then {listed} else echo "CUDA Version: {cuda}"; fi')


@dataclass(frozen=True)
class Fault:
    """Shell that plants it on node2, shell that heals it, and what the doctor must say of which hosts."""

    name: str
    plant: str = "true"
    heal: str = "true"
    found: dict[str, str] = field(default_factory=dict)  # hosts by check
    words: str = ""
    hosts: str = BOTH
    first: str = "true"  # on node1
    heal_first: str = "true"


FAULTS = [
    Fault("unknown-name", hosts="node1,node9", found={"ssh": "node9"}, words="its name is unknown here"),
    Fault(
        "other-code",
        "cp -r $PACKAGE $PLANT && cd $PLANT/* && echo '# changed' >> loop.py && mount --bind . $PACKAGE",
        "umount $PACKAGE",
        {"code": "node2"},
        "bring the same commit",
    ),
    Fault("no-code", "mount -t tmpfs none $PACKAGE", "umount $PACKAGE", {"python": "node2"}, "No module named"),
    Fault(
        "other-python",
        "echo 'import platform; platform.python_version = lambda: \"3.8.1\"' > $PLANT/sitecustomize.py",
        found={"python": "node2"},
        words="3.8 on node2",
    ),
    Fault(
        "other-framework",
        metadata(FRAMEWORK, "1.2"),
        found={FRAMEWORK.replace("_", "-"): "node2"},
        words="1.2 on node2",
    ),
    Fault("other-horovod", metadata("horovod", "0.27.0"), found={"horovod": "node2"}, words="0.27.0 on node2"),
    Fault(
        "other-mpi", program("mpirun", "echo 'mpirun (Open MPI) 5.0.1'"), found={"mpi": "node2"}, words="5.0.1 on node2"
    ),
    Fault(
        "no-common-network",
        "ip addr flush eth0 && ip addr add 10.77.0.2/32 dev eth0 && ip route add 10.77.0.0/24 dev eth0",
        "ip addr flush eth0 && ip addr add 10.77.0.2/24 dev eth0",
        {"network": "node1,node2"},
        "node1: eth0 10.77.0.1/32; node2: eth0 10.77.0.2/32",
        first="ip addr flush eth0 && ip addr add 10.77.0.1/32 dev eth0 && ip route add 10.77.0.0/24 dev eth0",
        heal_first="ip addr flush eth0 && ip addr add 10.77.0.1/24 dev eth0",
    ),
    Fault(
        "other-mtu",
        "ip link set eth0 mtu 1400",
        "ip link set eth0 mtu 1500",
        {"mtu": "node2"},
        "1500 on node1; 1400 on node2",
    ),
    Fault(
        "host-name",
        "hostname node1",
        "hostname node2",
        {"host name": "node1,node2"},
        "node2 calls itself node1",
    ),
    Fault(
        "gpus-and-drivers",
        f"{nvidia(1, '12.4')} && {metadata('nvidia_cuda_runtime', '13.0.96')}",
        found={"gpus": "node2", "driver": "node2"},
        words="node2 1 for 2 slots; node2: the driver supports CUDA 12.4, the framework is for 13.0.96",
        hosts="node1:2,node2:2",
        first=f"{nvidia(2, '13.1')} && {metadata('nvidia_cuda_runtime', '13.0.96')}",
    ),
    Fault(
        "cpu-framework",
        nvidia(1, "12.4"),
        found={"driver": "node1,node2"},
        words="it may be a build for the CPU",
        first=nvidia(1, "12.4"),
    ),
    Fault(
        "little-shm",
        "mount -o remount,size=64m /dev/shm",
        "mount -o remount,size=2g /dev/shm",
        {"/dev/shm": "node2"},
        "node2 67 MB",
    ),
    Fault(
        "memlock",
        "mount -t tmpfs none $PLANT && mkdir -p $PLANT/up/infiniband $PLANT/work"
        " && mount -t overlay -o lowerdir=/dev,upperdir=$PLANT/up,workdir=$PLANT/work none /dev"
        " && mount -t tmpfs -o size=2g none /dev/shm && prlimit --pid $(cat /run/sshd.pid) --memlock=65536:",
        "umount -l /dev; umount -l $PLANT",
        {"memlock": "node2"},
        "node2 65 kB",
    ),
    Fault(
        "small-and-separate-disk",
        "mount -t tmpfs -o size=50m none $RUNS",
        "umount $RUNS",
        {"disk": "node2", "run folder": "node2"},
        "node2 52 MB; $RUNS is not shared with node2",
    ),
    Fault(
        "read-only-runs",
        "mount --bind $RUNS $RUNS && mount -o remount,bind,ro $RUNS",
        "umount $RUNS",
        {"run folder": "node2"},
        "not writable: node2 $RUNS",
    ),
]


class Ward:
    """Two hosts, each with a folder of its own ($PLANT) that comes first on PATH and among Python's modules."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.runs, self.plant = folder / "runs", folder / "plant"
        for path in (self.runs, self.plant):
            path.mkdir()
        for name in hosts.names:
            (folder / name).mkdir()
            hosts.check(name, "mount", "--bind", folder / name, self.plant)

    def environment(self) -> dict[str, str]:
        """Variables for the hosts' shells and for the doctor."""
        known = environment()
        return {
            "PLANT": str(self.plant),
            "RUNS": str(self.runs),
            "PACKAGE": str(SOURCES),
            "PATH": f"{self.plant}:{known['PATH']}",
            "PYTHONPATH": f"{self.plant}:{known['PYTHONPATH']}",
            "OMPI_MCA_plm_rsh_args": f"-F {self.hosts.folder}/config -o ConnectTimeout=2",
            "SSH_CONNECTION": f"{DECOY}.9 50000 {DECOY}.1 22",  # how the user came to node1 says nothing of the others
        }

    def shell(self, host: str, script: str) -> None:
        done = self.hosts.run(host, "bash", "-c", script, **self.environment())
        assert done.returncode == 0, f"{host}: {script}\n{done.stderr}"

    def doctor(self, *options: str, folder: Path | None = None) -> list[dict[str, Any]]:
        """Its findings; its exit code must fit them."""
        words = [
            sys.executable,
            "-m",
            f"{PACKAGE}.cluster.doctor",
            "--json",
            "--folder",
            str(folder or self.runs),
            *options,
        ]
        done = self.hosts.run("node1", *words, **self.environment())
        assert done.stdout, done.stderr
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        assert done.returncode == (2 if any(item["state"] == "fault" for item in findings) else 0)
        return findings

    def trouble(self, *options: str, folder: Path | None = None) -> tuple[dict[str, str], str]:
        """What it does not like after a quick look: the hosts by check, and all its words."""
        findings = self.doctor("--quick", *options, folder=folder)
        bad = [item for item in findings if item["state"] != "good"]
        assert all(item["way_out"] for item in bad), bad
        by_check: dict[str, str] = {}
        for item in bad:
            by_check[item["check"]] = ",".join(filter(None, [by_check.get(item["check"], ""), *item["hosts"]]))
        return by_check, "; ".join(f"{item['found']}: {item['way_out']}" for item in bad)


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield Ward(hosts, tmp_path_factory.mktemp("ward"))


@pytest.mark.slow
@NEEDS_ROOT
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_its_name_and_nothing_else(fault: Fault, ward: Ward) -> None:
    try:
        ward.shell("node1", fault.first)
        ward.shell("node2", fault.plant)
        found, words = ward.trouble("-H", fault.hosts)
    finally:
        ward.shell("node2", fault.heal)
        ward.shell("node1", fault.heal_first)
        for name in ward.hosts.names:
            ward.shell(name, "rm -rf $PLANT/*")
    assert found == fault.found, words
    assert all(part.replace("$RUNS", str(ward.runs)) in words for part in fault.words.split("; ")), words


@pytest.mark.slow
@NEEDS_ROOT
def test_healthy_hosts(ward: Ward) -> None:
    ward.hosts.add_decoy_network()
    try:
        findings = ward.doctor("--quick", "-H", BOTH)
        wrong, words = ward.trouble("-H", BOTH, "--network", f"{DECOY}.0/28")
    finally:
        ward.hosts.remove_decoy_network()
    assert {item["state"] for item in findings} == {"good"}, findings
    (network,) = [item["found"] for item in findings if item["check"] == "network"]
    assert network == "10.77.0.0/24: node1 eth0 10.77.0.1, node2 eth0 10.77.0.2"
    assert wrong == {"connections": "node1,node2"}  # it has cards with addresses on both hosts, but leads nowhere
    assert "node1 cannot reach node2 (no answer); node2 cannot reach node1 (no answer): open all ports" in words


@pytest.mark.slow
@NEEDS_ROOT
def test_why_ssh_fails(ward: Ward) -> None:
    hosts, known = ward.hosts, ward.hosts.folder / "known_hosts"
    keys = known.read_text()

    def words() -> str:
        found, words = ward.trouble("-H", BOTH)
        assert found == {"ssh": "node2"}
        return words

    known.write_text(keys.replace(keys.splitlines()[1].split()[-2], keys.splitlines()[0].split()[-2]))
    assert "its host key has changed: make sure that it is the right host, then run ssh-keygen -R" in words()
    known.write_text(keys.splitlines()[0] + "\n")
    assert "its host key is not known here: connect once by hand" in words()
    known.write_text(keys)
    hosts.cut("node2")
    assert "it does not answer: see whether it is up" in words()
    hosts.mend("node2")
    hosts.stop_sshd("node2")
    assert "it refuses connections: start sshd there" in words()
    hosts.start_sshd("node2", "-p", "22", "-p", "2222")
    assert ward.trouble("-H", "node2", "--port", "2222")[0] == {}
    hosts.stop_sshd("node2")
    hosts.start_sshd("node2", "-o", "AuthorizedKeysFile=/dev/null")
    assert "it refuses the key: put your public key into" in words()
    hosts.stop_sshd("node2")
    hosts.start_sshd("node2")


@pytest.mark.slow
@NEEDS_ROOT
def test_a_clock_that_is_ahead(ward: Ward) -> None:
    """A library that shifts the time of every program on a host stands for a wrong clock: namespaces share theirs."""
    library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
    assert library, "this test needs faketime: apt-get install faketime"
    ward.hosts.stop_sshd("node2")
    ward.hosts.start_sshd("node2", "-o", f"SetEnv=LD_PRELOAD={library} FAKETIME=+61s")
    try:
        found, words = ward.trouble("-H", BOTH)
    finally:
        ward.hosts.stop_sshd("node2")
        ward.hosts.start_sshd("node2")
    assert found == {"clock": "node2"}
    assert "node2 61 s ahead: let chrony or ntpd set the clocks" in words


@pytest.mark.slow
@NEEDS_ROOT
def test_a_run_that_another_job_works_on(ward: Ward, tmp_path: Path) -> None:
    run = tmp_path / "first"
    hold = (
        "import pathlib, sys; from {0}.checkpoints.lock import run_lock\nwith run_lock(pathlib.Path(sys.argv[1])):"
        " print(flush=True); sys.stdin.read()"
    )
    (run / "checkpoints").mkdir(parents=True)
    words = ward.hosts.command("node1", sys.executable, "-c", hold.format(PACKAGE), run / "checkpoints")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=ward.hosts.environment(), text=True, **pipes) as job:  # type: ignore[call-overload]
        job.stdout.readline()
        found, said = ward.trouble(folder=run)
        job.stdin.close()
    assert found == {"run": "localhost"}
    assert "is in use by host node1, process" in said
    assert ward.trouble(folder=run)[0] == {}


@pytest.mark.slow
@NEEDS_ROOT
def test_a_real_job(ward: Ward, tmp_path: Path) -> None:
    """The bandwidth is that of the link: two ranks send as many bytes as the tensor has."""
    (tmp_path / "hosts").write_text("node1\nnode2 slots=2\n")
    ward.hosts.add_decoy_network()
    ward.hosts.shape("node2", "400mbit")
    try:
        tried = [item for item in ward.doctor("--hosts", str(tmp_path / "hosts")) if item["check"] == "allreduce"]
    finally:
        ward.hosts.free("node2")
        ward.hosts.remove_decoy_network()
    assert [item["state"] for item in tried] == ["good"] * len(ENGINES)
    for engine, item in zip(ENGINES, tried, strict=True):
        measured = re.fullmatch(rf"{engine}: 2 ranks, 64 MiB of main memory at (\d+) MB/s", item["found"])
        assert measured, item
        assert 0 < int(measured[1]) < 55  # such a link carries no more


@pytest.mark.slow
@NEEDS_ROOT
def test_a_real_job_that_fails(ward: Ward) -> None:
    """What no look at versions can find: Horovod's library on one host does not load."""
    spec = find_spec("horovod")
    assert spec and spec.submodule_search_locations
    libraries = [str(file) for file in Path(spec.submodule_search_locations[0]).glob("*/mpi_lib*.so")]
    ward.shell("node2", "".join(f"mount --bind /dev/null {library};" for library in libraries))
    try:
        bad = [item for item in ward.doctor("-H", BOTH) if item["state"] != "good"]
    finally:
        ward.shell("node2", f"umount {' '.join(libraries)}")
    assert [item["check"] for item in bad] == ["allreduce"] * len(ENGINES)
    assert "cannot be imported" in bad[0]["found"]
    assert f"start it by hand to see more: {sys.executable} -m {PACKAGE}.launch ssh --no-check" in bad[0]["way_out"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_can_be_stopped_while_a_host_does_not_answer(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    words = [sys.executable, "-m", f"{PACKAGE}.cluster.doctor", "-H", "192.0.2.1", "--folder", str(tmp_path / "runs")]
    settings = environment() | {"PATH": f"{tmp_path}:{environment()['PATH']}"}
    with subprocess.Popen(words, env=settings, stderr=subprocess.PIPE, text=True) as doctor:
        wait_until((tmp_path / "asked").exists, "the doctor's call of ssh")
        doctor.send_signal(number)
        _, said = doctor.communicate(timeout=10)
    assert doctor.returncode == code
    assert said.count("\n") <= 1
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("listed", "shown", "names"),
    [
        ("ab", None, ["GPU-a", "GPU-b"]),
        ("ab", "1,0", ["GPU-b", "GPU-a"]),
        ("b", "0", ["GPU-b"]),  # as Slurm shows its GPU to one of several ranks
        ("ab", "MIG-1", ["MIG-1"]),
        ("", "3", ["3"]),
    ],
)
def test_names_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, shown: str | None, names: list[str]
) -> None:
    lines = "".join(f"echo 'GPU {number}: NVIDIA H200 (UUID: GPU-{name})'\n" for number, name in enumerate(listed))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [gpu_name(number) for number in range(len(names))] == names


def test_this_machine_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-m", f"{PACKAGE}.cluster.doctor", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "writable, and the same one everywhere" in done.stdout
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run([*words, "-H", "a,a"], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: -H a,a: 'a' names a a second time: add the slots up in one entry\n"


def test_a_host_that_gives_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversation without ssh: a Python that hangs, none, one without the project, no folder."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)

    def answer(python: str | Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "executable", str(python))
        with HostSessions(["localhost"], tmp_path, "x") as opened:
            answer = opened.answers["localhost"]
        return answer.check, answer.found

    assert answer("/nowhere/python") == ("python", "there is no /nowhere/python")
    monkeypatch.setattr(host_sessions, "ANSWER_S", 1.0)
    assert answer(slow) == ("answer", "Python there gave no answer within 1 s")
    monkeypatch.setattr(host_sessions, "ANSWER_S", 30.0)
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "gone")
    assert answer(slow) == ("code", f"there is no folder {tmp_path / 'gone'}")
