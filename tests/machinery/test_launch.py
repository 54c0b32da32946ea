"""Command lines and what is refused; test_supervise.py and test_hosts_job.py start jobs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import PACKAGE, ROOT, environment
from needs import HOROVOD_MPI
from waiting import wait_until

from my_training.cluster import command, elastic, hosts
from my_training.cluster.command import (
    ElasticLauncher,
    available_hosts,
    elastic_parser,
    listed_hosts,
    run_folder,
)
from my_training.cluster.elastic import Limits, Pool
from my_training.cluster.network import Interface, Network
from my_training.cluster.start import HostsStart, passed_names
from my_training.errors import UserError
from my_training.launch.command import launcher_for, parse
from my_training.launch.supervise import _first_of_mpi, _split
from my_training.launch.transport import (
    Host,
    horovod_has_mpi,
    mpi_version,
    mpirun_command,
    plan_gloo,
)

HAS_MPI = horovod_has_mpi() and mpi_version()
NEEDS_MPI = pytest.mark.needs(*([] if HAS_MPI else [HOROVOD_MPI]))
TRANSPORTS = ["gloo", "mpi"] if HAS_MPI else ["gloo", pytest.param("mpi", marks=NEEDS_MPI)]
EXPECTED = Path(__file__).parent / "expected"
HOSTS = [Host("a.example", 2), Host("b.example", 1)]
CARDS = {"a.example": Interface("eth0", "10.0.0.1", 24), "b.example": Interface("eth0", "10.0.0.2", 24)}
NETWORK = Network("10.0.0.0/24", CARDS)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> HostsStart:
    """Three ranks on two hosts, with a known environment."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not for the eyes of others")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return HostsStart(["python", "-m", f"{PACKAGE}.train", "name=first"], HOSTS, NETWORK, port=2222)


def expect(file: str, text: str) -> None:
    """Compare with the reviewed file."""
    wanted = (EXPECTED / file).read_text().replace("PACKAGE", PACKAGE)
    assert text.strip() == wanted.strip()


def versioned(transport: str) -> str:
    """The transport, and the version of Open MPI: its options differ."""
    return f"mpi-{mpi_version()}" if transport == "mpi" else transport


def one_a_line(command: str) -> str:
    """A command with each option on a line of its own."""
    return re.sub(r" (?=-|python )", "\n", command)


@pytest.mark.parametrize("version", [4, 5])
def test_the_command_line_for_open_mpi(start: HostsStart, version: int) -> None:
    expect(f"mpirun-{version}.txt", one_a_line(shlex.join(mpirun_command(start, version))))


@pytest.mark.parametrize("version", [4, 5])
def test_cards_of_different_names(start: HostsStart, version: int) -> None:
    """Only MPI's own subnet and Open MPI 4's hold on all hosts then."""
    cards = {**CARDS, "b.example": Interface("ens5", "10.0.0.2", 24)}
    command = mpirun_command(replace(start, network=Network("10.0.0.0/24", cards)), version)
    assert not {"prte_if_include", "eth0", "NCCL_SOCKET_IFNAME"} & {*command}
    assert command.count("10.0.0.0/24") == {4: 2, 5: 1}[version]
    parts = plan_gloo(replace(start, network=Network("10.0.0.0/24", cards)), "10.0.0.1", 4000)
    assert parts[1].processes[0].environment["HOROVOD_GLOO_IFACE"] == "ens5"


def test_the_environment_of_ranks_over_gloo(start: HostsStart) -> None:
    parts = plan_gloo(start, "10.0.0.1", 4000)
    lines = [
        f"{part.host} {process.name} {name}={value}"
        for part in parts
        for process in part.processes
        for name, value in process.environment.items()
    ]
    expect("gloo.txt", "\n".join(lines))
    assert all("AWS" not in name for part in parts for name in part.environment)


