"""Folders that a stranger made to run code, through everything that reads one: nothing in them is built or called."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compress_helpers import alone, compress_config
from jobs import CONF, ENGINES, PACKAGE, ROOT, compose_config
from omegaconf import OmegaConf

from my_training.checkpoints.diff import read_flat
from my_training.checkpoints.manifest import seal
from my_training.checkpoints.store import Store
from my_training.compress.measure import measure, measure_apart
from my_training.compress.single import compress_once, training_config
from my_training.errors import UserError
from my_training.evaluate import run_config
from my_training.export.artefacts import load_predictor
from my_training.export.command import FORMATS, export
from my_training.train import train
from my_training.trust import LISTED

Node = dict[str, Any]
OURS = f"{PACKAGE}.{ENGINES[0]}"
SHRUNK = f"{PACKAGE}.compress.{ENGINES[0]}.shrink.shrunk"
EXPORT = f"{PACKAGE}.export.{ENGINES[0]}"
SHAPE: Node = {"shape": [8, 8, 1], "classes": 10}
TELLING = r"names .*, which could run any code: only if you know what it does, add --trust \S"


def system(canary: str) -> Node:
    return {"_target_": "os.system", "command": f"touch {canary}"}


def calls(target: str, *arguments: Any, **options: Any) -> Node:
    return {"_target_": target, **({"_args_": [*arguments]} if arguments else {}), **options}


def ours(**options: Any) -> Node:
    """A listed architecture with something in its arguments."""
    return {"_target_": f"{OURS}.models.mlp", **SHAPE, **options}


def deep(node: Any, levels: int) -> Any:
    for level in range(levels):
        node = [node] if level % 2 else {"a": node}
    return node


# What each writes a file with, if it is ever called.
NAMED: dict[str, Callable[[str], Node]] = {
    "shell": system,
    "shell, by another name": lambda c: calls("posix.system", f"touch {c}"),
    "process": lambda c: calls("subprocess.run", ["touch", c]),
    "process, as a class": lambda c: calls("subprocess.Popen", ["touch", c]),
    "exec": lambda c: calls("builtins.exec", f"open({c!r}, 'w')"),
    "eval": lambda c: calls("builtins.eval", f"open({c!r}, 'w')"),
    "open": lambda c: calls("builtins.open", c, "w"),
    "io": lambda c: calls("io.open", c, "w"),
    "a method": lambda c: calls("pathlib.Path.touch", calls("pathlib.Path", c)),
    "source": lambda c: calls("timeit.timeit", f"open({c!r}, 'w')", number=1),
    "another source": lambda c: calls("cProfile.run", f"open({c!r}, 'w')"),
    "a log": lambda c: calls("logging.FileHandler", c),
    "a database": lambda c: calls("sqlite3.connect", c),
    "yaml": lambda c: calls("yaml.unsafe_load", f"!!python/object/apply:os.system ['touch {c}']"),
    "numpy": lambda c: calls("numpy.save", c, [1, 2]),
    "omegaconf": lambda c: calls("omegaconf.OmegaConf.save", {"a": 1}, c),
    "horovod": lambda c: calls("horovod.runner.common.util.safe_shell_exec.execute", f"touch {c}"),
    "hydra itself": lambda c: calls("hydra.utils.instantiate", system(c)),
    "hydra, later": lambda c: calls("hydra.utils.instantiate", system(c), _recursive_=False),
    "hydra, a part": lambda c: calls("hydra.utils.call", {**system(c), "_partial_": True}),
    "partial": lambda c: {**system(c), "_partial_": True},
    "our doctor": lambda c: calls(f"{PACKAGE}.cluster.doctor._run", job=["sh", "-c", f"touch {c}"]),
    "our probe": lambda c: calls(f"{PACKAGE}.checkpoints.manifest.write_durably", calls("pathlib.Path", c), "text"),
    "what our module imports": lambda c: calls(f"{PACKAGE}.data.np.save", c, [1, 2]),
    "a class that our module imports": lambda c: calls(f"{OURS}.models.Path.touch", calls(f"{OURS}.models.Path", c)),
    "our reader of models": lambda c: calls(
        f"{EXPORT}.load_model", folder=str(Path(c).with_name("second")), trusted=["os", "posix", "subprocess"]
    ),
    "our reader of keras files": lambda c: calls(f"{PACKAGE}.tensorflow.models.keras_file", c),
    "a listed name and more": lambda c: calls(f"{PACKAGE}.data.digits.__globals__", c),
    "a name with a space": lambda c: calls("os.system ", f"touch {c}"),
    "in an argument": lambda c: ours(hidden=system(c)),
    "in a list": lambda c: ours(hidden=[8, system(c)]),
    "in a list of lists": lambda c: ours(hidden=[[[system(c)]]]),
    "in _args_": lambda c: calls(f"{OURS}.models.mlp", [8, 8, 1], system(c)),
    "deep": lambda c: ours(hidden=deep(system(c), 40)),
    "beside": lambda c: ours(_recursive_=False, _convert_="all", other=system(c)),
    "of what is shrunk": lambda c: calls(SHRUNK, base=system(c), changes=[]),
    "in changes": lambda c: calls(SHRUNK, base=ours(), changes=[{"kind": "widths", "layers": system(c)}]),
}
# What has no callable to name, or hides it.
ODD: dict[str, Callable[[str], Node]] = {
    "looked up": lambda c: {"_target_": "${name}.system", "command": f"touch {c}"},
    "from the environment": lambda c: ours(hidden="${oc.env:PATH}"),
    "decoded": lambda c: ours(hidden="${oc.decode:'[1,2]'}"),
    "made": lambda c: ours(hidden="${oc.create:{_target_:os.system,command:id}}"),
    "in a key": lambda c: ours(hidden={"${oc.env:PATH}": 1}),
    "a target that is a list": lambda c: {"_target_": ["os.system"], "command": f"touch {c}"},
    "a target that is to be built": lambda c: {"_target_": system(c)},
    "arguments that are none": lambda c: ours(_args_=system(c)["command"]),
    "a conversion that is none": lambda c: ours(_convert_="code"),
}


SMALLER: Node = {"name": "it", "resume": "auto", "trust": [], "compress": {"finetune": None}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the first engine."""
    folder = tmp_path_factory.mktemp("own") / "run"
    train(compose_config("epochs=1", "model.hidden=[8]", "tracking.tensorboard=false"), folder)
    return folder


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    export(run, "best", folder, "folder")
    return folder


