"""Refuses answers that would give a broken project, before anything is written."""

import json
import keyword
import re
import sys
from typing import Any

# JSON never holds three quotes in a row, so no answer can break out of the raw string.
ANSWERS: dict[str, Any] = json.loads(r"""<< cookiecutter | tojson >>""")

FRAMEWORKS = ("torch", "tensorflow", "both")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause", "proprietary")
# The folders beside the package, and what it or its environment imports.
TAKEN_NAMES = {
    *("launch", "licenses", "noxfile", "runs", "scripts", "src", "tests"),
    *("cffi", "cloudpickle", "cookiecutter", "fsspec", "horovod", "hydra", "keras", "matplotlib"),
    *("moto", "mpi4py", "mypy"),
    *("nox", "numpy", "omegaconf", "packaging", "pil", "pip", "psutil", "pytest", "rich", "ruff"),
    *("s3fs", "safetensors", "scipy", "setuptools", "sklearn", "tensorboard", "tensorflow", "torch"),
    *("triton", "wheel", "yaml"),
}


def refuse(key: str, rule: str, example: str) -> None:
    """Ends with one sentence: the value, the rule, an example."""
    value = json.dumps(ANSWERS[key], ensure_ascii=False)
    sys.exit(f"error: {key} is {value}, but it must be {rule}, for example {example}.")


def check_text(key: str, example: str) -> None:
    """A human-readable answer: one line with something in it."""
    text = ANSWERS[key]
    if not text.strip() or not text.isprintable():
        refuse(key, "one line of printable text that is not empty", example)


def check_choice(key: str, choices: tuple[str, ...]) -> None:
    """Cookiecutter checks choices too, but not those that come from a replay file."""
    if ANSWERS[key] not in choices:
        refuse(key, "one of " + ", ".join(choices), choices[0])


def check_slug() -> None:
    """The slug is a folder, a distribution and a host name at once."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", ANSWERS["project_slug"]):
        rule = "1 to 50 lower-case letters, digits and inner hyphens, a letter first"
        refuse("project_slug", rule, "my-training")


def check_package() -> None:
    """The package must be importable and hide no other module."""
    name = ANSWERS["package_name"]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        rule = "a lower-case Python identifier (letters, digits, underscores, no keyword)"
        refuse("package_name", rule, "my_training")
    if name in TAKEN_NAMES or name in sys.stdlib_module_names:
        rule = "a name that no module of Python or of the dependencies has"
        refuse("package_name", rule, f"{name}_training")


def main() -> None:
    """Checks every answer."""
    check_text("project_name", "My Training")
    check_text("description", "Distributed deep learning with Horovod.")
    check_text("author", "Ada Lovelace")
    check_slug()
    check_package()
    check_choice("framework", FRAMEWORKS)
    check_choice("python_version", PYTHONS)
    check_choice("cuda_version", tuple(ANSWERS["_pins"]))
    check_choice("license", LICENSES)


main()
