"""Builds, proves and caches the Horovod wheel that fits the environment of this interpreter.

    python scripts/build_horovod.py     # the frameworks must be installed; prints the path of the wheel

The last release of Horovod no longer compiles against current frameworks: NEEDED and QUICK are all that is changed in
it, and why. Standard output carries only the result. Exit codes: 2 if something is missing, and then nothing was begun;
1 if the build or its proof failed.
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
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
SDISTS = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
TOOLS = ["setuptools==80.*", "wheel==0.*", "cmake==4.*", "ninja==1.*"]  # for the build; never put into the environment
NEEDS = ["cloudpickle", "packaging", "psutil", "pyyaml"]  # what the wheel requires, for its proof
OLDEST = {"torch": (2, 7), "tensorflow": (2, 18)}  # the first whose wheels have the new C++ ABI
GIB_PER_JOB = 1.5  # the largest compiler was seen to take 1.1
PROOF_SECONDS = 180

ROOT, TORCH, TENSORFLOW = (folder + "CMakeLists.txt" for folder in ("", "horovod/torch/", "horovod/tensorflow/"))
UNITY = "PROPERTIES UNITY_BUILD ON UNITY_BUILD_RELOCATABLE ON UNITY_BUILD_BATCH_SIZE"
COMMON_LIBRARY = rf"""
add_library(horovod_common OBJECT ${{SOURCES}})
target_include_directories(horovod_common PRIVATE "${{EIGEN_INCLUDE_PATH}}" "${{FLATBUFFERS_INCLUDE_PATH}}")
set_target_properties(horovod_common {UNITY} 10)
\g<0>"""
FIND_PYTORCH = """\
set(PYTORCH_FOUND TRUE)
set(Pytorch_VERSION "$ENV{RECIPE_TORCH_VERSION}")
set(Pytorch_INCLUDE_DIRS "$ENV{RECIPE_TORCH}/include" "$ENV{RECIPE_TORCH}/include/torch/csrc/api/include")
set(Pytorch_CXX11 TRUE)
set(Pytorch_CUDA ${HAVE_CUDA})
set(_libraries c10 torch torch_cpu torch_python)
if(HAVE_CUDA)
    list(APPEND _libraries c10_cuda torch_cuda)
endif()
foreach(_library IN LISTS _libraries)
    list(APPEND Pytorch_LIBRARIES "$ENV{RECIPE_TORCH}/lib/lib${_library}.so")
