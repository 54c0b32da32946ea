"""What a compression has decided, once, on the writing rank, before it trains: plan.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .. import trust
from ..checkpoints.manifest import sha256, write_durably
from ..checkpoints.store import Store
from ..engine import Engine
from ..errors import UserError
from ..evaluate import load_all
from ..export.model_folder import export_model
from ..files import follow_umask
from ..options import plain
from ..weights import FILE
from .pruning import NOTABLE, PrunableWeights
from .sparsity import share_of, zeros_of
from .wing import Wing, wing_of

PLAN = "plan.json"
REBUILT = ("channels", "low_rank", "qat")  # methods that change the architecture


@dataclass(frozen=True)
class Plan:
    """What the writing rank has decided, the same on every rank.

    Attributes:
        parent: The checkpoint that it begins from.
        parent_sha256: Of its weights.
        source: The run and the name of its checkpoint, as they were asked for.
        recipe: The options of compress.
        model: The config of the new model.
        remarks: For the report.
    """

    parent: str
    parent_sha256: str
    source: list[str]
    recipe: dict[str, Any]
    model: dict[str, Any]
    remarks: list[str]


def make_plan(config: DictConfig, training: DictConfig, engine: Engine, folder: Path) -> Plan:
    """Read plan.json, or verify the source, keep a copy of its model and decide; see write_plan()."""
    recipe = plain(config.compress)
    source = [str(Path(config["from"]).resolve()), str(config.from_checkpoint)]
    if (folder / PLAN).exists():
        plan = _read_plan(folder)
        trust.check(plan.model, folder / PLAN, trusted_by(config, training))
        if plan.recipe != recipe:
            raise UserError(f"{folder} was begun with other options: set them back, or use another name=...")
        if plan.source != source:
            was = f"from={plan.source[0]} from_checkpoint={plan.source[1]}"
            raise UserError(f"{folder} was begun with {was}: set them back, or use another name=...")
        return plan
    parent = Store(Path(config["from"]) / "checkpoints").find_good(config.from_checkpoint).folder
    model = trust.read_config(parent / "config.yaml").get("model")
    trust.check(model, parent / "config.yaml", trusted_by(config, training))
    load_all(engine, parent)
    shutil.rmtree(folder / "source", ignore_errors=True)
    export_model(parent, folder / "source")
    model, remarks = _decide(config, training, engine, folder)
    return Plan(str(parent.resolve()), sha256(parent / FILE), source, recipe, model, remarks)


def write_plan(plan: Plan, folder: Path) -> None:
    """Write plan.json, once nothing can refuse the plan any more."""
    write_durably(folder / f"{PLAN}.tmp", json.dumps(vars(plan), indent=2))
    (folder / f"{PLAN}.tmp").rename(folder / PLAN)


def _read_plan(folder: Path) -> Plan:
    try:
        return Plan(**trust.read_json(folder / PLAN))
    except TypeError as error:
        raise UserError(f"{folder} was begun by another version of this project: use another name=...") from error


def _decide(config: DictConfig, training: DictConfig, engine: Engine, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The config of the new model, and remarks."""
    options, model = config.compress, plain(training.model)
    if options.method == "distill":
        whole = OmegaConf.merge(training, {"model": None})
        whole.model = plain(options.student)
        return plain(whole.model, resolve=True), []
    wing = wing_of(training.engine)
    if options.method == "prune":
        return model, _left_dense(wing.PrunableWeights(engine.model, list(options.layers), list(options.skip)), options)
    if options.method not in REBUILT:
        return model, []
    (folder / "start").mkdir(exist_ok=True)
    model, remarks = _rebuild(wing, engine, model, options, training.data, folder / "start" / FILE)
    follow_umask(folder / "start")
    return model, [*remarks, *(_lost_zeros(folder / "source") if options.method == "low_rank" else [])]


def _rebuild(
    wing: Wing, engine: Engine, base: dict[str, Any], options: Any, data: Any, file: Path
) -> tuple[dict[str, Any], list[str]]:
    """Write the weights that another architecture begins with; returns its config, and remarks."""
    model = wing.copy_model(engine, base)
    if options.method == "qat":
        skip = list(options.skip)
        wing.save_weights(wing.prepare(model, skip), file)
        return {"_target_": _name(wing.prepare), "model": base, "skip": skip}, []
    chosen, changes, remarks = wing.shrink(model, options, data)
    wing.save_weights(chosen, file)
    return {"_target_": _name(wing.shrunk), "base": base, "changes": changes}, remarks


def _name(builder: Callable[..., Any]) -> str:
    return f"{builder.__module__}.{builder.__name__}"


def _lost_zeros(source: Path) -> list[str]:
    share = share_of(zeros_of(source))
    return [f"the zeros of the source ({share:.0%}) are lost: factors are new weights"] if share > NOTABLE else []


def _left_dense(prunable: PrunableWeights, options: Any) -> list[str]:
    if options.pattern != "2:4":
        return []
    shapes = {name: array.shape for name, array in prunable.copies().items()}
    odd = [name for name, shape in shapes.items() if shape[prunable.input_axis] % 4]
    return [f"left dense, since 2:4 needs a multiple of 4 inputs: {', '.join(odd)}"] if odd else []


def trusted_by(config: DictConfig, training: DictConfig) -> tuple[str, ...]:
    """What the user says: by `trust`, and as a student, a teacher or another option of compress."""
    whole = OmegaConf.create({**plain(training), "compress": plain(config.compress)})
    return tuple(sorted({*config.trust, *trust.targets(plain(whole.compress, resolve=True))}))
