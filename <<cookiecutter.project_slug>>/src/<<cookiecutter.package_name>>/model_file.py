"""A trained model as one folder: model.json says what it is, the weights lie beside it, nothing in it is code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import manifest
from .errors import UserError
from .weights import FILE

FORMAT = 1
DESCRIPTION = "model.json"


def export_model(checkpoint: Path, target: Path) -> None:
    """Make a model folder of a checkpoint; all of it or nothing.

    Args:
        checkpoint: A verified checkpoint.
        target: The folder to make.

    Raises:
        UserError: if the target exists, or the checkpoint lacks what a model needs.
    """
    if target.exists():
        raise UserError(f"{target} exists: name a new one for the model")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        made = Path(temporary, "model")
        _make_folder(checkpoint, made)
        made.rename(target)


def _make_folder(checkpoint: Path, folder: Path) -> None:
    """Architecture, config of inputs and outputs, and weights, with a manifest."""
    from omegaconf import OmegaConf

    weights = checkpoint / FILE
    if not weights.exists() or not (checkpoint / "config.yaml").exists():
        raise UserError(f"{checkpoint} has no {FILE} with a config.yaml: export another checkpoint")
    config: Any = OmegaConf.to_container(OmegaConf.load(checkpoint / "config.yaml"))
    inputs = {key: config["data"][key] for key in ("shape", "classes", "normalize")}
    description = {"format": FORMAT, "engine": config["engine"], "model": config["model"], "data": inputs}
    folder.mkdir()
    shutil.copyfile(weights, folder / FILE)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    manifest.seal(folder)


def build_model(folder: Path, trusted: Sequence[str]) -> Any:
    """The architecture that model.json names, with initial weights, once the whole folder is verified.

    Args:
        folder: A model folder.
        trusted: Packages whose own functions and classes the file may name. It can do no more than name one and give
            it plain values, but one from anywhere could do harm.

    Raises:
        UserError: if the folder is damaged, of a newer format, or names what is not an architecture of `trusted`.
    """
    description = _read(folder)
    return _build(folder, description["model"], trusted)


def _build(folder: Path, description: dict[str, Any], trusted: Sequence[str]) -> Any:
    """What a description names, after the parts that it is built of."""
    parts = {
        key: _build(folder, value, trusted) if isinstance(value, dict) and "_target_" in value else value
        for key, value in description.items()
    }
    make = _find(folder, str(parts.pop("_target_")), trusted)
    try:
        return make(**parts)
    except Exception as error:
        raise UserError(f"{folder / DESCRIPTION} does not fit its architecture ({error}): export it again") from error


def data_shape(folder: Path) -> tuple[int, ...]:
    """What a model folder's model takes: the shape of one sample as the data set gives it, channels last."""
    return tuple(_read(folder)["data"]["shape"])


def _find(folder: Path, name: str, trusted: Sequence[str]) -> Callable[..., Any]:
    """A function or class that is defined, not only imported, in a trusted package."""
    from hydra.utils import get_object

    found: Any = None
    if name.startswith(tuple(f"{package}." for package in trusted)):
        with suppress(Exception):
            found = get_object(name)
    home = f"{getattr(found, '__module__', '')}."
    if not callable(found) or not home.startswith(tuple(f"{package}." for package in trusted)):
        raise UserError(f"model {folder} names {name}, which is not in {', '.join(trusted)}: trust its package first")
    return found  # type: ignore[no-any-return]


def _read(folder: Path) -> dict[str, Any]:
    if problems := manifest.verify(folder):
        raise UserError(f"model {folder} is damaged ({'; '.join(problems)}): export it again")
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        version, _ = description["format"], description["model"]["_target_"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / DESCRIPTION} does not describe a model ({error}): export it again") from error
    if version > FORMAT:
        raise UserError(f"model {folder} has format {version} and this program reads up to {FORMAT}: update it")
    return description
