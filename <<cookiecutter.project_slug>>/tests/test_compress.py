"""Compression of a trained model: what is reported is what lies in the files, and a killed job goes on."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from compress_helpers import alone, command, compress_config, make_source, report_of, run_compress, zeros_in
from jobs import ENGINES, PACKAGE, wait_for_training
from omegaconf import OmegaConf

from << cookiecutter.package_name >>.checkpoints.lock import run_lock
from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.compress.command import compress
from << cookiecutter.package_name >>.compress.measure import answers, missed
from << cookiecutter.package_name >>.compress.pruning import (
    cubic,
    pack,
    smallest_off,
    two_of_four,
    unpack,
)
from << cookiecutter.package_name >>.compress.report import front
from << cookiecutter.package_name >>.errors import UserError

EPOCHS = "compress.finetune.epochs=4"


@pytest.fixture(scope="module", params=ENGINES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A trained run of each engine in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_ENGINE", request.param)
        yield make_source(tmp_path_factory.mktemp(request.param) / "source")


def test_masks_switch_off_the_smallest() -> None:
    weights = {"a": np.array([[0.1, -5.0], [0.2, 3.0]]), "b": np.array([[9.0, -0.3]])}
    everywhere = smallest_off(weights, 0.5, "global")
    assert everywhere["a"].tolist() == [[False, True], [False, True]]
    assert everywhere["b"].tolist() == [[True, False]]
    assert smallest_off(weights, 0.5, "layer")["a"].tolist() == [[False, True], [False, True]]
    assert all((unpack(pack(everywhere), {"a": (2, 2), "b": (1, 2)})[name] == everywhere[name]).all() for name in "ab")
    with pytest.raises(UserError, match=r"leaves nothing of a"):
        smallest_off({"a": np.ones((2, 2)), "b": np.full((2, 2), 5.0)}, 0.5, "global")


@pytest.mark.parametrize("axis", [0, 1])
def test_two_of_four_along_the_inputs(axis: int) -> None:
    weight = np.random.default_rng(0).random((8, 8, 3))
    mask = two_of_four({"a": weight, "odd": weight[:7, :7]}, axis)
    assert [*mask] == ["a"]
    fours = np.moveaxis(mask["a"], axis, -1).reshape(-1, 4)
    assert (fours.sum(axis=1) == 2).all()
    kept = np.where(mask["a"], weight, 0).sum()
    assert kept > np.where(mask["a"], 0, weight).sum()


def test_the_cubic_rise_is_the_papers() -> None:
    assert cubic(0, 0.8) == 0
    assert cubic(0.5, 0.8) == pytest.approx(0.8 * (1 - 0.5**3))
    assert cubic(1, 0.8) == cubic(2, 0.8) == 0.8


def test_the_front_holds_what_nothing_beats() -> None:
    assert front([(3, 5), (1, 2), (2, 1), (2, 4), (4, 5)]) == [(1, 2), (2, 4), (3, 5)]


def test_answers_that_are_no_numbers_are_no_result() -> None:
    inputs = np.zeros((3, 2), np.float32)
    with pytest.raises(UserError, match="the model after compression answers with NaN"):
        answers(lambda batch: np.full((len(batch), 2), np.nan, np.float32), inputs, "after")


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"max_accuracy_drop": 0.02, "max_latency_ratio": 0.5, "min_size_ratio": 2, "min_gzip_ratio": 4}, ""),
        ({"max_accuracy_drop": 0.005}, r"accuracy fell by 0\.0100 and compress\.require\.max_accuracy_drop is 0\.005"),
        (
            {"max_latency_ratio": 0.4},
            r"a call takes 0\.50 of the time and compress\.require\.max_latency_ratio is 0\.4",
        ),
        ({"min_size_ratio": 3}, r"bytes shrank 2\.00 times and compress\.require\.min_size_ratio is 3"),
    ],
)
def test_what_is_missed_is_said(wanted: dict[str, float], sentence: str) -> None:
    names = ("accuracy", "p50_ms", "bytes", "gzipped")
    figures = {
        "before": (0.98, 9.0, 100, 80),
        "before, ONNX Runtime": (0.98, 2.0, 110, 90),
        "after": (0.97, 1.0, 50, 20),
    }
    rows = {model: dict(zip(names, row, strict=True)) for model, row in figures.items()}
    options = dict.fromkeys(("max_accuracy_drop", "max_latency_ratio", "min_size_ratio", "min_gzip_ratio"))
    assert re.fullmatch(sentence, missed(rows, OmegaConf.create({**options, **wanted})))


@pytest.mark.slow
def test_pruned_models_are_as_good_as_they_say(source: Path, tmp_path: Path) -> None:
    result = run_compress(source, tmp_path, "compress=prune", "compress.sweep=[0.5,0.8]", EPOCHS, ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    models = report_of(tmp_path)["models"]
    for sparsity, drop in ((0.5, 0.005), (0.8, 0.02)):
        folder = tmp_path / f"sparsity-{sparsity}"
        row = report_of(folder)["models"]["after"]
        assert row["accuracy"] >= models["before"]["accuracy"] - drop
        assert zeros_in(folder) == row["sparsity"] == pytest.approx(sparsity, abs=1e-3)
        assert models[folder.name]["sha256"] == row["sha256"]
        assert row["gzipped"] < models["before"]["gzipped"]
        store = Store(folder / "checkpoints")
        lineage = store.find_good("artefact").meta["artefact"]
        assert lineage["sha256"] == row["sha256"]
        assert Path(lineage["parent"]).parent == source / "checkpoints"
    again = run_compress(source, tmp_path, "compress=prune", "compress.sweep=[0.5,0.8]", EPOCHS)
    assert again.returncode == 0, again.stderr
    assert "epoch" not in again.stdout  # nothing is trained twice


@pytest.mark.slow
def test_eight_bits_without_training(source: Path, tmp_path: Path) -> None:
    """Two ranks calibrate; the time is compared with the same runtime's without rounding."""
    result = run_compress(source, tmp_path, "compress=int8", ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    before, twin, after = report_of(tmp_path)["models"].values()
    assert before["runtime"] != twin["runtime"] == after["runtime"]
    assert twin["agreement"] == 1
    assert after["accuracy"] >= before["accuracy"] - 0.01
    assert after["gzipped"] < 0.6 * twin["gzipped"]
    assert 0 < after["sparsity"] < 0.2  # of weights so small that they are rounded to zero
    assert twin["sparsity"] < after["sparsity"]
    assert len(after["layers"]) == len(before["layers"])
    published = Store(tmp_path / "checkpoints").find_good("artefact")
    assert published.meta["artefact"]["sha256"] == after["sha256"]
    assert [path.stem for path in (published.folder / "artefact").iterdir()] == ["model"]
    words = [sys.executable, "-m", f"{PACKAGE}.evaluate", str(tmp_path), "--checkpoint", "artefact"]
    done = subprocess.run(words, env=alone(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no model.safetensors, as after quantization: name a checkpoint that was trained" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
def test_fewer_calibration_samples_than_ranks(source: Path, tmp_path: Path) -> None:
    few = run_compress(source, tmp_path, "compress=int8", "compress.samples=1", ranks=2)
    assert few.returncode != 0
    assert "1 calibration samples for 2 ranks" in few.stdout + few.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
def test_a_killed_job_makes_the_same_artefact(source: Path, tmp_path: Path) -> None:
    options = ["compress=prune", "compress.schedule=gradual", "compress.sparsity=0.8", EPOCHS]
    options += ["+compress.finetune.checkpoint.every_steps=7"]  # not a multiple of compress.every
    whole = run_compress(source, tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    killed = [sys.executable, *command(source, tmp_path / "killed", *options)]
    with subprocess.Popen(killed, env=alone(), stdout=subprocess.DEVNULL) as job:
        wait_for_training(tmp_path / "killed", lines=8)
        job.kill()
    assert not (tmp_path / "killed" / "report.json").exists()
    again = run_compress(source, tmp_path / "killed", *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from" in (tmp_path / "killed" / "logs" / "rank-0.log").read_text()
    rows = [report_of(tmp_path / name)["models"]["after"] for name in ("whole", "killed")]
    assert rows[0]["sha256"] == rows[1]["sha256"]
    assert rows[0]["sparsity"] == pytest.approx(0.8, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
def test_a_sweep_goes_on_after_a_result_that_is_refused(source: Path, tmp_path: Path) -> None:
    options = [
        "compress.scope=layer",
        "compress.sweep=[0.99,0.5]",
        "compress.finetune.epochs=1",
        "compress.require.max_accuracy_drop=0.1",
    ]
    result = run_compress(source, tmp_path, *options)
    assert result.returncode == 2
    assert "error: sparsity-0.99: accuracy fell by" in result.stderr
    assert [*report_of(tmp_path)["models"]] == ["before", "sparsity-0.99", "sparsity-0.5"]
    assert (tmp_path / "report.png").exists()
    assert (tmp_path / "sparsity-0.5" / "artefact").exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
def test_what_misses_its_requirements_is_put_aside(source: Path, tmp_path: Path) -> None:
    options = ["compress=prune_2_4", "compress.finetune.epochs=1", "compress.require.min_gzip_ratio=5"]
    for _ in range(2):  # the second finds it done, and refused
        result = run_compress(source, tmp_path, *options)
        assert result.returncode == 2
        assert "error: gzipped shrank 1." in result.stderr
        assert str(tmp_path / "rejected") in result.stderr
        assert "same answer" in result.stdout  # the table, also of what was done before
    assert (tmp_path / "rejected" / "model" / "model.json").exists()
    assert not (tmp_path / "artefact").exists()
    assert "artefact" not in Store(tmp_path / "checkpoints").pointers()
    again = subprocess.run([sys.executable, "-m", f"{PACKAGE}.compress.measure", tmp_path], env=alone(), check=False)
    assert again.returncode == 0
    for change in ("from_checkpoint=latest", f"from={tmp_path}"):
        other = run_compress(source, tmp_path, *options, change)
        assert "was begun with from=" in other.stderr
    report = report_of(tmp_path)
    assert report["missed"]  # a second measurement does not change what was decided
    assert report["remarks"][0].startswith("left dense, since 2:4 needs a multiple of 4 inputs: ")
    assert 0.45 < report["models"]["after"]["sparsity"] < 0.5
    (tmp_path / "rejected").rename(tmp_path / "elsewhere")
    assert f"speaks of {tmp_path / 'rejected'}, which is not there" in run_compress(source, tmp_path, *options).stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({key: plan[key] for key in plan if key != "source"}))
    assert "was begun by another version of this project" in run_compress(source, tmp_path, *options).stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compress=chain", "compress.steps=['compress=int8','compress=prune']"], "1-int8 makes a file for a runtime"),
        (["compress=chain", "compress.steps=['compress=prune compress.sweep=[0.5]']"], "1-prune has a compress.sweep"),
        (["compress=chain", "compress.steps=['compress=prune','compress=prune \"']"], "No closing quotation"),
        (["compress.sweep=[0.5,abc]"], "compress.sparsity=abc must be a number"),
        (["compress=chain", "compress.require.max_accuracy_drop=0.1"], "unknown option 'compress.require.max_accuracy"),
    ],
)
def test_all_of_a_series_is_checked_first(source: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    result = run_compress(source, tmp_path, *overrides)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not [*tmp_path.rglob("plan.json")]


@pytest.mark.slow  # for the source
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
def test_two_jobs_do_not_share_a_folder(source: Path, tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(UserError, match=r"is in use by .*: wait for that job"):
        compress(compress_config(source, "compress=fp16"), tmp_path)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow  # for the source
@pytest.mark.parametrize("source", ENGINES[:1], indirect=True)
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compress.sparsity=1"], r"compress.sparsity=1 must be a number from 0 to 0.9999"),
        (["compress.rise=0"], r"compress.rise=0 must be a number from 1e-06 to 1"),
        (["compress=int8", "compress.samples=0"], r"compress.samples=0 must be "),
        (["compress.layers=[nothing*]"], r"no layer is called nothing\*: there are "),
        (
            ["compress=chain", "compress.steps=['name=x']"],
            r"step 1 of compress.steps is 'name=x': it must",
        ),
        (["compress=chain"], r"compress=chain needs steps"),
        (["compress.sweep=0.5"], r"compress.sweep=0.5 must be a list"),
        (["compress.skip=0"], r"compress.skip=0 must be a list"),
        (["compress.skip=['9999']"], r"no layer is called 9999: there are "),
        (["compress.pattern=4:8"], r"compress.pattern=4:8 must be one of free, 2:4"),
        (["compress=prune_2_4", "compress.schedule=gradual"], r"compress.schedule=gradual does not go with"),
        (["compress.finetune=null"], r"compress.finetune=None does not go with compress.method=prune"),
        (["compress=int8", "+compress.finetune.epochs=1"], r"does not go with compress.method=quantize"),
        (["compress=low_rank", "compress.rank=4", "compress.sweep=[0.5]"], r"leave one out"),
        (["from_checkpoint=999"], r"there is no checkpoint '999'"),
        (["+compress.finetune.model.width=8"], r"is of another model: .* use it with the options it was made with"),
        (["from=nowhere"], r"nowhere is no run: it has no .hydra/config.yaml"),
    ],
)
def test_one_sentence_for_what_cannot_be(source: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(UserError, match=sentence):
        compress(compress_config(source, *overrides), tmp_path)
    assert not (tmp_path / "artefact").exists()
