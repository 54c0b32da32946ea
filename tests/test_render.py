"""What a rendering holds: the tree, the contents, and the ways to get it."""

import itertools
import json
import re
import shutil
import stat
import sys
from email.parser import Parser
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from conftest import (
    CHOICES,
    COMBINATIONS,
    EVERY,
    HARD_ANSWERS,
    NEEDED,
    PROJECT_FOLDER,
    QUESTIONS,
    ROOT,
    Answers,
    check,
    label,
    pairs,
    render,
    run,
)
from flit_core import buildapi
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from nox.project import load_toml

SHELL = {
    ".github/workflows/ci.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "launch/local.sh",
    "noxfile.py",
    "pyproject.toml",
    "scripts/build_horovod.py",
    "scripts/predict.py",
}
OPTIONAL = {
    "use_container": {
        ".dockerignore",
        ".github/workflows/image.yml",
        "Dockerfile",
        "compose.yaml",
        "docker/entrypoint.sh",
        "docker/environment.sh",
        "docker/health.sh",
        "docker/sshd_config",
    },
    "use_cluster": {"launch/elastic.sh", "launch/hosts.example", "launch/ssh.sh"},
    "use_slurm": {"launch/slurm.sbatch"},
    "use_kubernetes": {"launch/kubernetes.yaml"},
}
# Paths of the package, tests and docs that an answer brings.
CODE = {
    "use_container": r"docs/container\.md",
    "use_compression": r"/compress[/.]|_compress|compress_|quantize|ranks/test_(.*_calibration|pruning_masks)\.py",
    "use_cluster": r"/cluster[/.-]",
}
# What no other file may name where it was left out.
NAMES = {
    "use_container": r"\bDockerfile\b|\bcompose\.yaml|\bdocker/|docs/container|image\.yml|launch/kubernetes",
    "use_compression": r"compress\.md|\bcompress=|module compress|my_training\.compress|torch.pruning",
    # The launcher may name a script in the sentence that only a project with all of them says.
    "use_cluster": r"launch/hosts|hosts\.example|cluster(-troubles)?\.md|my_training\.cluster|launch/ssh\.sh(?! or)",
    "use_slurm": r"slurm\.sbatch",
    "use_kubernetes": r"launch/kubernetes",
}
DEFAULTS = {key: value[0] if isinstance(value, list) else value for key, value in QUESTIONS.items()}
LICENSE_WORDS = {
    "Apache-2.0": "Apache License",
    "MIT": "MIT License",
    "BSD-3-Clause": "BSD 3-Clause",
    "proprietary": "All rights reserved",
}
MARKER = re.compile(r"<<|<%|<#|cookiecutter")


def files(project: Path) -> set[str]:
    return {p.relative_to(project).as_posix() for p in project.rglob("*") if p.is_file()}


def code_files(template: Path, answers: Answers) -> set[str]:
    """The template's own package, tests and docs that are asked for, under the default package name."""
    names = {name for name in files(template / PROJECT_FOLDER) if name.startswith(("docs/", "src/", "tests/"))}
    others = {"torch", "tensorflow"} - {answers["framework"]} if answers["framework"] != "both" else set()
    left_out = [*others, *(paths for key, paths in CODE.items() if not answers[key])]
    names = {name for name in names if not any(re.search(paths, name) for paths in left_out)}
    return {name.replace("<<cookiecutter.package_name>>", "my_training") for name in names}


def locks(answers: Answers) -> set[str]:
    """One for each framework and kind."""
    framework = answers["framework"]
    frameworks = ("torch", "tensorflow") if framework == "both" else (framework,)
    hashed = {f"locks/{name}-{kind}.txt" for name in frameworks for kind in ("cpu", "gpu")}
    unhashed = {"locks/torch-cpu-unhashed.txt"} if framework != "tensorflow" else set()
    return hashed | unhashed if answers["use_container"] else set()


def wanted_files(template: Path, answers: Answers) -> set[str]:
    chosen = [paths for key, paths in OPTIONAL.items() if answers[key]]
    return SHELL.union(*chosen) | code_files(template, answers) | locks(answers)