def resealed(folder: Path) -> Path:
    (folder / "MANIFEST.json").unlink(missing_ok=True)
    seal(folder)
    return folder


def hostile_model(model: Path, target: Path, node: Any) -> Path:
    """A model folder of which model.json names something else."""
    shutil.copytree(model, target)
    description = json.loads((target / "model.json").read_text())
    (target / "model.json").write_text(json.dumps({**description, "model": node}))
    return resealed(target)


def with_option(file: Path, option: str, node: Any) -> None:
    """Write a value into a config without anything being looked at."""
    config = OmegaConf.to_container(OmegaConf.load(file))
    *parents, last = option.split(".")
    place: Any = config
    for parent in parents:
        place = place[parent]
    place[last] = node
    file.write_text(json.dumps(config))  # is YAML too


def hostile_run(run: Path, target: Path, option: str, node: Any) -> Path:
    """A run whose own config, and that of its checkpoint, name something else."""
    shutil.copytree(run, target)
    with_option(target / ".hydra" / "config.yaml", option, node)
    for checkpoint in (target / "checkpoints").glob("step-*"):
        with_option(checkpoint / "config.yaml", option, node)
        resealed(checkpoint)
    return target


def read_all(run: Path, model: Path, folder: Path, node: Node) -> list[str]:
    """What everything says that reads a folder with this as its model."""
    said = []

    def refused(read: Callable[[], object]) -> None:
        with pytest.raises(UserError) as error:
            read()
        said.append(str(error.value))

    bad = hostile_model(model, folder / "model", node)
    refused(lambda: import_module(EXPORT).load_model(bad))
    refused(lambda: load_predictor(bad))
    read_run(hostile_run(run, folder / "run", "model", node), refused)
    return said


def read_run(run: Path, refused: Callable[[Callable[[], object]], None]) -> None:
    """As evaluate, compress, report and export do."""
    kind = import_module(EXPORT).FORMATS[0]
    refused(lambda: run_config(run, []))
    refused(lambda: training_config(OmegaConf.create({**SMALLER, "from": str(run)})))
    refused(lambda: measure(run))
    refused(lambda: export(run, "best", run / f"made{FORMATS[kind]}", kind))


