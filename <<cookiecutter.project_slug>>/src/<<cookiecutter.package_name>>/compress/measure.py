"""Measure what a compression has brought: python -m <package>.compress.measure runs/first-pruned does it again here.

Every figure comes from the written files, loaded again in a process that has done nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig

from ..assemble import open_data
from ..data import Dataset, normalized
from ..errors import Parser, UserError, end_well
from ..export.artefacts import Floats, Predictor, load_predictor, runtime_of, weigh
from ..options import MODEL_AND_DATA, read_options
from ..trust import add_trust, read_json
from ..weights import FILE
from .report import FIGURES, Report, Row
from .sparsity import share_of, zeros_of

QUANTIZED = "quantized.json"
BLOCK = 256  # samples at once when answers are compared
WARM_UP = 10  # calls
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd")


def measure_apart(folder: Path, series: Sequence[str] = (), trusted: Sequence[str] = ()) -> Report:
    """Measure in a process of its own, which no training has warmed, threaded or filled.

    Args:
        folder: Of a compression, or of several.
        series: The names of the several.
        trusted: As for measure().

    Raises:
        UserError: what that process says.
    """
    command = [sys.executable, "-m", f"{__package__}.measure", "--json", *(f"--trust={name}" for name in trusted)]
    command += ["--", str(folder), *series]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(last.removeprefix("error: "))
    return Report(**json.loads(result.stdout.strip().splitlines()[-1]))


@dataclass(frozen=True)
class Entry:
    """A written model: `path` is measured, `model` is the model folder that says its layers."""

    path: Path
    model: Path


def measure(folder: Path, series: Sequence[str] = (), trusted: Sequence[str] = ()) -> Report:
    """Load the source and the artefacts made of it and measure them by turns.

    Args:
        folder: Of a compression, or of several.
        series: The names of the several.
        trusted: As for load_predictor(); for the data too.
    """
    runs = [folder / name for name in series] or [folder]
    config = read_options(runs[0] / ".hydra" / "config.yaml", [], trusted, MODEL_AND_DATA)
    plans = {run: _read_plan(run / "plan.json") for run in runs}
    rows = _measure_all(_entries(runs, series), config, trusted)
    return Report(
        models=rows,
        setting=_setting(config),
        lineage={key: plans[runs[0]][key] for key in ("parent", "parent_sha256")}
        | {"recipe": [plan["recipe"] for plan in plans.values()] if series else plans[folder]["recipe"]},
        remarks=[remark for run, plan in plans.items() for remark in (*plan["remarks"], *_left_in_float(run))],
        missed="" if series else missed(rows, config.compress.require),
    )


def _read_plan(file: Path) -> dict[str, Any]:
    plan = read_json(file)
    if missing := {"parent", "parent_sha256", "recipe", "remarks"} - plan.keys():
        raise UserError(f"{file} lacks {', '.join(sorted(missing))}: name the folder of a finished compression")
    return plan


def _left_in_float(run: Path) -> list[str]:
    """What a quantization has left as it was, and why."""
    file = run / QUANTIZED
    kept = read_json(file).get("fp32", {}) if file.exists() else {}
    return [f"not quantized: {', '.join(f'{name} ({reason})' for name, reason in kept.items())}"] if kept else []


def _entries(runs: Sequence[Path], series: Sequence[str]) -> dict[str, Entry]:
    """The source, then each artefact, after what it was made of in the same runtime if that is another one."""
    entries = {"before": Entry(runs[0] / "source", runs[0] / "source")}
    for run in runs:
        for twin in run.glob("source.*"):
            entries[f"{[*entries][-1]}, {runtime_of(twin)}"] = Entry(twin, run / "source")
        entries[run.name if series else "after"] = _entry(run)
    return entries


def _entry(run: Path) -> Entry:
    home = run / "artefact" if (run / "artefact").exists() else run / "rejected"
    path = next(iter(home.iterdir()))
    return Entry(path, path if (path / FILE).exists() else run / "source")


def _measure_all(entries: Mapping[str, Entry], config: DictConfig, trusted: Sequence[str]) -> dict[str, Row]:
    how, validation = config.compress.measure, open_data(config).validation
    predictors = {name: load_predictor(entry.path, how.threads, trusted) for name, entry in entries.items()}
    inputs, labels = _samples(validation, config.data.normalize)
    said = {name: answers(predictor, inputs, name) for name, predictor in predictors.items()}
    times = _latencies(list(predictors.values()), np.resize(inputs, (how.batch, *inputs.shape[1:])), how.calls)
    first = next(iter(said.values()))
    rows: dict[str, Row] = {}
    for (name, entry), milliseconds in zip(entries.items(), times, strict=True):
        weighed = weigh(entry.path)
        rows[name] = {
            "path": str(entry.path),
            "runtime": weighed.runtime,
            "bytes": weighed.size,
            "gzipped": weighed.gzipped,
            "sha256": weighed.sha256,
            "accuracy": float((said[name] == labels).mean()),
            "agreement": float((said[name] == first).mean()),
            "p50_ms": float(np.percentile(milliseconds, 50)),
            "p95_ms": float(np.percentile(milliseconds, 95)),
            **import_module(f".{config.engine}.measure", __package__).count(entry.model, config.data.shape, trusted),
            **_sparsity(entry.path),
        }
    return rows


def _samples(validation: Dataset, normalize: Any) -> tuple[Floats, npt.NDArray[Any]]:
    """The whole validation part, as artefacts take it."""
    inputs, labels = validation.fetch(np.arange(len(validation)), 0)
    return normalized(inputs, normalize), labels


def answers(predictor: Predictor, inputs: Floats, name: str) -> npt.NDArray[np.int64]:
    """The class that a model says for each input."""
    logits = np.concatenate([predictor(inputs[start : start + BLOCK]) for start in range(0, len(inputs), BLOCK)])
    if not np.isfinite(logits).all():
        raise UserError(f"the model {name} compression answers with NaN: compress less, or fine-tune with a lower rate")
    best: npt.NDArray[np.int64] = logits.argmax(axis=1)
    return best


def _latencies(predictors: Sequence[Predictor], batch: Floats, calls: int) -> npt.NDArray[np.float64]:
    """Milliseconds of each call of each predictor, which take turns so that all see the same machine."""
    times = np.zeros((len(predictors), WARM_UP + calls))
    for call in range(WARM_UP + calls):
        for index, predictor in enumerate(predictors):
            began = time.perf_counter()
            predictor(batch)
            times[index, call] = 1000 * (time.perf_counter() - began)
    return times[:, WARM_UP:]


def _sparsity(path: Path) -> Row:
    """The fraction of zeros in each weight, counted in the file."""
    zeros = zeros_of(path)
    return {"sparsity": share_of(zeros), "layers": {name: float(zero.mean()) for name, zero in zeros.items()}}


def _setting(config: DictConfig) -> Row:
    how = config.compress.measure
    return {
        "batch": how.batch,
        "threads": how.threads,
        "calls": how.calls,
        "processor": _cpuinfo("model name"),
        "features": [one for one in FEATURES if one in _cpuinfo("flags").split()],
        "counted": "macs: multiplications of convolutions, dense layers and (PyTorch) attention, zeros included",
    }


def _cpuinfo(key: str) -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def missed(rows: Mapping[str, Row], wanted: Any) -> str:
    """The first requirement that the last row misses, as a sentence; empty if none.

    Args:
        rows: See Report.models; times are compared with the row before the last, which is of the same runtime.
        wanted: compress.require.
    """
    before, after, twin = rows["before"], rows["after"], [*rows.values()][-2]
    drop, time = before["accuracy"] - after["accuracy"], after["p50_ms"] / twin["p50_ms"]
    if wanted.max_accuracy_drop is not None and drop > wanted.max_accuracy_drop:
        return f"accuracy fell by {drop:.4f} and compress.require.max_accuracy_drop is {wanted.max_accuracy_drop}"
    if wanted.max_latency_ratio is not None and time > wanted.max_latency_ratio:
        return (
            f"a call takes {time:.2f} of the time and compress.require.max_latency_ratio is {wanted.max_latency_ratio}"
        )
    for option, key in (("min_size_ratio", "bytes"), ("min_gzip_ratio", "gzipped")):
        ratio = before[key] / after[key]
        if wanted[option] is not None and ratio < wanted[option]:
            return f"{key} shrank {ratio:.2f} times and compress.require.{option} is {wanted[option]}"
    return ""


def main() -> None:
    """Read the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that a compression has made")
    parser.add_argument("series", nargs="*", help="the folders in it to compare; default: all of a chain or sweep")
    parser.add_argument("--json", action="store_true", help="print JSON and write nothing")
    add_trust(parser)
    options = parser.parse_args()
    if options.json:
        print(json.dumps(vars(measure(options.folder, options.series, options.trust))))
        return
    old = Report.read(options.folder)
    if old is None:
        raise UserError(f"{options.folder} has no {FIGURES}: name the folder of a finished compression")
    steps = [name for name in old.models if Path(name).name == name and (options.folder / name / "plan.json").exists()]
    new = measure(options.folder, options.series or steps, options.trust)
    replace(new, missed=old.missed).write(options.folder)  # the job has acted on its own figures


if __name__ == "__main__":
    end_well(main, lambda: 0)
