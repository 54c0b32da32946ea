"""The batch script on a real Slurm of two virtual nodes on this machine."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import HARD_ANSWERS, check, nox, render
from waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.needs("munged", "sbatch", "slurmctld", "slurmd")]

CONF = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as closing:
        sockets = [closing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A controller, two nodes and munge of its own; gives the environment for Slurm's commands."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    port, first, second = free_ports(3)
    host = socket.gethostname().partition(".")[0]
    text = CONF.format(folder=folder, host=host, port=port, first=first, second=second)
    (folder / "slurm.conf").write_text(text)
    for node in ("n1", "n2"):  # PMIx keeps its files there, and the nodes share this machine
        (folder / node).mkdir()
        (folder / f"{node}.conf").write_text(f"{text}TmpFS={folder}/{node}\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    names = [f"--{option}={folder}/munge.{end}" for option, end in munge.items()]
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [["munged", "--foreground", "--force", *names], ["slurmctld", "-D"]]
    daemons += [["slurmd", "-D", "-f", f"{folder}/{node}.conf", "-N", node] for node in ("n1", "n2")]
    with ExitStack() as cleaning:
        for words in daemons:
            log = cleaning.enter_context((folder / f"{words[0]}-{words[-1]}.log".replace("/", "_")).open("w"))
            path = shutil.which(words[0], path=f"/usr/sbin:{os.environ['PATH']}")
            assert path
            daemon = subprocess.Popen([path, *words[1:]], env=environment, stdout=log, stderr=log)
            cleaning.callback(daemon.wait)
            cleaning.callback(daemon.terminate)
            if words[0] == "munged":
                wait_until((folder / "munge.socket").exists, "munge", 20)
        wait_until(lambda: slurm(environment, "sinfo", "-h", "-o", "%T %D") == "idle 2", "two idle nodes", 60)
        yield environment


def slurm(environment: dict[str, str], *words: str) -> str:
    """What one of Slurm's commands says."""
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def submit_folder(template: Path, full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the batch script; it takes the environment of the installed one."""
    nox(full_project, "train", "-n", "1", "name=installs", "epochs=1")
    folder = render(template, tmp_path_factory.mktemp("batch"), use_slurm=True, **HARD_ANSWERS)
    (folder / ".venv").symlink_to(full_project / ".venv")
    return folder


def user(cluster: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of who submits jobs."""
    environment = {**cluster, "PYTHONPATH": str(folder / "src")}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # the nodes share this machine's cores
    return environment


def submit(cluster: dict[str, str], folder: Path, *words: str) -> str:
    """Submits the batch script; gives the job's number."""
    command = ["sbatch", "--parsable", "--cpus-per-task=1", "--time=10", *words]
    done = subprocess.run(command, cwd=folder, env=user(cluster, folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(cluster: dict[str, str], job: str) -> str:
    found = re.search(r"JobState=(\w+)", slurm(cluster, "scontrol", "show", "job", job))
    return found[1] if found else ""


def finish(cluster: dict[str, str], folder: Path, job: str) -> str:
    """Waits for a job to end well; gives its log."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_until(lambda: state(cluster, job) in ends, f"the end of job {job}", 150)
    log = (folder / f"slurm-{job}.log").read_text()
    assert state(cluster, job) == "COMPLETED", log
    return log


def lines(folder: Path, run: str) -> list[dict[str, float]]:
    file = folder / "runs" / run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def curve(folder: Path, run: str) -> list[tuple[float, float]]:
    return [(line["step"], line["train/loss"]) for line in lines(folder, run) if "train/loss" in line]


def weights(folder: Path, run: str) -> bytes:
    checkpoints = folder / "runs" / run / "checkpoints"
    return (checkpoints / (checkpoints / "latest").read_text().strip() / "model.safetensors").read_bytes()


def test_it_saves_before_the_time_limit_goes_back_and_on(cluster: dict[str, str], submit_folder: Path) -> None:
    """The signal is the one that Slurm sends before the limit; together the parts are the undisturbed run."""
    options = ("epochs=30", "tracking.tensorboard=false", "checkpoint.every_epochs=10", "evaluate_every=10")
    whole = submit(cluster, submit_folder, "launch/slurm.sbatch", "name=whole", *options)
    package = next((submit_folder / "src").iterdir()).name
    step = f"srun --mpi=pmix --kill-on-bad-exit=0 --wait=30 python -m {package}.train name=whole {' '.join(options)}"
    assert f"start 0 of job {whole} on n[1-2]: {step}\n" in finish(cluster, submit_folder, whole)
    parts = submit(cluster, submit_folder, "launch/slurm.sbatch", "name=parts", "resume=never", *options)
    wait_until(lambda: len(lines(submit_folder, "parts")) > 3, "training", 90)
    check("env", f"SLURM_CONF={cluster['SLURM_CONF']}", "scancel", "--signal=USR1", "--batch", parts)
    log = finish(cluster, submit_folder, parts)
    assert "stopped by a signal after step" in log
    assert f"start 1 of job {parts}" in log
    assert {path.name for path in (submit_folder / "runs/parts/logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert curve(submit_folder, "parts") == curve(submit_folder, "whole")
    assert weights(submit_folder, "parts") == weights(submit_folder, "whole")


def test_an_array_is_a_sweep(cluster: dict[str, str], submit_folder: Path) -> None:
    rates = [0.01, 0.02]
    sweep = "\r\n".join(f"name='rate-{rate}' \"optimizer.lr={rate}\"" for rate in rates)
    (submit_folder / "launch/sweep.txt").write_text(sweep)
    words = ["--nodes=1", "--array=1-3", "launch/slurm.sbatch", "epochs=1", "tracking.tensorboard=false"]
    submit(cluster, submit_folder, *words)
    runs = [f"rate-{rate}" for rate in rates]
    wait_until(lambda: all(curve(submit_folder, run) for run in runs), "both runs", 90)
    wait_until(lambda: slurm(cluster, "squeue", "-h") == "", "an empty queue", 90)
    assert curve(submit_folder, runs[0]) != curve(submit_folder, runs[1])
    logs = [file.read_text() for file in submit_folder.glob("slurm-*.log")]
    assert [log for log in logs if log.startswith("error: line 3 of launch/sweep.txt is empty or missing")]


def test_hydra_submits_a_sweep(cluster: dict[str, str], submit_folder: Path) -> None:
    text = (submit_folder / "pyproject.toml").read_text()
    plugin = re.search(r'^slurm = \["(.+?)"\]', text, re.MULTILINE)
    assert plugin
    check(".venv/bin/pip", "install", "--quiet", plugin[1], cwd=submit_folder)
    package = next((submit_folder / "src").iterdir()).name
    command = [".venv/bin/python", "-m", f"{package}.train", "--multirun", "hydra/launcher=submitit_slurm"]
    command += ["hydra.launcher.nodes=2", "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=10"]
    command += ["name=swept", "optimizer.lr=0.01,0.02", "epochs=1"]
    environment = {**user(cluster, submit_folder), "SLURM_MPI_TYPE": "pmix", "SUBMITIT_PREEMPT_SIGNAL": "USR1"}
    done = subprocess.run(command, cwd=submit_folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [f"swept-sweep/epochs=1_optimizer.lr={rate}" for rate in (0.01, 0.02)]
    for run in runs:
        logs = (submit_folder / "runs" / run / "logs").iterdir()
        assert {path.name for path in logs} == {"rank-0.log", "rank-1.log"}
    assert curve(submit_folder, runs[0]) != curve(submit_folder, runs[1])


def test_a_cancelled_job_stays_cancelled(cluster: dict[str, str], submit_folder: Path) -> None:
    job = submit(cluster, submit_folder, "launch/slurm.sbatch", "name=cancelled", "epochs=100000")
    wait_until(lambda: len(lines(submit_folder, "cancelled")) > 3, "training", 90)
    slurm(cluster, "scancel", job)
    wait_until(lambda: slurm(cluster, "squeue", "-h") == "", "an empty queue", 90)
    assert state(cluster, job) == "CANCELLED"