def test_each_pair_of_answers_is_rendered() -> None:
    """But those that are refused, whatever the other answers are."""
    rendered = set().union(*(pairs({key: answers[key] for key in CHOICES}) for answers in COMBINATIONS))
    values = [[(key, value) for value in choices] for key, choices in CHOICES.items()]
    every = {pair for first, other in itertools.combinations(values, 2) for pair in itertools.product(first, other)}
    refused = {((key, False), (part, True)) for part, needed in NEEDED.items() for key in needed}
    assert rendered == every - refused
    assert len(COMBINATIONS) < 20 < len(EVERY)


@pytest.mark.parametrize("answers", COMBINATIONS, ids=label)
def test_every_combination(answers: Answers, template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, **answers)
    wanted = wanted_files(template, answers)
    assert files(project) == wanted
    assert LICENSE_WORDS[answers["license"]] in (project / "LICENSE").read_text()
    for name in wanted - {path for path in wanted if path.endswith(".gz")}:
        found = MARKER.search((project / name).read_text())
        assert not found, f"{found} in {name}"
    check_syntax(project)
    check_style(project)
    check_blanks(project)
    check_versions(project, answers)
    check_one_wing(project, answers["framework"])
    check_names(project, answers)
    check_links(project)


def check_names(project: Path, answers: Answers) -> None:
    """No file names what was left out."""
    left_out = re.compile("|".join([*(names for key, names in NAMES.items() if not answers[key]), "(?!)"]))
    for name in files(project):
        found = left_out.search((project / name).read_text(errors="replace"))
        assert not found, f"{found} in {name}"


def check_links(project: Path) -> None:
    """Every relative link of a page leads somewhere."""
    for page in project.rglob("*.md"):
        links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_a_link_to_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("[one](there.md#place) [two](https://example.org/a) [three](#here)")
    check_links(tmp_path)
    (tmp_path / "there.md").write_text("[one](there.md) [two](docs/not.md#place)")
    with pytest.raises(AssertionError, match=r"docs/not\.md"):
        check_links(tmp_path)


class Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML's loader lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


def load_all(file: Path) -> list[Any]:
    with file.open() as stream:
        return list(yaml.load_all(stream, Strict))


def check_syntax(project: Path) -> None:
    """Every file of settings and every script can be read; workflows and compose.yaml keep their schema."""
    for name in files(project):
        file = project / name
        if file.suffix in {".yml", ".yaml"}:
            assert load_all(file), name
        elif file.suffix == ".toml":
            load_toml(file)
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".sbatch" or file.read_bytes().startswith(b"#!/usr/bin/env bash") or file.suffix == ".sh":
            check("bash", "-n", file)
    for file in (project / ".github/workflows").iterdir():
        keep_schema("github-workflows", file)
    if (project / "compose.yaml").exists():
        keep_schema("compose-spec", project / "compose.yaml")


@cache
def validator(schema: str) -> Validator:
    content = get_builtin_schema(f"vendor.{schema}")
    return validator_for(content)(content)


def keep_schema(schema: str, file: Path) -> None:
    (content,) = load_all(file)
    if True in content:  # YAML 1.1 reads a workflow's `on` as a truth value
        content["on"] = content.pop(True)
    assert [error.message for error in validator(schema).iter_errors(content)] == [], file


