"""Refuses answers that would give a broken project, before anything is written."""

import json
import keyword
import re
import shlex
import sys
import unicodedata
from importlib import metadata
from typing import Any

# JSON never holds three quotes in a row, so no answer can break out of the raw string.
TEXT = r"""<< cookiecutter | tojson >>"""
if not TEXT.startswith("{"):  # an older one does not know these delimiters
    sys.exit(
        f"error: cookiecutter {metadata.version('cookiecutter')} is too old, this template needs 2.6 or newer: "
        "pip install 'cookiecutter>=2.6'"
    )
ANSWERS: dict[str, Any] = json.loads(TEXT)

FRAMEWORKS = ("torch", "tensorflow", "both")
PYTHONS = ("3.10", "3.11", "3.12")  # that of Ubuntu 24.04 is the newest for which CUDA images exist
LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause", "proprietary")
# A test finds the names that these lists lack, in locks, rendered files, environments and the libraries of all Pythons.
# What the project installs: one of the same name would take its place.
INSTALLED = """
absl-py ai-edge-litert aiobotocore aiohappyeyeballs aiohttp aioitertools aiosignal annotated-types
antlr4-python3-runtime argcomplete ast-serialize astunparse attrs aws-xray-sdk backports-strenum blinker boto3
botocore certifi cffi cfn-lint charset-normalizer click cloudpickle cmake colorlog contourpy cookiecutter cryptography
cuda-bindings cuda-pathfinder cuda-toolkit cycler dependency-groups distlib docker execnet filelock flask flask-cors
flatbuffers flit-core fonttools frozenlist fsspec gast google-pasta graphql-core grpcio h5py horovod humanize
hydra-core hydra-submitit-launcher idna iniconfig itsdangerous jinja2 jmespath joserfc jsonpatch jsonpath-ng
jsonpointer jsonschema jsonschema-path jsonschema-specifications keras kiwisolver lazy-object-proxy libclang librt
markdown markdown-it-py markupsafe matplotlib mdurl ml-dtypes moto mpmath multidict mypy mypy-extensions namex
networkx ninja nox numpy nvidia-cublas nvidia-cublas-cu12 nvidia-cuda-cupti nvidia-cuda-cupti-cu12
nvidia-cuda-nvcc-cu12 nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime nvidia-cuda-runtime-cu12
nvidia-cudnn-cu12 nvidia-cudnn-cu13 nvidia-cufft nvidia-cufft-cu12 nvidia-cufile nvidia-cufile-cu12 nvidia-curand
nvidia-curand-cu12 nvidia-cusolver nvidia-cusolver-cu12 nvidia-cusparse nvidia-cusparse-cu12 nvidia-cusparselt-cu12
nvidia-cusparselt-cu13 nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvjitlink-cu12 nvidia-nvshmem-cu12
nvidia-nvshmem-cu13 nvidia-nvtx nvidia-nvtx-cu12 omegaconf onnx onnx-ir onnxruntime onnxscript
openapi-schema-validator openapi-spec-validator opt-einsum optree packaging pathable pathspec pillow pip platformdirs
pluggy propcache protobuf psutil py-partiql-parser pycparser pydantic pydantic-core pydantic-settings pygments
pyparsing pytest pytest-timeout pytest-xdist python-dateutil python-discovery python-dotenv pyyaml referencing regex
requests responses rfc3339-validator rich rpds-py ruff s3fs s3transfer safetensors setuptools six submitit sympy
tensorboard tensorboard-data-server tensorflow tensorflow-cpu tensorflow-gpu termcolor torch torch-pruning tqdm triton
typing-extensions typing-inspection tzdata urllib3 uv virtualenv werkzeug wheel wrapt xmltodict yarl
"""
# What is imported from these under other names, from the folders beside the package, and from some Pythons alone.
IMPORTED = """
absl aifc annotationlib antlr4 asynchat asyncore attr audioop backports binhex build_horovod cfnlint cgi cgitb chunk
clang compress_helpers compression conftest crypt cuda dateutil demo distutils docs dotenv engine_helpers faulty
functorch google graphql grpc hydra hydra_plugins imghdr imp isympy jobs jsonpatch_cli launch lib2to3 licenses locks
mailcap markdown_it mpi4py mpl_toolkits msilib multirun mypyc needs nis nntplib noxfile nvidia ossaudiodev own pasta pil
pipes pkg_resources predict profiling py pydevd_plugins pylab quantize_helpers rank_session rpds runs scipy scripts
sklearn smtpd sndhdr spwd src sre_compile sre_constants sre_parse stalls store_helpers sunau telnetlib tests tomllib
torch_halves torchgen uu waiting xdist xdrlib xxlimited yaml
"""
DISTRIBUTIONS, MODULES = INSTALLED.split(), IMPORTED.split()


