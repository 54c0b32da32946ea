"""The result of a compression: written as a file or folder, measured there, and put into the store with its lineage."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from ..checkpoints.checkpoint import META, Checkpoint
from ..checkpoints.manifest import MANIFEST
from ..checkpoints.store import Store
from ..export.command import FORMATS, writer
from ..export.model_folder import export_model
from .measure import measure_apart
from .plan import Plan
from .report import Report
from .wing import wing_of

TAG = "artefact"


def finish(training: DictConfig, folder: Path, store: Store, plan: Plan, trusted: Sequence[str]) -> Report:
    """Write the artefact, measure it in a process of its own, and publish it with its lineage."""
    checkpoint = None
    if training.compress.finetune is not None:
        checkpoint = store.find_good(_pick(plan))
    if not (folder / "artefact").exists():
        assert checkpoint is not None
        _write_artefact(training, folder, checkpoint, trusted)
    _write_twin(training, folder, trusted)
    report = measure_apart(folder, trusted=trusted)
    if report.missed:
        shutil.rmtree(folder / "rejected", ignore_errors=True)
        (folder / "artefact").rename(folder / "rejected")
    else:
        _publish(store, folder, checkpoint, plan, report)
    report.write(folder)
    return report


def _pick(plan: Plan) -> str:
    """The best one by validation accuracy, as the source was; the last one where sparsity was still rising before."""
    return "latest" if plan.recipe.get("schedule") == "gradual" else "best"


def _write_artefact(training: DictConfig, folder: Path, checkpoint: Checkpoint, trusted: Sequence[str]) -> None:
    making = emptied(folder / ".artefact")
    if training.compress.method == "qat":
        trained = emptied(folder / ".trained") / "model"
        export_model(checkpoint.folder, trained)
        quantizer = wing_of(training.engine).Quantizer(trained, "qat", list(training.compress.skip), trusted)
        quantizer.convert(making / "model.onnx")
        shutil.rmtree(trained.parent)
    else:
        export_model(checkpoint.folder, making / "model")
    making.rename(folder / "artefact")


def _write_twin(training: DictConfig, folder: Path, trusted: Sequence[str]) -> None:
    """The source for the artefact's runtime, if that is another one: only within one are times to be compared."""
    (artefact,) = (folder / "artefact").iterdir()
    twin, making = (folder / f"{name}{artefact.suffix}" for name in ("source", ".twin"))
    if artefact.is_dir() or twin.exists():
        return
    kind = next(kind for kind, suffix in FORMATS.items() if suffix == artefact.suffix)
    writer(training.engine, kind)(folder / "source", making, kind, "fp32", trusted)
    making.rename(twin)


def emptied(folder: Path) -> Path:
    """Make a folder anew, with those above it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _publish(store: Store, folder: Path, checkpoint: Checkpoint | None, plan: Plan, report: Report) -> None:
    """A checkpoint with the artefact and where it came from; it can be resumed from as the one that it was made of."""
    if TAG in store.pointers():
        return
    after = report.models["after"]

    def write(target: Path) -> None:
        for file in (*checkpoint.folder.iterdir(),) if checkpoint else ():
            if file.name not in (META, MANIFEST):
                shutil.copyfile(file, target / file.name)
        shutil.copytree(folder / "artefact", target / "artefact")

    lineage = {"parent": plan.parent, "parent_sha256": plan.parent_sha256, "sha256": after["sha256"]}
    meta = {
        **({key: value for key, value in checkpoint.meta.items() if key != "parent"} if checkpoint else {}),
        "metrics": {"val/accuracy": after["accuracy"]},
        "artefact": {**lineage, "recipe": plan.recipe},
    }
    with store.lock():
        if checkpoint:
            store.resumed_from(checkpoint)
        store.tag(TAG, store.publish(checkpoint.step if checkpoint else 0, write, meta))
