"""Tests, lints and tries the template: `nox -s tests`, `nox -s long_tests`, `nox -s lint`, `nox -s demo`."""

import itertools
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nox

TEMPLATE = Path("<<cookiecutter.project_slug>>")
sys.path.insert(0, str(TEMPLATE.resolve() / "scripts"))
from build_horovod import keep_pip_here  # noqa: E402

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
# pip, not uv: pip's own configuration decides between a CPU and a CUDA build of the framework.
nox.options.default_venv_backend = "virtualenv"

keep_pip_here(os.environ)

DEMO = Path("demo")
QUESTIONS: dict[str, Any] = {
    key: value for key, value in json.loads(Path("cookiecutter.json").read_text()).items() if not key.startswith("_")
}


def install(session: nox.Session) -> None:
    """Installs the tools that pyproject.toml lists."""
    groups = nox.project.load_toml("pyproject.toml")
    session.install(*nox.project.dependency_groups(groups, "dev"))


def check(session: nox.Session) -> None:
    """Style and types of the template's own code."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and types of the template's own code."""
    install(session)
    check(session)


@nox.session
def tests(session: nox.Session) -> None:
    """Lints the template, renders it in many ways, and tries the default project; arguments go to pytest."""
    install(session)
    check(session)
    session.run("pytest", "-m", "not long and not gpu_image", *session.posargs)


@nox.session(default=False)
def long_tests(session: nox.Session) -> None:
    """All other tests: the project with everything, the machinery, images, Slurm; arguments go to pytest."""
    install(session)
    session.run("pytest", "-m", "long and not gpu_image", *session.posargs)


def parse_answer(session: nox.Session, argument: str) -> tuple[str, str]:
    """Splits `key=value`; cookiecutter itself would drop an unknown key silently."""
    key, equals, value = argument.partition("=")
    if not equals or key not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        session.error(f"'{argument}' is no answer: write key=value with a key of {known}")
    choices = QUESTIONS[key]
    if isinstance(choices, list) and value not in choices:
        session.error(f"{key} is '{value}', but it must be one of {', '.join(choices)}")
    return key, value


def demo_answers(session: nox.Session) -> list[str]:
    """The answers after `--`; the Python is the running one where the template has it."""
    answers = {}
    here = ".".join(platform.python_version_tuple()[:2])
    if here in QUESTIONS["python_version"]:
        answers["python_version"] = here
    answers |= dict(parse_answer(session, argument) for argument in session.posargs)
    return [f"{key}={value}" for key, value in answers.items()]


def render(session: nox.Session, answers: list[str], folder: Path = DEMO) -> Path:
    """Renders into a folder, over an earlier project: its environment and runs stay."""
    folder.mkdir(exist_ok=True)
    options = ["--no-input", "--overwrite-if-exists", "--output-dir", str(folder)]
    session.run("cookiecutter", *options, ".", *answers)
    return max(folder.glob("*/pyproject.toml"), key=lambda path: path.stat().st_mtime).parent


@nox.session(default=False)
def locks(session: nox.Session) -> None:
    """Renews the versions of the images for every CUDA and framework: after a change of pins or dependencies."""
    session.install("cookiecutter>=2.6", "nox")
    for cuda, framework in itertools.product(QUESTIONS["cuda_version"], ("torch", "tensorflow")):
        answers = [f"cuda_version={cuda}", f"framework={framework}", "python_version=3.10"]
        project = render(session, answers, Path(session.create_tmp()))
        session.run("nox", "-f", str(project / "noxfile.py"), "-s", "lock")
        target = TEMPLATE / "locks" / cuda
        target.mkdir(parents=True, exist_ok=True)
        for lock in (project / "locks").glob(f"{framework}-*.txt"):
            shutil.copy(lock, target)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Renders a project and trains in it: `nox -s demo -- framework=torch`."""
    answers = demo_answers(session)
    session.install("cookiecutter>=2.6")
    project = render(session, answers)
    run = time.strftime("demo-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), "-s", "train"]
    session.run(*command, "--", f"name={run}", external=True)
    session.log(f"The curves are in {project / 'runs' / run / 'curves.png'}")
