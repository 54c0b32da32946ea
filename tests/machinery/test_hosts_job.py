"""Jobs on two hosts: they find the network that joins them, and end or go on when a cable is pulled."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import PACKAGE, ROOT, current_engine, read_lines, start_job, values, wait_for_process, wait_for_training
from namespaces import NEEDS_ROOT, Hosts
from test_launch import NEEDS_MPI, TRANSPORTS, expect, one_a_line, versioned

pytestmark = [pytest.mark.slow, NEEDS_ROOT]

SOURCES = ROOT / "src" / PACKAGE
LOST_S = 60  # the promise: a static job has ended so many seconds after a cable was pulled
OPTIONS = ("epochs=4", "tracking.tensorboard=false", "tracking.log_every=2", "data.global_batch=64")
DATA = ("data.source._target_=faulty.waits", "~data.source.validation_fraction")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as two:
        two.add_decoy_network()
        yield two


@pytest.fixture
def hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data of jobs comes slowly until this file is there."""
    monkeypatch.setenv("HURRY", str(tmp_path / "hurry"))
    return tmp_path / "hurry"


def launch(
    hosts: Hosts, run: Path, *options: str, script: str = "ssh", into: Any = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start training from node1."""
    settings = [f"engine={current_engine()}", f"hydra.run.dir={run}", *OPTIONS, *DATA]
    return hosts.start("node1", f"launch/{script}.sh", "--env", "HURRY", *options, *settings, into=into)


def end_of(job: subprocess.Popen[str], seconds: float) -> str:
    """What a job has printed when it ends, which it must do within so many seconds."""
    try:
        return job.communicate(timeout=seconds)[0] or ""
    finally:
        job.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(900):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within 90 s: {what}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("script", ["ssh", "elastic"])
def test_a_dry_run_is_the_reviewed_command(hosts: Hosts, transport: str, script: str, tmp_path: Path) -> None:
    """From these variables alone: the command of MPI lists those that it passes on."""
    (tmp_path / "hosts").write_text("node1\nnode2 slots=2\n")
    variables = [f"{name}={hosts.environment()[name]}" for name in ("HOME", "PATH", "OMPI_MCA_plm_rsh_args")]
    variables.append(f"VIRTUAL_ENV={sys.prefix}")
    options = ["--hosts", str(tmp_path / "hosts"), "--transport", transport, "--dry-run", "name=first"]
    said = hosts.check("node1", "env", "-i", *variables, f"launch/{script}.sh", *options)
    said = re.sub(r"\S+/(python|mpirun)[\d.]*", r"\1", said).replace(" --allow-run-as-root", "")
    expect(f"hosts-{versioned(transport)}.txt", one_a_line(said.replace(str(hosts.folder), "KEYS")))


@NEEDS_MPI
def test_a_dry_run_over_mpi_is_a_command_to_copy(hosts: Hosts) -> None:
    """And what would not stop the job is said beside it."""
    options = ["-H", "node1,node2", "--transport", "mpi", "--dry-run", "--command", "--", "hostname"]
    hosts.check("node2", "mount", "-o", "remount,size=64m", "/dev/shm")
    done = hosts.run("node1", "launch/ssh.sh", *options)
    hosts.check("node2", "mount", "-o", "remount,size=2g", "/dev/shm")
    assert "launch: warning: node2: node2 67 MB: start the container with --shm-size" in done.stderr
    assert sorted(hosts.check("node1", "bash", "-c", done.stdout).split()) == ["node1", "node2"]


def test_hosts_by_ipv6_addresses(hosts: Hosts, tmp_path: Path) -> None:
    """ssh reaches them so; the ranks meet over IPv4."""
    known = hosts.folder / "known_hosts"
    before = known.read_text()
    for number, name in enumerate(hosts.names, 1):
        hosts.check(name, "ip", "-6", "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        known.write_text(f"{known.read_text()}fd77::{number} {(hosts.folder / f'{name}.key.pub').read_text()}")
    options = [f"engine={current_engine()}", f"hydra.run.dir={tmp_path / 'run'}", "epochs=1"]
    try:
        done = hosts.run("node1", "launch/ssh.sh", "-H", "[fd77::1]:1,fd77::2", *options)
    finally:
        known.write_text(before)
        for number, name in enumerate(hosts.names, 1):
            hosts.check(name, "ip", "-6", "addr", "del", f"fd77::{number}/64", "dev", "eth0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_fails_elsewhere_is_named_and_no_secret_is_seen(
    hosts: Hosts, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_KEY", "for-the-ranks-alone")
    script = "echo $STORE_KEY on $(hostname); sleep 4; test $(hostname) = node1 || exit 7; sleep 300"
    options = ["-H", "node1,node2", "--transport", transport, "--env", "STORE_KEY"]
    listed = ""
    with hosts.start("node1", "launch/ssh.sh", *options, "--command", "--", "bash", "-c", script) as job:
        while job.poll() is None:
            listed += "".join(hosts.check(name, "ps", "-eww", "-o", "args") for name in hosts.names)
            time.sleep(0.5)
        output = end_of(job, 1)
    assert job.returncode == 7, output
    assert "error: rank 1 on host node2 ended with code 7" in output
    assert all(f"for-the-ranks-alone on {name}" in output for name in hosts.names)
    assert "sleep 300" in listed
    assert "for-the-ranks-alone" not in listed
    for name in hosts.names:
        assert not re.search("sleep 300|orted|prted", hosts.check(name, "ps", "-eww", "-o", "args"))


@pytest.mark.parametrize("transport", TRANSPORTS[-1:])  # over Gloo the elastic job loses a host
def test_a_pulled_cable_ends_the_job_and_the_next_start_goes_on(
    hosts: Hosts, tmp_path: Path, hurry: Path, transport: str
) -> None:
    run, options = tmp_path / "run", ("-H", "node1,node2", "--transport", transport)
    with launch(hosts, run, *options, "checkpoint.every_steps=2") as job:
        wait_for_training(run)
        hosts.cut("node2")
        output = end_of(job, LOST_S)
    hosts.mend("node2")
    assert job.returncode == 1, output
    assert "error: host node2 is lost" in output
    wait_until(
        lambda: not re.search(f"{PACKAGE}|orted|prted", hosts.check("node2", "ps", "-eww", "-o", "args")),
        "the end of node2's own part",
    )
    reached = read_lines(run)[-1]["step"]
    hurry.touch()
    with launch(hosts, run, *options, "--network", "10.77.0.0/24") as job:
        output = end_of(job, 120)
    assert job.returncode == 0, output
    assert "resum" in (run / "logs" / "rank-1.log").read_text()
    assert values(run, "step")[-1] == 4 * 23 > reached > 2
    assert values(run, "val/accuracy")[-1] > 0.9


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_elastic_job_goes_on_with_the_rest_and_takes_the_host_back(
    hosts: Hosts, tmp_path: Path, hurry: Path, transport: str
) -> None:
    """But not as long as it is faulty: the others are left alone then."""
    run, listed, said = tmp_path / "run", tmp_path / "listed", tmp_path / "said"
    listed.write_text("node1\nnode2\n")
    options = ("--discover", f"cat {listed}", "--transport", transport, "checkpoint.every_steps=4", "resume=never")
    with said.open("w") as log, launch(hosts, run, *options, script="elastic", into=log) as job:
        wait_for_training(run)
        hosts.cut("node2")
        wait_for_process(run, 0, start=2)
        reached = read_lines(run)[-1]["step"]
        wait_until(lambda: read_lines(run)[-1]["step"] > reached + 4, "steps of the rest alone")
        hosts.check("node2", "mount", "-t", "tmpfs", "none", SOURCES)
        hosts.mend("node2")
        wait_until(lambda: "No module named" in said.read_text(), "the fault of node2")
        hosts.check("node2", "umount", SOURCES)
        wait_for_process(run, 1, start=2)
        hurry.touch()
        end_of(job, 120)
    output = said.read_text()
    assert job.returncode == 0, output
    assert "launch: host node2 is not used: node2: " in output
    assert re.findall(r"launch: starting on (.*)", output) == ["node1:1, node2:1", "node1:1", "node1:1, node2:1"]
    with start_job(2, tmp_path / "whole", *OPTIONS, *DATA) as job:
        output = end_of(job, 120)
    for name in ("train/loss", "val/loss"):
        assert values(run, name) == pytest.approx(values(tmp_path / "whole", name), rel=1e-3)
