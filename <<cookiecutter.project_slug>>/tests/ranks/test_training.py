"""Training on several ranks: the result of one process, for any number of ranks, and agreed refusals."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jobs import PACKAGE, SINGLE, SMALL, compose_config, current_engine, values

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.train import train

QUICK = ("epochs=1", "tracking.tensorboard=false")


class Refusing(pickle.Unpickler):
    """Stands for the class itself, of which what is imported later makes others."""

    def load(self) -> NoReturn:
        refuse()


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise RuntimeError("something was unpickled")


def test_no_rank_unpickles_what_another_sends(
    ranks: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pickle, importlib.import_module("cloudpickle")):
        for name in ("load", "loads"):
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refusing)
    assert train(compose_config(*QUICK), tmp_path).step > 0


def train_alone(folder: Path, *overrides: str) -> None:
    """The same with one process of its own, to which no launcher has told anything."""
    words = [sys.executable, "-m", f"{PACKAGE}.train", f"engine={current_engine()}", f"hydra.run.dir={folder}"]
    told = ("HOROVOD_", "OMPI_", "PMI", "SLURM_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    subprocess.run([*words, *overrides], env=variables | SINGLE, stdout=subprocess.DEVNULL, check=True)


@pytest.mark.ranks(2, 3)
def test_any_number_of_ranks_trains_alike(ranks: Communicator, tmp_path: Path) -> None:
    """With SGD too: test_resume.py changes the number of ranks on the way."""
    overrides = ["data.global_batch=96", "horovod.accumulation=2", "data.workers=1", "clip_norm=1.0", "optimizer=adamw"]
    overrides += [*SMALL, "tracking.log_every=5"]
    ranks.on_writer(lambda: train_alone(tmp_path / "alone", *overrides), "alone")
    train(compose_config(*overrides), tmp_path / "together")
    for name in ("train/loss", "val/loss", "val/accuracy"):
        alone, together = (values(tmp_path / run, name) for run in ("alone", "together"))
        assert len(alone) >= 2
        assert together == pytest.approx(alone, rel=1e-4)


def test_batch_norm_and_fp16_on_the_wire(ranks: Communicator, tmp_path: Path) -> None:
    layout = ["channels_last=true"] if current_engine() == "torch" else []  # TensorFlow has no other
    train(compose_config(*SMALL, "model=cnn", "horovod.compression=fp16", "horovod.groups=2", *layout), tmp_path)
    assert values(tmp_path, "val/accuracy")[-1] > 0.9


def test_adasum(ranks: Communicator, tmp_path: Path) -> None:
    config = compose_config(*SMALL, "horovod.op=adasum", "schedule.scaling=adasum")
    if ranks.hvd.mpi_enabled():
        train(config, tmp_path)
        assert values(tmp_path, "val/accuracy")[-1] > 0.9
        return
    with pytest.raises(UserError, match="adasum needs MPI"):
        train(config, tmp_path)


def test_a_loss_that_is_not_a_number(ranks: Communicator, tmp_path: Path) -> None:
    faulty = [*SMALL, "data.source._target_=faulty.not_a_number", "~data.source.validation_fraction"]
    # The activation of a hidden layer can make 0 of it.
    stopped = compose_config(*faulty, "model.hidden=[]", "horovod.compression=fp16")
    with pytest.raises(UserError, match="the loss is not finite between steps") as caught:
        train(stopped, tmp_path / "stopped")
    way_out = "try horovod.compression=none instead of fp16, or a larger horovod.predivide_factor"
    assert way_out in str(caught.value)
    assert caught.value.agreed
    train(compose_config(*faulty, "on_nan=skip", "model=cnn", "tracking.log_every=1"), tmp_path / "skipped")
    assert values(tmp_path / "skipped", "val/accuracy")[-1] > 0.9


def test_a_run_that_cannot_go_on_so(ranks: Communicator, tmp_path: Path) -> None:
    """All ranks say it, and none trains."""
    first = train(compose_config(*QUICK), tmp_path)
    for option, sentence in (
        ("resume=never", "resume=never, but .* already has checkpoints"),
        ("resume=next", "there is no checkpoint 'next'"),
        ("seed=1", "seed was 0 and is 1 now, which .* cannot go on with"),
    ):
        with pytest.raises(UserError, match=sentence) as caught:
            train(compose_config("epochs=2", "tracking.tensorboard=false", option), tmp_path)
        assert caught.value.agreed
    assert train(compose_config("epochs=2", "tracking.tensorboard=false"), tmp_path).step == 2 * first.step
