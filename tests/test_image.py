"""The container image of a generated project: really built, entered as its user, joined over ssh."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import KNOW_AN_ENGINE, check, render, run
from needs import need
from nox.project import load_toml
from waiting import wait_until

NEEDS_ROOT = pytest.mark.root  # for images without an engine
BUILDAH = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
USER = "10001"
BASE = "localhost/test-base"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def buildah(*words: str | Path, fails: bool = False) -> str:
    """Runs buildah and gives what it printed."""
    need("buildah")
    command = ["buildah", *map(str, words)]
    done = subprocess.run(command, env=os.environ | BUILDAH, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def source(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh project by the default answers; the image is built from this folder."""
    return render(template, tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Debian as a base image, since none can be fetched everywhere; kept for the next time."""
    if buildah("images", "--quiet", "--filter", f"reference={BASE}").strip():
        return BASE
    folder = tmp_path_factory.mktemp("debian") / "root"
    check("debootstrap", "--variant=minbase", "bookworm", folder)
    if CERTIFICATES.exists():  # those of a proxy, which a company's base image would have
        shutil.copy(CERTIFICATES, folder / "etc/proxy.crt")
        (folder / "etc/pip.conf").write_text("[global]\ncert = /etc/proxy.crt\n")
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, folder, "/")
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(folder)
    return BASE


def build(source: Path, base: str, *more: str) -> str:
    """Builds the CPU image; pip's own extra places for wheels are handed in."""
    links = run(sys.executable, "-m", "pip", "config", "get", "global.find-links").stdout.strip()
    links = os.environ.get("PIP_FIND_LINKS", links)
    arguments = {"CUDA": "off", "BASE_IMAGE": base, "RUNTIME_IMAGE": base}
    words = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    if links:
        words += [f"--build-arg=PIP_FIND_LINKS={links}", *(f"--volume={place}:{place}:ro" for place in links.split())]
    return buildah("bud", "--layers", "--tag", "localhost/test-image", *words, *more, source)


@pytest.fixture(scope="session")
def image(source: Path, base: str) -> str:
    """The CPU image."""
    build(source, base)
    return "localhost/test-image"


@contextmanager
def container(image: str) -> Iterator[str]:
    """A container with a file system of its own."""
    name = buildah("from", image).strip()
    try:
        yield name
    finally:
        buildah("rm", name)


def inside(name: str, *words: str, options: tuple[str, ...] = (), user: str = USER) -> list[str]:
    """The command that runs something in a container as the image does: its user, its entry."""
    entry = ["setpriv", "--no-new-privs", "tini", "-s", "--", "/opt/docker/entrypoint.sh"]
    return ["buildah", "run", "--user", f"{user}:0", *options, name, "--", *entry, *words]


def enter(name: str, *words: str, user: str = USER) -> str:
    """Runs a command in a container."""
    done = subprocess.run(inside(name, *words, user=user), env=os.environ | BUILDAH, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.long
@NEEDS_ROOT
def test_a_change_of_code_compiles_nothing(image: str, source: Path, base: str) -> None:
    code = source / "src" / source.name.replace("-", "_") / "schedule.py"
    code.write_text(code.read_text() + "\n# changed\n")
    log = build(source, base)
    assert "build_horovod" not in log.replace("scripts/build_horovod.py", "").replace("/build_horovod.py", "")
    assert log.count("Using cache") >= 8
    with container(image) as name:
        assert "# changed" in enter(name, "cat", f"/app/src/{code.parent.name}/schedule.py")


@pytest.mark.long
@NEEDS_ROOT
def test_it_trains_as_its_own_user(image: str) -> None:
    with container(image) as name:
        assert enter(name, "id", "-u").strip() == USER
        output = enter(name, "launch/local.sh", "-n", "2", "name=pair")
        assert float(re.findall(r"best validation accuracy +([\d.]+) %", output)[0]) >= 97
        assert enter(name, "ls", "runs/pair/logs").split() == ["rank-0.log", "rank-1.log"]


@pytest.mark.long
@NEEDS_ROOT
def test_any_user_of_group_0_will_do(image: str) -> None:
    with container(image) as name:
        assert enter(name, "bash", "-c", "id -u; whoami", user="4321").split() == ["4321", "trainer"]
        enter(name, "launch/local.sh", "-n", "1", "name=any", "epochs=1", user="4321")


@pytest.mark.long
@NEEDS_ROOT
@pytest.mark.parametrize("user", [USER, "4321"])
def test_its_user_can_write_no_system_file(user: str, image: str) -> None:
    """One that can write /etc/passwd, a library or the code becomes root, or whoever comes next."""
    with container(image) as name:
        find = r"find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' -not -path '/sys/*'"
        found = enter(name, "bash", "-c", f"{find} 2>/dev/null || true", user=user).splitlines()
        own = ("/tmp", "/var/", "/run/", "/app/runs", "/home/trainer")  # /var: logs, nothing that runs
        assert [path for path in found if not path.startswith(own)] == []


@pytest.mark.long
@NEEDS_ROOT
def test_a_read_only_root_will_do(image: str) -> None:
    """Only /tmp and runs/ can be written; buildah has no option for it, so the mounts are made here."""
    with container(image) as name:
        root = buildah("mount", name).strip()
        mounts = [
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            *(f"mount --rbind /{folder} {root}/{folder}" for folder in ("proc", "dev", "sys")),
            *(f"mount -t tmpfs -o mode=1777 tmpfs {root}/{folder}" for folder in ("tmp", "app/runs")),
        ]
        settings = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]["Env"]
        entry = ["/opt/docker/entrypoint.sh", "launch/local.sh", "-n", "2", "name=pair", "epochs=1"]
        inner = shlex.join(["env", "-i", *settings, "bash", "-c", f"cd /app && exec {shlex.join(entry)}"])
        script = " && ".join([*mounts, f"exec chroot --userspec={USER}:0 {root} {inner}"])
        check("unshare", "--mount", "bash", "-c", script)
        with pytest.raises(AssertionError, match="Read-only file system"):
            check("unshare", "--mount", "bash", "-c", " && ".join([*mounts, f"touch {root}/app/file"]))


@pytest.mark.long
@NEEDS_ROOT
def test_the_projects_tests_pass_in_it(image: str, source: Path) -> None:
    with container(image) as name:
        extras = load_toml(source / "pyproject.toml")["project"]["optional-dependencies"]
        wanted = ["pytest", "pytest-timeout", "pytest-xdist", *extras["export"], *extras["compress"]]
        buildah("run", "--user", "root", name, "--", "pip", "install", "--quiet", *wanted)
        chosen = ["-m", "not slow", "-k", f"({KNOW_AN_ENGINE}) and not killed", "tests"]
        assert re.search(
            r"\d+ passed", enter(name, "python", "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *chosen)
        )


@pytest.mark.long
@NEEDS_ROOT
def test_every_library_is_there_and_no_compiler(image: str) -> None:
    with container(image) as name:
        libraries = "ldd $(find /opt/venv -name 'mpi_lib*.so')"
        assert "not found" not in enter(name, "bash", "-c", libraries)
        assert "libmpi.so" in enter(name, "bash", "-c", libraries)
        built = "import horovod.torch as hvd; print(hvd.mpi_built(), hvd.gloo_built())"
        assert enter(name, "python", "-c", built).split()[-2:] == ["True", "True"]
        assert enter(name, "bash", "-c", "type -P g++ make nvcc ccache || echo none").strip() == "none"
        assert enter(name, "bash", "-c", "ls /etc/ssh/ssh_host_* 2>/dev/null || echo none").strip() == "none"
        assert enter(name, "bash", "-lc", "command -v python").strip() == "/opt/venv/bin/python"
    labels = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == "0.1.0"


@pytest.mark.long
@NEEDS_ROOT
def test_a_stop_saves_first(image: str) -> None:
    with container(image) as name:
        command = inside(name, "launch/local.sh", "-n", "2", "name=stopped", "epochs=100000")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, env=os.environ | BUILDAH, text=True, **pipes) as job:  # type: ignore[call-overload]
            wait_until(lambda: "val/loss" in peek(name, "runs/stopped/metrics.jsonl"), "training")
            (tini,) = check("pgrep", "--full", "^[^ ]*tini -s -- .*name=stopped").split()
            os.kill(int(tini), signal.SIGTERM)
            output, _ = job.communicate(timeout=30)
        stopped = re.search(r"stopped by a signal after step (\d+)", output)
        assert stopped, output
        latest = enter(name, "cat", "runs/stopped/checkpoints/latest")
        assert int(re.findall(r"step-(\d+)", latest)[0]) == int(stopped[1])


def peek(name: str, file: str) -> str:
    """A file of a container as far as it is there."""
    return subprocess.run(inside(name, "cat", file), env=os.environ | BUILDAH, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces on one bridge: names and addresses."""
    hosts = [("image-host-1", "10.77.0.1"), ("image-host-2", "10.77.0.2")]
    with ExitStack() as cleaning:
        check("ip", "link", "add", "image-bridge", "type", "bridge")
        cleaning.callback(run, "ip", "link", "del", "image-bridge")
        check("ip", "link", "set", "image-bridge", "up")
        for number, (name, address) in enumerate(hosts):
            check("ip", "netns", "add", name)
            cleaning.callback(run, "ip", "netns", "del", name)
            check("ip", "link", "add", f"image-{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            cleaning.callback(run, "ip", "link", "del", f"image-{number}")  # with its namespace it goes only later
            check("ip", "link", "set", f"image-{number}", "master", "image-bridge", "up")
            for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                check("ip", "-n", name, *words)
            check("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts


def succeeds(*command: str) -> bool:
    return run(*command).returncode == 0


def stop_sshd(host: str) -> None:
    """Ends those in this network namespace, which is the test's own."""
    for process in check("ip", "netns", "pids", host).split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may end by itself
            if Path(f"/proc/{process}/comm").read_text() == "sshd\n":
                os.kill(int(process), signal.SIGTERM)


@pytest.mark.long
@NEEDS_ROOT
@pytest.mark.parametrize("user", [USER, "4321"])
def test_two_containers_train_together(user: str, image: str, source: Path, tmp_path: Path) -> None:
    """A container in each of two networks, over ssh and MPI; the run's folder is shared."""
    keys, runs = tmp_path / "keys", tmp_path / "runs"
    for folder in (keys, runs):
        folder.mkdir()
        os.chown(folder, int(user), 0)
    check("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id_ed25519")
    os.chown(keys / "id_ed25519", int(user), 0)
    options = ("--volume", f"{keys}:/run/secrets/ssh:ro", "--volume", f"{runs}:/app/runs")
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        names = [stack.enter_context(container(image)) for _ in range(3)]
        for (host, _), name in zip(hosts, names, strict=False):
            command = ["ip", "netns", "exec", host, *inside(name, "worker", options=options, user=user)]
            worker = subprocess.Popen(command, env=os.environ | BUILDAH, stderr=subprocess.DEVNULL)
            stack.callback(worker.wait)
            stack.callback(stop_sshd, host)
        listening = ["ip", "netns", "exec", hosts[0][0], "bash", "-c"]
        for _, address in hosts:
            knock = [*listening, f": <>/dev/tcp/{address}/2222"]
            wait_until(partial(succeeds, *knock), f"sshd at {address}")
        package = source.name.replace("-", "_")
        train = ["python", "-m", f"{package}.train", "name=pair", "epochs=3"]
        places = ",".join(f"{address}:1" for _, address in hosts)
        network = [*("--mca", "btl_tcp_if_include", "10.77.0.0/24"), *("--mca", "oob_tcp_if_include", "10.77.0.0/24")]
        job = ["mpirun", "--host", places, "--bind-to", "none", *network, *train]
        command = ["ip", "netns", "exec", hosts[0][0], *inside(names[2], *job, options=options, user=user)]
        done = subprocess.run(command, env=os.environ | BUILDAH, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"ranks, global batch +2, 64", done.stdout)
        assert {file.name for file in (runs / "pair/logs").iterdir()} == {"rank-0.log", "rank-1.log"}


LIBRARIES = """
import horovod.torch as hvd
hvd.init()
assert hvd.nccl_built() and hvd.cuda_built() and hvd.mpi_built()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/lib" in line}
print(*sorted(path for path in mapped if "libnccl" in path or "libcudart" in path))
"""


@pytest.fixture(scope="session")
def gpu_image(source: Path, base: str) -> str:
    """The image for GPUs, compiled with this machine's CUDA toolkit for one architecture; it runs on the small base."""
    toolkit = Path("/usr/local/cuda").resolve()
    compiler = buildah("from", base).strip()
    buildah("add", "--quiet", compiler, toolkit, toolkit)
    buildah("run", compiler, "--", "ln", "--symbolic", "--no-dereference", "--force", toolkit, "/usr/local/cuda")
    buildah("commit", "--quiet", compiler, "localhost/test-cuda")
    buildah("rm", compiler)
    arguments = {"BASE_IMAGE": "localhost/test-cuda", "RUNTIME_IMAGE": base}
    arguments["HOROVOD_BUILD_CUDA_CC_LIST"] = "90"
    words = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    buildah("bud", "--layers", "--tag", "localhost/test-gpu", *words, source)
    return "localhost/test-gpu"


@pytest.mark.long
@NEEDS_ROOT
@pytest.mark.gpu_image
def test_the_gpu_image_has_one_nccl(gpu_image: str) -> None:
    """As far as a machine without a GPU can tell."""
    with container(gpu_image) as name:
        libraries = enter(name, "python", "-c", LIBRARIES).split()
        assert [re.sub(r".*site-packages/", "", path) for path in libraries] == [
            "nvidia/cu13/lib/libcudart.so.13",
            "nvidia/nccl/lib/libnccl.so.2",
        ]
        find = r"find / -xdev \( -name 'libnccl*' -o -name 'libcudnn.so*' \) -not -path '/proc/*' 2>/dev/null | sort"
        found = enter(name, "bash", "-c", find).split()
        assert len({Path(path).name for path in found}) == len(found) >= 2
        assert enter(name, "bash", "-c", "type -P g++ nvcc || echo none").strip() == "none"
        enter(name, "launch/local.sh", "-n", "2", "name=pair", "epochs=1", "device=cpu")


@pytest.fixture
def entry(source: Path, tmp_path: Path) -> Path:
    """The entry point with programs of ours first on PATH."""
    (tmp_path / "bin").mkdir()
    return source / "docker/entrypoint.sh"


def start_entry(entry: Path, tmp_path: Path, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **settings}
    return subprocess.run([entry, *words], env=environment, capture_output=True, text=True, timeout=30)


def fake(tmp_path: Path, program: str, text: str) -> None:
    file = tmp_path / "bin" / program
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_the_entry_says_what_is_missing(entry: Path, tmp_path: Path) -> None:
    fake(tmp_path, "nvidia-smi", "exit 9")
    done = start_entry(entry, tmp_path, "true", IMAGE_CUDA="13.0")
    assert done.returncode == 0
    assert "no GPU is visible and the CPU is used: start the container with 'docker run --gpus all'" in done.stderr
    fake(tmp_path, "nvidia-smi", "echo '| NVIDIA-SMI 550.54 Driver Version: 550.54 CUDA Version: 12.4 |'")
    done = start_entry(entry, tmp_path, "true", IMAGE_CUDA="13.0")
    assert done.returncode == 2
    assert "the driver supports CUDA 12.4 but this image is for CUDA 13.0: update the driver" in done.stderr
    assert start_entry(entry, tmp_path, "true", IMAGE_CUDA="12.9").returncode == 0
    fake(tmp_path, "df", "echo 65536")
    assert "/dev/shm has 65 MB, too little for data.workers" in start_entry(entry, tmp_path, "true").stderr
    done = start_entry(entry, tmp_path, "worker", SSH_SECRET=str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"no id_ed25519 in {tmp_path}/none that uid" in done.stderr


def test_the_entry_passes_the_code_on(entry: Path, tmp_path: Path) -> None:
    assert start_entry(entry, tmp_path, "bash", "-c", "exit 75").returncode == 75


def test_the_files_around_it(source: Path) -> None:
    check("shellcheck", *sorted((source / "docker").glob("*.sh")))
    check(Path(sys.executable).with_name("hadolint"), source / "Dockerfile")
    ignored = (source / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert "!secrets" not in ignored