endforeach()
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
TOKEN_HEADER = """\
static std::vector<std::string> TokenHeader() {
  auto token = std::getenv("HOROVOD_GLOO_TOKEN");
  return token ? std::vector<std::string>{std::string("Job-Token: ") + token} : std::vector<std::string>{};
}

"""
# With HOROVOD_GLOO_KEY both ends of a connection prove that they know it before either takes the other for its peer:
# the caller sends a nonce, the listener a nonce and its proof of both, the caller its own proof. Others are hung up on.
PAIR_MEMBERS = r"""\g<0>
  struct Caller {
    int fd = -1;
    std::array<uint64_t, 6> words{}; // two nonces of two words each, the listener's proof, the caller's proof
    size_t heard = 0; // bytes of the message that is awaited
    bool greeted = false; // this side has sent its first message
  };
  static std::vector<uint64_t> readKey();
  static int hear(Caller& caller, size_t first, size_t count);
  static bool tell(Caller& caller, size_t first, size_t count);
  uint64_t proof(uint64_t role, const Caller& caller) const;
  int judge(Caller& caller);
  void letIn();
  bool introduce();
  void dialAgain();
  void hangUp(size_t keep);
  const std::vector<uint64_t> key_ = readKey(); // two words, or none
  std::deque<Caller> callers_; // who has called and is no peer yet
  Caller own_; // this side as a caller
"""
PAIR_PROOF = r"""
constexpr size_t kCallers = 16; // that may be silent at a time: one more, and the first one is hung up on

std::vector<uint64_t> Pair::readKey() {
  auto text = std::getenv("HOROVOD_GLOO_KEY");
  std::string digits(text ? text : "");
  if (digits.empty()) {
    return {};
  }
  GLOO_ENFORCE_EQ(digits.size(), 32u, "HOROVOD_GLOO_KEY must have 32 hexadecimal digits");
  return {std::stoull(digits.substr(0, 16), nullptr, 16), std::stoull(digits.substr(16), nullptr, 16)};
}

// SipHash-2-4 of the role and both nonces.
uint64_t Pair::proof(uint64_t role, const Caller& caller) const {
  uint64_t a = key_[0] ^ 0x736f6d6570736575, b = key_[1] ^ 0x646f72616e646f6d;
  uint64_t c = key_[0] ^ 0x6c7967656e657261, d = key_[1] ^ 0x7465646279746573;
  auto mix = [&](int rounds) {
    while (rounds-- > 0) {
      a += b, b = std::rotl(b, 13) ^ a, a = std::rotl(a, 32);
      c += d, d = std::rotl(d, 16) ^ c;
      a += d, d = std::rotl(d, 21) ^ a;
      c += b, b = std::rotl(b, 17) ^ c, c = std::rotl(c, 32);
    }
  };
  const auto& words = caller.words;
  const uint64_t length = 40 * 0x100000000000000; // of the message in bytes, as the last byte of the last word
  for (auto word : {role, words[0], words[1], words[2], words[3], length}) {
    d ^= word;
    mix(2);
    a ^= word;
  }
  c ^= 0xff;
  mix(4);
  return a ^ b ^ c ^ d;
}

// 1 once so many words are here, 0 while they are not, -1 if the other side is gone.
int Pair::hear(Caller& caller, size_t first, size_t count) {
  auto into = reinterpret_cast<char*>(&caller.words[first]);
  auto rv = ::recv(caller.fd, into + caller.heard, count * 8 - caller.heard, MSG_DONTWAIT);
  if (rv == 0 || (rv == -1 && errno != EAGAIN && errno != EINTR)) {
    return -1;
  }
  caller.heard += std::max<ssize_t>(rv, 0);
  return caller.heard == count * 8;
}

bool Pair::tell(Caller& caller, size_t first, size_t count) {
  caller.greeted = true;
  caller.heard = 0;
  return ::send(caller.fd, &caller.words[first], count * 8, MSG_DONTWAIT | MSG_NOSIGNAL) == ssize_t(count * 8);
}

// 1 for the peer, 0 as long as it may be, -1 for anyone else.
int Pair::judge(Caller& caller) {
  int heard = 1;
  if (!caller.greeted && (heard = hear(caller, 0, 2)) == 1) {
    GLOO_ENFORCE_EQ(getrandom(&caller.words[2], 16, 0), 16);
    caller.words[4] = proof('l', caller);
    heard = tell(caller, 2, 3) ? 1 : -1;
  }
  if (heard != 1 || (heard = hear(caller, 5, 1)) != 1) {
    return heard;
  }
  return caller.words[5] == proof('c', caller) ? 1 : -1;
}

// Takes the next caller from the queue, hears all that wait, and connects with the one that is the peer.
void Pair::letIn() {
  auto fd = accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  auto full = fd == FD_INVALID && (errno == EMFILE || errno == ENFILE);
  if (fd != FD_INVALID) {
    callers_.emplace_back();
    callers_.back().fd = fd;
    device_->registerDescriptor(fd, EPOLLIN, this);
  }
  for (auto waiting = callers_.size(); waiting > 0; waiting--) {
    auto caller = callers_.front();
    callers_.pop_front();
    auto verdict = judge(caller);
    if (verdict == 0) {
      callers_.push_back(caller);
      continue;
    }
    auto closed = verdict == 1 ? std::exchange(fd_, caller.fd) : caller.fd;
    device_->unregisterDescriptor(closed, this);
    ::close(closed);
    if (verdict == 1) {
      handleConnected();
      return;
    }
  }
  hangUp(full ? 0 : kCallers);
}

// The caller's part; whether all is proven.
bool Pair::introduce() {
  if (!own_.greeted) {
    own_.fd = fd_;
    GLOO_ENFORCE_EQ(getrandom(&own_.words[0], 16, 0), 16);
    tell(own_, 0, 2); // if this fails, so will the next step
    device_->registerDescriptor(fd_, EPOLLIN, this);
    return false;
  }
  auto heard = hear(own_, 2, 3);
  if (heard == 1 && own_.words[4] != proof('l', own_)) {
    signalException(GLOO_ERROR_MSG(peer_.str(), " does not know the job's key"));
    return false;
  }
  if (heard == 1) {
    own_.words[5] = proof('c', own_);
    heard = tell(own_, 5, 1) ? 1 : -1;
  }
  if (heard == -1) {
    dialAgain();
  }
  return heard == 1;
}

// Others have called the peer, too many at a time.
void Pair::dialAgain() {
  const auto& address = peer_.getSockaddr();
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);
  own_ = Caller();
  fd_ = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
  GLOO_ENFORCE_NE(fd_, -1, "socket: ", strerror(errno));
  auto failed = ::connect(fd_, (const sockaddr*)&address, sizeof(address)) == -1 && errno != EINPROGRESS;
  device_->registerDescriptor(fd_, EPOLLIN | EPOLLOUT, this);
  if (failed) {
    signalException(GLOO_ERROR_MSG("connect ", peer_.str(), ": nobody listens any more"));
  }
}

// On those that have waited longest, until so many are left.
void Pair::hangUp(size_t keep) {
  for (; callers_.size() > keep; callers_.pop_front()) {
    device_->unregisterDescriptor(callers_.front().fd, this);
    ::close(callers_.front().fd);
  }
}

\g<0>"""


