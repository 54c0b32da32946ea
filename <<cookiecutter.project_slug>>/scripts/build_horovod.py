"""Builds, proves and caches the one Horovod wheel that fits the environment of this interpreter.

    python scripts/build_horovod.py          # prints the wheel's path; the frameworks must be installed

The last release of Horovod no longer compiles against current frameworks. EDITS is all that is changed in it,
and why; docs/building-horovod.md of the template says what each edit brought. Standard output carries only the result.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata, util
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
SDISTS = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
TOOLS = ("setuptools==80.*", "cmake==4.*", "ninja==1.*")  # they never enter the environment itself
NEEDS = ("cloudpickle", "packaging", "psutil", "pyyaml")  # what the wheel itself requires
OLDEST = {"torch": (2, 7), "tensorflow": (2, 18)}  # the first whose wheels have the new C++ ABI
GIB_PER_JOB = 1.5  # one compiler was seen to take 1.1
PROOF_SECONDS = 180
PIP_LOCAL = ("--no-deps", "--no-build-isolation", "--no-cache-dir")


@dataclass(frozen=True)
class Edit:
    """One change to the sdist, made at every match of the pattern; no match is an error."""

    file: str
    pattern: str
    replacement: str
    why: str


ROOT = "CMakeLists.txt"
TORCH = "horovod/torch/CMakeLists.txt"
TENSORFLOW = "horovod/tensorflow/CMakeLists.txt"
UNITY = "PROPERTIES UNITY_BUILD ON UNITY_BUILD_RELOCATABLE ON UNITY_BUILD_BATCH_SIZE"
COMMON_LIBRARY = rf"""
add_library(horovod_common OBJECT ${{SOURCES}})
target_include_directories(horovod_common PRIVATE "${{EIGEN_INCLUDE_PATH}}" "${{FLATBUFFERS_INCLUDE_PATH}}")
set_target_properties(horovod_common {UNITY} 10)
\g<0>"""
FIND_PYTORCH = """\
set(Pytorch_VERSION "$ENV{RECIPE_TORCH_VERSION}")
set(Pytorch_INCLUDE_DIRS "$ENV{RECIPE_TORCH}/include" "$ENV{RECIPE_TORCH}/include/torch/csrc/api/include")
set(Pytorch_CXX11 TRUE)
set(_libraries c10 torch torch_cpu torch_python)
if(HAVE_CUDA)
    set(Pytorch_CUDA TRUE)
    list(APPEND _libraries c10_cuda torch_cuda)
endif()
foreach(_library IN LISTS _libraries)
    list(APPEND Pytorch_LIBRARIES "$ENV{RECIPE_TORCH}/lib/lib${_library}${CMAKE_SHARED_LIBRARY_SUFFIX}")
