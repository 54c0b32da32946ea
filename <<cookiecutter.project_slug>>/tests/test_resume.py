"""Going on: bit for bit at the same number of ranks, along the same curve at another, from good checkpoints only."""

import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Job
from jobs import (
    PACKAGE,
    compose_config,
    mounted,
    read_lines,
    start_job,
    values,
    wait_for_process,
    wait_for_training,
)

from << cookiecutter.package_name >>.checkpoints.checkpoint import Checkpoint
from << cookiecutter.package_name >>.checkpoints.manifest import read_manifest, seal
from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.errors import PREEMPTED, UserError
from << cookiecutter.package_name >>.tracking import open_log
from << cookiecutter.package_name >>.train import train

each_engine = pytest.mark.usefixtures("engine")

QUICK = ("tracking.tensorboard=false", "data.evaluation_batch=64")
MLP = ("epochs=2", "model.hidden=[16]", *QUICK)


def newest(run: Path) -> Checkpoint:
    found = Store(run / "checkpoints").newest_good()
    assert found
    return found


def hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """What a checkpoint holds, without what tells of its making."""
    files = read_manifest(checkpoint.folder)
    return {name: digest for name, (_, digest) in files.items() if name not in ("meta.json", "config.yaml")}


def train_here(folder: Path, *overrides: str) -> Path:
    """Train in this process."""
    train(compose_config(*MLP, *overrides), folder)
    return folder


@each_engine
def test_killed_at_random_moments_it_ends_with_the_same_bits(job: Job, tmp_path: Path) -> None:
    """KILLS=50 in the environment makes it the long version."""
    options = ("epochs=6", "model=cnn", "model.width=4", "optimizer=adamw", "checkpoint.every_steps=5", *QUICK)
    assert job(2, *options, folder=tmp_path / "whole").returncode == 0
    run, rng = tmp_path / "run", random.Random(0)
    for start in range(int(os.environ.get("KILLS", 2))):
        with start_job(2, run, *options) as process:
            victims = [wait_for_process(run, rank, start + 1) for rank in range(2)]
            time.sleep(rng.uniform(0, 4))
            with suppress(ProcessLookupError):  # it may have come to its end
                os.kill(rng.choice(victims), signal.SIGKILL)
            process.communicate(timeout=60)
    finished = job(2, *options)
    assert finished.returncode == 0, finished.stdout
    assert hashes(newest(run)) == hashes(newest(tmp_path / "whole"))
    for name in ("train/loss", "val/loss", "val/accuracy", "lr"):
        assert values(run, name) == values(tmp_path / "whole", name)


