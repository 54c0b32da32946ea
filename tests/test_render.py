"""What a rendering holds: the tree, the contents, and the ways to get it."""

import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import COMBINATIONS, HARD_ANSWERS, PROJECT_FOLDER, ROOT, check, render, run
from nox.project import load_toml

SHELL = {
    ".dockerignore",
    ".github/workflows/ci.yml",
    ".github/workflows/image.yml",
    ".gitignore",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "compose.yaml",
    "docker/entrypoint.sh",
    "docker/environment.sh",
    "docker/health.sh",
    "docker/sshd_config",
    "launch/elastic.sh",
    "launch/hosts.example",
    "launch/local.sh",
    "launch/ssh.sh",
    "noxfile.py",
    "pyproject.toml",
    "scripts/build_horovod.py",
    "scripts/predict.py",
}
OPTIONAL = {"use_slurm": "launch/slurm.sbatch", "use_kubernetes": "launch/kubernetes.yaml"}
LICENSE_WORDS = {
    "Apache-2.0": "Apache License",
    "MIT": "MIT License",
    "BSD-3-Clause": "BSD 3-Clause",
    "proprietary": "All rights reserved",
}
MARKER = re.compile(r"<<|<%|<#|cookiecutter")


def files(project: Path) -> set[str]:
    return {p.relative_to(project).as_posix() for p in project.rglob("*") if p.is_file()}


def code_files(template: Path, framework: str = "torch") -> set[str]:
    """The template's own package, tests and docs, under the default package name, without the other framework's."""
    names = {name for name in files(template / PROJECT_FOLDER) if name.startswith(("docs/", "src/", "tests/"))}
    others = {"torch", "tensorflow"} - {framework} if framework != "both" else set()
    names = {name for name in names if not any(other in name for other in others)}
    return {name.replace("<<cookiecutter.package_name>>", "my_training") for name in names}


def locks(framework: str) -> set[str]:
    """One for each framework and kind."""
    frameworks = ("torch", "tensorflow") if framework == "both" else (framework,)
    return {f"locks/{name}-{kind}.txt" for name in frameworks for kind in ("cpu", "gpu")}


def label(answers: dict[str, Any]) -> str:
    return "-".join(map(str, answers.values()))


@pytest.mark.parametrize("answers", COMBINATIONS, ids=label)
def test_every_combination(answers: dict[str, Any], template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, **answers)
    chosen = {path for key, path in OPTIONAL.items() if answers[key]}
    wanted = SHELL | chosen | code_files(template, answers["framework"]) | locks(answers["framework"])
    assert files(project) == wanted
    assert LICENSE_WORDS[answers["license"]] in (project / "LICENSE").read_text()
    for name in wanted - {path for path in wanted if path.endswith(".gz")}:
        found = MARKER.search((project / name).read_text())
        assert not found, f"{found} in {name}"
    check_style(project)
    check_versions(project, answers)
    check_one_wing(project, answers["framework"])


def check_style(project: Path) -> None:
    """Types depend on no answer but the framework: test_generated.py checks them once."""
    check(sys.executable, "-m", "ruff", "check", "--no-cache", cwd=project)
    check(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", cwd=project)


def check_versions(project: Path, answers: dict[str, Any]) -> None:
    settings = load_toml(project / "pyproject.toml")
    python = answers["python_version"]
    assert settings["project"]["requires-python"] == f">={python}"
    assert settings["tool"]["mypy"]["python_version"] == python
    torch, tensorflow = {"13.0": ("2.13.0", "2.21.0"), "12.8": ("2.10.0", "2.20.0")}[answers["cuda_version"]]
    extras = {"torch": [f"torch=={torch}"]} if answers["framework"] != "tensorflow" else {}
    if answers["framework"] != "torch":
        extras["tensorflow"] = [f"tensorflow-cpu=={tensorflow}"]
        extras["tensorflow-gpu"] = [f"tensorflow[and-cuda]=={tensorflow}"]
    written = settings["project"]["optional-dependencies"]
    free = {name: written[name] for name in ("compress", "dev", *(["slurm"] if answers["use_slurm"] else []))}
    assert written == {"horovod": ["horovod==0.28.1"], **extras, **free}
    assert ("onnxruntime>=1.22" in written["compress"]) == (answers["framework"] != "tensorflow")
    assert ("ai-edge-litert>=2.0" in written["compress"]) == (answers["framework"] != "torch")
    workflow = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())
    for framework, version in (("torch", torch), ("tensorflow", tensorflow)):
        for lock in (project / "locks").glob(f"{framework}-*.txt"):
            assert re.search(rf"^{framework}(-cpu)?(\[and-cuda\])?=={version}\b", lock.read_text(), re.MULTILINE), lock
    assert {"python-version": python} in [step.get("with") for step in workflow["jobs"]["test"]["steps"]]


