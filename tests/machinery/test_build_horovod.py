"""The recipe's refusals, its key and its cache; nothing is compiled here."""

import importlib.util
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jobs import is_alive
from waiting import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/build_horovod.py"


def load() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_horovod"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe: Any = load()
FIND_COMPILER = recipe.find_compiler
TORCH = recipe.Framework("torch", "2.13.0+cpu", "", "/somewhere")
CUDA_TORCH = recipe.Framework("torch", "2.14.1+cu130", "13.0", "/somewhere")
PLAN = recipe.Plan("0.28.1", (TORCH,), "g++\ng++ 12", "/usr/bin\nOpen MPI 4", None, "-mavx")
CUDA = recipe.Cuda("/toolkit", "13.0", "/nccl", "2.30", "90")


@pytest.fixture(autouse=True)
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small project, an empty cache, and one framework, whatever this machine has."""
    (tmp_path / "pyproject.toml").write_text('x = ["horovod==0.28.1"]')
    monkeypatch.setattr(recipe, "PYPROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(recipe, "find_torch", lambda: TORCH)
    monkeypatch.setattr(recipe, "find_tensorflow", lambda: None)
    monkeypatch.setattr(recipe, "find_compiler", lambda: "g++\ng++ 12")
    monkeypatch.setattr(recipe, "free_gib", lambda: 8.0)
    monkeypatch.setenv("HOROVOD_WHEEL_CACHE", str(tmp_path / "cache"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the recipe says when it refuses: one line, and nothing on stdout."""
    assert recipe.main(list(arguments)) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    return said.err


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recipe, "find_compiler", FIND_COMPILER)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' was not found on PATH; install one (Debian/Ubuntu: apt-get" in refusal(capsys)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["g++ 'open", 'g++ "'])
def test_compiler_that_is_no_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "find_compiler", FIND_COMPILER)
    monkeypatch.setenv("CXX", command)
    assert f"CXX is {command!r}, which is no command (No closing quotation): mend it" in refusal(capsys)