endforeach()
set(PYTORCH_FOUND TRUE)
"""
TORCH_HEADERS = """\
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
namespace torch { using namespace at; }
"""
STREAM_VALUE = r"""\1
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""
EDITS = (
    # Without these it does not compile, or does not run.
    Edit(ROOT, r"CMAKE_CXX_STANDARD 1[47]\)", "CMAKE_CXX_STANDARD 20)", "torch >= 2.14 needs C++20"),
    Edit(TORCH, r"CMAKE_CXX_STANDARD 14\)", "CMAKE_CXX_STANDARD 20)", "torch >= 2.14 needs C++20"),
    Edit(TENSORFLOW, r"CMAKE_CXX_STANDARD 17\)", "CMAKE_CXX_STANDARD 20)", "one standard for all"),
    Edit(TENSORFLOW, r"^.*xla_mpi_ops\.cc.*\n", "", "TensorFlow >= 2.19 moved the headers of XLA"),
    Edit(
        TORCH,
        r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python >= 3.12 has no distutils",
    ),
    Edit(
        "horovod/runner/js_run.py",
        r"^from distutils\.spawn import find_executable$",
        "from shutil import which as find_executable",
        "Python >= 3.12 has no distutils, and horovodrun imports this file",
    ),
    Edit("horovod/common/common.h", r"^#include <string>$", "#include <stdexcept>\n\\g<0>", "gcc >= 13"),
    Edit("horovod/common/group_table.h", r"^#include <queue>$", "\\g<0>\n#include <string>", "gcc >= 13"),
    Edit("horovod/common/ops/cuda/CMakeLists.txt", r"STANDARD 11\)", "STANDARD 17)", "nvcc with gcc >= 14"),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        r"^// Forward declaration of AsGpuStreamValue\n(?:.*\n){5}(#if(?:.*\n){4}#endif.*)\n",
        STREAM_VALUE,
        "TensorFlow >= 2.21 no longer exports this function",
    ),
    Edit("setup.py", r"require_list\.append\('cffi>=1\.4\.0'\)", "pass", "nothing in it imports cffi"),
    # With these it is quick and small, at the same optimisation level.
    Edit(ROOT, r'"-O2" "-O3"', '"-O2 -g" "-O3"', "debug information is most of the plain wheel"),
    Edit(ROOT, r"^# TF\n", COMMON_LIBRARY, "common files: once for all frameworks, and in few units"),
    Edit(
        TORCH,
        r"SHARED \$\{SOURCES\} (.*)$",
        rf"SHARED $<TARGET_OBJECTS:horovod_common> \1\nset_target_properties(${{PYTORCH_TARGET_LIB}} {UNITY} 0)",
        "use the common objects; read torch's headers once",
    ),
    Edit(TENSORFLOW, r"SHARED \$\{SOURCES\}", "SHARED $<TARGET_OBJECTS:horovod_common>", "the common objects"),
    Edit(TENSORFLOW, r"CXX17 TRUE\)", "CXX17 FALSE)", "one Gloo: standard and ABI are the same for all now"),
    Edit(
        "third_party/gloo/gloo/CMakeLists.txt",
        r"^add_library\(gloo .*$",
        rf"\g<0>\nset_target_properties(gloo {UNITY} 0)",
        "Gloo in one unit",
    ),
    Edit(
        "third_party/gloo/gloo/allreduce.cc",
        r"\bReductionFunction\b",
        "AllreduceFunction",
        "a local alias that is ambiguous once Gloo is one unit",
    ),
    Edit(
        "horovod/torch/adapter_v2.h",
        r"^#include <torch/extension\.h>\n#include <torch/torch\.h>\n",
        TORCH_HEADERS,
        "the headers that are used, not the whole C++ frontend",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        r"^#include <torch/extension\.h>\n#include <torch/torch\.h>\n",
        '#include "adapter_v2.h"\n',
        "the headers that are used, not the whole C++ frontend",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        r"(?s)\A.+\Z",
        FIND_PYTORCH,
        "it imports torch eight times to learn what is known here",
    ),
    Edit("setup.py", r"cmake_build_args \+= .*$", "pass", "they are for make, but ninja builds"),
)
PROOF = """
import importlib, sys
transport, cuda, *names = sys.argv[1:]
for name in names:
    hvd = importlib.import_module("horovod." + name)
    hvd.init()
    assert hvd.size() == 2, f"{hvd.size()} processes instead of 2"
    assert getattr(hvd, transport + "_enabled")(), f"{transport} is not in use"
    assert cuda == "cpu" or (hvd.nccl_built() and hvd.cuda_built()), "CUDA or NCCL is not built in"
    framework = importlib.import_module(name)
    tensor = framework.tensor if name == "torch" else framework.constant
    total = hvd.allreduce(tensor([1.0, 2.0]) + hvd.rank(), op=hvd.Sum, name="proof")
    assert total.numpy().tolist() == [3.0, 5.0], f"wrong sum {total}"
"""
MPI_SETTINGS = {  # the same wishes to Open MPI 4 and 5: any user, any container, few cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Refusal(Exception):
    """Says in one sentence what is missing and the way out; nothing was begun."""


class Failure(Exception):
    """Says in one sentence which stage went wrong and where its output is."""


@dataclass(frozen=True)
class Framework:
    """An installed framework, read from its files: importing it would take seconds."""

    name: str
    version: str
    cuda: str  # the CUDA version that it was built for, or ""
    folder: str = ""


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit, and the NCCL that the framework itself uses."""

    toolkit: str
    version: str
    nccl: str
    nccl_version: str
    architectures: str


@dataclass(frozen=True)
class Plan:
    """Everything that the wheel depends on."""

    horovod: str
    frameworks: tuple[Framework, ...]
    compiler: str
    mpi: str
    cuda: Cuda | None
    arch_flags: str

    def key(self) -> str:
        """The name of the wheel's folder in the cache: the same facts, the same wheel."""
        portable = replace(self, frameworks=tuple(replace(one, folder="") for one in self.frameworks))
        recipe = [SDISTS[self.horovod], TOOLS, PROOF, [asdict(edit) for edit in EDITS]]
        python = [platform.python_version(), sysconfig.get_config_var("SOABI")]
        system = [sysconfig.get_platform(), platform.libc_ver()]
        facts = json.dumps([asdict(portable), recipe, python, system], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:20]

    def local_version(self) -> str:
        """The part of the wheel's version that tells what it was built for."""
        parts = [one.name + re.sub("[^a-z0-9]+", ".", one.version.lower()) for one in self.frameworks]
        parts += ["mpi"] if self.mpi else []
        parts += ["cu" + self.cuda.version.replace(".", "")] if self.cuda else []
        return ".".join(parts)


def say(text: str) -> None:
    """Reports progress; standard output is for the result."""
    print(f"build_horovod: {text}", file=sys.stderr, flush=True)


def search(pattern: str, text: str) -> str:
    """The pattern's first group where it first matches, or nothing."""
    found = re.search(pattern, text)
    return found.group(1) if found else ""


def output(*command: str) -> str:
    """What a program prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def which(program: str) -> str:
    """Finds a program beside the interpreter or on PATH, or nothing."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(program, path=os.pathsep.join(folders)) or ""


# What is here


def horovod_version() -> str:
    """The version that the project pins."""
    text = PYPROJECT.read_text(encoding="utf-8") if PYPROJECT.is_file() else ""
    version = search('"horovod==([^"]+)"', text)
    if not version:
        raise Refusal(f'No Horovod version: {PYPROJECT} has no "horovod==..."; add it to an extra.')
    if version not in SDISTS:
        known = " and ".join(SDISTS)
        raise Refusal(f"Horovod {version} in {PYPROJECT} has no known hash and edits, only {known} has: pin that.")
    return version


def package_folder(name: str) -> Path | None:
    """Finds a package without importing it."""
    with suppress(ModuleNotFoundError):
        spec = util.find_spec(name)
        for place in (spec.submodule_search_locations or []) if spec else []:
            return Path(place)
    return None


def installed_version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, or nothing."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def find_torch() -> Framework | None:
    """Describes torch; its metadata lacks the local version, such as +cpu."""
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None
    text = (folder / "version.py").read_text(encoding="utf-8")
    version, cuda = search("__version__ = '(.+)'", text), search("cuda: .* = '(.+)'", text)
    return Framework("torch", version, cuda, str(folder))


def find_tensorflow() -> Framework | None:
    """Describes TensorFlow, which several distributions bring."""
    folder = package_folder("tensorflow")
    version = installed_version("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")
    if folder is None or not version:
        return None
    text = (folder / "python/platform/build_info.py").read_text(encoding="utf-8")
    return Framework("tensorflow", version, search("'cuda_version': '(.+?)'", text), str(folder))


def find_frameworks(wanted: str) -> tuple[Framework, ...]:
    """Describes the frameworks that were asked for, or all that are installed."""
    names = list(OLDEST) if wanted == "auto" else wanted.split(",")
    finders = {"torch": find_torch, "tensorflow": find_tensorflow}
    for name in names:
        if name not in finders:
            raise Refusal(f"Unknown framework {name!r}: say torch, tensorflow or torch,tensorflow.")
    found = {name: finders[name]() for name in names}
    missing = [name for name, one in found.items() if one is None]
    if len(missing) == len(names) or (missing and wanted != "auto"):
        way = f"{sys.executable} -m pip install {missing[0]}"
        raise Refusal(f"No framework: {' or '.join(missing)} is not installed; install it first ({way}).")
    return tuple(new_enough(one) for one in found.values() if one)


def new_enough(one: Framework) -> Framework:
    """Refuses a framework that was built with the old C++ ABI."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", one.version)[:2])
    if numbers < OLDEST[one.name]:
        oldest = ".".join(map(str, OLDEST[one.name]))
        raise Refusal(f"{one.name} {one.version} is older than {oldest}, the oldest that fits: upgrade it.")
    return one


def find_compiler() -> str:
    """The C++ compiler's command and version."""
    command = os.environ.get("CXX") or "g++"
    program = shlex.split(command)[0]
    if not shutil.which(program):
        raise Refusal(
            f"No C++ compiler: {program!r} was not found on PATH; "
            "install one (Debian/Ubuntu: apt-get install g++) or set CXX."
        )
    return f"{command}\n{output(program, '--version').splitlines()[0]}"


def find_mpi(wanted: str) -> str:
    """The version and the place of the MPI to build for, or nothing."""
    programs = {name: which(name) for name in ("mpicxx", "mpirun")}
    missing = [name for name, program in programs.items() if not program]
    if wanted == "no" or (wanted == "auto" and missing):
        return ""
    if missing:
        raise Refusal(
            f"No MPI: {missing[0]!r} was not found on PATH; install one "
            "(Debian/Ubuntu: apt-get install libopenmpi-dev openmpi-bin) or pass --mpi no."
        )
    return f"{output(programs['mpirun'], '--version').splitlines()[0]}\n{Path(programs['mpicxx']).parent}"


def find_toolkit(wanted: str) -> Path:
    """The folder of the CUDA toolkit; the nvcc on PATH may be a script elsewhere."""
    nvcc = Path(shutil.which("nvcc") or "/").resolve()
    places = [Path(os.environ.get("CUDA_HOME", "/")), nvcc.parent.parent, Path("/usr/local/cuda")]
    for place in places if wanted == "auto" else [Path(wanted)]:
        if (place / "bin/nvcc").is_file() and (place / "include/cuda_runtime.h").is_file():
            return place.resolve()
    where = "on PATH, in $CUDA_HOME or /usr/local/cuda" if wanted == "auto" else f"in {wanted}"
    raise Refusal(f"No CUDA toolkit: bin/nvcc and its headers are not {where}; install one or pass --cuda off.")


def find_cuda(wanted: str, frameworks: tuple[Framework, ...]) -> Cuda | None:
    """The CUDA to build for; a gap is an error only if a toolkit was named."""
    if wanted == "off" or (wanted == "auto" and not any(one.cuda for one in frameworks)):
        return None
    try:
        return describe_cuda(find_toolkit(wanted), frameworks)
    except Refusal as refusal:
        if wanted != "auto":
            raise
        say(f"for the CPU only: {refusal}")
        return None


def describe_cuda(toolkit: Path, frameworks: tuple[Framework, ...]) -> Cuda:
    """Checks that the toolkit, every framework and NCCL belong together."""
    version = search(r"release (\d+\.\d+)", output(str(toolkit / "bin/nvcc"), "--version"))
    major = version.partition(".")[0]
    for one in frameworks:
        if one.cuda.partition(".")[0] != major:
            built = f"CUDA {one.cuda}" if one.cuda else "the CPU only"
            raise Refusal(
                f"{one.name} {one.version} was built for {built}, but {toolkit} is CUDA {version}: "
                "the major versions must agree; name another toolkit or pass --cuda off."
            )
    folder, nccl = package_folder("nvidia.nccl"), installed_version(f"nvidia-nccl-cu{major}")
    if folder is None or not nccl:
        raise Refusal(f"No NCCL: nvidia-nccl-cu{major} is not installed; pip install it or pass --cuda off.")
    return Cuda(str(toolkit), version, str(folder), nccl, os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", ""))


def find_arch_flags() -> str:
    """The instructions that Horovod uses if the processor has them."""
    with suppress(OSError):
        has = set(search(r"flags\s*: (.*)", Path("/proc/cpuinfo").read_text()).split())
        return " ".join(f"-m{name}" for name in ("f16c", "avx", "fma") if name in has)
    return ""


def make_plan(options: argparse.Namespace) -> Plan:
    """Gathers what the wheel will depend on, or refuses."""
    version, frameworks = horovod_version(), find_frameworks(options.frameworks)
    compiler, mpi = find_compiler(), find_mpi(options.mpi)
    return Plan(version, frameworks, compiler, mpi, find_cuda(options.cuda, frameworks), find_arch_flags())


def free_gib() -> float:
    """The memory that is left, within the limits of a container too."""
    left = [float("inf")]
    with suppress(OSError):
        left.append(int(search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())) / 2**20)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # absent, or "max"
            top, now = (int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used))
            left.append((top - now) / 2**30)
    return min(left)


