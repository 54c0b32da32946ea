"""What the doctor finds in the reports of the hosts: each check is a function of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.lock import run_lock
from ..errors import UserError
from ..launch.transport import LOCAL, Host
from .host_report import HostReport
from .host_sessions import HostSessions
from .network import Interface, Network, choose_network

MAX_SKEW_S = 5.0
MIN_SHM = 10**9  # bytes: what the workers of one data loader need
MIN_FREE = 10**9  # bytes: for some checkpoints

Reports = Mapping[str, HostReport]


@dataclass(frozen=True)
class Finding:
    """What one check found; `state` is good, warning or fault, and all but a good one has a way out."""

    state: str
    check: str
    hosts: tuple[str, ...]
    found: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{names(self.hosts)}: {self.found}: {self.way_out}"


def _verdict(
    check: str, hosts: Iterable[str], wrong: Mapping[str, str], good: str, way_out: str, state: str = "fault"
) -> Finding:
    """What is `wrong`, by host, and the way out; where nothing is, the good that is to be said of all hosts."""
    if wrong:
        return Finding(state, check, tuple(wrong), "; ".join(dict.fromkeys(wrong.values())), way_out)
    return Finding("good", check, tuple(hosts), good)


def _refusal(check: str, hosts: Iterable[str], error: UserError) -> Finding:
    """A sentence, whose last part is the way out."""
    found, _, way_out = str(error).rpartition(": ")
    return Finding("fault", check, tuple(hosts), found, way_out)


def check_ssh(sessions: HostSessions) -> list[Finding]:
    """Who answers, and the reasons of those who do not."""
    failed = [
        Finding("fault", answer.check, (host,), answer.found, answer.way_out)
        for host, answer in sessions.answers.items()
        if answer.report is None
    ]
    answers = sessions.answers.items()
    times = {host: answer.connected_s for host, answer in answers if answer.report and answer.report.reached}
    if not times:
        return failed
    slowest = max(times, key=lambda host: times[host])
    found = f"open in {times[slowest]:.1f} s" + (f" at most ({slowest})" if len(times) > 1 else "")
    return [*failed, Finding("good", "ssh", tuple(times), found)]


def check_equal(reports: Reports, mpi: bool) -> list[Finding]:
    """What must be the same everywhere; Open MPI only where it starts the ranks."""
    if not reports:
        return []
    pythons = {host: ".".join(report.python.split(".")[:2]) for host, report in reports.items()}
    findings = [
        _same("code", {host: _code(report) for host, report in reports.items()}, "bring the same commit to all hosts"),
        _same("python", pythons, "use the same minor version on all hosts, with the same packages"),
    ]
    for name in _packages(reports):
        way_out = "install the same versions there, best from one lock file, wheel or image"
        findings.append(_same(name, _versions(reports, name), way_out, "warning" if name == "numpy" else "fault"))
    if not any("horovod" in report.versions for report in reports.values()):
        way_out = "run 'nox -s train' once, or install the wheel of scripts/build_horovod.py"
        findings.append(Finding("fault", "horovod", tuple(reports), "it is not installed", way_out))
    versions = {host: report.mpi or "none" for host, report in reports.items()}
    way_out = "install the same Open MPI on all hosts, first on PATH also in ssh sessions, or use --transport gloo"
    return [*findings, _same("mpi", versions, way_out, "fault" if mpi else "warning")]


def _packages(reports: Reports) -> list[str]:
    return sorted({package for report in reports.values() for package in report.versions})


def _versions(reports: Reports, package: str) -> dict[str, str]:
    return {host: report.versions.get(package, "none") for host, report in reports.items()}


def _code(report: HostReport) -> str:
    commit = f"commit {report.commit[:8]}{'+' if report.dirty else ''}, " if report.commit else ""
    return f"{commit}sources {report.code}"


def _same(name: str, values: Mapping[str, str], way_out: str, state: str = "fault") -> Finding:
    """Good if all hosts have the same value; else about those that differ from most."""
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    groups = sorted(by_value.items(), key=lambda item: -len(item[1]))
    if len(groups) <= 1:
        return Finding("good", name, tuple(values), "".join(by_value))
    strays = tuple(host for _, hosts in groups[1:] for host in hosts)
    found = "; ".join(f"{value} on {names(hosts)}" for value, hosts in groups)
    return Finding(state, name, strays, found, way_out)


def check_network(reports: Reports, subnet: str | None) -> tuple[Network | None, list[Finding]]:
    """The network that all hosts share, and whether its cards take packets of one size."""
    interfaces = {host: [Interface(**item) for item in report.interfaces] for host, report in reports.items()}
    reached = {host: report.reached for host, report in reports.items() if report.reached}
    try:
        network = choose_network(interfaces, reached, subnet)
    except UserError as error:
        return None, [_refusal("network", reports, error)]
    cards = ", ".join(f"{host} {item.name} {item.address}" for host, item in network.interfaces.items())
    mtus = {host: str(reports[host].mtus[item.name]) for host, item in network.interfaces.items()}
    way_out = "set the same MTU on these cards: with a larger one small messages pass and large ones are lost"
    chosen = Finding("good", "network", tuple(reports), f"{network.subnet}: {cards}")
    return network, [chosen, _same("mtu", mtus, way_out, "warning")]


def check_connections(sessions: HostSessions, network: Network) -> list[Finding]:
    """Every host connects to every other one through the network, at a port such as MPI and Gloo choose."""
    reports = sessions.reports()
    addresses = {host: (network.interfaces[host].address, report.port) for host, report in reports.items()}
    way_out = "open all ports between the hosts in this network, or choose another one with --network"
    failed = {
        host: f"{host} cannot reach " + ", ".join(f"{other} ({reason})" for other, reason in reasons.items())
        for host, reasons in sessions.connect(addresses).items()
        if reasons
    }
    return [_verdict("connections", reports, failed, "every host reaches every other one", way_out)]


def check_names(reports: Reports) -> list[Finding]:
    """NCCL and the launchers tell hosts apart by the names that these give themselves."""
    own = {host: report.hostname for host, report in reports.items()}
    told = [*own.values()]
    twice = {host: f"{host} calls itself {name}" for host, name in own.items() if told.count(name) > 1}
    way_out = "give each host a name of its own (hostnamectl), and list no host under two names"
    return [_verdict("host name", own, twice, ", ".join(told), way_out)]


def check_clocks(sessions: HostSessions) -> list[Finding]:
    """Logs and ages of checkpoints mislead where clocks differ; each is read when its answer arrives."""
    ahead = {host: answer.ahead_s for host, answer in sessions.answers.items() if answer.report}
    off = {
        host: f"{host} {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
        for host, seconds in ahead.items()
        if abs(seconds) > MAX_SKEW_S
    }
    good = f"within {max(0.1, *map(abs, ahead.values())):.1f} s" if ahead else ""
    return [_verdict("clock", ahead, off, good, "let chrony or ntpd set the clocks", "warning")]


def check_gpus(hosts: Iterable[Host], reports: Reports) -> list[Finding]:
    """Fewer GPUs than slots, hosts without GPUs among others, and drivers older than the framework's CUDA."""
    asked = {host.name: reports[host.name] for host in hosts if host.name in reports}
    counts = {host: report.gpus for host, report in asked.items()}
    if not any(counts.values()):
        return [Finding("good", "gpus", tuple(counts), "none: the ranks will use CPUs")]
    slots = {host.name: host.slots or counts.get(host.name, 0) or 1 for host in hosts}
    few = {host: f"{host} {count} for {slots[host]} slots" for host, count in counts.items() if count < slots[host]}
    good = ", ".join(f"{host} {count}" for host, count in counts.items())
    way_out = "list each host with as many slots as it has GPUs, mend those that nvidia-smi misses, or use device=cpu"
    drivers = _check_drivers({host: report for host, report in asked.items() if report.gpus})
    return [_verdict("gpus", counts, few, good, way_out, "warning"), drivers]