@dataclass(frozen=True)
class Edit:
    """One change to the sdist, made at every match of the pattern; no match is an error."""

    file: str
    why: str
    pattern: str
    replacement: str


# fmt: off
PAIR_CHANGES = (
    ("pair.h", (r"^#include <atomic>$", "#include <array>\n\\g<0>")),
    ("pair.h", (r"^  bool is_client_;$", PAIR_MEMBERS)),
    ("pair.cc", (r"^#include <errno\.h>$", "#include <bit>\n#include <utility>\n\\g<0>\n#include <sys/random.h>")),
    ("pair.cc", (r"^Pair::Pair\($", PAIR_PROOF)),
    ("pair.cc", (r"attr\.ai_socktype, attr", "attr.ai_socktype | (key_.empty() ? 0 : SOCK_NONBLOCK), attr")),
    ("pair.cc", (r"^  // First destroy listening socket\.$", "\\g<0>\n  hangUp(0);")),
    ("pair.cc", (r"GLOO_ENFORCE_LE\(state_, CONNECTED\);", "if (state_ == CLOSED) {\n    return;\n  }")),
    ("pair.cc", (r"^void Pair::handleListening\(\) \{$",
                 "\\g<0>\n  if (!key_.empty()) {\n    letIn();\n    return;\n  }")),
    ("pair.cc", (r"optval != 0(\) \{(?:.*\n){5})",
                 "optval != 0 && !own_.greeted\\1  if (!key_.empty() && !introduce()) {\n    return;\n  }\n")),
    ("pair.cc", (r"^  state_ = nextState;$", "  if (nextState >= CONNECTED) {\n    hangUp(0);\n  }\n\\g<0>")),
)
NEEDED = (  # or it does not compile, or does not run
    Edit(ROOT, "torch >= 2.14 needs C++20", r"CMAKE_CXX_STANDARD 1[47]\)", "CMAKE_CXX_STANDARD 20)"),
    Edit(ROOT, "the cache's path may have a space",
         r"(version-script=)(\$\{CMAKE_SOURCE_DIR\}/horovod\.lds)", r'\1\\"\2\\"'),
    Edit(TORCH, "torch >= 2.14 needs C++20", r"CMAKE_CXX_STANDARD 14\)", "CMAKE_CXX_STANDARD 20)"),
    Edit(TENSORFLOW, "one standard for all", r"CMAKE_CXX_STANDARD 17\)", "CMAKE_CXX_STANDARD 20)"),
    Edit(TENSORFLOW, "TensorFlow >= 2.19 moved the headers of XLA", r"^.*xla_mpi_ops\.cc.*\n", ""),
    Edit("horovod/tensorflow/mpi_ops.cc", "TensorFlow >= 2.21 no longer exports this function",
         r"^// Forward declaration of AsGpuStreamValue\n(?:.*\n){5}(#if(?:.*\n){4}#endif.*)\n", STREAM_VALUE),
    Edit(TORCH, "Python >= 3.12 has no distutils", r"from distutils\.sysconfig .*get_python_inc\(\)\)",
         "import sysconfig; print(sysconfig.get_path('include'))"),
    Edit("horovod/runner/js_run.py", "Python >= 3.12 has no distutils, and horovodrun imports this file",
         r"^from distutils\.spawn import find_executable$", "from shutil import which as find_executable"),
    Edit("horovod/common/common.h", "gcc >= 13", r"^#include <string>$", "#include <stdexcept>\n\\g<0>"),
    Edit("horovod/common/group_table.h", "gcc >= 13", r"^#include <queue>$", "\\g<0>\n#include <string>"),
    Edit("horovod/common/ops/cuda/CMakeLists.txt", "nvcc with gcc >= 14", r"STANDARD 11\)", "STANDARD 17)"),
    Edit("horovod/common/gloo/gloo_controller.cc", "an empty list of ranks: over Gloo no stalled rank is ever noticed",
         r"global_ranks_\.reserve\(size_\)", "global_ranks_.resize(size_)"),
    Edit("horovod/common/gloo/gloo_context.cc", "over Gloo the data ignored the network that was chosen",
         r"^  assert\(global_context\.IsEnabled\(\)\);\n", "\\g<0>  gloo_iface_ = global_context.gloo_iface_;\n"),
    Edit("third_party/gloo/gloo/transport/tcp/device.cc", "a host name without an address crashed the process",
         r"GLOO_ENFORCE_NE\(rv, -1\);",
         'GLOO_ENFORCE_EQ(rv, 0, "no address for ", attr.hostname, ": ", gai_strerror(rv));'),
    Edit("setup.py", "nothing in it imports cffi", r"require_list\.append\('cffi>=1\.4\.0'\)", "pass"),
    Edit("horovod/common/gloo/http_store.cc", "whoever found the port of the rendezvous could join the job",
         r"^void HTTPStore::Finalize\(\)", rf"{TOKEN_HEADER}\g<0>"),
    Edit("horovod/common/gloo/http_store.cc", "whoever found the port of the rendezvous could join the job",
         r"request\.send\(method, body\)", "request.send(method, body, TokenHeader())"),
    *(Edit(f"third_party/gloo/gloo/transport/tcp/{file}", "whoever called first was taken for the other rank", *change)
      for file, change in PAIR_CHANGES),
)
QUICK = (  # and small, at the same optimisation level
    Edit(ROOT, "debug information is most of the plain wheel", r'"-O2" "-O3"', '"-O2 -g" "-O3"'),
    Edit(ROOT, "common files once for all frameworks, and in few units", r"^# TF\n", COMMON_LIBRARY),
    Edit(TORCH, "take the common objects, and read torch's headers once", r"SHARED \$\{SOURCES\} (.*)$",
         rf"SHARED $<TARGET_OBJECTS:horovod_common> \1\nset_target_properties(${{PYTORCH_TARGET_LIB}} {UNITY} 0)"),
    Edit(TENSORFLOW, "take the common objects", r"SHARED \$\{SOURCES\}", "SHARED $<TARGET_OBJECTS:horovod_common>"),
    Edit(TENSORFLOW, "one Gloo: standard and ABI are the same for all now", r"CXX17 TRUE\)", "CXX17 FALSE)"),
    Edit("third_party/gloo/gloo/CMakeLists.txt", "Gloo in one unit", r"^add_library\(gloo .*$",
         rf"\g<0>\nset_target_properties(gloo {UNITY} 0)"),
    Edit("third_party/gloo/gloo/allreduce.cc", "a local alias that is ambiguous once Gloo is one unit",
         r"\bReductionFunction\b", "AllreduceFunction"),
    Edit("horovod/torch/adapter_v2.h", "the headers that are used, not torch's whole C++ frontend",
         r"^#include <torch/extension\.h>\n#include <torch/torch\.h>\n", TORCH_HEADERS),
    Edit("horovod/torch/mpi_ops_v2.cc", "the headers that are used, not torch's whole C++ frontend",
         r"^#include <torch/extension\.h>\n#include <torch/torch\.h>\n", '#include "adapter_v2.h"\n'),
    Edit("cmake/Modules/FindPytorch.cmake", "it imports torch eight times to learn what is known here",
         r"(?s)\A.+\Z", FIND_PYTORCH),
    Edit("setup.py", "these arguments are for make, but ninja builds", r"cmake_build_args \+= .*$", "pass"),
)
# fmt: on
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
    **{f"{name}_ALLOW_RUN_AS_ROOT{confirm}": "1" for name in ("OMPI", "PRTE") for confirm in ("", "_CONFIRM")},
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