def choose_jobs(wanted: int | None) -> int:
    """As many compilers at once as there are cores and memory for."""
    free = free_gib()
    if free < GIB_PER_JOB:
        raise Refusal(f"Too little memory: {free:.1f} GiB are free and one compiler takes {GIB_PER_JOB}; free some.")
    return max(1, int(min(wanted or len(os.sched_getaffinity(0)), free / GIB_PER_JOB)))


# The build


class Workshop:
    """The folder of one build, with its log and its environment."""

    def __init__(self, plan: Plan, home: Path, jobs: int) -> None:
        self.plan, self.home = plan, home
        self.folder = home / plan.key()
        self.work, self.log = self.folder / "work", self.folder / "build.log"
        self.tools = home / f"tools-{hashlib.sha256(repr((TOOLS, NEEDS, sys.version)).encode()).hexdigest()[:12]}"
        self.environment = build_environment(plan, self.tools, self.work, jobs)

    def run(
        self, stage: str, command: list[str], extra: dict[str, str] | None = None, timeout: int | None = None
    ) -> None:
        """Runs a stage; its children end with it, and its output goes to the log."""
        start, offset, code = time.monotonic(), self.log.stat().st_size, None
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.environment | (extra or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            with suppress(subprocess.TimeoutExpired), ended(process):
                code = process.wait(timeout)
        if code != 0:
            raise Failure(self.explain(stage, code, offset))
        say(f"{stage}: {time.monotonic() - start:.1f} s")

    def explain(self, stage: str, code: int | None, offset: int) -> str:
        """The first line of a stage's output that tells of an error, in a sentence."""
        text = self.log.read_bytes()[offset:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b|Error\b", line, re.IGNORECASE)]
        what = "was still running when its time was up" if code is None else f"ended with exit code {code}"
        return f"{stage} {what}: {(errors or lines[-1:] or ['no output'])[0]} (all of it: {self.log})"

    def get_tools(self) -> None:
        """Installs the build tools into a folder of their own, once."""
        if self.tools.is_dir():
            return
        new = self.work / "tools"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(new), *TOOLS, *NEEDS]
        self.run("build tools", pip)
        with suppress(OSError):  # another build was quicker
            new.rename(self.tools)

    def get_source(self) -> Path:
        """Takes the sdist from the package index once, and unpacks it."""
        version, digest = self.plan.horovod, SDISTS[self.plan.horovod]
        sdist = self.home / f"horovod-{version}.tar.gz"
        if not sdist.is_file() or hashlib.sha256(sdist.read_bytes()).hexdigest() != digest:
            (self.work / "pin.txt").write_text(f"horovod=={version} --hash=sha256:{digest}\n")
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod"]
            self.run("download", [*pip, "--no-build-isolation", "--require-hashes", "-r", "pin.txt"])
            (self.work / sdist.name).replace(sdist)
        with tarfile.open(sdist) as archive:
            archive.extractall(self.work, filter="data")
        return self.work / f"horovod-{version}"

    def compile(self, source: Path) -> Path:
        """Builds the wheel."""
        name = {"HOROVOD_LOCAL_VERSION": self.plan.local_version()}
        self.run("compile", [sys.executable, "-m", "pip", "wheel", str(source), *PIP_LOCAL, "-w", "dist"], name)
        return next((self.work / "dist").glob("*.whl"))

    def prove(self, wheel: Path) -> None:
        """Reduces a vector over two processes, by each transport that is built in."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.work / "site")
        (self.work / "proof.py").write_text(PROOF)
        names = [one.name for one in self.plan.frameworks]
        programs = [sys.executable, "proof.py"]
        arguments = ["cuda" if self.plan.cuda else "cpu", *names]
        path = f"{self.work / 'site'}{os.pathsep}{self.environment['PYTHONPATH']}"
        launcher = "from horovod.runner.launch import run_commandline; run_commandline()"
        horovodrun = [sys.executable, "-c", launcher, "--gloo", "-np", "2"]
        self.run("proof with Gloo", [*horovodrun, *programs, "gloo", *arguments], {"PYTHONPATH": path}, PROOF_SECONDS)
        if self.plan.mpi:
            mpirun = [which("mpirun"), "-np", "2", *programs, "mpi", *arguments]
            self.run("proof with MPI", mpirun, {"PYTHONPATH": path} | MPI_SETTINGS, PROOF_SECONDS)

    def build(self) -> Path:
        """Makes the wheel and puts it into the cache in one step, when it is proven."""
        shutil.rmtree(self.work, ignore_errors=True)  # of a build that was killed
        self.work.mkdir()
        self.log.write_bytes(b"")
        try:
            self.get_tools()
            source = self.get_source()
            apply_edits(source)
            wheel = self.compile(source)
            self.prove(wheel)
            return wheel.replace(self.folder / wheel.name)
        finally:
            shutil.rmtree(self.work, ignore_errors=True)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills whatever is left of a process and its children."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def apply_edits(source: Path) -> None:
    """Makes every edit, or names the one that no longer fits."""
    for edit in EDITS:
        file = source / edit.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        text, count = re.subn(edit.pattern, edit.replacement, text, flags=re.MULTILINE)
        if not count:
            raise Failure(f"The edit of {edit.file} ({edit.why}) matches nothing: {edit.pattern!r}; mend EDITS.")
        file.write_text(text, encoding="utf-8")


def build_environment(plan: Plan, tools: Path, work: Path, jobs: int) -> dict[str, str]:
    """The variables of a build: none of the user's may change what the key does not know."""
    drop = re.compile("(HOROVOD|CMAKE|RECIPE)_|(CFLAGS|CPPFLAGS|CXXFLAGS|LDFLAGS|MAKEFLAGS)$")
    mine = {name: value for name, value in os.environ.items() if not drop.match(name)}
    folders = [tools / "cmake/data/bin", tools / "bin", Path(sys.executable).parent]
    mine["PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))
    mine |= {"CMAKE_GENERATOR": "Ninja", "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    mine |= {"CXX": plan.compiler.partition("\n")[0], "LDFLAGS": "-s", "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
    mine |= {"CCACHE_BASEDIR": str(work), "CCACHE_NOHASHDIR": "1"}  # hits from any folder
    mine |= {"HOROVOD_BUILD_ARCH_FLAGS": plan.arch_flags}
    mine |= {"HOROVOD_WITH_GLOO": "1", f"HOROVOD_WITH{'' if plan.mpi else 'OUT'}_MPI": "1"}
    mine |= {"HOROVOD_WITHOUT_MXNET": "1"} | framework_settings(plan.frameworks)
    return mine | (cuda_settings(plan.cuda, work) if plan.cuda else {})


def framework_settings(frameworks: tuple[Framework, ...]) -> dict[str, str]:
    """Which frameworks must be found, and where torch is."""
    names = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
    there = {one.name: one for one in frameworks}
    chosen = {f"HOROVOD_WITH{'' if name in there else 'OUT'}_{long}": "1" for name, long in names.items()}
    if "torch" in there:
        chosen |= {"RECIPE_TORCH": there["torch"].folder, "RECIPE_TORCH_VERSION": there["torch"].version}
    return chosen


def cuda_settings(cuda: Cuda, work: Path) -> dict[str, str]:
    """Where CUDA and NCCL are; the run path finds NCCL beside Horovod wherever it is installed."""
    chosen = {"HOROVOD_CUDA_HOME": cuda.toolkit, "CUDA_HOME": cuda.toolkit, "HOROVOD_GPU_OPERATIONS": "NCCL"}
    chosen |= {"HOROVOD_NCCL_HOME": str(work / "nccl"), "HOROVOD_NCCL_LINK": "SHARED"}
    chosen |= {"LDFLAGS": "-s -Wl,-rpath,'$ORIGIN/../../nvidia/nccl/lib'"}
    return chosen | ({"HOROVOD_BUILD_CUDA_CC_LIST": cuda.architectures} if cuda.architectures else {})


# The cache


def cache_folder() -> Path:
    """Where the wheels are kept."""
    standard = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "horovod-wheels"
    return Path(os.environ.get("HOROVOD_WHEEL_CACHE") or standard).expanduser().absolute()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lets one process at a time build a key; the kernel frees the lock of a killed one."""
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the same wheel")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def get_wheel(plan: Plan, force: bool, jobs: int | None) -> Path:
    """Takes the wheel from the cache, or builds it into the cache."""
    home, key = cache_folder(), plan.key()
    ready = sorted((home / key).glob("horovod-*.whl"))
    if ready and not force:
        return ready[0]
    workshop = Workshop(plan, home, choose_jobs(jobs))
    workshop.folder.mkdir(parents=True, exist_ok=True)
    with locked(workshop.folder / "lock"):
        built = sorted(workshop.folder.glob("horovod-*.whl"))
        return built[0] if built and not force else workshop.build()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Builds, proves and caches the Horovod wheel for this Python.")
    parser.add_argument("--print-key", action="store_true", help="print the cache key and stop")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="copy the wheel there, and print that path")
    parser.add_argument(
        "--frameworks", default="auto", metavar="LIST", help="torch,tensorflow; default: installed ones"
    )
    parser.add_argument("--mpi", choices=("auto", "yes", "no"), default="auto", help="default: auto, if it is found")
    parser.add_argument("--cuda", default="auto", metavar="auto|off|PATH", help="the CUDA toolkit; default: auto")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once; default: by cores and memory")
    parser.add_argument("--force", action="store_true", help="build even if the wheel is cached")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Prints the wheel's path or the key; 2 is a refusal, 1 a failed build."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the build cleans up
    try:
        plan = make_plan(options)
        if options.print_key:
            print(plan.key())
            return 0
        wheel = get_wheel(plan, options.force, options.jobs)
        if options.wheel_dir:
            options.wheel_dir.mkdir(parents=True, exist_ok=True)
            wheel = Path(shutil.copy2(wheel, options.wheel_dir)).absolute()
        print(wheel)
        return 0
    except (Refusal, Failure, OSError) as error:
        say(str(error))
        return 2 if isinstance(error, Refusal) else 1


if __name__ == "__main__":
    sys.exit(main())