@pytest.mark.parametrize("command", ["", " ", "\t "])
def test_no_name_of_a_compiler_is_the_usual_one(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    assert FIND_COMPILER().startswith("g++\n")


def test_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOROVOD_WHEEL_CACHE", str(tmp_path / "file/cache"))
    assert "cannot be written (Not a directory): set HOROVOD_WHEEL_CACHE to another" in refusal(capsys, "--mpi", "no")
    monkeypatch.setenv("HOROVOD_WHEEL_CACHE", "~no-such-user/cache")
    assert "No folder for the wheels (" in refusal(capsys, "--mpi", "no")


@pytest.mark.parametrize("jobs", ["0", "-3", "two"])
def test_number_of_compilers(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        recipe.main([f"--jobs={jobs}"])
    assert f"{jobs!r} must be a whole number from 1" in capsys.readouterr().err


def test_no_mpi(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recipe, "which", lambda name: "")
    assert "'mpicxx' was not found on PATH; install one (Debian/Ubuntu: apt-get" in refusal(capsys, "--mpi", "yes")
    assert recipe.find_mpi("auto") == recipe.find_mpi("no") == ""


def test_no_framework(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tensorflow is not installed" in refusal(capsys, "--frameworks", "torch,tensorflow")
    assert "Unknown framework 'jax'" in refusal(capsys, "--frameworks", "jax")
    monkeypatch.setattr(recipe, "find_torch", lambda: None)
    assert "torch or tensorflow is not installed" in refusal(capsys)
    monkeypatch.setattr(recipe, "find_torch", lambda: recipe.Framework("torch", "2.6.1", ""))
    assert "torch 2.6.1 is older than 2.7" in refusal(capsys)


def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recipe, "free_gib", lambda: 0.7)
    assert "Too little memory: 0.7 GiB" in refusal(capsys)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(recipe, "free_gib", lambda: 3.1)
    assert recipe.check_means(16) == 2


@pytest.mark.parametrize(
    ("text", "said"), [("", 'has no "horovod==..."'), ('"horovod==0.99"', "Horovod 0.99 in"), (None, "No Horovod")]
)
def test_no_version(text: str | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.PYPROJECT.unlink() if text is None else recipe.PYPROJECT.write_text(text)
    assert said in refusal(capsys)


def test_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.find_cuda("auto", (TORCH,)) is recipe.find_cuda("off", (CUDA_TORCH,)) is None
    assert f"bin/nvcc and its headers are not in {tmp_path}" in refusal(capsys, "--cuda", str(tmp_path))
    monkeypatch.setattr(recipe, "find_toolkit", Path)
    monkeypatch.setattr(recipe, "output", lambda *_: "release 12.4, V12.4.1")
    with pytest.raises(recipe.Refusal, match=r"2\.14\.1\+cu130 was built for CUDA 13\.0, but .* is CUDA 12\.4"):
        recipe.find_cuda("/toolkit", (CUDA_TORCH,))
    with pytest.raises(recipe.Refusal, match="built for the CPU only"):
        recipe.find_cuda("/toolkit", (TORCH,))
    assert recipe.find_cuda("auto", (CUDA_TORCH,)) is None  # with a word on stderr
    assert "for the CPU only" in capsys.readouterr().err


def test_key_changes_with_every_fact() -> None:
    newer = replace(TORCH, version="2.13.1+cpu")
    others: list[dict[str, Any]] = [
        {"frameworks": (newer,)},
        {"frameworks": (TORCH, recipe.Framework("tensorflow", "2.21.0", ""))},
        {"compiler": "g++\ng++ 13"},
        {"mpi": ""},
        {"cuda": CUDA},
        {"cuda": replace(CUDA, nccl_version="2.31")},
        {"cuda": replace(CUDA, architectures="80")},
        {"arch_flags": ""},
    ]
    assert len({PLAN.key(), *(replace(PLAN, **other).key() for other in others)}) == len(others) + 1


def test_key_knows_no_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert replace(PLAN, frameworks=(replace(TORCH, folder="/elsewhere"),)).key() == PLAN.key()
    assert recipe.main(["--print-key", "--mpi", "no"]) == 0
    assert re.fullmatch("[0-9a-f]{20}\n", capsys.readouterr().out)


def test_local_version() -> None:
    both = (CUDA_TORCH, recipe.Framework("tensorflow", "2.21.0-rc1", "13.0"))
    assert PLAN.local_version() == "torch2.13.0.cpu.mpi"
    assert replace(PLAN, frameworks=both, mpi="", cuda=CUDA).local_version() == (
        "torch2.14.1.cu130.tensorflow2.21.0.rc1.cu130"
    )


def test_environment_has_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CXXFLAGS",
        "HOROVOD_WITHOUT_GLOO",
        "CMAKE_BUILD_TYPE",
        "MAKEFLAGS",
        "PIP_TARGET",
        "PIP_NO_DEPS",
        "FORCE_COLOR",
    ):
        monkeypatch.setenv(name, "theirs")
    made = recipe.build_environment(replace(PLAN, cuda=CUDA), Path("/tools"), Path("/work"), 3)
    assert "theirs" not in made.values()
    wanted = {"HOROVOD_WITH_PYTORCH", "HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITH_MPI", "HOROVOD_NCCL_HOME"}
    assert wanted <= made.keys()
    assert made["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"


def test_edits(tmp_path: Path) -> None:
    file = tmp_path / "CMakeLists.txt"
    file.write_text("set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD 17)\n")
    recipe.apply_edits(tmp_path, recipe.NEEDED[:1])
    assert file.read_text() == "set(CMAKE_CXX_STANDARD 20)\n" * 2
    with pytest.raises(recipe.Failure, match=r"edit of CMakeLists.txt \(torch >= 2.14 .*matches nothing"):
        recipe.apply_edits(tmp_path, recipe.NEEDED[:1])
    assert all(re.compile(edit.pattern) and edit.why for edit in recipe.NEEDED + recipe.QUICK)


def test_failure_names_the_first_error(tmp_path: Path) -> None:
    workshop = recipe.Workshop(PLAN, tmp_path, 1)
    workshop.work.mkdir(parents=True)
    workshop.log.write_text("an error: of an earlier stage\n")
    program = "print('fine'); print('a.cc:3: error: no x'); print('error: two'); raise SystemExit(4)"
    with pytest.raises(recipe.Failure) as caught:
        workshop.run("compile", [sys.executable, "-c", program])
    sentence = f"compile ended with exit code 4: a.cc:3: error: no x (all of its output: {workshop.log})"
    assert str(caught.value) == sentence


def test_time_out_ends_the_children_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up as soon as both processes are there."""
    until_its_end = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return until_its_end(process)
        wait_until(lambda: len(list(tmp_path.glob("process-*"))) == 2, "two processes")
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    program = "import os, time; os.fork(); open(f'process-{os.getpid()}', 'w'); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        code = recipe.run_group([sys.executable, "-c", program], tmp_path, {}, log.fileno(), 1)
    assert code is None
    assert not any(is_alive(int(file.name.removeprefix("process-"))) for file in tmp_path.glob("process-*"))


CHILD = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(60)"
STARTS_A_CHILD = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"
RUNS_A_STAGE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import build_horovod
from pathlib import Path
build_horovod.make_plan = lambda options: sys.exit(
    build_horovod.run_group([sys.executable, "-c", sys.argv[2]], Path("/"), dict(os.environ), 1, None)
)
sys.exit(build_horovod.main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_build_leaves_no_process(number: signal.Signals) -> None:
    """Also not one in a group of its own, as ninja's compilers are."""
    words = [sys.executable, "-c", RUNS_A_STAGE, str(SCRIPT.parent), STARTS_A_CHILD]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as build:
        assert build.stdout
        child = int(build.stdout.readline())
        build.send_signal(number)
        _, said = build.communicate(timeout=30)  # ends when nobody holds it: also not the guard
        code = {signal.SIGKILL: -9, signal.SIGINT: 130}.get(number, 128 + number)
        assert build.returncode == code
        assert "Traceback" not in said
    assert not is_alive(child)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    builds = []

    def build(workshop: Any) -> Path:
        builds.append(workshop)
        time.sleep(0.2)
        wheel: Path = workshop.folder / "horovod-0.28.1.whl"
        wheel.write_text("wheel")
        return wheel

    monkeypatch.setattr(recipe.Workshop, "build", build)
    threads = [threading.Thread(target=recipe.get_wheel, args=(PLAN, False, None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1, "a build of the same key must wait, then take the cached wheel"
    recipe.get_wheel(PLAN, True, None)
    assert len(builds) == 2, "--force builds again"
    monkeypatch.setattr(recipe, "make_plan", lambda options: PLAN)
    capsys.readouterr()
    assert recipe.main(["--wheel-dir", str(tmp_path / "dist")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'dist/horovod-0.28.1.whl'}\n"
    assert (tmp_path / "dist/horovod-0.28.1.whl").read_text() == "wheel"
    assert len(builds) == 2