# Where pip installs, what it leaves out and what it passes to builds; where packages come from is the user's to say.
DIVERTS = re.compile(
    "PIP_(ABI|BUILD_OPTION|CONFIG_SETTINGS?|DEST|DRY_RUN|EDITABLE|GLOBAL_OPTION|GROUP|IGNORE_INSTALLED|IMPLEMENTATION"
    "|NO_BUILD_ISOLATION|NO_DEPS|NO_DEPENDENCIES|PLATFORM|PREFIX|PYTHON|PYTHON_VERSION|QUIET|REPORT|REQUIREMENT"
    "|REQUIRE_HASHES|REQUIRE_VIRTUALENV|ROOT|TARGET|USER|WHEEL_DIR)"
)


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
    nccl: str  # its folder
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
        """The name of the wheel's folder in the cache: the same facts and the same recipe, the same wheel."""
        frameworks = [(one.name, one.version, one.cuda) for one in self.frameworks]
        cuda = self.cuda and [self.cuda.version, self.cuda.nccl_version, self.cuda.architectures]
        python = [sys.version, sysconfig.get_config_var("SOABI"), sysconfig.get_platform(), platform.libc_ver()]
        recipe = Path(__file__).read_text(encoding="utf-8")
        facts = json.dumps([self.horovod, frameworks, self.compiler, self.mpi, cuda, self.arch_flags, python, recipe])
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


