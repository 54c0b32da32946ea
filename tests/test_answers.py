"""Refused answers: one sentence, a non-zero exit code, nothing left behind."""

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, render, run

COOKIECUTTER = (sys.executable, "-m", "cookiecutter", ROOT)
REFUSED = [
    ("project_name", " "),
    ("project_name", "two\nlines"),
    ("description", ""),
    ("author", "a\tb"),
    ("project_slug", "My Training"),
    ("project_slug", "9lives"),
    ("project_slug", "tail-"),
    ("project_slug", "x" * 51),
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
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_refused(key: str, value: str, tmp_path: Path) -> None:
    done = run(*COOKIECUTTER, "--no-input", "-o", tmp_path / "out", f"{key}={value}")
    assert done.returncode != 0
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stderr
    assert f"{key} is {json.dumps(value, ensure_ascii=False)}, " in sentences[0]
    assert "for example" in sentences[0]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*"))


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
    assert "Traceback" not in done.stdout + done.stderr