@each_engine
@pytest.mark.slow
def test_two_then_one_then_three_then_two_ranks(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part ends within an epoch by a signal to one rank; together they are the undisturbed run."""
    data = ("data.source._target_=faulty.recorded", "~data.source.validation_fraction")
    options = ("epochs=5", "data.global_batch=60", "schedule.warmup_epochs=2", *data, *QUICK)
    monkeypatch.setenv("RECORD", str(tmp_path / "whole.jsonl"))
    assert job(2, *options, folder=tmp_path / "whole").returncode == 0
    monkeypatch.setenv("RECORD", str(tmp_path / "parts.jsonl"))
    for ranks, stop in ((2, 12), (1, 25), (3, 5), (2, 0)):
        monkeypatch.setenv("STOP_AFTER", str(stop))
        result = job(ranks, *options)
        assert (result.returncode == 0) == (stop == 0), result.stdout
        assert ("error: stopped by a signal after step" in result.stdout) == (stop != 0)
        if stop:
            assert result.returncode == PREEMPTED
    for record in ("whole.jsonl", "parts.jsonl"):
        fetched = [json.loads(line) for line in (tmp_path / record).read_text().splitlines()]
        batches = [(epoch, indices) for epoch, indices in fetched if indices != [0]]  # that one checks the shape
        seen = Counter((epoch, index) for epoch, indices in batches for index in indices)
        assert set(seen.values()) == {1}
        assert len(seen) == 5 * 1438
    for name in ("train/loss", "val/loss", "lr"):
        assert values(tmp_path / "run", name) == pytest.approx(values(tmp_path / "whole", name), rel=1e-4)


@pytest.mark.slow
def test_a_signal_within_an_evaluation(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation is left at once and made after the resume."""
    data = ("data.source._target_=faulty.stops", "~data.source.validation_fraction", "data.evaluation_batch=2")
    options = ("epochs=2", "tracking.tensorboard=false", *data)
    assert job(2, *options, folder=tmp_path / "whole").returncode == 0
    monkeypatch.setenv("FAULT", "1")
    stopped = job(2, *options)
    assert "error: stopped by a signal after step 23" in stopped.stdout
    assert not values(tmp_path / "run", "val/loss")
    monkeypatch.delenv("FAULT")
    assert job(2, *options).returncode == 0
    for name in ("train/loss", "val/loss"):
        assert values(tmp_path / "run", name) == values(tmp_path / "whole", name)
    assert hashes(newest(tmp_path / "run")) == hashes(newest(tmp_path / "whole"))


@pytest.mark.slow
def test_a_second_job_on_a_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_job(1, run, "epochs=100000", *QUICK) as first:
        wait_for_training(run)
        process = wait_for_process(run, 0)
        with pytest.raises(UserError, match=rf"is in use by .*{process}.*: wait for that job, stop it"):
            train_here(run)
        os.kill(process, signal.SIGUSR1)
        first.communicate(timeout=60)
    assert first.returncode == PREEMPTED


@each_engine
def test_from_a_named_step_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Dropout draws random numbers in every step; the optimizer's options are the config's, not the file's."""
    options = ("model.dropout=0.2", "checkpoint.every_steps=20", "checkpoint.keep_last=9")
    run = train_here(tmp_path / "run", *options)
    whole = hashes(newest(run))
    train_here(run, *options, "resume=20")
    assert newest(run).name == "step-00000090.1"
    assert hashes(newest(run)) == whole
    count = len(Store(run / "checkpoints").checkpoints())
    train_here(run, *options)
    assert len(Store(run / "checkpoints").checkpoints()) == count  # nothing happened, so nothing was saved
    train_here(run, *options, "resume=20", "optimizer.weight_decay=0.5")
    assert hashes(newest(run)) != whole


@pytest.mark.root
def test_a_last_checkpoint_that_fails_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_here(tmp_path / "run", "epochs=1")
    with mounted(tmp_path / "small", "2m") as disk:
        shutil.copytree(run, disk / "run")
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 8000))
        with pytest.raises(UserError, match="could not be saved"):
            train_here(disk / "run")


@pytest.mark.root
def test_a_log_on_a_full_disk_is_left_behind(tmp_path: Path) -> None:
    """The next run in this process keeps its own."""
    with mounted(tmp_path / "small", "64k") as disk:
        open_log(disk, 0)
        for _ in range(1000):
            logging.getLogger().info("one more line of a log that has no end")
        open_log(tmp_path, 0)
    logging.getLogger().info("here")
    assert "here" in (tmp_path / "logs/rank-0.log").read_text()


@each_engine
def test_an_asynchronous_checkpoint_is_the_synchronous_one(tmp_path: Path) -> None:
    for name in ("true", "false"):
        train_here(tmp_path / name, f"checkpoint.asynchronous={name}", "checkpoint.every_steps=7")
    both = [Store(tmp_path / name / "checkpoints").checkpoints() for name in ("true", "false")]
    assert [item.step for item in both[0]] == [item.step for item in both[1]]
    for one, other in zip(*both, strict=True):
        assert hashes(one) == hashes(other)
    assert hashes(both[0][0]) != hashes(both[0][-1])


@pytest.mark.root
@each_engine
@pytest.mark.slow
def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    """Saves fail and say so; when space returns they succeed again, and no metric is lost."""
    with mounted(tmp_path / "disk", "2m") as disk:
        run = disk / "run"
        options = ("epochs=100000", "model.hidden=[64]", "checkpoint.max_failures=100000", *QUICK)
        with start_job(2, run, *options) as job:
            wait_for_training(run)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1000))
                except OSError:
                    pass
            time.sleep(2)
            count = len(read_lines(run))
            filler.unlink()
            wait_for_training(run, lines=count + 30)
            os.kill(wait_for_process(run, 0), signal.SIGUSR1)
            output, _ = job.communicate(timeout=60)
        assert re.search(r"could not be saved in .*: (No space left|\d+ MB are needed)", output)
        stopped = re.search(r"stopped by a signal after step (\d+)", output)
        assert stopped
        assert newest(run).step == int(stopped[1])
        steps = [line["step"] for line in read_lines(run) if "train/loss" in line]
        assert steps == sorted(set(steps))
        assert {step for step in steps if step % 10 == 0} == set(range(10, int(stopped[1]) + 1, 10))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "code ran")


