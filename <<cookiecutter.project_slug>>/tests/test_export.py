"""The command python -m <package>.export, and its files in processes that know nothing of this package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import ENGINES, PACKAGE, ROOT, compose_config

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.artefacts import PROGRAMS, load_predictor, weigh
from << cookiecutter.package_name >>.export.command import (
    FORMATS,
    compare,
    export,
    validation_samples,
)
from << cookiecutter.package_name >>.train import train

KINDS = [(engine, kind) for engine in ENGINES for kind in import_module(f"{PACKAGE}.export.{engine}").FORMATS]
BROKEN = {"torch": "a.onnx", "tensorflow": "a.tflite"}[ENGINES[0]]  # of a runtime that the project has
# Runs a script with all of this project unreachable.
ALONE = """
import runpy, sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{package}":
            raise ImportError(name)
sys.meta_path.insert(0, Wall())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short run of each engine."""
    folders = {}
    for engine in ENGINES:
        folders[engine] = tmp_path_factory.mktemp(engine) / "run"
        options = ["epochs=1", "model=cnn", "model.width=4", "tracking.tensorboard=false"]
        train(compose_config(f"engine={engine}", *options), folders[engine])
    return folders


@pytest.fixture(scope="module")
def samples() -> Any:
    return validation_samples(compose_config(), 32)


def classes_without_the_package(artefact: Path, inputs: Path) -> list[int]:
    script = str(ROOT / "scripts" / "predict.py")
    command = [sys.executable, "-c", ALONE.format(package=PACKAGE), script, str(artefact), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=artefact.parent)
    if loader := re.search(r"may hold code, which (\S+) runs: .* add --trust \1$", done.stderr):
        with pytest.raises(UserError, match=rf"add --trust {loader[1]}"):
            load_predictor(artefact)
        trust = ["--trust", loader[1]]
        done = subprocess.run([*command, *trust], capture_output=True, text=True, check=False, cwd=artefact.parent)
    assert (loader is not None) == (artefact.suffix not in (".onnx", ".tflite"))
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_a_model_goes_out(runs: dict[str, Path], samples: Any, tmp_path: Path, engine: str, kind: str) -> None:
    target = tmp_path / f"model{FORMATS[kind]}"
    report = export(runs[engine], "best", target, kind)
    assert [entry.name for entry in tmp_path.iterdir()] == [target.name]
    assert report["agreement"]["samples"] == 256
    assert report["agreement"]["top1_agreement"] == 1
    assert report["sha256"] == weigh(target).sha256
    assert report["gzipped_bytes"] < report["bytes"] == weigh(target).size
    answers = load_predictor(target, trusted=PROGRAMS)(samples)
    assert load_predictor(target, trusted=PROGRAMS)(samples[:3]).shape == (3, 10)
    np.save(tmp_path / "inputs.npy", samples)
    assert classes_without_the_package(target, tmp_path / "inputs.npy") == list(answers.argmax(1))
    with pytest.raises(UserError, match="exists: name a new one"):
        export(runs[engine], "best", target, kind)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (("model.keras", "a.npy"), "model.keras is not there, or has another suffix than .onnx"),
        ((BROKEN, "none.npy"), "none.npy is no .npy file of numbers ([Errno 2] No such file or directory"),
        ((BROKEN, BROKEN), f"{BROKEN} is no .npy file of numbers"),
        ((BROKEN, "a.npy"), f"{BROKEN} cannot be run with inputs of shape (2, 3) ("),
    ],
)
def test_the_script_says_what_it_cannot_run(tmp_path: Path, files: tuple[str, str], sentence: str) -> None:
    (tmp_path / BROKEN).write_text("no model")
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    command = [sys.executable, str(ROOT / "scripts" / "predict.py"), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {sentence}")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision(runs: dict[str, Path], tmp_path: Path, engine: str) -> None:
    kinds = {"torch": ("onnx", "torch_export"), "tensorflow": ("tflite",)}[engine]
    for kind in kinds:
        whole, half = (tmp_path / f"{name}{FORMATS[kind]}" for name in ("whole", "half"))
        export(runs[engine], "best", whole, kind)
        report = export(runs[engine], "best", half, kind, precision="fp16")
        assert 0 < report["agreement"]["relative_difference"] < 0.01
        assert weigh(half).size < weigh(whole).size


def test_the_command(runs: dict[str, Path], engine: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"{PACKAGE}.export", str(runs[engine]), "latest", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["runtime"] == "this project"
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (2, f"error: {tmp_path}/model exists: name a new one for the model\n")


@pytest.mark.parametrize(
    ("target", "kind", "options", "sentence"),
    [
        ("model", "onnx", {}, r"is no name for --format onnx: it must end in \.onnx"),
        ("model.h5", "savedmodel", {}, "it must be a folder's"),
        ("model", "folder", {"precision": "fp16"}, "is not for a model folder"),
        ("model", "folder", {"which": "999"}, "999"),
    ],
)
def test_what_cannot_be(
    runs: dict[str, Path], tmp_path: Path, target: str, kind: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        export(runs[ENGINES[0]], options.pop("which", "best"), tmp_path / target, kind, **options)
    assert not list(tmp_path.iterdir())


def test_formats_of_another_framework_are_refused(runs: dict[str, Path], engine: str, tmp_path: Path) -> None:
    own = import_module(f"{PACKAGE}.export.{engine}").FORMATS
    for kind in FORMATS.keys() - {"folder", *own}:
        with pytest.raises(UserError, match=f"--format {kind} is not there for {engine} models"):
            export(runs[engine], "best", tmp_path / f"model{FORMATS[kind]}", kind)
    assert not list(tmp_path.iterdir())


def test_another_model_does_not_agree(runs: dict[str, Path], samples: Any, engine: str, tmp_path: Path) -> None:
    folders = [tmp_path / which for which in ("best", "noise")]
    export(runs[engine], "best", folders[0], "folder")
    export(runs[engine], "best", folders[1], "folder")
    assert compare(folders[0], folders[1], samples)["relative_difference"] == 0
    other = import_module(f"{PACKAGE}.checkpoints.manifest")
    weights = import_module("safetensors.numpy")
    tensors = weights.load_file(folders[1] / "model.safetensors")
    weights.save_file({name: np.asarray(-value) for name, value in tensors.items()}, folders[1] / "model.safetensors")
    (folders[1] / "MANIFEST.json").unlink()
    other.seal(folders[1])
    assert not compare(folders[0], folders[1], samples)["relative_difference"] < 0.1


@pytest.mark.parametrize("name", ["none.onnx", "model.pth", "empty", "broken.onnx"])
def test_what_is_no_artefact(tmp_path: Path, name: str) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    elif name != "none.onnx":
        (tmp_path / name).write_bytes(b"no model")
    with pytest.raises(UserError, match=r"does not exist|is no exported model|needs ONNX|cannot be loaded by ONNX"):
        load_predictor(tmp_path / name)