@pytest.mark.parametrize("kind", NAMED)
def test_no_callable_from_a_file_is_called(run: Path, model: Path, tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    hostile_model(model, tmp_path / "second", system(str(canary)))
    for sentence in read_all(run, model, tmp_path, NAMED[kind](str(canary))):
        assert re.search(TELLING, sentence), sentence
    assert not canary.exists()


@pytest.mark.parametrize(
    "option", ["data.source", "data.source.seed", "optimizer", "optimizer.lr", "horovod.compression"]
)
def test_the_other_parts_of_a_run_are_data_as_well(run: Path, tmp_path: Path, option: str) -> None:
    """An export has no use for the last ones."""
    bad = hostile_run(run, tmp_path / "run", option, system("canary"))
    reads: list[Callable[[], object]] = [
        lambda: run_config(bad, []),
        lambda: training_config(OmegaConf.create({**SMALLER, "from": str(bad)})),
    ]
    if option.startswith("data"):
        kind = import_module(EXPORT).FORMATS[0]
        reads += [lambda: measure(bad), lambda: export(bad, "best", bad / f"made{FORMATS[kind]}", kind)]
    for read in reads:
        with pytest.raises(UserError, match=TELLING):
            read()


@pytest.mark.parametrize("kind", ODD)
def test_nothing_is_looked_up_for_a_file(run: Path, model: Path, tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    for sentence in read_all(run, model, tmp_path, ODD[kind](str(canary))):
        assert "nothing is looked up" in sentence or "which has no such form" in sentence, sentence
    assert not canary.exists()


def test_trust_is_of_one_callable_by_its_whole_name(model: Path, tmp_path: Path) -> None:
    load_model = import_module(EXPORT).load_model
    mine = hostile_model(
        model, tmp_path / "mine", {"_target_": "collections.OrderedDict", "a": {"_target_": "builtins.dict"}}
    )
    names = "names builtins.dict, collections.OrderedDict, .* add --trust builtins.dict --trust collections.OrderedDict"
    for trusted in ((), ["collections"], ["builtins", "collections."], "collections.OrderedDict", ["*"], [""]):
        with pytest.raises(UserError, match=names):
            load_model(mine, trusted)
    with pytest.raises(UserError, match=r"names builtins\.dict, which"):
        load_model(mine, ["collections.OrderedDict"])
    with pytest.raises(Exception, match=r"OrderedDict|dict") as error:  # built, and no model
        load_model(mine, ["collections.OrderedDict", "builtins.dict"])
    assert "trust" not in str(error.value)


def test_what_the_command_line_says_is_trusted(run: Path, tmp_path: Path) -> None:
    other = hostile_run(run, tmp_path / "run", "data.source._target_", "my.Data")
    with pytest.raises(UserError, match=r"names my\.Data"):
        run_config(other, ["data.workers=1"])
    assert run_config(other, ["data.source._target_=your.Data"]).data.source._target_ == "your.Data"
    assert run_config(other, ["data.source={_target_: your.Data}"]).data.source._target_ == "your.Data"
    assert run_config(other, ["data.workers=${epochs}"], ["my.Data"]).data.workers == 1


def test_the_list_has_what_conf_names() -> None:
    """Else a run of the project's own parts could not be evaluated."""
    found: set[str] = set()
    for engine in ENGINES:
        words = OmegaConf.load(CONF / "engine" / f"{engine}.yaml")
        for file in CONF.rglob("*.yaml"):
            for name in re.findall(r"^ *_target_: (\S+)", file.read_text(), re.M):
                found.add(name.replace("${engine}", engine).replace("${optimizers}", words.optimizers))
    assert len(found) > 8
    assert found <= LISTED


ALIASES = "a: &a [1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)
TEXTS = {
    "a tag of python": "model: !!python/object/apply:os.system ['touch {canary}']",
    "a name of python": "model: !!python/name:os.system",
    "aliases without end": ALIASES,
    "without end": "[" * 2**20,
    "without end, by lines": "".join(f"{' ' * level}a:\n" for level in range(1000)),
    "too large": "a: " + "x" * 2**21,
    "too long": f"a: [{'1,' * 2**19}]",
    "no text": "\0\1",
    "a list": "[1, 2]",
    "a broken lookup": "model: ${oc.env:",
}


@pytest.mark.parametrize("kind", [*TEXTS, "a pipe", "a device", "a folder"])
def test_a_file_that_is_no_config(run: Path, model: Path, tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(model, tmp_path / "model")
    for file in (tmp_path / "run" / ".hydra" / "config.yaml", tmp_path / "model" / "model.json"):
        file.unlink()
        if kind == "a pipe":
            os.mkfifo(file)
        elif kind == "a device":
            file.symlink_to("/dev/zero")
        elif kind == "a folder":
            file.mkdir()
        else:
            file.write_text(TEXTS[kind].replace("{canary}", str(canary)))
    for read in (
        lambda: run_config(tmp_path / "run", []),
        lambda: read_flat(tmp_path / "run" / ".hydra" / "config.yaml"),
        lambda: measure(tmp_path / "run"),
        lambda: load_predictor(tmp_path / "model"),
    ):
        with pytest.raises(UserError):
            read()
    assert not canary.exists()


@pytest.mark.parametrize("name", ["os", "..", "torch.models", "doctor", "", None, ["torch"], 3])
def test_an_engine_is_one_of_ours(model: Path, run: Path, tmp_path: Path, name: Any) -> None:
    """A name from a file never becomes an import."""
    bad = shutil.copytree(model, tmp_path / "model")
    description = json.loads((bad / "model.json").read_text())
    (bad / "model.json").write_text(json.dumps({**description, "engine": name}))
    with pytest.raises(UserError, match=r"engine=.* must be one of torch, tensorflow"):
        load_predictor(resealed(bad))
    with pytest.raises(UserError, match=r"engine=.* must be one of torch, tensorflow"):
        run_config(hostile_run(run, tmp_path / "run", "engine", name), [])


@pytest.mark.parametrize(
    "change", [{"forward": 1}, {"activation": {"class_name": "function", "config": "eval"}}, {"units": "1"}]
)
def test_a_change_of_a_layer_is_of_its_widths_only(model: Path, engine: str, tmp_path: Path, change: Node) -> None:
    name = {"torch": "1", "tensorflow": "dense"}[engine]
    base = {"_target_": f"{PACKAGE}.{engine}.models.mlp", **SHAPE}
    node = calls(
        f"{PACKAGE}.compress.{engine}.shrink.shrunk", base=base, changes=[{"kind": "widths", "layers": {name: change}}]
    )
    with pytest.raises(UserError, match=r"are no widths"):
        import_module(f"{PACKAGE}.export.{engine}").load_model(hostile_model(model, tmp_path / "model", node))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def hostile_program(file: Path, canary: Path) -> None:
    """A .pt2 whose sample inputs are a harmful pickle."""
    torch: Any = import_module("torch")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), file.with_suffix(".0.pt2"))
    evil = io.BytesIO()
    torch.save(Evil(canary), evil)
    with zipfile.ZipFile(file.with_suffix(".0.pt2")) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, evil.getvalue() if "sample_inputs" in name else old.read(name))


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One of the project's commands; the limit only ends what hangs."""
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, env=alone(), cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_each_command_ends_in_one_sentence(run: Path, model: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = hostile_run(run, tmp_path / "bad", "model", NAMED["our doctor"](str(canary)))
    weights = hostile_run(run, tmp_path / "weights", "model", system(str(canary))) / "checkpoints" / "latest"
    checkpoint = weights.with_name(weights.read_text().strip())
    (checkpoint / "model.safetensors").write_bytes(pickle.dumps(Evil(canary)))
    resealed(checkpoint)
    kind = import_module(EXPORT).FORMATS[0]
    started = ["-m", f"{PACKAGE}.train", f"engine={ENGINES[0]}", f"hydra.run.dir={tmp_path}/new", "model.hidden=[8]"]
    started += ["epochs=1", "tracking.tensorboard=false"]
    smaller = ["-m", f"{PACKAGE}.compress", f"hydra.run.dir={tmp_path}/small", "name=small"]
    foreign = next((bad / "checkpoints").glob("step-*"))
    for arguments, sentence in (
        (["-m", f"{PACKAGE}.evaluate", bad], TELLING),
        (["-m", f"{PACKAGE}.compress.measure", "--json", bad], TELLING),
        (["-m", f"{PACKAGE}.export", bad, "best", f"made{FORMATS[kind]}", "--format", kind], TELLING),
        ([*smaller, f"from={bad}", "compress=prune"], TELLING),
        ([*smaller, f"from={bad}", "compress=distill"], TELLING),
        ([*smaller, f"from={run}", f"from_checkpoint={foreign}"], TELLING),
        ([*started, f"resume={foreign}"], r"model\._target_ was .* cannot go on with"),
        ([*started, f"weights_from={checkpoint}"], "no safetensors file"),
    ):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        said = done.stderr.splitlines()  # TensorFlow logs while it is imported
        assert [line for line in said if line.startswith(("error: ", "Traceback"))] == said[-1:], done.stderr
        assert re.search(sentence, said[-1]), done.stderr
    done = command(
        "-m", f"{PACKAGE}.checkpoints", "pull", f"file://{bad}/checkpoints", tmp_path / "pulled", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr  # a copy: nothing is built of it
    assert not (canary.exists() or (tmp_path / "small" / "plan.json").exists() or [*tmp_path.glob("made*")])


@pytest.mark.slow
def test_ones_own_parts_go_all_the_way(tmp_path: Path) -> None:
    """A run's own data by trust, a student of a chain by having been named: neither is asked for again on the way."""
    own = [
        "data.source._target_=own.data",
        "~data.source.validation_fraction",
        "tracking.tensorboard=false",
        "epochs=1",
    ]
    start = [
        "-m",
        f"{PACKAGE}.train",
        f"engine={ENGINES[0]}",
        f"hydra.run.dir={tmp_path}/run",
        "model.hidden=[8]",
        *own,
    ]
    student = "model@compress.student=cnn compress.student._target_=own.net compress.student.width=4"
    steps = f"compress.steps=['compress=distill {student} compress.finetune.epochs=1']"
    smaller = ["-m", f"{PACKAGE}.compress", f"from={tmp_path}/run", f"hydra.run.dir={tmp_path}/small", "name=small"]
    assert command(*start, cwd=tmp_path).returncode == 0
    refused = command(*smaller, "compress=chain", steps, cwd=tmp_path)
    assert (refused.returncode, "add --trust own.data (" in refused.stderr) == (2, True)
    done = command(*smaller, "compress=chain", steps, "trust=[own.data]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_was_begun_is_data_too(run: Path, tmp_path: Path) -> None:
    """The plan, the source and the teacher in the folder of a compression that goes on."""
    canary = tmp_path / "canary"
    config = compress_config(run, "compress=distill", "compress.student.width=4", "compress.finetune.epochs=1")
    checkpoint = Store(run / "checkpoints").find_good("best")
    plan = {
        "parent": str(checkpoint.folder),
        "parent_sha256": "",
        "source": [str(run.resolve()), "best"],
        "recipe": OmegaConf.to_container(config.compress),
        "model": NAMED["our doctor"](str(canary)),
        "remarks": [],
    }
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=TELLING):
        compress_once(config, folder)
    student = {"_target_": f"{OURS}.models.cnn", **SHAPE, "width": 4}
    (folder / "plan.json").write_text(json.dumps({**plan, "model": student}))
    export(run, "best", folder / "own", "folder")
    hostile_model(folder / "own", folder / "source", NAMED["our doctor"](str(canary)))
    with pytest.raises(UserError, match=TELLING):
        compress_once(config, folder)
    assert not canary.exists()


def test_a_file_that_may_hold_code_is_not_loaded(run: Path, tmp_path: Path) -> None:
    """By the script, by load_predictor, and as the artefact of somebody's report."""
    canary, file = tmp_path / "canary", tmp_path / "evil.pt2"
    if "torch" in ENGINES:
        hostile_program(file, canary)
    else:
        file.write_bytes(b"")
    np.save(tmp_path / "inputs.npy", np.zeros((1, 2), np.float32))
    sentence = (
        r"evil\.pt2 may hold code, which torch\.export\.load runs: only if you trust its maker, add --trust torch"
    )
    done = command(ROOT / "scripts" / "predict.py", file, tmp_path / "inputs.npy", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(sentence, done.stderr)
    report = shutil.copytree(run, tmp_path / "report")
    with_option(report / ".hydra" / "config.yaml", "compress", OmegaConf.to_container(compress_config(run).compress))
    (report / "plan.json").write_text(json.dumps({"parent": "", "parent_sha256": "", "recipe": {}, "remarks": []}))
    export(run, "best", report / "source", "folder")
    (report / "artefact").mkdir()
    shutil.copy(file, report / "artefact" / "evil.pt2")
    for read in (lambda: load_predictor(file), lambda: measure_apart(report)):
        with pytest.raises(UserError, match=sentence):
            read()
    assert not canary.exists()
    if "torch" in ENGINES:  # and it was a real one
        with pytest.raises(UserError):
            load_predictor(file, trusted=["torch.export.load"])
        assert canary.exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_a_report_names_no_folder_outside(run: Path, tmp_path: Path, name: str) -> None:
    """Its rows are taken for the names of its steps."""
    report = shutil.copytree(run, tmp_path / "report")
    shutil.copytree(run, tmp_path / "out")
    (tmp_path / "out" / "plan.json").write_text("{}")
    rows: dict[str, Node] = {name.replace("/tmp", str(tmp_path)): {}}
    (report / "report.json").write_text(json.dumps({"models": rows, "setting": {}}))
    done = command("-m", f"{PACKAGE}.compress.measure", report, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{report}/plan.json" in done.stderr
