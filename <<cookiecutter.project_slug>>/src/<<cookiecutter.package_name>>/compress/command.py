"""Make a trained model smaller: python -m <package>.compress from=runs/first compress=prune name=first-pruned.

The source's own config, data and loop are used, with one or more ranks, so that a killed job goes on by itself.
runs/<name>/ then holds:

    source/         the model as it was
    plan.json       what was decided: parent, recipe, the new architecture
    checkpoints/    of the fine-tuning; the tag `artefact` is the one with the result and its lineage
    artefact/       the result, one file or folder
    source.*        the model as it was for the artefact's runtime, if that is another one
    report.json, report.png
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..errors import UserError, end_well
from ..evaluate import run_config
from ..export.artefacts import PROGRAMS
from ..ranks import launched_rank, open_communicator
from ..run_folder import COMPRESSION, SERIES, check_folder
from .measure import measure_apart
from .plan import trusted_by
from .result import TAG
from .rules import check
from .single import Missed, compress_once, has_no_files


def compress(config: DictConfig, folder: Path) -> Path:
    """Carry out one compression, or a series of them; returns the report."""
    check(config)
    steps = _series(config)
    check_folder(folder, SERIES if steps else COMPRESSION)
    for name, _ in steps:
        check_folder(folder / name, COMPRESSION)
    if not steps:
        return compress_once(config, folder)
    return compress_series(steps, config, folder)


def _series(config: DictConfig) -> list[tuple[str, list[str]]]:
    """The names and options of the compressions that the config asks for; none if it is a single one."""
    options = config.compress
    if options.method == "chain":
        if not options.get("steps"):
            raise UserError("compress=chain needs steps, as in \"compress.steps=['compress=prune','compress=int8']\"")
        return [_step(number, str(step)) for number, step in enumerate(options.steps, 1)]
    if not options.get("sweep"):
        return []
    knob = next((name for name in ("sparsity", "energy") if name in options), None)
    if knob is None:
        raise UserError(f"compress.sweep needs a method with a sparsity or energy, not {options.method}")
    own = [item for item in HydraConfig.get().overrides.task if not item.startswith(("compress.sweep", "name="))]
    return [(f"{knob}-{value}", [*own, "compress.sweep=null", f"compress.{knob}={value}"]) for value in options.sweep]


def _step(number: int, step: str) -> tuple[str, list[str]]:
    """The name and the options of a step of a chain."""
    choice = re.search(r"\bcompress=(\w+)", step)
    if choice is None or choice[1].startswith("chain"):
        raise UserError(f"step {number} of compress.steps is {step!r}: it must say what to do, as in compress=prune")
    try:
        return f"{number}-{choice[1]}", shlex.split(step)
    except ValueError as error:
        raise UserError(f"step {number} of compress.steps is {step!r}: {error}") from error


def compress_series(steps: list[tuple[str, list[str]]], config: DictConfig, folder: Path) -> Path:
    """Carry them out in folders of their own, each on the last one's result in a chain, then compare all.

    Raises:
        Missed: if a result is not what compress.require asks for: at once in a chain, at the end of a sweep.
        UserError: for what cannot be, before the first one begins.
    """
    chain, missed = config.compress.method == "chain", []
    singles = [*_composed(steps, config, folder, chain)]
    training = run_config(Path(config["from"]), [], config.trust)
    trusted = sorted({*config.trust, *(name for _, single in singles for name in trusted_by(single, training))})
    own = PROGRAMS if all(has_no_files(folder / name) for name, _ in singles) else ()
    for name, single in singles:
        single.trust = trusted  # a step meets what the one before was told to build
        try:
            compress_once(single, folder / name)
        except Missed as error:
            if chain:
                raise
            missed.append(f"{name}: {error}")
    communicator = open_communicator(training.engine, training.horovod)
    names = [name for name, _ in steps]
    communicator.on_writer(lambda: measure_apart(folder, names, (*trusted, *own)).write(folder), "series")
    if missed:
        raise Missed("; ".join(missed), agreed=True)
    return folder / "report.json"


def _composed(
    steps: list[tuple[str, list[str]]], config: DictConfig, folder: Path, chain: bool
) -> Iterator[tuple[str, DictConfig]]:
    """The config of each."""
    source, which = str(config["from"]), str(config.from_checkpoint)
    for name, overrides in steps:
        single = compose("compress", overrides)  # the rest as it is: Hydra would read an option in a folder's '='
        own = {"from": source, "from_checkpoint": which, "name": f"{config.name}/{name}", "resume": config.resume}
        single.update(own)
        check(single)
        if chain and single.compress.sweep:
            raise UserError(f"{name} has a compress.sweep, and a step has one result: sweep outside of the chain")
        if chain and single.compress.method in ("quantize", "qat") and name != steps[-1][0]:
            raise UserError(f"{name} makes a file for a runtime, of which no other step can make anything: put it last")
        yield name, single
        if chain:
            source, which = str(folder / name), TAG


@hydra.main(version_base="1.3", config_path="../conf", config_name="compress")
def main(config: DictConfig) -> None:
    """Hydra's entry."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    end_well(lambda: compress(config, folder), launched_rank)
