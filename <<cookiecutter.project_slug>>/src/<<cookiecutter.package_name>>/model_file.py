"""A trained model as one folder: model.json says what it is, the weights lie beside it, nothing in it is code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import manifest
from .errors import UserError

FORMAT = 1
DESCRIPTION = "model.json"
WEIGHTS = ("model.safetensors",)


def export_model(checkpoint: Path, folder: Path) -> None:
    """Make a model folder of a checkpoint: architecture, config of inputs and outputs, and weights, with a manifest.

    Raises:
        UserError: if the folder exists, or the checkpoint lacks what a model needs.
    """
    from omegaconf import OmegaConf

    weights = [checkpoint / name for name in WEIGHTS if (checkpoint / name).exists()]
    if folder.exists():
        raise UserError(f"{folder} exists: name a new folder for the model")
    if not weights or not (checkpoint / "config.yaml").exists():
        raise UserError(f"{checkpoint} has no {' or '.join(WEIGHTS)} with a config.yaml: export another checkpoint")
    config: Any = OmegaConf.to_container(OmegaConf.load(checkpoint / "config.yaml"), resolve=True)
    inputs = {key: config["data"][key] for key in ("shape", "classes", "normalize")}
    description = {"format": FORMAT, "engine": config["engine"], "model": config["model"], "data": inputs}
    folder.mkdir(parents=True)
    for file in weights:
        shutil.copyfile(file, folder / file.name)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    manifest.seal(folder)


def read_description(folder: Path, trusted: Sequence[str]) -> dict[str, Any]:
    """What model.json says, once the whole folder is verified.

    Args:
        folder: A model folder.
        trusted: Packages whose functions and classes the file may name as the architecture. Naming is all that it
            can do, but a name from anywhere could be that of a function which does harm.

    Raises:
        UserError: if the folder is damaged, of a newer format, or names an architecture from elsewhere.
    """
    if problems := manifest.verify(folder):
        raise UserError(f"model {folder} is damaged ({'; '.join(problems)}): export it again")
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        version, target = description["format"], str(description["model"]["_target_"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / DESCRIPTION} does not describe a model ({error}): export it again") from error
    if version > FORMAT:
        raise UserError(f"model {folder} has format {version} and this program reads up to {FORMAT}: update it")
    if not any(target.startswith(f"{package}.") for package in trusted):
        raise UserError(f"model {folder} names {target}, which is not in {', '.join(trusted)}: trust its package first")
    return description
