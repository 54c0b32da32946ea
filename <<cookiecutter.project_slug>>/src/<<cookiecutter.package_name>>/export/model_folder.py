"""A trained model as one folder: model.json says what it is, the weights lie beside it, nothing in it is code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..checkpoints import manifest
from ..errors import UserError
from ..trust import ENGINES, check, read_config, read_json
from ..weights import FILE

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
    weights = checkpoint / FILE
    if not weights.exists() or not (checkpoint / "config.yaml").exists():
        raise UserError(f"{checkpoint} has no {FILE} with a config.yaml: export another checkpoint")
    config = read_config(checkpoint / "config.yaml")
    try:
        inputs = {key: config["data"][key] for key in ("shape", "classes", "normalize")}
        description = {"format": FORMAT, "engine": config["engine"], "model": config["model"], "data": inputs}
    except (KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / 'config.yaml'} lacks {error}: export another checkpoint") from error
    folder.mkdir()
    shutil.copyfile(weights, folder / FILE)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    manifest.seal(folder)


def build_model(folder: Path, trusted: Sequence[str] = ()) -> Any:
    """The architecture that model.json names, once the whole folder is verified; a wing then loads the weights.

    Args:
        folder: A model folder.
        trusted: What else than our own architectures may be built, as ["package.Net"]; see trust.check().

    Raises:
        UserError: if the folder is damaged, of a newer format, or names what is not trusted.
    """
    from hydra.utils import instantiate

    model = _read(folder)["model"]
    check(model, folder / DESCRIPTION, trusted)
    try:
        return instantiate(model, _convert_="all")
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{folder / DESCRIPTION} does not fit its architecture ({reason}): export it again") from error


def data_shape(folder: Path) -> tuple[int, ...]:
    """What a model folder's model takes: the shape of one sample as the data set gives it, channels last."""
    return tuple(_read(folder)["data"]["shape"])


def engine_of(folder: Path) -> str:
    """The engine that a model folder is for.

    Raises:
        UserError: if it is none of ours.
    """
    engine = read_json(folder / DESCRIPTION).get("engine")
    if engine not in ENGINES:
        raise UserError(f"{folder / DESCRIPTION} has engine={engine}: it must be one of {', '.join(ENGINES)}")
    return str(engine)


def _read(folder: Path) -> dict[str, Any]:
    if problems := manifest.verify(folder):
        raise UserError(f"model {folder} is damaged ({'; '.join(problems)}): export it again")
    description = read_json(folder / DESCRIPTION)
    try:
        version, _ = int(description["format"]), (description["model"]["_target_"], [*description["data"]["shape"]])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / DESCRIPTION} does not describe a model ({error}): export it again") from error
    if version > FORMAT:
        raise UserError(f"model {folder} has format {version} and this program reads up to {FORMAT}: update it")
    return description
