"""How much smaller and faster int8, and half the channels, make ResNet-18: ratios to float32 in the same runtime.

    PYTHONPATH=my-project/src python benchmarks/smaller_resnet.py --package my_training [--size 224] [--repeats 20]

The weights and images are random: only size and speed mean something. The files answer by turns on one thread, and the
best time of each counts, since a shared machine only ever adds to it. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# name: at least so many times smaller, at most this part of the time.
TARGETS = {"int8": (3.5, 0.7), "channels": (2.0, 0.6)}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="my_training")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    runtime = importlib.import_module(f"{options.package}.export.artefacts")
    shape = (options.size, options.size, 3)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.onnx") for name in ("float32", *TARGETS)}
        write(options.package, shape, files)
        sizes = {name: runtime.weigh(file).size for name, file in files.items()}
        predictors = {name: runtime.load_predictor(file, threads=1) for name, file in files.items()}
        best = race(predictors, torch.rand(1, *shape).numpy(), options.repeats)
    return int(any([judge(name, sizes, best) for name in TARGETS]))


def race(predictors: dict[str, Any], image: Any, repeats: int) -> dict[str, float]:
    """The best time of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in predictors}
    for _ in range(repeats):
        for name, predict in predictors.items():
            began = time.perf_counter()
            predict(image)
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: min(all_of_it) for name, all_of_it in times.items()}


def judge(name: str, sizes: dict[str, int], best: dict[str, float]) -> bool:
    """Print one line; whether a target is missed."""
    smaller, latency = sizes["float32"] / sizes[name], best[name] / best["float32"]
    size_target, time_target = TARGETS[name]
    print(
        f"{name}: {sizes['float32'] / 1e6:.1f} -> {sizes[name] / 1e6:.1f} MB, {smaller:.2f} times smaller"
        f" (target {size_target}); {best['float32']:.1f} -> {best[name]:.1f} ms, {latency:.2f} of the time"
        f" (target {time_target})"
    )
    return smaller < size_target or latency > time_target


def write(package: str, shape: tuple[int, int, int], files: dict[str, Path]) -> None:
    """ResNet-18 in each form."""
    models, export, fake_quantize, quantize, shrink = (
        importlib.import_module(f"{package}.{name}")
        for name in (
            "torch.models",
            "export.torch",
            "compress.torch.fake_quantize",
            "compress.torch.quantization",
            "compress.torch.shrink",
        )
    )
    model, inputs = models.resnet18(shape, 1000).eval(), torch.rand(2, shape[2], *shape[:2])
    export.write(model, files["float32"], shape)
    prepared = fake_quantize.prepare(model)
    with fake_quantize.calibrating(prepared), torch.no_grad():
        prepared(inputs)
    quantize.convert(prepared, files["int8"], shape)
    options = SimpleNamespace(sparsity=0.5, scope="layer", layers=["*"], skip=[])
    export.write(shrink.fewer_channels(model, options, inputs, 1000)[0], files["channels"], shape)


if __name__ == "__main__":
    sys.exit(main())