def keep_pip_here(environment: MutableMapping[str, str]) -> None:
    """Takes out of an environment what would send pip's packages elsewhere."""
    for name in filter(DIVERTS.fullmatch, list(environment)):
        del environment[name]
    environment["PIP_USER"] = "0"  # also against a configuration file


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
    command = os.environ.get("CXX", "").strip() or "g++"
    try:
        program = shlex.split(command)[0]
    except ValueError as error:
        raise Refusal(f"CXX is {command!r}, which is no command ({error}): mend it, or unset it for g++.") from error
    if not shutil.which(program):
        raise Refusal(
            f"No C++ compiler: {program!r} was not found on PATH; "
            "install one (Debian/Ubuntu: apt-get install g++) or set CXX."
        )
    return f"{command}\n{output(program, '--version')}"


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
    return f"{Path(programs['mpicxx']).parent}\n{output(programs['mpirun'], '--version')}"


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
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")
    if not re.fullmatch(r"(\d+[a-z]?(,\d+[a-z]?)*)?", architectures):
        raise Refusal(f"HOROVOD_BUILD_CUDA_CC_LIST is {architectures!r}, but must be numbers as in 80,90.")
    return Cuda(str(toolkit), version, str(folder), nccl, architectures)


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
    """The memory that is free, and not above a container's limit."""
    files = {"/proc/meminfo": (r"MemAvailable:\s*(\d+)", 2**20)}
    files |= {f"/sys/fs/cgroup/{name}": (r"(\d+)", 2**30) for name in ("memory.max", "memory/memory.limit_in_bytes")}
    found = [float("inf")]
    for file, (pattern, unit) in files.items():
        with suppress(OSError, ValueError):  # absent, or without a limit
            found.append(int(search(pattern, Path(file).read_text())) / unit)
    return min(found)


