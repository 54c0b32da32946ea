"""Make a file for users of a model: python -m <package>.export runs/first best model.onnx --format onnx.

The file is loaded again in its own runtime, and gets its name only if it answers as the model does on samples of the
run's validation data. Options of the data may follow, as in data.source.root=/elsewhere. See docs/export.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from omegaconf import DictConfig

from ..assemble import open_data
from ..checkpoints.checkpoint import is_name
from ..checkpoints.manifest import MANIFEST
from ..checkpoints.store import Store, store_folder
from ..data import normalized
from ..errors import Parser, UserError
from ..options import MODEL_AND_DATA, read_options
from ..trust import add_trust
from .artefacts import PROGRAMS, Floats, load_predictor, runtime_of, weigh
from .model_folder import export_model

SAMPLES = 256
# How far the largest logit may move, as a part of it, and how many samples must keep their class.
TOLERANCES = {"fp32": (1e-4, 0.99), "fp16": (1e-2, 0.98), "bf16": (1e-1, 0.95)}
FORMATS = {
    "folder": "",
    "onnx": ".onnx",
    "torch_export": ".pt2",
    "keras": ".keras",
    "h5": ".h5",
    "savedmodel": "",
    "tflite": ".tflite",
}


def export(
    run: Path,
    which: str,
    target: Path,
    kind: str,
    precision: str = "fp32",
    trusted: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Make `target` of a checkpoint, all of it or nothing.

    Args:
        run: The run's folder.
        which: best, latest, a step, a tag, a checkpoint's name or a path.
        target: The new file or folder.
        kind: One of FORMATS.
        precision: fp32 | fp16 | bf16, what the model computes in.
        trusted: What else than our own architectures and data may be built, see trust.check().
        changes: Options of the data that differ from the run's; what they name is trusted.

    Returns:
        What was made, how large it is, and how it differs from the model.

    Raises:
        UserError: if it cannot be made, or answers otherwise than the model.
    """
    check_target(target, kind)
    checkpoint = Store(store_folder(run)).find_good(which)
    target.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        if precision != "fp32":
            raise UserError(f"--precision {precision} is not for a model folder: choose another --format")
        export_model(checkpoint.folder, target)
        return {"checkpoint": checkpoint.name, **facts(target)}
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        folder, made = Path(temporary, "model"), Path(temporary, f"made{FORMATS[kind]}")
        config = read_options(checkpoint.folder / "config.yaml", changes, trusted, MODEL_AND_DATA)
        export_model(checkpoint.folder, folder)
        writer(config.engine, kind)(folder, made, kind, precision, trusted)
        agreement = compare(folder, made, validation_samples(config, SAMPLES), trusted)
        _check_agreement(target, agreement, precision)
        report = {"checkpoint": checkpoint.name, **facts(made), "artefact": str(target), "agreement": agreement}
        made.rename(target)
    return report


def check_target(target: Path, kind: str) -> None:
    """Refuse a target that exists, lies within a checkpoint, or whose name does not say what it holds.

    Raises:
        UserError: in these cases.
    """
    if os.path.lexists(target):
        raise UserError(f"{target} exists: name a new one for the model")
    if is_name(target.name) or any((folder / MANIFEST).exists() for folder in target.absolute().parents):
        raise UserError(f"{target} is a place of checkpoints: name another")
    if target.suffix != FORMATS[kind] and (FORMATS[kind] or target.suffix in FORMATS.values()):
        ending = f"end in {FORMATS[kind]}" if FORMATS[kind] else "be a folder's, without such an ending"
        raise UserError(f"{target} is no name for --format {kind}: it must {ending}")


def writer(engine: str, kind: str) -> Callable[..., None]:
    """What an engine's wing has to make a file of a model folder.

    Raises:
        UserError: if the engine is not in this project, or lacks the format.
    """
    name = f".{engine}"
    if find_spec(name, __package__) is None:
        raise UserError(f"engine={engine} is not in this project: generate one with framework={engine}")
    wing = import_module(name, __package__)
    if kind not in wing.FORMATS:
        raise UserError(f"--format {kind} is not there for {engine} models: choose folder, {', '.join(wing.FORMATS)}")
    write: Callable[..., None] = wing.export
    return write


def validation_samples(config: DictConfig, count: int) -> Floats:
    """Up to `count` validation samples, spread over all, as artefacts take them."""
    part = open_data(config).validation
    indices = np.linspace(0, len(part) - 1, min(count, len(part))).astype(np.int64)
    return normalized(part.fetch(indices, 0)[0], config.data.normalize)


def compare(folder: Path, made: Path, inputs: Floats, trusted: Sequence[str] = ()) -> dict[str, float]:
    """How an artefact's answers differ from its model folder's, both loaded from their files.

    Args:
        folder: The model folder.
        made: The artefact, by this process.
        inputs: (n, *data.shape), normalized.
        trusted: As for load_model().

    Returns:
        `max_difference` of any logit; `relative_difference`, the same as a part of the largest logit;
        `top1_agreement`, the part of the samples that get the same class; `samples`.
    """
    wanted, got = load_predictor(folder, trusted=trusted)(inputs), load_predictor(made, trusted=PROGRAMS)(inputs)
    if wanted.shape != got.shape:
        raise UserError(f"the exported model answers with shape {got.shape}, the model with {wanted.shape}")
    difference = float(np.abs(wanted - got).max())
    return {
        "max_difference": difference,
        "relative_difference": difference / max(float(np.abs(wanted).max()), 1e-12),
        "top1_agreement": float((wanted.argmax(1) == got.argmax(1)).mean()),
        "samples": len(inputs),
    }


def _check_agreement(target: Path, agreement: Mapping[str, float], precision: str) -> None:
    tolerance, share = TOLERANCES[precision]
    # So written that a NaN fails.
    if not (agreement["relative_difference"] <= tolerance and agreement["top1_agreement"] >= share):
        raise UserError(
            f"{target} would not answer as the model does: {agreement['relative_difference']:.2g} of the largest logit"
            f" apart, the same class for {agreement['top1_agreement']:.1%}; choose another format or precision"
        )


def facts(artefact: Path) -> dict[str, Any]:
    """What an artefact is and weighs, for a report."""
    found = weigh(artefact)
    return {
        "artefact": str(artefact),
        "runtime": runtime_of(artefact),
        "bytes": found.size,
        "gzipped_bytes": found.gzipped,
        "sha256": found.sha256,
    }


def main() -> None:
    """Read the command line and print the report as JSON."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("which", help="best, latest, a step, a tag, a checkpoint's name or a path")
    parser.add_argument("target", type=Path, help="a new file or folder")
    parser.add_argument("--format", default="folder", choices=list(FORMATS), help="(default: folder)")
    parser.add_argument("--precision", default="fp32", choices=list(TOLERANCES), help="(default: fp32)")
    add_trust(parser)
    parser.add_argument("changes", nargs="*", help="options of the data that differ from the run's")
    options = parser.parse_intermixed_args()
    report = export(
        options.run,
        options.which,
        options.target,
        options.format,
        options.precision,
        options.trust,
        options.changes,
    )
    print(json.dumps(report, indent=2))
