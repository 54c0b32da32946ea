"""Keeps the files that the answers ask for, removes the others, prints the next steps."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ANSWERS: dict[str, Any] = json.loads(r"""<< cookiecutter | tojson >>""")

PACKAGE = f"src/{ANSWERS['package_name']}"
# What goes without each answer, as patterns of paths.
PARTS = {
    "use_container": (
        ".dockerignore",
        ".github/workflows/image.yml",
        "Dockerfile",
        "compose.yaml",
        "docker",
        "docs/container.md",
        "locks",
    ),
    "use_compression": (
        f"{PACKAGE}/compress",
        f"{PACKAGE}/conf/compress",
        f"{PACKAGE}/conf/compress.yaml",
        "docs/compress.md",
        "tests/*compress*",
        "tests/*quantize*",
        "tests/ranks/*_calibration.py",
        "tests/ranks/test_pruning_masks.py",
    ),
    "use_cluster": (
        f"{PACKAGE}/cluster",
        "docs/cluster*.md",
        "launch/elastic.sh",
        "launch/hosts.example",
        "launch/ssh.sh",
    ),
    "use_slurm": ("launch/slurm.sbatch",),
    "use_kubernetes": ("launch/kubernetes.yaml",),
}
NEXT_STEPS = """
{project_slug} is ready. Next:
    cd {project_slug}
    git init
    pip install nox
    nox -s train            # builds Horovod the first time (minutes), then trains
README.md says what each file is for.
"""


def keep_one_license() -> None:
    """The chosen licence becomes LICENSE, the others go."""
    os.replace(Path("licenses", ANSWERS["license"]), "LICENSE")
    shutil.rmtree("licenses")


def keep_one_lock() -> None:
    """Versions for the chosen CUDA alone."""
    chosen = Path("locks", ANSWERS["cuda_version"])
    for file in chosen.iterdir():
        os.replace(file, Path("locks", file.name))
    for folder in [path for path in Path("locks").iterdir() if path.is_dir()]:
        shutil.rmtree(folder)


def remove(path: Path) -> None:
    """A file, or a folder with all that is in it; it may have gone with its own folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unwanted() -> None:
    """Whole files are switched, never lines in them."""
    patterns = [pattern for answer, paths in PARTS.items() if not ANSWERS[answer] for pattern in paths]
    other = {"torch": "tensorflow", "tensorflow": "torch"}.get(ANSWERS["framework"])
    if other:  # what only one framework needs has its name in its path
        patterns += [f"{folder}/**/*{other}*" for folder in ("docs", "locks", "tests", PACKAGE)]
    for path in [path for pattern in patterns for path in Path().glob(pattern)]:
        remove(path)


def warn_of_old_python() -> None:
    """Only a warning: another interpreter may be the one that trains."""
    wanted, here = ANSWERS["python_version"], sys.version_info[:2]
    if here < tuple(map(int, wanted.split("."))):
        print(
            f"warning: the project needs Python {wanted} or newer, but this is Python {here[0]}.{here[1]}: train with "
            f"a newer one (python{wanted} -m venv ...), or generate it again with an older python_version.",
            file=sys.stderr,
        )


def main() -> None:
    """Tidies the fresh project and says what to do with it."""
    keep_one_license()
    keep_one_lock()
    remove_unwanted()
    print(NEXT_STEPS.format(**ANSWERS), flush=True)
    warn_of_old_python()


main()
