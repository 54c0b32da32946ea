"""Artefacts: trained models as files, each run by its own runtime, and what they weigh.

An artefact is a file or folder whose name says what runs it:

    folder/ with model.json      this project (model_folder.py)
    folder/ with saved_model.pb  TensorFlow
    *.onnx                       ONNX Runtime
    *.pt2                        torch.export
    *.keras, *.h5                Keras 3
    *.tflite                     LiteRT

All take what the data sets give: float32 of shape (n, *data.shape), channels last, already normalized, for any n; all
answer with float32 logits of shape (n, classes). Where a model wants channels first, its graph begins with the
transpose.
What torch.export, Keras and TensorFlow read may hold code, which they run: see `trusted` of load_predictor().
"""

from __future__ import annotations

import hashlib
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import files
from ..checkpoints.manifest import sha256
from ..errors import UserError
from ..trust import check_program
from .model_folder import DESCRIPTION, engine_of

Floats = npt.NDArray[np.float32]
Predictor = Callable[[Floats], Floats]

BLOCK = 2**20


@dataclass(frozen=True)
class Artefact:
    """What an artefact weighs.

    Attributes:
        path: The file or folder.
        runtime: What runs it.
        size: Bytes on the disk.
        gzipped: Bytes after compression, file by file, as a download would have them.
        sha256: Of the file; of a folder over its files' names and hashes.
    """

    path: Path
    runtime: str
    size: int
    gzipped: int
    sha256: str


def weigh(path: Path) -> Artefact:
    """Measure an artefact as it lies on the disk.

    Raises:
        UserError: if it is none.
    """
    runtime = runtime_of(path)
    parts = [path.resolve()] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    hashes = [sha256(part) for part in parts]
    names = ["" if path.is_file() else part.relative_to(path).as_posix() for part in parts]
    whole = hashes[0] if path.is_file() else hashlib.sha256("\0".join([*names, *hashes]).encode()).hexdigest()
    size = sum(part.stat().st_size for part in parts)
    return Artefact(path, runtime, size, sum(map(_gzipped, parts)), whole)


def _gzipped(file: Path) -> int:
    packer = zlib.compressobj(wbits=31)
    with file.open("rb") as stream:
        size = sum(len(packer.compress(block)) for block in iter(lambda: stream.read(BLOCK), b""))
    return size + len(packer.flush())


def load_predictor(path: Path, threads: int | None = None, trusted: Sequence[str] = ()) -> Predictor:
    """Load an artefact in its runtime: (n, *data.shape) normalized float32 -> (n, classes) float32 logits.

    Args:
        path: The artefact.
        threads: How many CPU threads one call may use; None leaves it to the runtime. PyTorch and TensorFlow have one
            setting for the whole process, and TensorFlow's must come before its first operation.
        trusted: For a model folder as for load_model(); for others the loader that may find code, one of PROGRAMS.

    Raises:
        UserError: if it is no artefact, not trusted, its runtime is not installed, or it cannot be read.
    """
    runtime = runtime_of(path)
    if runtime in _PROGRAMS:
        check_program(_PROGRAMS[runtime], path, trusted)
    try:
        if runtime == FOLDER:
            return _load_folder(path, threads, trusted)
        return _LOADERS[runtime](path, threads)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{path} needs {runtime} ({error}): install this project's extra 'export'") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be loaded by {runtime} ({reason}): export it again") from error


@contextmanager
def writing(form: str) -> Iterator[None]:
    """Within it a model is written as `form`.

    Raises:
        UserError: whatever the framework says against it.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the model cannot be written as {form} ({reason}): choose another format") from error


def runtime_of(path: Path) -> str:
    """What runs an artefact, by its name.

    Raises:
        UserError: if it does not exist or has no name that a runtime knows.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: name an exported model")
    if problem := _not_files(path):
        raise UserError(f"{path} is no exported model: {problem}")
    if path.is_dir():
        found = next((name for file, name in _FOLDERS.items() if (path / file).exists()), None)
    else:
        found = _SUFFIXES.get(path.suffix)
    if found is None:
        raise UserError(f"{path} is no exported model: it must be a model folder, a SavedModel, or {_KNOWN}")
    return found


