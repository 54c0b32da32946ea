"""Training in which ranks have what only PyTorch's engine has, or is tried with one engine alone."""

from pathlib import Path

import pytest
from faulty import FailsLater
from jobs import SMALL, compose_config, read_lines, values

from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.train import train


def test_replicate(ranks: Communicator, tmp_path: Path) -> None:
    train(compose_config(*SMALL, "data.distribution=replicate"), tmp_path)
    assert read_lines(tmp_path)[-1]["step"] == 2 * 45  # 1,438 samples in batches of 32, on each rank
    assert values(tmp_path, "val/accuracy")[-1] > 0.9


def test_a_run_with_powersgd_goes_on_where_it_was(
    ranks: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training with compressed gradients: as good a model, and the errors that each rank has kept are saved."""
    source = ("data.source._target_=faulty.fails_later", "~data.source.validation_fraction")
    options = ("epochs=3", "horovod.compression=powersgd", "horovod.powersgd_rank=2", *source)
    train(compose_config(*options), tmp_path / "whole")
    assert values(tmp_path / "whole", "val/accuracy")[-1] > 0.9
    monkeypatch.setenv("FAULT", "1")
    monkeypatch.setattr(FailsLater, "victims", (0, 1))  # one alone would leave the other waiting
    with pytest.raises(ValueError, match=f"the disk of rank {ranks.rank} is gone"):
        train(compose_config(*options), tmp_path / "run")
    monkeypatch.delenv("FAULT")
    train(compose_config(*options), tmp_path / "run")
    for name in ("train/loss", "val/loss"):
        assert values(tmp_path / "run", name) == values(tmp_path / "whole", name)
