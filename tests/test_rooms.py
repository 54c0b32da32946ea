"""Which room of the package imports which, and how large they are; `python tests/test_rooms.py` renews the picture."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import PROJECT_FOLDER, QUESTIONS, ROOT, render

PACKAGE = ROOT / PROJECT_FOLDER / "src" / "<<cookiecutter.package_name>>"
PAGE = ROOT / "CONTRIBUTING.md"
WINGS = ("torch", "tensorflow")

# The package's own folder holds two rooms: the modules that know nothing else of it, and the rest.
BOTTOM = {"addresses", "errors", "files", "gpus", "tables", "trust"}
BASE = {"bottom", "checkpoints", "core"}
# From the bottom upwards; every room may import itself.
MAY_IMPORT: dict[str, set[str]] = {
    "bottom": set(),
    "checkpoints": {"bottom"},
    "core": {"bottom", "checkpoints"},
    "torch": BASE,
    "tensorflow": BASE,
    "export": BASE | {"torch", "tensorflow"},
    "compress": BASE | {"export"},
    "compress/torch": BASE | {"export", "compress", "torch"},
    "compress/tensorflow": BASE | {"export", "compress", "tensorflow"},
    "launch": {"bottom", "checkpoints"},
    "cluster": BASE | {"launch"},
}

Imports = dict[str, set[str]]  # what each module imports; a module is its path without the suffix


def room_of(module: str) -> str:
    folder = module.rpartition("/")[0]
    if folder in ("", "conf"):  # conf/ holds settings
        return "bottom" if module in BOTTOM else "core"
    return folder


def wing_of(module: str) -> str | None:
    """The framework that a module goes with, as the hook decides it: by its path."""
    return next((wing for wing in WINGS if wing in module), None)


def read_imports(package: Path) -> Imports:
    """All of them: those within functions and for types alone too."""
    modules = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")}
    return {
        module: {
            target for node in ast.walk(ast.parse(path.read_text())) for target in targets(module, node, {*modules})
        }
        for module, path in sorted(modules.items())
    }


def targets(module: str, node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules of the package that a statement imports."""
    if not isinstance(node, ast.ImportFrom) or not node.level:
        return
    folder = module.split("/")[: -node.level]
    place = "/".join([*folder, *(node.module.split(".") if node.module else [])])
    if place in modules:
        yield place
        return
    for alias in node.names:
        inside = f"{place}/{alias.name}".lstrip("/")
        yield inside if inside in modules else f"{place}/__init__".lstrip("/")


def faults(imports: Imports) -> list[str]:
    """A sentence for each import that no room may have, each room that nobody knows, and a cycle."""
    rooms = {room_of(module) for module in imports}
    found = [f"{room}/ is in no room: add it to MAY_IMPORT" for room in sorted(rooms - MAY_IMPORT.keys())]
    for module, wanted in imports.items():
        found += [f"{module} imports {target}: {why}" for target in sorted(wanted) if (why := refusal(module, target))]
    return found + cycle(imports)


def refusal(module: str, target: str) -> str:
    """Why a module may not import another one; nothing if it may."""
    here, there = room_of(module), room_of(target)
    if there != here and there not in MAY_IMPORT.get(here, {there}):
        return f"{here} may not import {there}"
    if wing_of(target) not in (None, wing_of(module)):
        return f"a project may lack {wing_of(target)}"
    return ""


def cycle(imports: Imports) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return [f"a cycle: {' <- '.join(error.args[1])}"]
    return []


def test_imports_run_one_way() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()
    assert faults(read_imports(PACKAGE)) == []


@pytest.mark.parametrize(
    ("module", "line", "sentence"),
    [
        ("files", "from .loop import fit", "files imports loop: bottom may not import core"),
        ("checkpoints/store", "from .. import loop", "checkpoints/store imports loop: checkpoints may not import core"),
        ("loop", "def f():\n    from .torch import engine", "loop imports torch/engine: core may not import torch"),
        ("loop", "from .torch import missing", "loop imports torch/__init__: core may not import torch"),
        (
            "compress/torch/pruning",
            "if TYPE_CHECKING:\n    from ...cluster import doctor",
            "compress/torch/pruning imports cluster/doctor: compress/torch may not import cluster",
        ),
        ("export/command", "from . import torch", "export/command imports export/torch: a project may lack torch"),
        ("rooms/new", "", "rooms/ is in no room: add it to MAY_IMPORT"),
    ],
)
def test_a_wrong_import_is_named(module: str, line: str, sentence: str, tmp_path: Path) -> None:
    others = {"loop", "export/torch", "cluster/doctor"} - {module}
    texts = {**dict.fromkeys(others, ""), "torch/__init__": "", "torch/engine": "", module: line}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    assert faults(read_imports(tmp_path)) == [sentence]