def check_means(jobs: int | None) -> int:
    """As many compilers at once as there are cores and memory for, or a refusal."""
    free = free_gib()
    if free < GIB_PER_JOB:
        raise Refusal(f"Too little memory: {free:.1f} GiB are free and one compiler takes {GIB_PER_JOB}; free some.")
    if not installed_version("pip"):
        raise Refusal(f"No pip: {sys.executable} has none; install it ({sys.executable} -m ensurepip).")
    few = len(os.sched_getaffinity(0)) + 2  # units are few and long: some more at once keep the last core busy
    return int(min(jobs or few, free / GIB_PER_JOB))


# The build


class Workshop:
    """The folder of one build, with its log and its environment."""

    def __init__(self, plan: Plan, home: Path, jobs: int) -> None:
        self.plan, self.home, self.folder = plan, home, home / plan.key()
        self.work, self.log = self.folder / "work", self.folder / "build.log"
        self.tools = home / f"tools-{hashlib.sha256(repr((TOOLS, NEEDS, sys.version)).encode()).hexdigest()[:12]}"
        self.environment = build_environment(plan, self.tools, self.work, jobs)

    def run(self, stage: str, command: list[str], timeout: int | None = None, **extra: str) -> None:
        """Runs a stage, with its output in the log."""
        start, offset, environment = time.monotonic(), self.log.stat().st_size, self.environment | extra
        with self.log.open("ab") as log:
            code = run_group(command, self.work, environment, log.fileno(), timeout)
        if code != 0:
            raise Failure(self.explain(stage, code, offset))
        say(f"{stage}: {time.monotonic() - start:.1f} s")

    def pip(self, stage: str, *arguments: str, **extra: str) -> None:
        """Runs a stage that is a pip command."""
        self.run(stage, [sys.executable, "-m", "pip", *arguments], None, **extra)

    def explain(self, stage: str, code: int | None, offset: int) -> str:
        """What went wrong, with the first line of the output that tells of an error."""
        text = self.log.read_bytes()[offset:].decode(errors="replace")
        lines = [line.strip()[:300] for line in text.splitlines() if line.strip()] or ["no output"]
        tells = re.compile(r"(?i:error:|CMake Error)(?! subprocess-exited)")
        errors = [line for line in lines if tells.search(line)]
        what = "did not end in time" if code is None else f"ended with exit code {code}"
        return f"{stage} {what}: {(errors or lines[-1:])[0]} (all of its output: {self.log})"

    def get_tools(self) -> None:
        """Installs what the build needs into a folder of its own, once."""
        if not self.tools.is_dir():
            new = self.work / "tools"
            self.pip("tools", "install", "--quiet", "--target", str(new), *TOOLS, *NEEDS)
            with suppress(OSError):  # another build was quicker
                new.rename(self.tools)

    def get_source(self) -> Path:
        """Takes the sdist from the package index once, then unpacks and edits it."""
        version, digest = self.plan.horovod, SDISTS[self.plan.horovod]
        sdist = self.home / f"horovod-{version}.tar.gz"
        if not sdist.is_file() or hashlib.sha256(sdist.read_bytes()).hexdigest() != digest:
            (self.work / "pin.txt").write_text(f"horovod=={version} --hash=sha256:{digest}\n")
            how = ["--no-deps", "--no-build-isolation", "--no-binary=horovod", "--require-hashes"]
            self.pip("download", "download", *how, "--requirement=pin.txt")
            (self.work / sdist.name).replace(sdist)
        with tarfile.open(sdist) as archive:
            if hasattr(tarfile, "data_filter"):  # older patch releases of Python have none; the hash was checked
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(self.work)
        return apply_edits(self.work / f"horovod-{version}", NEEDED + QUICK)

    def compile(self, source: Path) -> Path:
        """Builds the wheel."""
        how = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir=dist"]
        self.pip("compile", "wheel", *how, str(source), HOROVOD_LOCAL_VERSION=self.plan.local_version())
        return next((self.work / "dist").glob("*.whl"))

    def prove(self, wheel: Path) -> None:
        """Reduces a vector over two processes, by each transport that is built in."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.work / "site")
        (self.work / "proof.py").write_text(PROOF)
        path = f"{self.work / 'site'}{os.pathsep}{self.environment['PYTHONPATH']}"
        horovodrun = "from horovod.runner.launch import run_commandline; run_commandline()"
        launchers = {"gloo": [sys.executable, "-c", horovodrun, "--gloo"]}
        if self.plan.mpi:
            launchers["mpi"] = [which("mpirun")]
        for transport, launcher in launchers.items():
            proof = [sys.executable, "proof.py", transport, "cuda" if self.plan.cuda else "cpu"]
            command = [*launcher, "-np", "2", *proof, *(one.name for one in self.plan.frameworks)]
            self.run(f"proof of {transport}", command, PROOF_SECONDS, PYTHONPATH=path, **MPI_SETTINGS)

    def build(self) -> Path:
        """Puts the proven wheel into the cache, in one step."""
        shutil.rmtree(self.work, ignore_errors=True)  # of a build that was killed
        self.work.mkdir()
        self.log.write_bytes(b"")
        try:
            self.get_tools()
            if self.plan.cuda:
                link_nccl(self.plan.cuda, self.work)
            wheel = self.compile(self.get_source())
            self.prove(wheel)
            return wheel.replace(self.folder / wheel.name)
        finally:
            shutil.rmtree(self.work, ignore_errors=True)


def run_group(command: list[str], folder: Path, env: dict[str, str], log: int, timeout: int | None) -> int | None:
    """Runs a program and returns its exit code, or None when its time is up; all that it started ends with it."""
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    guard, pipe = start_guard(process.pid)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        os.close(pipe)
        os.waitpid(guard, 0)
        process.wait()


def start_guard(session: int) -> tuple[int, int]:
    """Starts a process that ends a session when a pipe is closed: by us, or by the kernel where we are killed."""
    ear, pipe = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.setsid()  # Ctrl-C is not for it
        os.close(pipe)
        os.read(ear, 1)
        end_session(session)
        os._exit(0)
    os.close(ear)
    return guard, pipe


def end_session(session: int) -> None:
    """Kills every process of a session: ninja gives each compiler a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    while members := session_members(session):
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)


