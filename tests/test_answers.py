"""Refused answers: one sentence, a non-zero exit code, nothing left behind."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import NEEDED, PROJECT_FOLDER, QUESTIONS, ROOT, check, nox, render, run
from nox.project import load_toml

COOKIECUTTER = (sys.executable, "-m", "cookiecutter", ROOT)
REFUSED = [
    ("project_name", " "),
    ("project_name", "two\nlines"),
    ("description", ""),
    ("author", "a\tb"),
    ("author", "a\u2028b"),
    ("author", "\u200d"),
    ("project_slug", "My Training"),
    ("project_slug", "9lives"),
    ("project_slug", "tail-"),
    ("project_slug", "x" * 51),
    ("project_slug", "sympy"),
    ("project_slug", "hydra-core"),
    ("package_name", "my-training"),
    ("package_name", "MyTraining"),
    ("package_name", "2fast"),
    ("package_name", "naïve"),
    ("package_name", ""),
    ("package_name", "lambda"),
    ("package_name", "statistics"),
    ("package_name", "torch"),
    ("package_name", "horovod"),
    ("package_name", "tests"),
    ("package_name", "x" * 51),
    ("package_name", "jobs"),
    ("package_name", "requests"),
    ("package_name", "yaml"),
    ("package_name", "distutils"),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_refused(key: str, value: str, tmp_path: Path) -> None:
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path / "out", f"{key}={value}")
    assert done.returncode != 0
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stderr
    assert f"{key} is {json.dumps(value, ensure_ascii=not value.isprintable())}, " in sentences[0]
    assert "for example" in sentences[0]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(("part", "needed"), [(part, key) for part, needed in NEEDED.items() for key in needed])
def test_a_part_without_what_it_needs(part: str, needed: str, tmp_path: Path) -> None:
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path / "out", f"{part}=yes", f"{needed}=no")
    assert done.returncode != 0
    sentence = (
        f"error: {part} is true, but it must be no without {needed}, for example {part}=no, or {needed}=yes beside"
    )
    assert sentence in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not list((tmp_path / "out").glob("*"))


def test_the_other_answers_are_kept(tmp_path: Path) -> None:
    """The refusal gives the command that asks again with all of them but the wrong one."""
    answers = ("author=O'Brien", "license=MIT", "use_slurm=yes", "package_name=torch")
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path, *answers)
    again = shlex.split(done.stderr.split("The same answers but this one: ")[1])
    assert again[0] == "cookiecutter"
    done = run(sys.executable, "-m", *again, "package_name=lamps", "--no-input", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MIT License" in (tmp_path / "my-training/LICENSE").read_text()
    assert "O'Brien" in (tmp_path / "my-training/pyproject.toml").read_text()
    assert (tmp_path / "my-training/launch/slurm.sbatch").exists()
    assert (tmp_path / "my-training/src/lamps").is_dir()


def test_a_name_that_gives_no_slug(tmp_path: Path) -> None:
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path, "project_name=!!!")
    assert done.returncode != 0
    assert done.stderr.startswith('error: project_name is "!!!", from which no project_slug can be made')
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.parametrize("author", ["Ada\u00a0Lovelace", "نیما\u200cیوشیج", "👩\u200d🔬 \U0001faea"])
def test_joined_and_new_letters_are_fine(author: str, template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, author=author)
    assert load_toml(project / "pyproject.toml")["project"]["authors"] == [{"name": author}]


@pytest.mark.parametrize("wanted", QUESTIONS["python_version"])
def test_an_old_interpreter_is_said(wanted: str, tmp_path: Path) -> None:
    """And the project is there: another interpreter may train."""
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path, f"python_version={wanted}")
    assert done.returncode == 0
    here = sys.version_info[:2]
    warning = f"warning: the project needs Python {wanted} or newer, but this is Python {here[0]}.{here[1]}: train"
    assert (warning in done.stderr) == (here < tuple(map(int, wanted.split("."))))


def test_the_oldest_python_is_the_default() -> None:
    versions = QUESTIONS["python_version"]
    assert versions == sorted(versions, key=lambda version: int(version.partition(".")[2]))
    assert f"Python {versions[0]} or newer" in (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages",
    [
        ("cookiecutter==1.7.3", "jinja2-time", "poyo", "six"),
        ("cookiecutter==2.1.1", "jinja2-time"),
        ("cookiecutter==2.5.0",),
    ],
)
def test_an_old_cookiecutter_is_one_sentence(packages: tuple[str, ...], tmp_path: Path) -> None:
    old = tmp_path / "old"
    check(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", old, *packages)
    done = run("env", f"PYTHONPATH={old}", *COOKIECUTTER, "--no-input", "-o", tmp_path / "out")
    version = packages[0].partition("==")[2]
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: cookiecutter {version} is too old, this template needs 2.6 or newer: pip")
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((tmp_path / "out").glob("*"))
    assert "'cookiecutter>=2.6'" in (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def hook(template: Path) -> dict[str, Any]:
    """The names in the hook that refuses, as cookiecutter renders it for the default answers."""
    answers = {key: value[0] if isinstance(value, list) else value for key, value in QUESTIONS.items()}
    answers |= {"_pins": {"13.0": {}}, "project_slug": "lamps", "package_name": "lamps"}
    text = (template / "hooks/pre_gen_project.py").read_text()
    names: dict[str, Any] = {}
    exec(text.replace("<< cookiecutter | tojson >>", json.dumps(answers)), names)
    return names


def test_names_of_the_projects_own_files_are_refused(hook: dict[str, Any], template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, framework="both", use_slurm=True, use_kubernetes=True)
    modules = {file.stem for file in project.rglob("*.py") if "src" not in file.parts}
    folders = {path.name for path in project.iterdir() if path.is_dir()}
    names = {name for name in modules | folders if name.isidentifier() and not name.startswith("test_")}
    assert [name for name in sorted(names) if not hook["is_taken"](name)] == []


def test_modules_of_all_supported_pythons_are_refused(hook: dict[str, Any]) -> None:
    """As mypy knows them, whichever Python runs here."""
    versions = Path(
        check(sys.executable, "-c", "import mypy; print(mypy.__path__[0])").strip(), "typeshed/stdlib/VERSIONS"
    )
    found = re.findall(r"^([a-z][a-z0-9_]*): 3\.\d+-(?:3\.(\d+))?", versions.read_text(), re.MULTILINE)
    names = {name for name, last in found if not last or int(last) >= 10}
    assert {"asyncore", "tomllib", "telnetlib"} < names
    assert [name for name in sorted(names) if not hook["is_taken"](name)] == []


def test_locked_distributions_are_refused(hook: dict[str, Any], template: Path) -> None:
    locks = [lock.read_text() for lock in (template / PROJECT_FOLDER / "locks").rglob("*.txt")]
    names = {name for text in locks for name in re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)}
    assert "sympy" in names
    assert sorted(names - set(hook["DISTRIBUTIONS"])) == []


INSTALLED = """
import json
from importlib import metadata
names = {one.metadata["Name"] for one in metadata.distributions()}
print(json.dumps([sorted(names), sorted(metadata.packages_distributions())]))
"""


@pytest.mark.long
def test_what_a_project_installs_is_refused(hook: dict[str, Any], full_project: Path) -> None:
    nox(full_project, "tests", "--version")
    distributions, modules = json.loads(check(full_project / ".venv/bin/python", "-I", "-c", INSTALLED))
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in distributions} - {full_project.name}
    assert sorted(names - set(hook["DISTRIBUTIONS"])) == []
    importable = {name for name in modules if re.fullmatch("[a-z][a-z0-9_]*", name)}
    importable -= {full_project.name.replace("-", "_")}
    assert [name for name in sorted(importable) if not hook["is_taken"](name)] == []


@pytest.mark.parametrize("letters", [1, 33, 50])
@pytest.mark.parametrize("letter", ["a", "z"])
def test_style_does_not_depend_on_the_name(letter: str, letters: int, template: Path, tmp_path: Path) -> None:
    name = letter * letters
    answers = {"framework": "both", "use_slurm": True, "use_kubernetes": True}
    project = render(template, tmp_path, project_slug=name, package_name=name, **answers)
    check(sys.executable, "-m", "ruff", "check", "--no-cache", cwd=project)
    check(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", cwd=project)


@pytest.mark.parametrize("slug", ["a/b", "../up", "/tmp/absolute", "..", "."])
def test_slug_that_is_a_path(slug: str, tmp_path: Path) -> None:
    """Cookiecutter makes this folder before any hook runs, and its parents too."""
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path / "in/out", f"project_slug={slug}")
    assert done.returncode != 0
    assert re.search("project_slug .*for example my-training", done.stderr)
    assert {path.name for path in tmp_path.rglob("*")} <= {"in", "out"}


@pytest.mark.parametrize("key", ["framework", "python_version", "cuda_version", "license"])
def test_unknown_choice(key: str, tmp_path: Path) -> None:
    """Cookiecutter itself refuses these on the command line..."""
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path / "out", f"{key}=other")
    assert done.returncode != 0
    assert f"other provided for choice variable {key}" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["framework", "python_version", "cuda_version", "license"])
def test_unknown_choice_replayed(key: str, replays: Path, tmp_path: Path) -> None:
    """... but not when they come from a replay file."""
    command = (*COOKIECUTTER, "-o", tmp_path / "out")
    assert run(*command, "--no-input").returncode == 0
    replay = max(replays.glob("*.json"), key=lambda file: file.stat().st_mtime)
    context = json.loads(replay.read_text())
    context["cookiecutter"] |= {key: "other", "project_slug": "second"}
    replay.write_text(json.dumps(context))
    done = run(*command, "--replay")
    assert done.returncode != 0
    assert f'error: {key} is "other", but it must be one of ' in done.stderr
    assert not (tmp_path / "out/second").exists()


@pytest.mark.parametrize(
    ("name", "slug", "package"),
    [
        ("My Training", "my-training", "my_training"),
        ("  Digits   2 ", "digits-2", "digits_2"),
        ("Modèle d'été", "modele-d-ete", "modele_d_ete"),
        ("学習", "xue-xi", "xue_xi"),
    ],
)
def test_derived_names(name: str, slug: str, package: str, template: Path, tmp_path: Path) -> None:
    project = render(template, tmp_path, project_name=name)
    assert project.name == slug
    assert [folder.name for folder in (project / "src").iterdir()] == [package]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("licence=MIT", "'licence=MIT' is no answer: write key=value with a key of project_name,"),
        ("torch", "'torch' is no answer: write key=value with a key of project_name,"),
        ("license=GPL", "license is 'GPL', but it must be one of Apache-2.0, MIT,"),
    ],
)
def test_demo_refuses(argument: str, sentence: str) -> None:
    done = run(sys.executable, "-m", "nox", "-s", "demo", "--", argument)
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
    assert not re.search(r"\.\.\s", done.stdout + done.stderr), "nox itself ends a sentence"
    assert "Traceback" not in done.stdout + done.stderr
