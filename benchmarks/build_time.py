"""Times Horovod's plain build against the recipe's, side by side, and weighs both wheels.

    ENV/bin/python benchmarks/build_time.py [--rounds 1] [--frameworks torch]

Run it with the Python of an environment that has the frameworks, on a machine that is otherwise idle. The contenders
take turns, so that a busy moment hits all alike. Plain: `pip wheel` of the sdist with only the edits without which it
does not compile, tools already installed. The recipe: all of `build_horovod.py --force`, its proof included.
"""

import argparse
import importlib.util
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>/scripts/build_horovod.py"
Figures = dict[str, float]


def load(project: Path) -> Any:
    """Copies the recipe into a small project, and imports it."""
    (project / "scripts").mkdir(parents=True)
    (project / "pyproject.toml").write_text('x = ["horovod==0.28.1"]')
    script = Path(shutil.copy(SCRIPT, project / "scripts"))
    spec = importlib.util.spec_from_file_location("build_horovod", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cpu_seconds() -> float:
    """What all ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], environment: dict[str, str], folder: Path) -> tuple[Figures, str]:
    """Runs a command; returns its times, and what it printed."""
    start, used = time.monotonic(), cpu_seconds()
    done = subprocess.run(command, env=environment, cwd=folder, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        sys.exit(f"{command} failed:\n{text[-3000:]}")
    return {"seconds": time.monotonic() - start, "CPU seconds": cpu_seconds() - used}, text


def plain(recipe: Any, plan: Any, cache: Path, work: Path) -> Figures:
    """The documented build of the edited sdist, with make and without ccache."""
    shop = recipe.Workshop(plan, cache, len(os.sched_getaffinity(0)))
    with tarfile.open(cache / f"horovod-{plan.horovod}.tar.gz") as archive:
        archive.extractall(work, filter="data")
    recipe.apply_edits(work / f"horovod-{plan.horovod}", recipe.NEEDED)
    mine = {name: text for name, text in shop.environment.items() if name not in ("CXXFLAGS", "CFLAGS", "LDFLAGS")}
    mine |= {"CMAKE_GENERATOR": "Unix Makefiles", "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}"}
    how = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(work)]
    command = [sys.executable, "-m", "pip", "wheel", *how, str(work / f"horovod-{plan.horovod}")]
    figures, _ = timed(command, mine | {"CCACHE_DISABLE": "1"}, work)
    return figures | {"wheel in MB": next(work.glob("*.whl")).stat().st_size / 1e6}


def with_recipe(recipe: Any, cache: Path, arguments: list[str], **settings: str) -> Figures:
    """The recipe as a user runs it, with the sdist and the tools already in its cache."""
    environment = os.environ | {"HOROVOD_WHEEL_CACHE": str(cache)} | settings
    command = [sys.executable, recipe.__file__, "--force", *arguments]
    figures, text = timed(command, environment, cache)
    wheel = Path(text.splitlines()[-1])
    compiled = float(re.findall(r"compile: ([\d.]+) s", text)[0])
    return figures | {"of them compile": compiled, "wheel in MB": wheel.stat().st_size / 1e6}


def measure(rounds: int, arguments: list[str]) -> dict[str, list[Figures]]:
    """Lets the contenders take turns."""
    results: dict[str, list[Figures]] = {"plain": [], "recipe": [], "recipe, warm ccache": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache, recipe = folder / "cache", load(folder / "project")
        cache.mkdir()
        warm = {"CCACHE_DIR": str(folder / "ccache")}
        with_recipe(recipe, cache, arguments, **warm)  # fills its cache, and ccache's
        plan = recipe.make_plan(recipe.parse(arguments))
        for index in range(rounds):
            work = folder / f"plain-{index}"
            work.mkdir()
            results["recipe"].append(with_recipe(recipe, cache, arguments, CCACHE_DISABLE="1"))
            results["plain"].append(plain(recipe, plan, cache, work))
            if recipe.which("ccache"):
                results["recipe, warm ccache"].append(with_recipe(recipe, cache, arguments, **warm))
    return {name: found for name, found in results.items() if found}


def table(results: dict[str, list[Figures]]) -> str:
    """The medians as a Markdown table, with ratios to the plain build."""
    columns = ["seconds", "CPU seconds", "of them compile", "wheel in MB"]
    lines = ["| build | " + " | ".join(columns) + " | seconds, ratio | CPU, ratio |", "|---" * 7 + "|"]
    middle = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    for name, found in middle.items():
        ratios = [found[key] / middle["plain"][key] for key in columns[:2]]
        cells = [f"{found[key]:.1f}" if key in found else "" for key in columns] + [f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--frameworks", default="auto")
    parser.add_argument("--mpi", default="auto")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}, cores: {len(os.sched_getaffinity(0))}")
    print(table(measure(options.rounds, ["--frameworks", options.frameworks, "--mpi", options.mpi])))


if __name__ == "__main__":
    main()
