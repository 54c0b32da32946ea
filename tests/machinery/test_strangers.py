"""Jobs over Gloo beside somebody who wants to take part, and ranks that the others miss."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import ROOT, environment, launched
from namespaces import NEEDS_ROOT, Hosts
from waiting import wait_until

pytestmark = pytest.mark.slow

STRANGER = Path(__file__).parent / "stranger.py"
JOINS = str(Path(__file__).parent / "joins.py")
END_S = 60


@contextmanager
def started(folder: Path, what: str, ranks: int = 3, **settings: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = launched(ranks, sys.executable, JOINS, str(folder), what)
    with subprocess.Popen(command, cwd=ROOT, env=environment() | settings, text=True, **pipes) as job:  # type: ignore[call-overload]
        try:
            yield job
        finally:
            job.kill()


def wait_for(job: subprocess.Popen[str], folder: Path, pattern: str, count: int) -> None:
    def are_there() -> bool:
        assert job.poll() is None, job.communicate()[0]
        return len(list(folder.glob(pattern))) == count

    wait_until(are_there, f"{count} {pattern} in {folder}", 90)


def end_of(job: subprocess.Popen[str], seconds: float = END_S) -> str:
    return job.communicate(timeout=seconds)[0]


def listening(processes: list[int]) -> set[tuple[str, int]]:
    """Where these processes listen: addresses as the kernel writes them, and ports."""
    inodes = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
            except FileNotFoundError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{processes[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def members(job: subprocess.Popen[str], folder: Path) -> list[int]:
    """The ranks that have begun, and the launcher."""
    return [job.pid, *(int(file.read_text()) for file in folder.glob("process-*"))]


@contextmanager
def attacked(command: list[str], **settings: str) -> Iterator[list[str]]:
    """What a stranger is told, who holds some connections open for as long as this lasts."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | settings, text=True, **pipes) as stranger:  # type: ignore[call-overload]
        answers, held = json.loads(stranger.stdout.readline())
        assert held
        yield answers
        stranger.communicate()


def check_nothing_was_told(answers: list[str]) -> None:
    """A port of a rank answers a nonce by another one and a proof of both: 24 bytes that nobody can use again."""
    assert answers
    assert {len(answer) // 2 for answer in answers} <= {0, 24}
    assert len({answer for answer in answers if answer}) == len([answer for answer in answers if answer])


def ends(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d ends with .*", output))


UNDISTURBED = [f"rank {rank} ends with 6" for rank in range(3)]  # 0 + 1 + 2, and 1 on average of each


def test_a_stranger_on_this_machine_changes_nothing(tmp_path: Path) -> None:
    """As another user, at every port of the job, while its ranks wait for the last one and while they work."""
    with started(tmp_path, "late") as job:
        wait_for(job, tmp_path, "process-*", 3)
        wait_until(lambda: len(listening(members(job, tmp_path))) >= 3, "the launcher's port, and those for the last")
        places = listening(members(job, tmp_path))
        assert {address for address, _ in places} == {"0100007F"}
        command = [sys.executable, str(STRANGER), "127.0.0.1", *(str(port) for _, port in places)]
        with attacked(command) as answers:
            check_nothing_was_told(answers)
            (tmp_path / "join").touch()
            wait_for(job, tmp_path, "talks-*", 3)
            left = listening(members(job, tmp_path))
            with attacked([*command[:3], *(str(port) for _, port in left)]) as answers:
                check_nothing_was_told(answers)
                (tmp_path / "stop").touch()
                output = end_of(job)
    assert job.returncode == 0, output
    assert ends(output) == UNDISTURBED
    assert "gloo" not in output.lower()


@NEEDS_ROOT
def test_the_secrets_of_a_job_are_seen_by_its_owner_alone(tmp_path: Path) -> None:
    with started(tmp_path, "late") as job:
        wait_for(job, tmp_path, "process-*", 3)
        rank = members(job, tmp_path)[1]
        secrets = re.findall(rb"HOROVOD_GLOO_(?:TOKEN|KEY)=(\w+)", Path(f"/proc/{rank}/environ").read_bytes())
        shown = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, check=True).stdout
        spied = subprocess.run(["cat", f"/proc/{rank}/environ"], capture_output=True, check=False, user=65534)
        job.terminate()
        output = end_of(job)
    assert len(set(secrets)) == 2
    assert not [secret for secret in secrets if secret in shown or secret.decode() in output]
    assert spied.returncode != 0
    assert spied.stdout == b""


@NEEDS_ROOT
def test_a_stranger_on_the_network_of_two_hosts_changes_nothing(tmp_path: Path) -> None:
    """On a third host, which reaches every port of both."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "hosts").mkdir()
    with Hosts(tmp_path / "hosts", 3) as hosts:
        options = ["-H", "node1:2,node2:1", "--transport", "gloo", "--command", "--"]
        command = ["launch/ssh.sh", *options, sys.executable, JOINS, str(run), "late"]
        with hosts.start("node1", *command) as job:
            wait_for(job, run, "process-*", 3)
            ports: dict[str, str] = {}
            for _ in range(300):
                ports = {name: hosts.check(name, "ss", "-Hltn") for name in ("node1", "node2")}
                places = {name: re.findall(rf"{hosts.address(name)}:(\d+) ", said) for name, said in ports.items()}
                if len(places["node1"]) >= 3:  # the launcher's, and those that await the last rank
                    break
                time.sleep(0.1)
            assert len(places["node1"]) >= 3, ports
            stranger = hosts.command("node3", sys.executable, STRANGER, hosts.address("node1"), *places["node1"])
            with attacked(stranger, **hosts.environment()) as answers:
                check_nothing_was_told(answers)
                (run / "join").touch()
                wait_for(job, run, "talks-*", 3)
                (run / "stop").touch()
                output = end_of(job)
    assert job.returncode == 0, output
    assert ends(output) == UNDISTURBED


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("late", "rank 2 on host localhost did not join the others in time: see what it is doing"),
        ("silent", "rank 2 on host localhost was silent for longer than the others wait: see what it is doing"),
        ("leaves", "rank 2 on host localhost ended with code 0 before it had joined the others"),
        ("quits", "rank 2 on host localhost had ended with code 0 when rank "),
    ],
)
def test_a_rank_that_the_others_miss_is_named(tmp_path: Path, what: str, sentence: str) -> None:
    with started(tmp_path, what, HOROVOD_GLOO_TIMEOUT_SECONDS="5") as job:
        if what == "leaves":
            wait_for(job, tmp_path, "process-*", 3)
            (tmp_path / "join").touch()
        output = end_of(job)
    assert job.returncode not in (0, None), output
    assert f"error: {sentence}" in output


def test_a_rank_that_comes_late_ends_no_job(tmp_path: Path) -> None:
    """By more than Gloo's own limit of 30 s."""
    with started(tmp_path, "late") as job:
        wait_for(job, tmp_path, "process-*", 3)
        time.sleep(34)
        (tmp_path / "join").touch()
        wait_for(job, tmp_path, "talks-*", 3)
        (tmp_path / "stop").touch()
        output = end_of(job)
    assert job.returncode == 0, output
    assert ends(output) == UNDISTURBED