def session_members(session: int) -> list[int]:
    """The processes of a session, as far as /proc tells; the dead that nobody has asked about are none."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
            found += [int(file.parent.name)] if its == str(session) and state not in "ZX" else []
    return found


def apply_edits(source: Path, edits: tuple[Edit, ...]) -> Path:
    """Makes every edit, or names the one that no longer fits."""
    for edit in edits:
        file = source / edit.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        text, count = re.subn(edit.pattern, edit.replacement, text, flags=re.MULTILINE)
        if not count:
            raise Failure(f"The edit of {edit.file} ({edit.why}) matches nothing: {edit.pattern!r}; mend the edit.")
        file.write_text(text, encoding="utf-8")
    return source


def build_environment(plan: Plan, tools: Path, work: Path, jobs: int) -> dict[str, str]:
    """The variables of a build: none of the user's may change what the key does not know."""
    drop = re.compile("(HOROVOD|CMAKE|RECIPE)_|(C|CPP|CXX|LD|MAKE)FLAGS$|(CLICOLOR_FORCE|FORCE_COLOR)$")
    mine = {name: value for name, value in os.environ.items() if not drop.match(name)}
    keep_pip_here(mine)
    folders = [tools / "cmake/data/bin", tools / "bin", Path(sys.executable).parent]
    mine["PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))
    mine |= {"CMAKE_GENERATOR": "Ninja", "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
    mine |= {"CXX": plan.compiler.partition("\n")[0], "LDFLAGS": "-s", "HOROVOD_BUILD_ARCH_FLAGS": plan.arch_flags}
    mine |= dict.fromkeys(["CFLAGS", "CXXFLAGS"], shlex.quote(f"-ffile-prefix-map={work}/="))  # no private paths in it
    mine |= {"CCACHE_BASEDIR": str(work), "CCACHE_NOHASHDIR": "1"}  # hits whatever the folder
    folders_of = {one.name: one for one in plan.frameworks}
    parts = {"PYTORCH": "torch" in folders_of, "TENSORFLOW": "tensorflow" in folders_of, "MXNET": False}
    for part, there in (parts | {"MPI": bool(plan.mpi), "GLOO": True}).items():
        mine[f"HOROVOD_{'WITH' if there else 'WITHOUT'}_{part}"] = "1"
    if torch := folders_of.get("torch"):
        mine |= {"RECIPE_TORCH": torch.folder, "RECIPE_TORCH_VERSION": torch.version}
    return mine | (cuda_settings(plan.cuda, work) if plan.cuda else {})


def cuda_settings(cuda: Cuda, work: Path) -> dict[str, str]:
    """Where CUDA and NCCL are; the run path finds NCCL beside Horovod, wherever both are installed."""
    chosen = {"HOROVOD_CUDA_HOME": cuda.toolkit, "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
    chosen |= {"HOROVOD_NCCL_HOME": str(work / "nccl"), "LDFLAGS": "-s -Wl,-rpath,'$ORIGIN/../../nvidia/nccl/lib'"}
    return chosen | ({"HOROVOD_BUILD_CUDA_CC_LIST": cuda.architectures} if cuda.architectures else {})


def link_nccl(cuda: Cuda, work: Path) -> None:
    """Gives the linker the name that it looks for; NCCL's own package has only libnccl.so.2."""
    (work / "nccl/lib").mkdir(parents=True)
    (work / "nccl/include").symlink_to(Path(cuda.nccl, "include"))
    (work / "nccl/lib/libnccl.so").symlink_to(Path(cuda.nccl, "lib/libnccl.so.2"))


# The cache and the command


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lets one process at a time build a wheel; the kernel frees the lock of a killed one."""
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the same wheel")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    """Where the wheels are kept."""
    standard = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "horovod-wheels"
    try:
        return Path(os.environ.get("HOROVOD_WHEEL_CACHE") or standard).expanduser().absolute()
    except RuntimeError as error:
        raise Refusal(f"No folder for the wheels ({error}): set HOROVOD_WHEEL_CACHE to one.") from error


def make_folder(folder: Path) -> Path:
    """Makes a wheel's folder in the cache, with the lock in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").open("a").close()
    except OSError as error:
        raise Refusal(f"{folder} cannot be written ({error.strerror}): set HOROVOD_WHEEL_CACHE to another.") from error
    return folder


def get_wheel(plan: Plan, force: bool, jobs: int | None) -> Path:
    """Takes the wheel from the cache, or builds it into the cache."""
    home = cache_folder()
    folder = home / plan.key()
    ready = list(folder.glob("horovod-*.whl"))
    if ready and not force:
        return ready[0]
    workshop = Workshop(plan, home, check_means(jobs))
    with locked(make_folder(folder) / "lock"):
        ready = list(folder.glob("horovod-*.whl"))
        return ready[0] if ready and not force else workshop.build()


def at_least_one(text: str) -> int:
    """A number of compilers."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Builds, proves and caches the Horovod wheel for this Python.")
    parser.add_argument("--print-key", action="store_true", help="print the cache key and stop")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="copy the wheel there, and print that path")
    parser.add_argument("--frameworks", default="auto", help="torch, tensorflow or torch,tensorflow (installed ones)")
    parser.add_argument("--mpi", choices=("auto", "yes", "no"), default="auto", help="default: yes if it is found")
    parser.add_argument("--cuda", default="auto", metavar="auto|off|PATH", help="the CUDA toolkit (auto)")
    parser.add_argument("--jobs", type=at_least_one, metavar="N", help="compilers at once (by cores and memory)")
    parser.add_argument("--force", action="store_true", help="build even if the wheel is in the cache")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Prints the wheel's path, or the key."""
    options = parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the build cleans up
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        plan = make_plan(options)
        print(
            plan.key()
            if options.print_key
            else deliver(get_wheel(plan, options.force, options.jobs), options.wheel_dir)
        )
        return 0
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (Refusal, Failure, OSError) as error:
        way = "; HOROVOD_WHEEL_CACHE names another folder for the build" if isinstance(error, OSError) else ""
        say(f"{error}{way}")
        return 2 if isinstance(error, Refusal) else 1


def deliver(wheel: Path, folder: Path | None) -> Path:
    """Copies the wheel if that was asked for."""
    if folder is None:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, folder)).absolute()


if __name__ == "__main__":
    sys.exit(main())