def _not_files(path: Path) -> str:
    """What is no file in a folder, or in a file's place: a runtime would wait for it, or follow it."""
    if not path.is_dir():
        mode = path.stat().st_mode
        return "" if stat.S_ISREG(mode) else f"it is {files.kind(mode)}"
    modes = ((name, about.st_mode) for name, about in files.walk(path))
    return next((f"{name} is {files.kind(mode)}" for name, mode in modes if not stat.S_ISREG(mode)), "")


FOLDER = "this project"
_FOLDERS = {DESCRIPTION: FOLDER, "saved_model.pb": "TensorFlow"}
_SUFFIXES = {".onnx": "ONNX Runtime", ".pt2": "torch.export", ".keras": "Keras", ".h5": "Keras", ".tflite": "LiteRT"}
_PROGRAMS = {
    "torch.export": "torch.export.load",  # pickles, and sources of guards
    "Keras": "keras.saving.load_model",  # whose safe mode is no wall
    "TensorFlow": "tensorflow.saved_model.load",  # a graph may write files
}
PROGRAMS = tuple(_PROGRAMS.values())
_KNOWN = f"end in {', '.join(list(_SUFFIXES)[:-1])} or {list(_SUFFIXES)[-1]}"


def _load_folder(path: Path, threads: int | None, trusted: Sequence[str]) -> Predictor:
    engine = engine_of(path)
    _limit_threads(engine, threads)
    predictor: Predictor = import_module(f".{engine}", __package__).predictor(path, trusted)
    return predictor


def _load_onnx(path: Path, threads: int | None) -> Predictor:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: np.asarray(session.run(None, {name: inputs})[0], np.float32)


def _load_torch_export(path: Path, threads: int | None) -> Predictor:
    _limit_threads("torch", threads)
    return torch_predictor(import_module("torch").export.load(path).module())


def torch_predictor(model: Any) -> Predictor:
    """What calls a PyTorch model that takes what artefacts take."""
    torch: Any = import_module("torch")

    def predict(inputs: Floats) -> Floats:
        with torch.inference_mode():
            logits: Floats = model(torch.from_numpy(inputs)).numpy()
            return logits

    return predict


def _load_keras(path: Path, threads: int | None) -> Predictor:
    _limit_threads("tensorflow", threads)
    return keras_predictor(import_module("keras").saving.load_model(path, compile=False, safe_mode=True))


def keras_predictor(model: Any) -> Predictor:
    """What calls a Keras model."""
    tensorflow = import_module("tensorflow")
    call = tensorflow.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)
    return lambda inputs: np.asarray(call(tensorflow.constant(inputs)), np.float32)


def _load_saved_model(path: Path, threads: int | None) -> Predictor:
    _limit_threads("tensorflow", threads)
    loaded = import_module("tensorflow").saved_model.load(str(path))
    return lambda inputs: np.asarray(loaded.serve(inputs), np.float32)  # `serve` alone would not keep the variables


def _load_litert(path: Path, threads: int | None) -> Predictor:
    litert: Any = import_module("ai_edge_litert.interpreter")
    interpreter = litert.Interpreter(str(path), num_threads=threads)
    interpreter.allocate_tensors()
    source, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]

    def predict(inputs: Floats) -> Floats:
        if tuple(interpreter.get_input_details()[0]["shape"]) != inputs.shape:
            interpreter.resize_tensor_input(source, inputs.shape)
            interpreter.allocate_tensors()
        interpreter.set_tensor(source, inputs)
        interpreter.invoke()
        return np.array(interpreter.get_tensor(result), np.float32)

    return predict


def _limit_threads(framework: str, threads: int | None) -> None:
    if threads is None:
        return
    if framework == "torch":
        import_module("torch").set_num_threads(threads)
        return
    threading = import_module("tensorflow").config.threading
    if threading.get_intra_op_parallelism_threads() == threads:
        return
    try:
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(1)
    except RuntimeError as error:
        raise UserError(f"TensorFlow already runs, so threads={threads} comes too late: set it first") from error


_LOADERS: dict[str, Callable[[Path, int | None], Predictor]] = {
    "ONNX Runtime": _load_onnx,
    "torch.export": _load_torch_export,
    "Keras": _load_keras,
    "TensorFlow": _load_saved_model,
    "LiteRT": _load_litert,
}
