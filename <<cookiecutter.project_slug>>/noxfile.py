"""Installs the project in the right order, then lints, tests or trains: see README.md.

All sessions share .venv, since a framework takes gigabytes; `. .venv/bin/activate` works too.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import nox
from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path("scripts").resolve()))
from build_horovod import keep_pip_here

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"

keep_pip_here(os.environ)
VENV = Path(".venv").resolve()
STAMP = VENV / "installed.sha256"
RECIPE = Path("scripts/build_horovod.py")
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Some frameworks have a build of their own for GPUs.
SUFFIX = "-gpu" if shutil.which("nvidia-smi") else ""
FRAMEWORKS = [name + SUFFIX if name + SUFFIX in EXTRAS else name for name in ("torch", "tensorflow") if name in EXTRAS]
PINS = [pin for extra in FRAMEWORKS for pin in EXTRAS[extra]]
# Horovod's collectives of objects need numpy, and the frameworks don't always bring it.
PINS += [pin for pin in PROJECT["dependencies"] if pin.startswith("numpy")]
BESIDE = [name for name in ("horovod", "export", "compress", "slurm", "dev") if name in EXTRAS]


def fingerprint() -> str:
    """Names what .venv must hold: it changes when a reinstall is due."""
    mpi = shutil.which("mpicxx") or ""  # once it is there, Horovod is built for it too
    parts = [platform.python_version(), Path("pyproject.toml").read_text(), RECIPE.read_text(), mpi]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_python(session: nox.Session) -> None:
    """Refuses an old interpreter now, not after the downloads."""
    wanted, here = PROJECT["requires-python"], platform.python_version()
    if here not in SpecifierSet(wanted):
        session.error(f"nox runs on Python {here}, but the project needs {wanted}")


def run(session: nox.Session, program: str, *arguments: str) -> None:
    """Runs a program of .venv; the full path keeps any other environment out."""
    session.run(str(VENV / "bin" / program), *arguments, external=True)


def read(session: nox.Session, *arguments: str) -> str:
    """What .venv's Python prints on stdout."""
    python = str(VENV / "bin/python")
    return str(session.run(python, *arguments, silent=True, stderr=None, external=True))


def announce_download(session: nox.Session) -> None:
    """Says so before pip downloads several gigabytes; where it cannot tell, the installation will say why."""
    session.log("Asking pip which build of the framework it would install.")
    report, names = VENV / "download.json", []
    ask = [str(VENV / "bin/pip"), "install", "--dry-run", "--quiet", "--report", str(report), *PINS]
    session.run(*ask, silent=True, external=True, success_codes=range(256))
    with suppress(OSError, ValueError, KeyError, TypeError):
        names = [item["metadata"]["name"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    cuda = [name for name in names if name.startswith(("cuda-", "nvidia-"))]
    if cuda:
        session.warn(
            f"pip will now download a CUDA build: several GB, {len(cuda)} CUDA packages. For the CPU build stop here "
            "(Ctrl-C) and set PIP_EXTRA_INDEX_URL to the CPU index that the framework's install page names."
        )


def install(session: nox.Session) -> None:
    """Installs the framework, then Horovod built against it, then the project."""
    check_python(session)
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(VENV), external=True)
    announce_download(session)
    run(session, "pip", "install", *PINS)
    if not list(VENV.glob("lib/python*/site-packages/numpy")):
        session.error(f"pip has not installed into {VENV}: '.venv/bin/pip config list' shows target, prefix or root")
    wheel = read(session, str(RECIPE)).strip()
    # pip would keep a Horovod of the same version that was built for another framework.
    run(session, "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
    extras = ",".join([*FRAMEWORKS, *BESIDE])
    run(session, "pip", "install", "--quiet", "--editable", f".[{extras}]")
    STAMP.write_text(fingerprint())


def use_environment(session: nox.Session) -> None:
    """Makes .venv the session's environment; installs only if something changed."""
    session.env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.env["VIRTUAL_ENV"] = str(VENV)
    if not STAMP.exists() or STAMP.read_text() != fingerprint():
        install(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and types."""
    use_environment(session)
    run(session, "ruff", "check")
    run(session, "ruff", "format", "--check")
    run(session, "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the quick tests, two at a time; arguments go to pytest instead: `nox -s tests -- -m slow` runs the rest."""
    use_environment(session)
    run(session, "pytest", *(session.posargs or ["-m", "not slow", "-n", "2", "--dist", "loadfile"]))


@nox.session(default=False, venv_backend="virtualenv")
def lock(session: nox.Session) -> None:
    """Writes locks/ anew: every version of a framework and the rest, for an image or another place."""
    Path("locks").mkdir(exist_ok=True)
    session.install("uv")
    for name in [extra for extra in EXTRAS if extra not in BESIDE]:
        framework, _, kind = name.partition("-")
        kinds = [kind] if kind else ["cpu"] if f"{name}-gpu" in EXTRAS else ["cpu", "gpu"]
        for wanted in kinds:
            write_lock(session, name, Path(f"locks/{framework}-{wanted}.txt"))


def write_lock(session: nox.Session, extra: str, file: Path) -> None:
    """Pins what an extra needs on any Linux, with hashes; for the CPU without CUDA's packages."""
    options = ["--extra", extra, "--universal", "--no-header", "--no-annotate", "--generate-hashes"]
    session.run("uv", "pip", "compile", "--quiet", "pyproject.toml", *options, "--output-file", str(file))
    if file.stem.endswith("cpu"):
        pins = re.split(r"^(?=\S)", file.read_text(), flags=re.MULTILINE)
        pins = [pin for pin in pins if not pin.startswith(("cuda-", "nvidia-", "triton"))]
        # PyTorch's build for the CPU is another file on another index: its version alone.
        unhashed = [pin.partition(" ")[0] + "\n" for pin in pins if pin.startswith("torch==")]
        file.write_text("".join(pin for pin in pins if not pin.startswith("torch==")))
        if unhashed:
            file.with_stem(f"{file.stem}-unhashed").write_text("".join(unhashed))


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Trains on this machine; arguments go to launch/local.sh: `nox -s train -- -n 2 name=first`.

    The launcher takes the place of nox, which would turn its codes into 1 and give it no time to save: name it last.
    """
    use_environment(session)
    variables = {name: value for name, value in session.env.items() if value is not None}
    session.log(f"launch/local.sh {' '.join(session.posargs)}")
    os.execve("launch/local.sh", ["launch/local.sh", *session.posargs], {**os.environ, **variables})
