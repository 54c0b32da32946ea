"""Find what is wrong before a job starts: python -m <package>.cluster.doctor --hosts FILE.

See docs/cluster-troubles.md.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import Parser, end_at_sigterm, end_well
from ..launch.command import PACKAGE
from ..launch.transport import LOCAL, Host
from ..tables import print_table
from . import doctor_checks as checks
from .allreduce import engines
from .doctor_checks import Finding
from .host_report import nearest
from .host_sessions import HostSessions
from .hosts import parse_hosts, read_hosts
from .network import Network, checked_subnet, is_here
from .ssh import port_number

FAULT_CODE = 2
JOB_S = 300  # for the allreduce: on a cold file system a framework may take minutes to load
STOP_S = 20  # for the launcher to end it


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the network for the ranks if there are several hosts and they have one."""

    findings: list[Finding]
    network: Network | None

    def faults(self) -> list[Finding]:
        """What would stop a job."""
        return [finding for finding in self.findings if finding.state == "fault"]


def check(
    hosts: Sequence[Host],
    folder: Path = Path("runs"),
    port: int | None = None,
    subnet: str | None = None,
    quick: bool = False,
    mpi: bool = True,
) -> Diagnosis:
    """Ask all hosts at once and compare what they say.

    Args:
        hosts: Those of the job; this machine joins them if it is not one of them, since it will launch.
        folder: That of all runs, or of one run.
        port: Of the hosts' sshd.
        subnet: The user's choice of a network.
        quick: Start no job.
        mpi: Whether Open MPI will start the ranks.

    Raises:
        UserError: if there is no ssh.
    """
    hosts = list(hosts) or [Host(LOCAL)]
    names = [host.name for host in hosts]
    if not any(map(is_here, names)):
        names.append(LOCAL)
    with ExitStack() as closing:
        token = _leave_token(nearest(folder), closing)
        sessions = closing.enter_context(HostSessions(names, nearest(folder), token, port))
        reports = sessions.reports()
        network, findings = checks.check_network(reports, subnet) if len(reports) > 1 else (None, [])
        findings = [*checks.check_ssh(sessions), *checks.check_equal(reports, mpi), *findings]
        if network is not None:
            findings += checks.check_connections(sessions, network)
        findings += [*checks.check_names(reports), *checks.check_clocks(sessions), *checks.check_gpus(hosts, reports)]
        findings += [*checks.check_limits(reports), *checks.check_folder(reports), *checks.check_lock(folder)]
    result = Diagnosis(findings, network)
    if not quick and not result.faults():
        findings += [_check_allreduce(engine, hosts, network, port) for engine in engines()]
    return result


def _leave_token(folder: Path, closing: ExitStack) -> str:
    """A file that every host sees if the folder is shared; gone when `closing` closes."""
    file = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        file.touch()
    except OSError:  # check_folder says that it is not writable
        return file.name
    closing.callback(file.unlink, missing_ok=True)
    return file.name


def _check_allreduce(engine: str, hosts: Sequence[Host], network: Network | None, port: int | None) -> Finding:
    """A real job of one engine: one rank on each host, or two on this one."""
    places = ["-n", "2"]
    if network:
        ways = ["--network", network.subnet, *(["--port", str(port)] if port else [])]
        places = ["ssh", "--no-check", *ways, "-H", ",".join(_place(host) for host in hosts)]
    launch = [sys.executable, "-m", f"{PACKAGE}.launch", *places]
    job = [*launch, "--module", "cluster.allreduce", engine]
    names = tuple(host.name for host in hosts)
    way_out = f"start it by hand to see more: {shlex.join(job)}"
    code, output, errors = _run(job)
    if code is None:
        return Finding("fault", "allreduce", names, f"a job of {engine} did not end within {JOB_S} s", way_out)
    measured = re.search(r'\{"ranks".*\}', output)
    if code or measured is None:
        said = next(iter(re.findall("^error: (.*)", errors, re.MULTILINE)), "it said nothing")
        return Finding("fault", "allreduce", names, f"a job of {engine} ended with code {code}: {said}", way_out)
    result = json.loads(measured[0])
    found = f"{engine}: {result['ranks']} ranks, 64 MiB of main memory at {result['megabytes_per_s']:.0f} MB/s"
    return Finding("good", "allreduce", names, found)


def _run(job: list[str]) -> tuple[int | None, str, str]:
    """A job's code, output and errors; no code if it had to be stopped."""
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            output, errors = process.communicate(timeout=JOB_S)
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            if process.poll() is None:
                _stop(process)
    return process.returncode, output, errors


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=STOP_S)
    process.kill()


def _place(host: Host) -> str:
    """One rank of a host, as -H takes it."""
    return f"[{host.name}]:1" if ":" in host.name else f"{host.name}:1"


def main() -> None:
    """Print the findings; the exit code is 0, or 2 if there is a fault."""
    end_at_sigterm()
    options = _parse(sys.argv[1:])
    hosts = options.H or (read_hosts(options.hosts) if options.hosts else [])
    diagnosis = check(hosts, options.folder, options.port, options.network, options.quick)
    if options.json:
        print(json.dumps([asdict(finding) for finding in diagnosis.findings], indent=2))
    else:
        _show(diagnosis.findings)
    sys.exit(FAULT_CODE if diagnosis.faults() else 0)


def _parse(arguments: list[str]) -> Any:
    parser = Parser(prog="doctor", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--hosts", type=Path, metavar="FILE", help="a hostfile; without hosts, this machine alone")
    which.add_argument("-H", type=parse_hosts, metavar="a:4,b:4", help="the hosts and their slots")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="of the runs, or of one run (runs)")
    parser.add_argument("--port", type=port_number, help="of the hosts' sshd; else what ssh's own configuration says")
    parser.add_argument("--network", type=checked_subnet, metavar="SUBNET", help="for the ranks, such as 10.0.0.0/16")
    parser.add_argument("--quick", action="store_true", help="start no job")
    parser.add_argument("--json", action="store_true", help="the findings as a list of objects")
    return parser.parse_args(arguments)


def _show(findings: Sequence[Finding]) -> None:
    everyone = max((len(finding.hosts) for finding in findings), default=0)
    rows = [
        (
            item.state,
            item.check,
            "all" if len(item.hosts) == everyone > 1 else checks.names(item.hosts),
            item.found,
            item.way_out,
        )
        for item in findings
    ]
    print_table(("state", "check", "hosts", "found", "way out"), rows)


if __name__ == "__main__":
    end_well(main, lambda: 0)
