"""How much smaller and faster int8 makes ResNet-18, as ratios to float32 in the same runtime, on one thread.

    PYTHONPATH=my-project/src python benchmarks/int8.py --package my_training [--size 224] [--repeats 20]

The weights and images are random: only size and speed mean something. The two files answer in turn, and the best time
of each counts, since a shared machine only ever adds to it. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZE_TARGET, LATENCY_TARGET = 3.5, 0.7


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="my_training")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    runtime = importlib.import_module(f"{options.package}.runtime")
    shape = (options.size, options.size, 3)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("float32.onnx", "int8.onnx")]
        write(options.package, shape, *files)
        sizes = [runtime.weigh(file).size for file in files]
        predictors = [runtime.load_predictor(file, threads=1) for file in files]
        image = torch.rand(1, *shape).numpy()
        seconds: list[list[float]] = [[], []]
        for _ in range(options.repeats):
            for predict, times in zip(predictors, seconds, strict=True):
                began = time.perf_counter()
                predict(image)
                times.append(time.perf_counter() - began)
    best = [min(times) * 1000 for times in seconds]
    smaller, latency = sizes[0] / sizes[1], best[1] / best[0]
    print(f"size:    {sizes[0] / 1e6:.1f} -> {sizes[1] / 1e6:.1f} MB: {smaller:.2f} x smaller (target {SIZE_TARGET})")
    print(f"latency: {best[0]:.1f} -> {best[1]:.1f} ms: {latency:.2f} of float32 (target {LATENCY_TARGET})")
    return int(smaller < SIZE_TARGET or latency > LATENCY_TARGET)


def write(package: str, shape: tuple[int, int, int], plain: Path, small: Path) -> None:
    """ResNet-18 in both forms."""
    models, export, fake_quantize, quantize = (
        importlib.import_module(f"{package}.torch.{name}") for name in ("models", "export", "fake_quantize", "quantize")
    )
    model = models.resnet18(shape, 1000).eval()
    export.write(model, plain, shape)
    prepared = fake_quantize.prepare(model)
    with fake_quantize.calibrating(prepared), torch.no_grad():
        prepared(torch.rand(2, shape[2], *shape[:2]))
    quantize.convert(prepared, small, shape)


if __name__ == "__main__":
    sys.exit(main())
