"""Renders the template, and shares one installed project between the slow tests."""

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PROJECT_FOLDER = "<<cookiecutter.project_slug>>"
MACHINERY = ROOT / "tests/machinery"
collect_ignore = [MACHINERY.name]  # these run in a generated project
sys.path.append(str(ROOT / PROJECT_FOLDER / "tests"))
from needs import need  # noqa: E402
from needs import pytest_runtest_setup as pytest_runtest_setup  # noqa: E402

os.environ.pop("FORCE_COLOR", None)  # tests read what programs print


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a test that was skipped is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


QUESTIONS: dict[str, Any] = {
    key: value for key, value in json.loads((ROOT / "cookiecutter.json").read_text()).items() if not key.startswith("_")
}
Answers = dict[str, Any]
CHOICES: dict[str, list[Any]] = {
    **{key: QUESTIONS[key] for key in ("framework", "cuda_version")},
    **{key: [default, not default] for key, default in QUESTIONS.items() if isinstance(default, bool)},
}
# Else an answer is refused.
NEEDED = {"use_slurm": ("use_cluster",), "use_kubernetes": ("use_container", "use_cluster")}
OTHERS = {key: itertools.cycle(QUESTIONS[key]) for key in ("python_version", "license")}  # nothing depends on these


def allowed(answers: Answers) -> bool:
    """Whether no answer lacks another one that it needs."""
    return all(answers[key] for part, needed in NEEDED.items() if answers[part] for key in needed)


def pairs(answers: Answers) -> set[tuple[Any, ...]]:
    """Any two answers with their values."""
    return {*itertools.combinations(answers.items(), 2)}


def pairwise(every: list[Answers]) -> list[Answers]:
    """Few of these combinations, with every pair of values that any of them has."""
    chosen: list[Answers] = []
    missing = set().union(*map(pairs, every))
    while missing:
        chosen.append(max(every, key=lambda answers: len(pairs(answers) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


EVERY = [*filter(allowed, (dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())))]
COMBINATIONS = [answers | {key: next(choices) for key, choices in OTHERS.items()} for answers in pairwise(EVERY)]
HARD_ANSWERS = {
    "project_name": "Ünïcode & \"quotes\" 'n' spaces 🐝",
    "description": "Back\\slash, \"double\", 'single', {{ braces }}, # hash: 深層学習 🐝",
    "author": 'O\'Brien & Müller "the team" 山田',
}

# Names of tests of a generated project, the rest of which do not depend on its answers.
KNOW_AN_ENGINE = "engine or torch or tensorflow or config or export or compress or resume"


def label(answers: Answers) -> str:
    """The name of a test with these answers."""
    return "-".join(map(str, answers.values()))


def render(template: Path, folder: Path, **answers: Any) -> Path:
    """The folder of a fresh project; cookiecutter would drop an unknown key silently."""
    assert answers.keys() <= QUESTIONS.keys()
    options = {"no_input": True, "output_dir": str(folder)}
    return Path(cookiecutter(str(template), extra_context=answers, **options))


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command and keeps what it prints; ends the test where it is missing."""
    if "/" not in str(command[0]):
        need(str(command[0]))
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)


def check(*command: str | Path, cwd: Path = ROOT) -> str:
    """Runs a command that must succeed and gives what it printed."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def nox(project: Path, session: str, *arguments: str) -> str:
    """Runs a session of the generated project."""
    return check(sys.executable, "-m", "nox", "-s", session, "--", *arguments, cwd=project)


@pytest.fixture(scope="session", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps the user's settings of git and cookiecutter out, and the tests out of theirs."""
    folder = tmp_path_factory.mktemp("settings")
    git, cookies = folder / "gitconfig", folder / "cookiecutter.yaml"
    git.write_text("[user]\nname = Test\nemail = test@example.org\n[safe]\ndirectory = *\n")
    cookies.write_text(f"replay_dir: {folder / 'replays'}\ncookiecutters_dir: {folder / 'clones'}\n")
    os.environ |= {"GIT_CONFIG_GLOBAL": str(git), "COOKIECUTTER_CONFIG": str(cookies)}
    return folder


@pytest.fixture(scope="session")
def replays(own_settings: Path) -> Path:
    """Where cookiecutter keeps the answers of its last run."""
    return own_settings / "replays"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as a commit of the working tree would hold it: no caches, no ignored files."""
    copy = tmp_path_factory.mktemp("template")
    listed = check("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return copy


def installable(template: Path, folder: Path, framework: str, **answers: str) -> Path:
    """A project that this Python can install."""
    here = ".".join(platform.python_version_tuple()[:2])
    oldest = here if here in QUESTIONS["python_version"] else QUESTIONS["python_version"][-1]
    return render(template, folder, python_version=oldest, framework=framework, **HARD_ANSWERS | answers)


@pytest.fixture(scope="session")
def project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one framework that most slow tests install and run."""
    return installable(template, tmp_path_factory.mktemp("torch"), "torch")


@pytest.fixture(scope="session")
def full_project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with both, and with the tests of what no owner of a project need look after."""
    project = installable(template, tmp_path_factory.mktemp("both"), "both", package_name="my_training")
    shutil.copytree(MACHINERY, project / "tests" / MACHINERY.name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = project / "pyproject.toml"  # mirrors want a server
    settings.write_text(settings.read_text().replace("dev = [", 'dev = ["moto[server]>=5", "s3fs>=2024.2", '))
    return project
