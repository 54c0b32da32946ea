"""What the tests of quantization share: a trained model of digits, and how good a file of it is."""

from pathlib import Path

import numpy as np
from jobs import compose_config

from << cookiecutter.package_name >>.data import digits
from << cookiecutter.package_name >>.export.artefacts import PROGRAMS, load_predictor
from << cookiecutter.package_name >>.export.command import export
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.train import train


def trained_model(engine: str, place: Path, communicator: Communicator) -> Path:
    """The model folder of a short run."""
    options = ["epochs=8", "model=cnn", "model.width=16", "tracking.tensorboard=false"]
    train(compose_config(f"engine={engine}", *options), place / "run")
    communicator.on_writer(lambda: export(place / "run", "best", place / "model", "folder"), "model")
    return place / "model"


def accuracy(artefact: Path) -> float:
    """On the validation part."""
    part = digits().validation
    inputs, labels = part.fetch(np.arange(len(part)), 0)
    return float((load_predictor(artefact, trusted=PROGRAMS)(inputs).argmax(1) == labels).mean())