def _check_drivers(reports: Reports) -> Finding:
    """A driver runs programs of its own major version of CUDA, and of older ones."""
    old = {
        host: f"{host}: the driver supports CUDA {report.driver_cuda}, the framework is for {report.cuda}"
        for host, report in reports.items()
        if report.cuda and _major(report.driver_cuda) < _major(report.cuda)
    }
    bare = {
        host: "GPUs, but no CUDA came with the framework: it may be a build for the CPU"
        for host, report in reports.items()
        if not report.cuda
    }
    if bare and not old:
        return _verdict("driver", reports, bare, "", "install a CUDA build, unless its CUDA lies elsewhere", "warning")
    good = ", ".join(sorted({f"CUDA {report.driver_cuda} for {report.cuda}" for report in reports.values()}))
    way_out = "update the driver of the host, or install a build of the framework for its CUDA"
    return _verdict("driver", reports, old, good, way_out)


def _major(version: str | None) -> int:
    return int((version or "0").partition(".")[0])


def check_limits(reports: Reports) -> list[Finding]:
    """Shared memory for the workers of data loaders and for NCCL; locked memory for RDMA."""
    way_out = "start the container with --shm-size=8g or --ipc=host, or enlarge the mount"
    findings = [_check_room("/dev/shm", {host: report.shm for host, report in reports.items()}, MIN_SHM, way_out)]
    rdma = {host: report.memlock for host, report in reports.items() if report.infiniband}
    limited = {host: f"{host} {limit // 1000} kB" for host, limit in rdma.items() if limit is not None}
    way_out = "set memlock to unlimited for ssh sessions (limits.conf or sshd's unit), or --ulimit memlock=-1"
    return findings + ([_verdict("memlock", rdma, limited, "unlimited", way_out)] if rdma else [])


def _check_room(check: str, sizes: Mapping[str, int], least: int, way_out: str) -> Finding:
    """Whether each host has so many bytes."""
    little = {host: f"{host} {size / 1e6:.0f} MB" for host, size in sizes.items() if size < least}
    good = f"{min(sizes.values(), default=0) / 1e9:.1f} GB at least"
    return _verdict(check, sizes, little, good, way_out, "warning")


def check_folder(reports: Reports) -> list[Finding]:
    """The folder of the runs: rights, room, and whether all hosts see the same one."""
    way_out = "make room, or choose another folder with hydra.run.dir=..."
    disk = _check_room("disk", {host: report.free for host, report in reports.items()}, MIN_FREE, way_out)
    closed = {host: f"not writable: {host} {report.folder}" for host, report in reports.items() if not report.writable}
    if closed:
        return [disk, _verdict("run folder", reports, closed, "", "set its rights, or choose another one")]
    apart = {host: f"{report.folder} is not shared with {host}" for host, report in reports.items() if not report.sees}
    way_out = "mount one shared folder on all hosts: every rank must read the checkpoints to resume"
    return [disk, _verdict("run folder", reports, apart, "writable, and the same one everywhere", way_out, "warning")]


def check_lock(folder: Path) -> list[Finding]:
    """Whether another job works on this run; says nothing about a folder that is no run."""
    store = folder / "checkpoints"
    if not (store / ".lock").exists():
        return []
    try:
        with run_lock(store):
            return [Finding("good", "run", (LOCAL,), f"no job works on {folder}")]
    except UserError as error:
        return [_refusal("run", (LOCAL,), error)]


def names(hosts: Iterable[str]) -> str:
    """Hosts in a sentence."""
    return ", ".join(hosts)