def check_one_wing(project: Path, framework: str) -> None:
    """No code of the other framework, no setting and no page about it."""
    engine = "tensorflow" if framework == "tensorflow" else "torch"
    assert f"  - engine: {engine}\n" in (project / "src/my_training/conf/train.yaml").read_text()
    for other in {"torch", "tensorflow"} - {framework} if framework != "both" else set():
        uses = re.compile(rf"^\s*(import|from) (horovod\.)?{other}\b", re.MULTILINE)
        assert not [path for path in project.rglob("*.py") if uses.search(path.read_text())]
        pages = [*project.rglob("*.md"), *project.rglob("*.yaml"), project / "pyproject.toml"]
        assert not [path for path in pages if re.search(rf"\b{other}\b", path.read_text())]


@pytest.mark.parametrize("name", LICENSE_WORDS)
def test_hard_answers(name: str, template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, license=name, use_kubernetes=True, **HARD_ANSWERS)
    settings = load_toml(project / "pyproject.toml")["project"]
    assert settings["description"] == HARD_ANSWERS["description"]
    assert settings["authors"] == [{"name": HARD_ANSWERS["author"]}]
    assert settings["name"] == project.name == "unicode-quotes-n-spaces"
    assert (project / "src/unicode_quotes_n_spaces/__init__.py").exists()
    assert HARD_ANSWERS["project_name"] in (project / "README.md").read_text()
    assert HARD_ANSWERS["author"] in (project / "LICENSE").read_text()
    _, job = yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text())
    assert job["metadata"]["name"] == project.name
    check_style(project)


def test_launch_scripts(template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, use_slurm=True)
    scripts = sorted((project / "launch").glob("*.sh"))
    assert len(scripts) == 3
    assert all(script.stat().st_mode & stat.S_IXUSR for script in scripts)
    others = [project / "launch/slurm.sbatch", project / "docker/entrypoint.sh", ROOT / ".ci/run"]
    check("shellcheck", *scripts, *others)


def test_replay(template: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cookiecutter", str(template), "--output-dir"]
    check(*command, tmp_path / "a", "--no-input", "license=MIT", "use_slurm=yes")
    check(*command, tmp_path / "b", "--replay")
    first, again = tmp_path / "a/my-training", tmp_path / "b/my-training"
    assert files(first) == files(again) >= {"launch/slurm.sbatch"}
    assert all((first / n).read_bytes() == (again / n).read_bytes() for n in files(first))


@pytest.fixture
def published(template: Path, tmp_path: Path) -> Path:
    """A repository with the template as it stands, committed."""
    repository = tmp_path / "template"
    shutil.copytree(template, repository)
    check("git", "init", "--quiet", "--initial-branch=main", cwd=repository)
    commit(repository)
    return repository


def commit(repository: Path) -> None:
    check("git", "add", "--all", cwd=repository)
    check("git", "commit", "--quiet", "--message=change", cwd=repository)


def test_git_url(published: Path, template: Path, tmp_path: Path) -> None:
    url = f"git+file://{published}"
    check(sys.executable, "-m", "cookiecutter", url, "--no-input", "-o", tmp_path / "out")
    assert files(tmp_path / "out/my-training") == SHELL | code_files(template) | locks("torch")


def test_cruft(published: Path, template: Path, tmp_path: Path) -> None:
    """A project follows its template: created, current, outdated, updated."""
    cruft = [sys.executable, "-m", "cruft"]
    check(*cruft, "create", published, "--no-input", "--output-dir", tmp_path / "out")
    project = tmp_path / "out/my-training"
    check("git", "init", "--quiet", cwd=project)
    commit(project)
    check(*cruft, "check", cwd=project)
    readme = published / PROJECT_FOLDER / "README.md"
    readme.write_text(readme.read_text() + "A new line.\n")
    commit(published)
    assert "FAILURE" in outdated(project)
    check(*cruft, "update", "--skip-apply-ask", cwd=project)
    check(*cruft, "check", cwd=project)
    assert (project / "README.md").read_text().endswith("A new line.\n")
    assert not (project / "licenses").exists()


def outdated(project: Path) -> str:
    done = run(sys.executable, "-m", "cruft", "check", cwd=project)
    assert done.returncode == 1
    return done.stdout + done.stderr
