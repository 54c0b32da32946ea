"""A run's folder belongs to one run, and what is written in it stays true: whose it is, its options, its metrics."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Job
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from jobs import PACKAGE, ROOT, compose_config, environment, read_lines
from omegaconf import DictConfig, OmegaConf

from my_training.assemble import open_cadence
from my_training.checkpoints.manifest import seal
from my_training.checkpoints.mirror import Remote
from my_training.checkpoints.store import Store
from my_training.compress.command import _composed
from my_training.errors import UserError
from my_training.evaluate import run_config
from my_training.export.command import export
from my_training.options import check_options
from my_training.ranks import _check_writable
from my_training.resume import read_start
from my_training.run_folder import COMPRESSION, TRAINING, check_folder, kind_of
from my_training.sampler import Position
from my_training.train import train
from my_training.train_state import TrainState, read_train_state

SMALL = ("epochs=1", "model.hidden=[4]", "tracking.tensorboard=false", "data.evaluation_batch=512")


def run_here(folder: Path, *overrides: str) -> TrainState:
    return train(compose_config(*SMALL, *overrides), folder)


def contents(folder: Path) -> dict[str, str]:
    """Every file but the logs, which each start goes on with."""
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_here(folder)
    return folder


def command(module: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", f"{PACKAGE}.{module}", *arguments]
    settings = environment() | {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    return subprocess.run(words, cwd=cwd, env=settings, capture_output=True, text=True, check=False)


# A finished run


def test_a_finished_run_shows_its_result_and_writes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(finished)
    state = run_here(finished)
    assert state.position.epoch == 1
    assert "training finished" in capsys.readouterr().out
    assert contents(finished) == before


@pytest.mark.parametrize("change", ["optimizer.lr=0.2", "data.batch_size=16", "patience=3"])
def test_a_finished_run_refuses_other_options(finished: Path, change: str) -> None:
    before = contents(finished)
    with pytest.raises(UserError, match=rf"{change.split('=')[0]} was .* is the end of its run: set it back"):
        run_here(finished, change)
    assert contents(finished) == before


def test_an_option_that_an_older_version_lacked_hides_no_result(tmp_path: Path) -> None:
    config = compose_config(*SMALL)
    OmegaConf.resolve(config)  # as train does
    older = config.copy()
    OmegaConf.set_struct(older, False)
    del older.schedule["power"]
    OmegaConf.save(older, tmp_path / "config.yaml")
    state = TrainState(samples=32, global_batch=8, world_size=1, position=Position(1), ended=1, metrics={"a": 1})
    state.write(tmp_path)
    start = read_start(tmp_path, state, config, open_cadence(config))
    assert start.finished
    assert "schedule.power was None" in start.remarks[0]


@pytest.mark.parametrize("change", ["seed=3", "model.hidden=[5]", "data.source.validation_fraction=0.5"])
def test_a_refused_start_leaves_every_record(finished: Path, change: str) -> None:
    before = contents(finished)
    with pytest.raises(UserError):
        run_here(finished, "epochs=2", change)
    with pytest.raises(UserError):  # found when the parts are built
        run_here(finished, "epochs=2", "sync_batch_norm=true", "+data.on_error=skip")
    assert contents(finished) == before


def test_more_epochs_go_on_and_are_recorded(tmp_path: Path) -> None:
    run_here(tmp_path / "run")
    run_here(tmp_path / "run", "epochs=2")
    assert read_lines(tmp_path / "run")[-1]["epoch"] == 2
    assert "epochs: 2" in (tmp_path / "run/.hydra/config.yaml").read_text()


def test_the_end_of_patience_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patient = ("epochs=9", "patience=1", "optimizer.lr=1e-9")
    for _ in range(2):  # the second finds it finished
        assert run_here(tmp_path / "run", *patient).position.epoch < 9
        assert "no better accuracy in 1 evaluations" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=r"epochs was 9 and is 12 now, but .* higher epochs=... \(or patience=...\)"):
        run_here(tmp_path / "run", *patient, "epochs=12")
    assert run_here(tmp_path / "run", *patient, "patience=2").position.epoch > 2


def test_a_finished_run_gives_its_mirror_what_it_lacks(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    options = ("epochs=2", f"checkpoint.mirror=file://{mirror}")
    run_here(tmp_path / "run", *options)
    there = Remote(f"file://{mirror}").names()
    assert there
    shutil.rmtree(mirror)
    run_here(tmp_path / "run", *options)
    assert Remote(f"file://{mirror}").names()[-1] == there[-1]


# The global batch


def test_an_inherited_global_batch_stays(finished: Path, tmp_path: Path) -> None:
    """2 ranks, then 3, 3 and 2 again, each with the options of the first."""
    start = Store(finished / "checkpoints").newest_good()
    assert start

    def planned(saved: TrainState, ranks: int, *overrides: str) -> TrainState:
        config = compose_config(*SMALL, *overrides)
        OmegaConf.resolve(config)
        fresh = replace(saved, world_size=ranks, global_batch=64 * ranks)
        return read_start(tmp_path, fresh, config, open_cadence(config)).state

    saved = replace(read_train_state(start.folder), global_batch=128, world_size=2)
    for ranks in (3, 3, 2):
        (tmp_path / "config.yaml").write_bytes((start.folder / "config.yaml").read_bytes())
        saved.write(tmp_path)
        saved = planned(saved, ranks)
        assert (saved.global_batch, saved.world_size) == (128, ranks)
    for change in ("data.global_batch=192", "data.batch_size=64", "horovod.accumulation=2"):
        assert planned(saved, 3, "epochs=9", change).global_batch == 192


def test_a_global_batch_that_is_left_out_stays_in_silence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_here(run, "data.global_batch=96")
    before = contents(run)
    assert run_here(run).global_batch == 96
    assert contents(run) == before
    assert run_here(run, "epochs=2").global_batch == 96
    assert "data.global_batch" not in (run / "logs/rank-0.log").read_text()


@pytest.mark.slow
def test_a_third_start_at_another_size_keeps_the_global_batch(job: Job, tmp_path: Path) -> None:
    options = ("model.hidden=[4]", "tracking.tensorboard=false")
    for epochs, ranks in enumerate((1, 2, 2), 1):
        result = job(ranks, f"epochs={epochs}", *options)
        assert result.returncode == 0, result.stdout
        newest = Store(tmp_path / "run/checkpoints").newest_good()
        assert newest
        assert newest.meta["global_batch"] == read_train_state(newest.folder).global_batch == 32


# Whose folder it is


def plant(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((), "new"),
        (("logs/rank-0.log", "checkpoints/.lock"), "a training run"),
        (("logs/rank-0.log", ".lock"), "new"),
        (("source/model.json", ".hydra/config.yaml", "checkpoints/latest"), "a compression"),
        (("1-prune/plan.json", "2-int8/logs/rank-0.log", "report.json"), "a series of compressions"),
        (("1-prune/logs/rank-0.log",), "new"),
        (("model.json", "model.safetensors"), "a model folder"),
        (("notes.txt",), "a folder with files of something else"),
        (("first/checkpoints/latest",), "a folder with files of something else"),
    ],
)
def test_kinds(names: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    assert kind_of(plant(tmp_path, *names)) == kind


PLACES = ["logs", ".hydra", "checkpoints", "tensorboard", "metrics.jsonl", "curves.png", "logs/rank-0.log"]
MAKERS: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("nowhere"),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_place_that_another_thing_has(place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    plant(tmp_path, ".hydra/config.yaml") if place != ".hydra" else None
    (tmp_path / place).parent.mkdir(exist_ok=True)
    MAKERS[kind](Path(place))
    if kind == ("a file" if "." in place[1:] else "a folder"):
        check_folder(tmp_path, TRAINING)
        return
    with pytest.raises(UserError, match=rf"{place} is {kind}, and the run needs .*: move it away") as refused:
        check_folder(tmp_path, TRAINING)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["notes of mine\n", '[1]\n{"step": 1, "epoch": 1}\n', '{"step": "a", "epoch": 1}\n'])
def test_metrics_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"line 1 of .*metrics.jsonl is no record of a training: move it away"):
        run_here(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_training_leaves_other_folders_alone(tmp_path: Path) -> None:
    for folder in (plant(tmp_path / "a", "plan.json"), plant(tmp_path / "b", "notes.txt")):
        before = contents(folder)
        with pytest.raises(UserError, match=r"is a .*, and a training run is to be written: use another name=\.\.\."):
            run_here(folder)
        assert contents(folder) == before
        assert not (folder / "logs").exists()


@pytest.mark.parametrize("more", [(), ("compress=chain_small_cnn",)])
def test_compressing_leaves_a_training_alone(finished: Path, more: tuple[str, ...]) -> None:
    """Also the one that it would make smaller."""
    before = contents(finished)
    done = command("compress", f"from={finished}", "name=any", f"hydra.run.dir={finished}", *more)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {finished} is a training run, and a ")
    assert done.stderr.count("\n") == 1
    assert contents(finished) == before


def test_a_refused_compression_leaves_no_plan(finished: Path, tmp_path: Path) -> None:
    """It is refused when the layers of both are compared; other options can then use the folder."""
    options = ("compress=distill", "compress.student=${oc.create:{_target_:nowhere.Model}}")
    done = command("compress", f"from={finished}", "name=any", f"hydra.run.dir={tmp_path / 'c'}", *options)
    assert done.returncode != 0
    assert not (tmp_path / "c" / "plan.json").exists()
    check_folder(tmp_path / "c", COMPRESSION)


# Names


@pytest.mark.parametrize(
    "name",
    ["..", "''", "null", "/tmp/x", "7", "1e3", "1_000", "true", "a/../b", ".a", "'-a'", "a//b", "[a]", "'a\\\\b'"],
)
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^name=.* must be a name for a folder in runs/"):
        run_here(tmp_path / "run", f"name={name}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["first", "007", "0x10", "yes", "2026-12-02", "group/first", "'é 1'", "'1e3'", "v1.2"])
def test_names_that_are_taken_as_they_are(name: str) -> None:
    config = compose_config(f"name={name}")
    check_options(config)
    assert config.name == name.strip("'")


def test_hydras_own_refusals_say_how(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, sentence in (
        ("name=é", "name=é has letters that need quotes: write it as \"name='é'\""),
        (f"name={'x' * 300}", "File name too long at runs/xxx"),
        (f"hydra.run.dir={tmp_path / 'file'}", f"File exists at {tmp_path / 'file'}: choose another name=..."),
    ):
        done = command("train", option, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("file", ["/nowhere/timeline.json", "/", "/dev/null"])
def test_a_timeline_that_cannot_be_written(file: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"horovod.timeline={file} cannot be written: name a file"):
        run_here(tmp_path / "run", f"horovod.timeline={file}")


@pytest.mark.slow
def test_two_sweeps_do_not_meet(tmp_path: Path) -> None:
    """The jobs of a second one with other values are new runs; the same sweep again finds its own."""
    for rates in ("0.05,0.1", "0.2", "0.05,0.1"):
        done = command("train", "--multirun", *SMALL, f"optimizer.lr={rates}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    runs = {json.dumps(read_lines(run)[0]["lr"]): run.name for run in (tmp_path / "runs").glob("*-sweep/*")}
    assert len(runs) == 3
    assert all(f"optimizer.lr={rate}" in name for rate, name in zip(sorted(runs), sorted(runs.values()), strict=True))


def test_jobs_of_a_sweep_over_epochs_or_sources_have_folders_of_their_own(tmp_path: Path) -> None:
    """What Hydra would name them, without training."""
    for module, values in (("train", ["epochs=1", "epochs=2"]), ("compress", ["from=runs/a", "from=runs/b"])):
        with initialize_config_module(f"{PACKAGE}.conf", version_base="1.3"):
            names = []
            for value in values:
                config = compose(module, ["name=it", value], return_hydra_config=True)
                names.append(sweep_folder(config, value))
        assert len({*names}) == 2, names


def sweep_folder(config: DictConfig, override: str) -> str:
    """The folder of a job of a sweep."""
    HydraConfig.instance().set_config(config)
    return str(config.hydra.sweep.subdir)


def test_a_timeline_takes_the_place_of_no_other_file(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UserError, match=r"horovod.timeline=.*notes is a file of something else: name a new one"):
        run_here(tmp_path / "run", f"horovod.timeline={tmp_path / 'notes'}")
    assert (tmp_path / "notes").read_text() == "mine"
    (tmp_path / "old").write_text("[\n")
    _check_writable(tmp_path / "old")


def test_a_measurement_leaves_the_trainings_timeline_alone(tmp_path: Path) -> None:
    config = compose_config(*SMALL, f"horovod.timeline={tmp_path / 'timeline'}")
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml", resolve=True)
    assert run_config(tmp_path, []).horovod.timeline is None
    assert run_config(tmp_path, ["horovod.timeline=other"]).horovod.timeline == "other"


def test_fewer_epochs_than_are_done_are_the_end_though_nothing_was_measured() -> None:
    cadence = open_cadence(compose_config(*SMALL, "epochs=2"))
    for epoch, offset, finished in ((1, 8, False), (2, 0, False), (2, 8, True), (3, 0, True)):
        state = TrainState(samples=32, global_batch=8, world_size=1, position=Position(epoch, offset))
        assert cadence.is_finished(state) is finished


def test_a_result_is_shown_with_the_ranks_that_made_it(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = Store(finished / "checkpoints").newest_good()
    assert start
    two = replace(read_train_state(start.folder), world_size=2)
    copy = Path(shutil.copytree(finished, finished.parent / "two"))
    folder = copy / "checkpoints" / start.name
    two.write(folder)
    (folder / "MANIFEST.json").unlink()
    seal(folder)
    run_here(copy)
    assert "2, 32" in capsys.readouterr().out


def test_an_export_is_not_written_into_what_is_sealed(finished: Path, tmp_path: Path) -> None:
    start = Store(finished / "checkpoints").newest_good()
    assert start
    before = contents(finished)
    for target in (start.folder / "model", start.folder / "deeper" / "model", finished / "checkpoints/step-00000999"):
        with pytest.raises(UserError, match=r"is a place of checkpoints: name another"):
            export(finished, "best", target, "folder")
    assert contents(finished) == before
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="exists: name a new one"):
        export(finished, "best", tmp_path / "link", "folder")


def test_steps_of_a_chain_take_any_name_and_source(finished: Path, tmp_path: Path) -> None:
    """Such as the folders of a sweep, whose names Hydra would read as options."""
    source = tmp_path / "lr=0.1_model.hidden=[4]"
    with initialize_config_module(f"{PACKAGE}.conf", version_base="1.3"):
        config = compose("compress", ["name='é 1'", f"from='{source}'", "compress=chain"])
        steps = [("1-prune", ["compress=prune"]), ("2-fp16", ["compress=fp16"])]
        both = [single for _, single in _composed(steps, config, tmp_path, True)]
    assert [single.name for single in both] == ["é 1/1-prune", "é 1/2-fp16"]
    assert [single["from"] for single in both] == [str(source), str(tmp_path / "1-prune")]
