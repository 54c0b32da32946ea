"""One compression, from the source to the report; what is done already is not done again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf, open_dict

from ..assemble import open_data, open_store
from ..checkpoints.diff import flat
from ..checkpoints.lock import run_lock
from ..data import normalized
from ..engine import Hooks, open_engine
from ..errors import UserError
from ..evaluate import load_all, run_config
from ..export.artefacts import PROGRAMS, Floats
from ..ranks import Communicator, launched_rank, open_communicator
from ..run_folder import COMPRESSION
from ..tracking import open_log
from ..train import Run, carry_on, open_run, write_options
from .distillation import open_distillation
from .measure import BLOCK, QUANTIZED
from .plan import REBUILT, Plan, make_plan, trusted_by, write_plan
from .pruning import KeptZeros, Pruning
from .quantization import post_training
from .report import Report, show
from .result import emptied, finish
from .wing import wing_of


class Missed(UserError):
    """The result is not what compress.require asks for; the same on all ranks."""


def compress_once(config: DictConfig, folder: Path) -> Path:
    """Plan, fine-tune, write the artefact, measure it, put it into the store; what is done already is not done again.

    Raises:
        Missed: if the result is not what compress.require asks for.
        UserError: for what cannot be.
    """
    open_log(folder, launched_rank())
    training = training_config(config)
    communicator = open_communicator(training.engine, training.horovod)
    with ExitStack() as closing:
        report = _carry_out(config, training, folder, communicator, closing)
    if report.missed:
        raise Missed(f"{report.missed}: the result lies in {folder / 'rejected'}", agreed=True)
    return folder / "report.json"


def _carry_out(
    config: DictConfig, training: DictConfig, folder: Path, communicator: Communicator, closing: ExitStack
) -> Report:
    """Every step that is not done yet, while no other job may work in the folder."""
    trusted = trusted_by(config, training)
    plan = _agree_on_plan(config, training, folder, communicator, closing)
    own = PROGRAMS if has_no_files(folder) else ()  # then the files that are measured are of this process
    with open_dict(training):
        training.model, training.compress = plan.model, plan.recipe
    store = open_store(training, folder)
    done = communicator.on_writer(lambda: [vars(one) for one in [Report.read(folder)] if one], "report")
    if done:
        report = Report(**done[0])
        communicator.on_writer(lambda: _show_again(folder, report), "result")
        return report
    if config.compress.method == "quantize":
        quantize(training, folder, plan, communicator, trusted)
    else:
        finetune(training, folder, plan, trusted)
    trusted = (*trusted, *own)
    return Report(**communicator.on_writer(lambda: vars(finish(training, folder, store, plan, trusted)), "artefact"))


def has_no_files(folder: Path) -> bool:
    """Whether no earlier job has left a file there that may hold code."""
    return not (folder / "artefact").exists() and not [*folder.glob("source.*")]


def _show_again(folder: Path, report: Report) -> None:
    home = folder / ("rejected" if report.missed else "artefact")
    if not home.exists():
        raise UserError(f"the report in {folder} speaks of {home}, which is not there: use another name=...")
    show(report)


def _agree_on_plan(
    config: DictConfig, training: DictConfig, folder: Path, communicator: Communicator, closing: ExitStack
) -> Plan:
    engine = open_engine(training, communicator)  # as the source: what it claims comes before any collective
    communicator.on_writer(lambda: closing.enter_context(run_lock(folder)), "folder")
    return Plan(**communicator.on_writer(lambda: vars(make_plan(config, training, engine, folder)), "plan"))


def training_config(config: DictConfig) -> DictConfig:
    """The source's config with the options of compress.finetune over it."""
    wanted = flat(OmegaConf.to_container(config.compress.finetune)) if config.compress.finetune else ()
    changes = [f"{key}={json.dumps(value)}" for key, value in wanted if value is not None]
    training = run_config(Path(config["from"]), changes, config.trust)
    with open_dict(training):
        training.name, training.resume, training.weights_from = config.name, config.resume, None
        training.pop("compress", None)
    return training


def finetune(training: DictConfig, folder: Path, plan: Plan, trusted: Sequence[str]) -> None:
    """Train in the run's folder from the plan's start, or from where an earlier job was stopped."""
    run = open_run(training, folder, COMPRESSION)
    hooks = run.communicator.together(lambda: open_hooks(run, plan, trusted), "hooks")
    run.communicator.check_equal(hooks.fingerprint(), "the teachers")
    run.engine.hooks = hooks

    def begin() -> None:
        start = folder / ("start" if plan.recipe["method"] in REBUILT else "source")
        if plan.recipe["method"] != "distill":
            run.communicator.together(lambda: load_all(run.engine, start), "start")
        hooks.begin()

    if not (folder / "artefact").exists():
        carry_on(run, begin, lambda: write_plan(plan, folder))


def open_hooks(run: Run, plan: Plan, trusted: Sequence[str]) -> Hooks:
    """What the plan's method adds to the training."""
    options, wing = OmegaConf.create(plan.recipe), wing_of(run.config.engine)
    if options.method == "prune":
        prunable = wing.PrunableWeights(run.engine.model, list(options.layers), list(options.skip))
        return Pruning(prunable, run.communicator, options, len(run.splits.train), run.config.epochs)
    if options.method == "distill":
        return open_distillation(wing, run.engine, run.folder / "source", options, run.config.data, trusted)
    if options.method == "low_rank":  # has new weights everywhere
        return Hooks()
    return KeptZeros(wing.PrunableWeights(run.engine.model, ["*"], []))


def quantize(
    training: DictConfig, folder: Path, plan: Plan, communicator: Communicator, trusted: Sequence[str]
) -> None:
    """Write the artefact without any training; each rank shows the model its part of the calibration samples."""
    options = training.compress
    if communicator.on_writer(lambda: (folder / "artefact").exists(), "artefact"):
        return
    suffixes = wing_of(training.engine).METHODS.get(options.kind, ("",))
    communicator.on_writer(lambda: emptied(folder / ".artefact"), "folder")
    done = post_training(
        folder / "source",
        folder / ".artefact" / f"model{suffixes[0]}",
        options.kind,
        _calibration(training, communicator),
        communicator,
        skip=list(options.skip),
        trusted=trusted,
    )
    communicator.on_writer(lambda: _settle(training, folder, plan, done), "artefact")


def _settle(training: DictConfig, folder: Path, plan: Plan, done: dict[str, Any]) -> None:
    write_plan(plan, folder)
    write_options(training, folder)
    (folder / QUANTIZED).write_text(json.dumps(done, indent=2), encoding="utf-8")
    (folder / ".artefact").rename(folder / "artefact")


def _calibration(training: DictConfig, communicator: Communicator) -> Iterator[Floats]:
    """This rank's batches of training samples."""
    data = communicator.together(lambda: open_data(training), "data").train
    chosen = np.random.default_rng(training.seed).permutation(len(data))[: training.compress.samples]
    mine = np.array_split(chosen, communicator.size)[communicator.rank]
    for start in range(0, len(mine), BLOCK):
        yield normalized(data.fetch(mine[start : start + BLOCK], 0)[0], training.data.normalize)
