"""Classify samples with an exported model: python scripts/predict.py model.onnx inputs.npy.

Needs numpy and the model's own runtime, nothing of this project: copy it to where the model is used. The inputs are
float32 of shape (n, *data.shape), channels last, normalized as in training; prints one class number per line.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


def onnx(model: Path, inputs: Any) -> Any:
    """With ONNX Runtime (pip install onnxruntime)."""
    onnxruntime: Any = import_module("onnxruntime")
    session = onnxruntime.InferenceSession(model)
    return session.run(None, {session.get_inputs()[0].name: inputs})[0]


def torch_export(model: Path, inputs: Any) -> Any:
    """With PyTorch (pip install torch)."""
    torch: Any = import_module("torch")
    return torch.export.load(model).module()(torch.from_numpy(inputs)).detach().numpy()


def keras(model: Path, inputs: Any) -> Any:
    """With Keras 3 (pip install tensorflow)."""
    return import_module("keras").saving.load_model(model, compile=False, safe_mode=True).predict(inputs, verbose=0)


def saved_model(model: Path, inputs: Any) -> Any:
    """With TensorFlow (pip install tensorflow)."""
    loaded: Any = import_module("tensorflow").saved_model.load(str(model))
    return loaded.serve(inputs).numpy()


def litert(model: Path, inputs: Any) -> Any:
    """With LiteRT (pip install ai-edge-litert)."""
    interpreter: Any = import_module("ai_edge_litert.interpreter").Interpreter(str(model))
    source, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    interpreter.resize_tensor_input(source, inputs.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source, inputs)
    interpreter.invoke()
    return interpreter.get_tensor(result)


# May hold code, which these run. Keras' safe mode is no wall, and a graph of TensorFlow can write files.
PROGRAMS = {
    torch_export: "torch.export.load",
    keras: "keras.saving.load_model",
    saved_model: "tensorflow.saved_model.load",
}
RUNTIMES = {".onnx": onnx, ".pt2": torch_export, ".keras": keras, ".h5": keras, ".tflite": litert}


def fail(sentence: str) -> NoReturn:
    """End with one sentence."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Read the command line, print the classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an .onnx, .pt2, .keras, .h5 or .tflite file, or a SavedModel folder")
    parser.add_argument("inputs", type=Path, help="a .npy file")
    trust = "the loader that may run code in the model, as torch.export.load"
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help=trust)
    options = parser.parse_args()
    run = saved_model if (options.model / "saved_model.pb").exists() else RUNTIMES.get(options.model.suffix)
    if run is None or not options.model.exists():
        fail(f"{options.model} is not there, or has another suffix than {', '.join(RUNTIMES)}")
    loader = PROGRAMS.get(run)
    if loader and loader not in options.trust:
        fail(f"{options.model} may hold code, which {loader} runs: only if you trust its maker, add --trust {loader}")
    try:
        inputs = np.load(options.inputs, allow_pickle=False).astype(np.float32)
    except (OSError, ValueError) as error:
        fail(f"{options.inputs} is no .npy file of numbers ({error})")
    try:
        logits = run(options.model, inputs)
    except ImportError as error:
        fail(f"{options.model} needs a runtime that is not installed ({error})")
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        fail(f"{options.model} cannot be run with inputs of shape {inputs.shape} ({reason})")
    print(*np.argmax(logits, axis=1), sep="\n")


if __name__ == "__main__":
    main()