def refuse(key: str, rule: str, example: str) -> None:
    """Ends with one sentence: the value, the rule, an example; then the command that keeps the other answers."""
    value = json.dumps(ANSWERS[key], ensure_ascii=not str(ANSWERS[key]).isprintable())
    others = {name: text for name, text in ANSWERS.items() if not name.startswith("_") and name != key}
    words = ["cookiecutter", str(ANSWERS.get("_template", ".")), *(f"{name}={text}" for name, text in others.items())]
    sys.exit(
        f"error: {key} is {value}, but it must be {rule}, for example {example}.\n"
        f"The same answers but this one: {shlex.join(words)}"
    )


def check_text(key: str, example: str) -> None:
    """A human-readable answer: one line with something in it."""
    kinds = {unicodedata.category(letter) for letter in ANSWERS[key]}
    if kinds & {"Cc", "Cs", "Zl", "Zp"} or not any(kind[0] not in "CZ" for kind in kinds):
        refuse(key, "one line without control characters that is not empty", example)


def check_choice(key: str, choices: tuple[str, ...]) -> None:
    """Cookiecutter checks choices too, but not those that come from a replay file."""
    if ANSWERS[key] not in choices:
        refuse(key, "one of " + ", ".join(choices), choices[0])


def check_part(key: str, *needed: str) -> None:
    """An answer that is of use only with others."""
    lacking = [name for name in needed if not ANSWERS[name]]
    if ANSWERS[key] and lacking:
        others = " ".join(f"{name}=yes" for name in lacking)
        refuse(key, "no without " + " and ".join(lacking), f"{key}=no, or {others} beside it")


def check_slug() -> None:
    """The slug is a folder, a distribution and a host name at once; cookiecutter.json refuses most of these sooner."""
    slug = ANSWERS["project_slug"]
    if not re.fullmatch(r"[a-z](-?[a-z0-9]){0,49}", slug) or len(slug) > 50:
        rule = "1 to 50 lower-case letters, digits and single inner hyphens, a letter first"
        refuse("project_slug", rule, "my-training")
    if slug in DISTRIBUTIONS:
        refuse("project_slug", "a name that no package has which the project installs", f"{slug[:41]}-training")


def is_taken(package: str) -> bool:
    """Whether a module of this name is there already, in any supported Python."""
    taken = {name.replace("-", "_") for name in DISTRIBUTIONS}
    return package in taken or package in MODULES or package in getattr(sys, "stdlib_module_names", ())


def check_package() -> None:
    """The package must be importable and hide no other module."""
    name = ANSWERS["package_name"]
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", name) or keyword.iskeyword(name):
        rule = "a lower-case Python identifier of at most 50 letters, digits and underscores, no keyword"
        refuse("package_name", rule, "my_training")
    if is_taken(name):
        rule = "a name that no module of Python, of the dependencies or of the tests has"
        refuse("package_name", rule, f"{name[:41]}_training")


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
    check_part("use_slurm", "use_cluster")
    check_part("use_kubernetes", "use_container", "use_cluster")


main()
