"""What horovodrun and mpirun get wrong when a job ends before its time; two ranks without Horovod, so all is quick."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ROOT, StartedJob, environment, is_alive, launched, start_job, wait_for_training
from test_launch import TRANSPORTS
from waiting import wait_until

from my_training.errors import BURST_S, PREEMPTED
from my_training.launch import agent
from my_training.launch.supervise import Job, Part, Process

DOWN_S = 15

pytestmark = pytest.mark.slow
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def start(what: str, folder: Path, transport: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).parent / "misbehaves.py"), what, str(folder)]
    launcher = launched(2, *command, options=("--transport", transport, *options))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return StartedJob(launcher, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def wait_for(folder: Path, pattern: str, count: int) -> list[Path]:
    wait_until(lambda: len(list(folder.glob(pattern))) == count, f"{count} {pattern} in {folder}")
    return sorted(folder.glob(pattern))


def check_down(folder: Path) -> None:
    """Nothing is left of a job that has ended."""
    for file in folder.glob("process-*"):
        assert not is_alive(int(file.read_text()))


@each_transport
@pytest.mark.parametrize("what", ["exits", "child", "killed"])
def test_the_rank_that_failed_first_is_named_and_its_code_is_the_jobs(
    tmp_path: Path, transport: str, what: str
) -> None:
    with start(what, tmp_path, transport) as job:
        output, _ = job.communicate(timeout=2 * DOWN_S)
    code = 128 + signal.SIGKILL if what == "killed" else 7
    assert job.returncode == code, output
    assert f"error: rank 1 on host localhost ended with code {code}\n" in output
    check_down(tmp_path)
    if what == "child":
        assert not is_alive(int((tmp_path / "child").read_text()))


@each_transport
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_ranks_as_save_and_stop(tmp_path: Path, transport: str, number: int) -> None:
    with start("saves", tmp_path, transport) as job:
        wait_for(tmp_path, "ready-*", 2)
        job.send_signal(number)
        output, _ = job.communicate(timeout=DOWN_S)
    assert job.returncode == PREEMPTED == 75, output
    check_down(tmp_path)


@each_transport
def test_a_burst_of_signals_is_one(tmp_path: Path, transport: str) -> None:
    with start("saves", tmp_path, transport) as job:
        wait_for(tmp_path, "ready-*", 2)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            job.send_signal(number)
            time.sleep(0.1)
        output, _ = job.communicate(timeout=DOWN_S)
    assert job.returncode == PREEMPTED, output
    check_down(tmp_path)


def two_hosts(folder: Path, first: str, second: str) -> Job:
    """A job of a rank on each of two hosts, which are this one; each runs a line of the shell in `folder`."""
    program = [sys.executable, agent.__file__]
    parts = [
        Part(host, program, range(rank, rank + 1), [Process(f"rank {rank}", ["sh", "-c", line])])
        for rank, (host, line) in enumerate({"a": first, "b": second}.items())
    ]
    return Job(parts, str(folder), grace_s=5)


@pytest.mark.parametrize("code", [1, 9, 134])
def test_the_first_end_counts_not_the_first_host(tmp_path: Path, code: int) -> None:
    """Whatever the other rank makes of it."""
    os.mkfifo(tmp_path / "pipe")
    failure = two_hosts(tmp_path, f"read _ < pipe; sleep .2; exit {code}", "echo > pipe; exit 7").wait(bool)
    assert failure is not None
    assert (failure.sentence, failure.host) == ("rank 1 on host b ended with code 7", "b")


@pytest.mark.parametrize("code", [1, 134])
def test_a_cause_counts_more_than_a_consequence(tmp_path: Path, code: int) -> None:
    """The report of the cause may come later, over a slower link."""
    failure = two_hosts(tmp_path, f"exit {code}", "sleep .4; exit 7").wait(bool)
    assert failure is not None
    assert (failure.code, failure.host) == (7, "b")


def test_a_rank_that_waited_in_vain_is_heard_however_much_it_says(tmp_path: Path) -> None:
    """All of it at once, as when the launcher has no time to listen."""
    (tmp_path / "said").write_text("[gloo/pair.cc:1] Timed out waiting 5000ms\n" + "of a traceback\n" * 1000)
    failure = two_hosts(tmp_path, "cat said >&2; exit 1", "sleep 20").wait(bool)
    assert failure is not None
    assert failure.sentence.startswith("rank 1 on host b was silent for longer than the others wait")


@each_transport
def test_an_agent_that_is_killed_is_noticed_and_leaves_nothing(tmp_path: Path, transport: str) -> None:
    """Also not a child of a rank that holds the launcher's pipes and has a session of its own."""
    with start("holds", tmp_path, transport) as job:
        ranks = [int(file.read_text()) for file in wait_for(tmp_path, "process-*", 2)]
        wait_for(tmp_path, "child-*", 2)
        wait_for(tmp_path, "ready-*", 2)
        (found,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(found), signal.SIGKILL)
        output, _ = job.communicate(timeout=2 * DOWN_S)
    assert job.returncode == 1, output
    assert "error: host localhost is lost: it cannot be reached, or its agent was killed there\n" in output
    for process in [*ranks, *(int(file.read_text()) for file in tmp_path.glob("child-*"))]:
        assert not is_alive(process)