def dry_run(script: str, *options: str) -> str:
    command = [f"launch/{script}", *options, "--dry-run", "name=first"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return re.sub(r"\S+/(python|mpirun)[\d.]*", r"\1", done.stdout).replace(" --allow-run-as-root", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dry_run_on_this_machine(transport: str) -> None:
    expect(f"local-{versioned(transport)}.txt", one_a_line(dry_run("local.sh", "-n", "2", "--transport", transport)))


def test_a_dry_run_names_what_would_start() -> None:
    assert dry_run("local.sh", "-n", "3").strip().endswith(f"python -m {PACKAGE}.train name=first")


def test_a_dry_run_of_an_elastic_job_is_its_largest_start() -> None:
    said = dry_run("elastic.sh", "--discover", "echo localhost:4", "--max", "2", "--transport", "gloo")
    assert said.count("on host localhost") == 2


@pytest.mark.parametrize(
    ("script", "options", "sentence"),
    [
        ("local", ["-n", "two"], "-n: 'two' is no whole number from 1 to 999999: --help lists the options"),
        ("local", ["-n", "0"], "-n: '0' is no whole number from 1"),
        ("local", ["-H", "localhost:2"], "-H is of use with several hosts only: start launch/ssh.sh"),
        ("local", ["--hosts=file"], "--hosts is of use with several hosts only"),
        ("local", ["--network", "10.0.0.0/8"], "unrecognized arguments: --network"),
        ("local", ["--min", "2"], "unrecognized arguments: --min"),
        ("local", ["--command", "--", "sh", "-c", "exit 2"], "ended with code 2"),
        ("local", ["--transport", "tcp"], "--transport: invalid choice: 'tcp'"),
        ("local", ["--module", "nothing"], "--module: nothing is not in this project"),
        ("local", ["--command"], "--command needs a command"),
        ("local", ["--module", "evaluate", "--command"], "--command: not allowed with argument --module"),
        ("local", ["--grace", "-1"], "--grace: '-1' is no number of seconds"),
        ("local", ["--grace", "nan"], "--grace: 'nan' is no number of seconds"),
        ("local", ["name=first", "-n", "2"], "-n stands behind name=first, where the training's options begin"),
        ("ssh", [], f"the hostfile {ROOT / 'launch/hosts'} cannot be read"),
        ("ssh", ["-H", "localhost:2", "-n", "3"], "3 processes do not fit the hosts, which have 2 slots"),
        ("ssh", ["-H", "localhost:2,localhost"], "names localhost a second time"),
        ("ssh", ["-H", "a..b"], "'a..b' has no valid host name"),
        ("ssh", ["-H", "a" * 64], "has no valid host name"),
        ("ssh", ["-H", "a:0"], "'a:0' has 0 slots, which must be a whole number from 1 to 999999"),
        ("ssh", ["-H", ""], "'' is no host"),
        ("ssh", ["-H", "localhost,127.0.0.1."], "localhost and 127.0.0.1 are both this machine: list it once"),
        ("ssh", ["--transport", "mpi", "-H", "2001:db8::1"], "2001:db8::1 is no host for mpirun, which takes no IPv6"),
        ("ssh", ["--network", "eth0", "-H", "a"], "--network eth0 is no subnet"),
        ("ssh", ["--port", "0", "-H", "a"], "--port: '0' is no port, which is a number from 1 to 65535"),
        ("ssh", ["-H", "a", "--hosts", "file"], "--hosts: not allowed with argument -H"),
        ("ssh", ["--hosts", "no-such-file"], f"the hostfile {ROOT / 'no-such-file'} cannot be read"),
        ("ssh", ["-H", "a", "--env", "NO_SUCH=1"], "--env: NO_SUCH=1 is no variable here"),
        ("ssh", ["-H", "a", "--min", "2"], "unrecognized arguments: --min"),
        ("elastic", ["-H", "a", "--min", "2", "--max", "1"], "--max 1 must be at least --min 2"),
        ("elastic", ["-H", "a", "-n", "2"], "unrecognized arguments: -n"),
        ("elastic", [], f"the hostfile {ROOT / 'launch/hosts'} cannot be read"),
        ("elastic", ["--discover", "exit 3"], "--discover 'exit 3' ended with 3 (it says nothing)"),
        ("elastic", ["-H", "localhost", "epochs=1,2", "--multirun"], "an elastic job starts one run again and again"),
        ("elastic", ["-H", "a", "--slots", "0"], "--slots: '0' is no whole number from 1"),
        ("elastic", ["-H", "a", "--discover", "true"], "--discover: not allowed with argument -H"),
        ("elastic", ["--discover", "echo; echo a slots=x"], "--discover 'echo; echo a slots=x', line 2: 'a slots=x'"),
        ("elastic", ["-H", "a", "--min", "2", "--dry-run"], "the hosts have 1 slots now, fewer than --min 2"),
    ],
)
def test_what_is_refused(script: str, options: list[str], sentence: str) -> None:
    command = [f"launch/{script}.sh", *(() if "--transport" in options else ("--transport", "gloo")), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.needs("ssh")
@pytest.mark.parametrize("more", [[], ["--no-check"]])
def test_a_host_that_does_not_answer_is_named(more: list[str]) -> None:
    command = ["launch/ssh.sh", "--transport", "gloo", "-H", "localhost,no-such-host.invalid", *more]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: no-such-host.invalid: " in done.stderr


def test_places() -> None:
    def placed(*words: str) -> list[Host]:
        launcher = launcher_for([*words, "--transport", "gloo"])
        found: list[list[Host]] = []
        launcher.run_on = found.append  # type: ignore[method-assign,assignment]
        launcher.run()
        return found[0]

    assert placed("-n", "5") == [Host("localhost", 5)]
    assert placed("ssh", "-H", "a:2,b") == [Host("a", 2), Host("b", 1)]
    assert placed("ssh", "-H", "a:2,b", "-n", "1") == [Host("a", 1)]


def test_commands() -> None:
    def command(*words: str) -> list[str]:
        return launcher_for(["--transport", "gloo", *words]).command

    assert command("--", "--cfg", "job")[1:] == ["-m", f"{PACKAGE}.train", "--cfg", "job"]
    assert command("name=first", "-x")[-2:] == ["name=first", "-x"]
    assert command("--module", "evaluate", "runs/first")[2:] == [f"{PACKAGE}.evaluate", "runs/first"]
    assert command("--command", "--", "date") == ["date"]


def test_a_project_without_several_hosts_still_launches(tmp_path: Path) -> None:
    """A copy that lacks the room for them, and what goes with it."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("cluster", "__pycache__"))
    variables = environment() | {"PYTHONPATH": str(tmp_path / "src")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"{PACKAGE}.launch", *words]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    for words in (["-H", "a:4"], ["--hosts", "file"], ["--elastic"], ["ssh", "-H", "a"], ["elastic", "--min", "2"]):
        done = run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: this project was generated without cluster/")
        assert done.stderr.count("\n") == 1
    done = run("-n", "2", "--transport", "gloo", "--command", "--", "sh", "-c", "exit $((5 + HOROVOD_RANK - 1))")
    assert done.returncode in (4, 5)
    assert re.search(r"error: rank \d on host localhost ended with code \d\n", done.stderr)


def test_only_harmless_variables_are_passed_on() -> None:
    names = ["HOROVOD_TIMELINE", "NCCL_DEBUG", "PATH", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME"]
    assert passed_names(names) == ["HOROVOD_TIMELINE", "NCCL_DEBUG", "PATH", "PYTHONPATH"]
    assert "HF_TOKEN" in passed_names(names, ["HF_TOKEN"])


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    train = [sys.executable, "-m", f"{PACKAGE}.train"]
    assert run_folder([*train, "hydra.run.dir=/elsewhere/run"]) == Path("/elsewhere/run")
    assert run_folder([*train, "model=cnn"]) == Path("runs/digits-cnn")
    assert run_folder([*train, "--multirun", "hydra.sweep.dir=/sweep", "epochs=1,2"]) == Path("/sweep")
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  run:\n    dir: /elsewhere/${name}\n"
    (tmp_path / "experiment" / "there.yaml").write_text(text)
    assert run_folder([*train, "--config-dir", str(tmp_path), "experiment=there", "name=x"]) == Path("/elsewhere/x")
    with pytest.raises(UserError, match="unknown option 'epoch'"):
        run_folder([*train, "epoch=3"])


def elastic_options(*words: str) -> Namespace:
    return parse(elastic_parser(), [*words])


def test_discovered_hosts() -> None:
    found = available_hosts(elastic_options("--slots", "4", "--discover", "echo a; echo b:2; echo c slots=3"))
    assert found == [Host("a", 4), Host("b", 2), Host("c", 3)]
    assert available_hosts(elastic_options("--discover", "true")) == []
    assert listed_hosts(elastic_options("-H", "a,b:2")) == [Host("a"), Host("b", 2)]


def test_a_pool_prefers_the_hosts_in_use_and_leaves_failed_ones_alone() -> None:
    limits = Limits(minimum=2, maximum=3, wait_s=1, restarts=3)
    listed = [Host("a", 1), Host("b", 2), Host("c", 2)]
    pool = Pool(lambda: listed, lambda host, known: "it does not answer" if host.name == "a" else "", limits)
    wait_until(lambda: len(pool.choice()) == 2, "two hosts")
    assert pool.choice() == [Host("b", 2), Host("c", 1)]
    pool.used = [Host("c", 2), Host("b", 1)]
    assert not pool.has_changed()
    pool.put_aside("b")
    assert pool.choice() == [Host("c", 2)]
    pool.put_aside("c")
    assert pool.choice() == []
    listed.remove(Host("c", 2))
    wait_until(pool.has_changed, "another list of hosts")


def test_a_host_that_is_slow_and_a_discovery_that_fails_keep_no_other_host_waiting() -> None:
    listed, never = [[Host("b")], [Host("slow"), Host("b"), Host("c")]], threading.Event()

    def discover() -> list[Host]:
        if not listed:
            raise RuntimeError("a fault of any kind")
        return listed.pop(0)

    pool = Pool(discover, lambda host, known: str(never.wait() if host.name == "slow" else ""), Limits(1, None, 1, 3))
    wait_until(lambda: pool.choice() == [Host("b", 1), Host("c", 1)], "both hosts")


def test_what_is_wrong_with_a_discovery_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "CHECK_EVERY_S", 0)
    said: list[str | None] = [None, *["no network"] * 9, "no such file", "no such file", None, None, "no network"]
    over = threading.Event()

    def discover() -> list[Host]:
        if not said:
            over.set()
            threading.Event().wait()
        if trouble := said.pop(0):
            raise UserError(trouble)
        return [Host("a")]

    Pool(discover, lambda host, known: "", Limits(1, None, 1, 3))
    assert over.wait(30)
    again = "the hosts can be listed again"
    wanted = ["no network", "no such file", again, "no network"]
    assert capsys.readouterr().out.splitlines() == [f"launch: {line}" for line in wanted]


def test_what_hangs_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ssh that never ends, and a command that lists hosts."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(command, "ANSWER_S", 0.2)
    monkeypatch.setattr(hosts, "DISCOVER_S", 0.2)
    launcher = ElasticLauncher(elastic_options("--transport", "gloo", "-H", "192.0.2.1"))
    assert launcher.fault(Host("192.0.2.1"), known=True) == "it does not answer"
    with pytest.raises(UserError, match=r"--discover 'sleep 600' took over 0.2 s: try it by hand"):
        available_hosts(elastic_options("--discover", "sleep 600"))


def test_ipv6_addresses_go_over_gloo() -> None:
    assert launcher_for(["ssh", "-H", "[2001:db8::1]:1,[2001:db8::2]:1"]).transport == "gloo"


def test_reports_are_taken_out_of_what_the_ranks_print() -> None:
    assert _split(b'one\x1e["rank 0", 7]\ntwo') == (b"onetwo", {"rank 0": 7}, b"")
    assert _split(b'one\x1e["rank') == (b"one", {}, b'\x1e["rank')
    assert _split(b"\x1e of a rank\n") == (b"\x1e of a rank\n", {}, b"")


@pytest.mark.parametrize(
    ("said", "first"),
    [
        (b"  Process name: [[12767,1],1]\n  Exit code:    7\n", (1, 7)),
        (b"mpirun noticed that process rank 3 with PID 0 on node vm exited on signal 9 (Killed).", (3, 137)),
        (b"  Process name: [prterun-vm-2@1,1]\n  Exit code:    7\n", (1, 7)),
        (b"prterun noticed that process rank 1 with PID 5 on node vm exited on\nsignal 9 (Killed).", (1, 137)),
        (b"nothing of the kind", None),
    ],
)
def test_what_mpirun_says_of_the_first_failure(said: bytes, first: tuple[int, int] | None) -> None:
    assert _first_of_mpi(said) == first
