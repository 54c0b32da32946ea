"""A model and data of a user's own; test_trust.py names them by _target_."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from jobs import PACKAGE, current_engine

from << cookiecutter.package_name >>.data import Splits, digits


def net(shape: Sequence[int], classes: int, width: int = 4) -> Any:
    return import_module(f"{PACKAGE}.{current_engine()}.models").cnn(shape, classes, width)


def data() -> Splits:
    return digits()