def test_own_workflows() -> None:
    for file in (ROOT / ".github/workflows").iterdir():
        keep_schema("github-workflows", file)
    keep_schema("dependabot", ROOT / ".github/dependabot.yml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a: 1\na: 2\n", "a key stands twice"), ("jobs: {}\n", "non-empty"), ("on: push\njobs: 1", "1")],
)
def test_a_bad_workflow_is_noticed(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text(text)
    with pytest.raises(AssertionError, match=sentence):
        keep_schema("github-workflows", tmp_path / "bad.yml")


def test_only_the_pushing_job_may_write(template: Path, tmp_path: Path) -> None:
    (workflow,) = load_all(render(template, tmp_path) / ".github/workflows/image.yml")
    assert workflow["permissions"] == {}
    writing = {name for name, job in workflow["jobs"].items() if "write" in job["permissions"].values()}
    pushing = {name for name, job in workflow["jobs"].items() if "'push': True" in str(job)}
    assert writing == pushing == {"push"}
    uses = re.findall(r"uses: (.*)", str(yaml.dump(workflow)))
    assert all(re.search(r"@[0-9a-f]{40}$", one) for one in uses)


@pytest.mark.parametrize("name", LICENSE_WORDS)
def test_the_metadata_agrees_with_the_license(
    name: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the build's backend writes it; an index refuses what is private."""
    monkeypatch.chdir(render(template, tmp_path, license=name))
    folder = tmp_path / "metadata"
    folder.mkdir()
    written = Parser().parsestr(
        (folder / buildapi.prepare_metadata_for_build_wheel(str(folder)) / "METADATA").read_text()
    )
    private = name == "proprietary"
    assert written["License-Expression"] == ("LicenseRef-Proprietary" if private else name)
    assert written.get_all("License-File") == ["LICENSE"]
    assert written.get_all("Classifier", []) == (["Private :: Do Not Upload"] if private else [])


def check_style(project: Path) -> None:
    """Types depend on no answer but the framework: test_generated.py checks them once."""
    check(sys.executable, "-m", "ruff", "check", "--no-cache", cwd=project)
    check(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", cwd=project)


def check_blanks(project: Path) -> None:
    """What is left out leaves no gap; Python's layout is ruff's matter."""
    for name in files(project):
        text = (project / name).read_text(errors="replace")
        if name.endswith((".py", ".gz")) or not text:
            continue
        found = re.search(r"[ \t]$|\A\n|\n{3}|\n\n\Z|[^\n]\Z", text, re.MULTILINE)
        assert not found, f"{found} in {name}"
    assert not re.search(r'^"', (project / "pyproject.toml").read_text(), re.MULTILINE)


def check_versions(project: Path, answers: Answers) -> None:
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
    if answers["use_compression"] and answers["framework"] != "tensorflow":
        extras["compress"] = ["torch-pruning>=1.6.1"]
    free = {name: written[name] for name in ("export", "dev", *(["slurm"] if answers["use_slurm"] else []))}
    assert written == {"horovod": ["horovod==0.28.1"], **extras, **free}
    assert ("onnxruntime>=1.22" in written["export"]) == (answers["framework"] != "tensorflow")
    assert ("ai-edge-litert>=2.0" in written["export"]) == (answers["framework"] != "torch")
    workflow = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())
    for framework, version in (("torch", torch), ("tensorflow", tensorflow)):
        for kind in ("cpu", "gpu"):
            text = "".join(lock.read_text() for lock in (project / "locks").glob(f"{framework}-{kind}*.txt"))
            assert not text or re.search(rf"^{framework}(-cpu)?(\[and-cuda\])?=={version}\b", text, re.MULTILINE)
    if answers["use_container"]:
        check_hashes(project)
    assert {"python-version": python} in [step.get("with") for step in workflow["jobs"]["test"]["steps"]]


def check_hashes(project: Path) -> None:
    """Every pin of a lock has hashes, but for PyTorch's CPU build; no lock names a place to install from."""
    for lock in (project / "locks").iterdir():
        pins = re.split(r"^(?=\S)", lock.read_text(), flags=re.MULTILINE)[1:]
        bare = [pin for pin in pins if " \\\n    --hash=sha256:" not in pin]
        assert len(bare) == len(pins) == 1 if "unhashed" in lock.name else len(pins) > len(bare) == 0, lock
        assert "://" not in lock.read_text()
        assert "-gpu" in lock.name or not re.search(r"^(cuda|nvidia|triton)", lock.read_text(), re.MULTILINE)


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
    assert files(tmp_path / "out/my-training") == wanted_files(template, DEFAULTS)


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
