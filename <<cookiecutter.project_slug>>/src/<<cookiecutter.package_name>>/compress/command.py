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

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from .. import trust
from ..assemble import open_data, open_store
from ..checkpoints.config_diff import flat
from ..checkpoints.manifest import MANIFEST, sha256, write_durably
from ..checkpoints.ownership import COMPRESSION, SERIES, check_folder, run_lock
from ..checkpoints.store import META, Checkpoint, Store
from ..data import normalized
from ..engine import Engine, Hooks, open_engine
from ..errors import UserError, end_well
from ..evaluate import load_all, run_config
from ..export.artefacts import PROGRAMS, Floats
from ..export.command import FORMATS, writer
from ..export.model_folder import export_model
from ..files import follow_umask
from ..options import check_options, plain
from ..ranks import Communicator, launched_rank, open_communicator
from ..tracking import open_log
from ..train import Run, carry_on, open_run, write_options
from ..weights import FILE
from .pruning import NOTABLE, KeptZeros, Layers, Pruning
from .report import BLOCK, QUANTIZED, Report, measure_apart, show
from .rules import NULLABLE, RULES
from .zeros import share_of, zeros_of

PLAN = "plan.json"
TAG = "artefact"
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


class Missed(UserError):
    """The result is not what compress.require asks for; the same on all ranks."""


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
    trusted = _trusted(config, training)
    plan = _agree_on_plan(config, training, folder, communicator, closing)
    own = PROGRAMS if _has_no_files(folder) else ()  # then the files that are measured are of this process
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


def _trusted(config: DictConfig, training: DictConfig) -> tuple[str, ...]:
    """What the user says: by `trust`, and as a student, a teacher or another option of compress."""
    whole = OmegaConf.create({**plain(training), "compress": plain(config.compress)})
    return tuple(sorted({*config.trust, *trust.targets(plain(whole.compress, resolve=True))}))


def _has_no_files(folder: Path) -> bool:
    return not (folder / "artefact").exists() and not [*folder.glob("source.*")]


def _show_again(folder: Path, report: Report) -> None:
    home = folder / ("rejected" if report.missed else "artefact")
    if not home.exists():
        raise UserError(f"the report in {folder} speaks of {home}, which is not there: use another name=...")
    show(report)


def check(config: DictConfig) -> None:
    """Refuse what would give another result than is asked for; names of layers become text.

    Raises:
        UserError: names the option.
    """
    check_options(config, RULES, NULLABLE)
    options = config.compress
    for key in ("layers", "skip"):
        if key in options:
            options[key] = [str(name) for name in options[key]]  # torch's may be numbers
    if options.method == "chain":
        return
    if (options.finetune is None) != (options.method == "quantize"):
        raise UserError(
            f"compress.finetune={options.finetune} does not go with compress.method={options.method}", agreed=True
        )
    if options.get("pattern") == "2:4" and options.schedule == "gradual":
        raise UserError("compress.schedule=gradual does not go with compress.pattern=2:4: use one_shot", agreed=True)
    if options.get("rank") is not None and options.sweep:
        raise UserError("compress.sweep is over energies, which compress.rank replaces: leave one out", agreed=True)


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


# What is decided once, on the writing rank


def make_plan(config: DictConfig, training: DictConfig, engine: Engine, folder: Path) -> Plan:
    """Read plan.json, or verify the source, keep a copy of its model and decide; see write_plan()."""
    recipe = plain(config.compress)
    source = [str(Path(config["from"]).resolve()), str(config.from_checkpoint)]
    if (folder / PLAN).exists():
        plan = _read_plan(folder)
        trust.check(plan.model, folder / PLAN, _trusted(config, training))
        if plan.recipe != recipe:
            raise UserError(f"{folder} was begun with other options: set them back, or use another name=...")
        if plan.source != source:
            was = f"from={plan.source[0]} from_checkpoint={plan.source[1]}"
            raise UserError(f"{folder} was begun with {was}: set them back, or use another name=...")
        return plan
    parent = Store(Path(config["from"]) / "checkpoints").find_good(config.from_checkpoint).folder
    model = trust.read_config(parent / "config.yaml").get("model")
    trust.check(model, parent / "config.yaml", _trusted(config, training))
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
        return model, _left_dense(wing.layers(engine, list(options.layers), list(options.skip)), options)
    if options.method not in REBUILT:
        return model, []
    (folder / "start").mkdir(exist_ok=True)
    model, remarks = wing.new_model(engine, model, options, training.data, folder / "start")
    follow_umask(folder / "start")
    return model, [*remarks, *(_lost_zeros(folder / "source") if options.method == "low_rank" else [])]


def _lost_zeros(source: Path) -> list[str]:
    share = share_of(zeros_of(source))
    return [f"the zeros of the source ({share:.0%}) are lost: factors are new weights"] if share > NOTABLE else []


def _left_dense(layers: Layers, options: Any) -> list[str]:
    if options.pattern != "2:4":
        return []
    shapes = {name: array.shape for name, array in layers.weights().items()}
    odd = [name for name, shape in shapes.items() if shape[layers.input_axis] % 4]
    return [f"left dense, since 2:4 needs a multiple of 4 inputs: {', '.join(odd)}"] if odd else []


def wing_of(engine: str) -> Any:
    """What the wing of an engine does to compress a model."""
    return import_module(f".{engine}.methods", __package__)


# Training


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
    options = OmegaConf.create(plan.recipe)
    if options.method == "prune":
        layers = wing_of(run.config.engine).layers(run.engine, list(options.layers), list(options.skip))
        return Pruning(layers, run.communicator, options, len(run.splits.train), run.config.epochs)
    if options.method == "distill":
        make: Callable[..., Hooks] = wing_of(run.config.engine).distillation
        return make(run.engine, run.folder / "source", options, run.config.data, trusted)
    if options.method == "low_rank":  # has new weights everywhere
        return Hooks()
    return KeptZeros(wing_of(run.config.engine).layers(run.engine, ["*"], []))


# The result


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
    making = _empty(folder / ".artefact")
    if training.compress.method == "qat":
        trained = _empty(folder / ".trained") / "model"
        export_model(checkpoint.folder, trained)
        wing = wing_of(training.engine)
        wing.convert_trained(trained, making / "model.onnx", training.data.shape, training.compress, trusted)
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


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def quantize(
    training: DictConfig, folder: Path, plan: Plan, communicator: Communicator, trusted: Sequence[str]
) -> None:
    """Write the artefact without any training; each rank shows the model its part of the calibration samples."""
    options = training.compress
    if communicator.on_writer(lambda: (folder / "artefact").exists(), "artefact"):
        return
    name = f".{training.engine}.quantize"
    if find_spec(name, __package__) is None:
        raise UserError(f"compress={options.kind} is not there for {training.engine} models", agreed=True)
    wing = import_module(name, __package__)
    communicator.on_writer(lambda: _empty(folder / ".artefact"), "folder")
    done = wing.post_training(
        folder / "source",
        folder / ".artefact" / f"model{wing.METHODS.get(options.kind, ('',))[0]}",
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


# Several in a row


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
    trusted = sorted({*config.trust, *(name for _, single in singles for name in _trusted(single, training))})
    own = PROGRAMS if all(_has_no_files(folder / name) for name, _ in singles) else ()
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