@each_transport
def test_nobody_need_read_the_output(tmp_path: Path, transport: str) -> None:
    """As in `launch/local.sh ... | head -1`."""
    run = tmp_path / "run"
    with start_job(2, run, "epochs=3", options=("--transport", transport)) as job:
        assert job.stdout
        job.stdout.readline()
        job.stdout.close()
        job.wait(timeout=120)
    assert job.returncode == 0, (run / "logs" / "rank-0.log").read_text()
    assert (run / "curves.png").exists()


@each_transport
def test_a_refusal_is_the_last_line(tmp_path: Path, transport: str) -> None:
    with start_job(2, tmp_path, "data.global_batch=1", options=("--transport", transport)) as job:
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 2
    *_, last = output.splitlines()
    assert last.startswith("error: the global batch of 1 is smaller than 2")
    assert "Primary job" not in output


@each_transport
def test_ranks_that_do_not_save_in_time_are_ended(tmp_path: Path, transport: str) -> None:
    with start("deaf", tmp_path, transport, "--grace", "1") as job:
        wait_for(tmp_path, "ready-*", 2)
        job.terminate()
        output, _ = job.communicate(timeout=2 * DOWN_S)
    assert job.returncode not in (0, PREEMPTED)
    assert "within 1 s after they were told to save and stop: give them more with --grace" in output
    check_down(tmp_path)


@each_transport
def test_a_second_signal_ends_all_at_once(tmp_path: Path, transport: str) -> None:
    with start("deaf", tmp_path, transport) as job:
        wait_for(tmp_path, "ready-*", 2)
        for _ in range(2):
            job.send_signal(signal.SIGINT)
            time.sleep(BURST_S + 0.5)
        output, _ = job.communicate(timeout=DOWN_S)
    assert job.returncode == 128 + signal.SIGINT, output
    check_down(tmp_path)


@each_transport
def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path: Path, transport: str) -> None:
    with start("deaf", tmp_path, transport) as job:
        ranks = [int(file.read_text()) for file in wait_for(tmp_path, "process-*", 2)]
        wait_for(tmp_path, "ready-*", 2)
        job.kill()
        wait_until(lambda: not any(map(is_alive, ranks)), "the end of all ranks", DOWN_S)


@pytest.mark.needs("ps")
@each_transport
def test_no_value_of_the_environment_is_on_a_command_line(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_OF_THIS_TEST", "for-nobody-else")
    with start("saves", tmp_path, transport) as job:
        ranks = [int(file.read_text()) for file in wait_for(tmp_path, "process-*", 2)]
        wait_for(tmp_path, "ready-*", 2)
        listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        seen = [Path(f"/proc/{rank}/environ").read_bytes() for rank in ranks]
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=DOWN_S)
    assert str(Path(__file__).parent / "misbehaves.py") in listed
    assert "for-nobody-else" not in listed
    assert all(b"HOROVOD_OF_THIS_TEST=for-nobody-else" in environ for environ in seen)


def test_a_command_that_is_not_there() -> None:
    result = subprocess.run(
        launched(2, "no-such-program"), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 127
    assert "error: No such file or directory: no-such-program" in result.stderr


def test_training_over_gloo_saves_on_a_signal(tmp_path: Path) -> None:
    """With horovodrun SIGUSR1 ends the job before the ranks have heard of it."""
    run = tmp_path / "run"
    with start_job(2, run, "epochs=100000", options=("--transport", "gloo")) as job:
        wait_for_training(run)
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=60)
    stopped = re.search(r"stopped by a signal after step (\d+)", output)
    assert stopped, output
    assert job.returncode == PREEMPTED
    assert (run / "checkpoints" / f"step-{int(stopped[1]):08d}").is_dir()