@each_engine
def test_no_file_of_a_checkpoint_can_run_code(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "epochs=1")
    names = set(read_manifest(newest(run).folder)) - {"meta.json"}
    assert len(names) >= 5
    for name in names:
        folder = newest(Path(shutil.copytree(run, tmp_path / name))).folder
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
        (folder / "MANIFEST.json").unlink()
        seal(folder)  # as somebody would who wants it to be trusted
        with pytest.raises(UserError) as error:
            train_here(tmp_path / name)
        assert name in str(error.value)
    assert not (tmp_path / "mark").exists()


@each_engine
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run")
    weights = newest(run).folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert newest(run).step == 45
    train_here(run)
    assert "passed over" in (run / "logs" / "rank-0.log").read_text()
    assert newest(run).step == 90


@each_engine
def test_a_smaller_rate_is_said_and_another_model_refused(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "epochs=1")
    with pytest.raises(UserError, match=r"model\.hidden was \[16\] and is \[8\] now, which .* cannot go on with"):
        train_here(run, "model.hidden=[8]")
    train_here(run, "optimizer.lr=0.01", "epochs=3")
    assert "optimizer.lr was 0.05 and is 0.01 now" in (run / "logs" / "rank-0.log").read_text()
    assert newest(run).step == 135


FIRST_AND_NEW = {
    "torch": (r"1\.weight", r"7\.weight", "(10, 16)"),
    "tensorflow": ("dense_0/kernel", "dense_1/kernel", "(16, 16)"),
}


def test_weights_from_another_run(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, new, shape = FIRST_AND_NEW[engine]
    teacher = train_here(tmp_path / "teacher", "epochs=3")
    tuned = train_here(tmp_path / "tuned", f"weights_from={teacher}", "epochs=1", "optimizer.lr=1e-6")
    assert values(tuned, "val/accuracy")[-1] == pytest.approx(values(teacher, "val/accuracy")[-1], abs=0.01)
    assert values(tuned, "lr")[0] < 1e-5
    train_here(tmp_path / "wider", f"weights_from={teacher}", "epochs=1", "model.hidden=[16,16]")
    printed = capsys.readouterr().out
    assert re.search(rf"{first} +loaded", printed)
    assert re.search(rf"{new} +not loaded: None in the file, {re.escape(shape)} in the model", printed)
    with pytest.raises(UserError, match=r"not one tensor of .* fits the model"):
        other = ("data=synthetic", "data.source.samples=64", "data.classes=7", "model.hidden=[7]")
        train_here(tmp_path / "other", f"weights_from={teacher}", *other)


def test_training_ends_when_it_no_longer_improves(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "epochs=50", "patience=1", "optimizer.lr=1e-9")
    assert newest(run).meta["epoch"] == 2
    assert train_here(run, "epochs=50", "patience=1", "optimizer.lr=1e-9") == run
    assert newest(run).meta["epoch"] == 2


def test_a_model_folder_becomes_a_model_in_two_lines(engine: str, tmp_path: Path) -> None:
    load_model = import_module(f"{PACKAGE}.export.{engine}").load_model
    run = tmp_path / "run"
    train(compose_config("epochs=1", "model=cnn", "model.width=4", *QUICK), run)
    folder = tmp_path / "model"
    subprocess.run([sys.executable, "-m", f"{PACKAGE}.export", str(run), "latest", str(folder)], check=True)
    model = load_model(folder)
    assert model(zeros(engine, 2, 8, 8, 1)).shape == (2, 10)
    description = json.loads((folder / "model.json").read_text())
    description["model"] = {"_target_": f"{PACKAGE}.{engine}.models.cnn", "shape": [8, 8, 1], "classes": "many"}
    with pytest.raises(UserError, match="does not fit its architecture"):
        load_model(resealed(folder, description))
    (folder / "model.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        load_model(folder)


def zeros(engine: str, *shape: int) -> Any:
    """A batch of images in the engine's own form."""
    if engine == "tensorflow":
        return np.zeros(shape, np.float32)
    return import_module("torch").zeros(shape[0], shape[3], *shape[1:3])


def resealed(folder: Path, description: dict[str, Any]) -> Path:
    (folder / "model.json").write_text(json.dumps(description))
    (folder / "MANIFEST.json").unlink()
    seal(folder)
    return folder