def test_a_cycle_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def fit():\n    from .save import save")
    (tmp_path / "save.py").write_text("from . import loop")
    (sentence,) = faults(read_imports(tmp_path))
    assert sentence in ("a cycle: loop <- save <- loop", "a cycle: save <- loop <- save")


def picture(imports: Imports) -> str:
    """What each room imports of the others, from the bottom upwards."""
    arrows = {(room_of(module), room_of(target)) for module, wanted in imports.items() for target in wanted}
    lines = []
    for room in MAY_IMPORT:
        below = ", ".join(other for other in MAY_IMPORT if other != room and (room, other) in arrows)
        lines.append(f"{room:<20}<- {below}" if below else room)
    return "\n".join(["```", *lines, "```"])


def test_the_picture_is_that_of_the_sources() -> None:
    wanted = picture(read_imports(PACKAGE))
    assert wanted in PAGE.read_text(), f"python tests/test_rooms.py renews it, or paste into {PAGE.name}:\n{wanted}"


def renew_picture() -> None:
    old = re.compile(r"```\nbottom\n.*?```", re.DOTALL)
    PAGE.write_text(old.sub(picture(read_imports(PACKAGE)), PAGE.read_text()))


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def room_sizes() -> dict[str, int]:
    """The lines of each room."""
    sizes = dict.fromkeys(MAY_IMPORT, 0)
    for path in PACKAGE.rglob("*.py"):
        sizes[room_of(path.relative_to(PACKAGE).with_suffix("").as_posix())] += lines_of([path])
    return sizes


def over_budget(sizes: dict[str, int], page: str) -> list[str]:
    """A sentence for each room that is larger than the page allows, or that has no line there."""
    budgets = {room: int(most) for room, most in re.findall(r"^\| `([\w/]+)` \|.*\| (\d+) \|$", page, re.MULTILINE)}
    found = [f"{room} has no budget, or is no room" for room in sorted(budgets.keys() ^ sizes.keys())]
    for room, size in sizes.items():
        if size > budgets.get(room, size):
            found.append(
                f"{room} has {size} lines and may have {budgets[room]}: take some out, or say why it needs more"
            )
    return found


def test_no_room_is_over_its_budget() -> None:
    assert over_budget(room_sizes(), PAGE.read_text()) == []


def test_a_room_over_its_budget_is_named() -> None:
    page = "| `core` | training | 50 |\n| `gone` | nothing | 50 |\n"
    assert over_budget({"core": 51, "launch": 1}, page) == [
        "gone has no budget, or is no room",
        "launch has no budget, or is no room",
        "core has 51 lines and may have 50: take some out, or say why it needs more",
    ]


def row(name: str, project: Path) -> str:
    """A project's line of the table: files, those in Python, and their lines to the nearest hundred; without tests."""
    files = [path for path in project.rglob("*") if path.is_file() and path.relative_to(project).parts[0] != "tests"]
    sources = [path for path in files if path.suffix == ".py"]
    return f"| {name} | {len(files)} | {len(sources)} | {round(lines_of(sources), -2)} |"


def test_the_smallest_and_the_largest_project(template: Path, tmp_path: Path) -> None:
    switches = [key for key, value in QUESTIONS.items() if isinstance(value, bool)]
    small = render(template, tmp_path / "small", framework="torch", **dict.fromkeys(switches, False))
    large = render(template, tmp_path / "large", framework="both", **dict.fromkeys(switches, True))
    wanted = f"{row('smallest', small)}\n{row('largest', large)}\n"
    assert wanted in PAGE.read_text(), f"{PAGE.name} needs these lines:\n{wanted}"


if __name__ == "__main__":
    renew_picture()
