"""What a file from elsewhere may have built: only what is listed here, or what the user trusts by exactly its name.

The configs and descriptions in checkpoints, model folders, runs and reports are data. They pass check() before
anything is made of them. What conf/ and the command line say is the user's own program and is not looked at.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Collection, Iterator
from contextlib import suppress
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from . import files
from .errors import UserError

ENGINES = ("torch", "tensorflow")
MODELS = ("mlp", "cnn", "resnet18", "resnet50")
SOURCES = ("data.digits", "data.synthetic", "data.npy", "data.image_folder", "tensorflow.tfrecord.tfrecords")
OPTIMIZERS = ("SGD", "Adam", "AdamW")
# To have your own built from checkpoints without --trust, add it: it must do no harm whatever its arguments are.
LISTED = frozenset(
    [
        *(f"{__package__}.{engine}.models.{name}" for engine, name in product(ENGINES, MODELS)),
        *(f"{__package__}.compress.{engine}.shrink.shrunk" for engine in ENGINES),
        f"{__package__}.compress.torch.fake_quantize.prepare",
        *(f"{__package__}.{name}" for name in SOURCES),
        *(f"{home}.{name}" for home, name in product(("torch.optim", "keras.optimizers"), OPTIMIZERS)),
    ]
)
# What must hold of the other words that Hydra's instantiate() obeys.
_SWITCHES = {
    "_partial_": (True, False),
    "_recursive_": (True, False),
    "_convert_": ("none", "partial", "object", "all"),
}
LARGEST_CONFIG, LARGEST_JSON = 2**20, 2**24  # bytes; a network with a thousand changed layers needs a tenth
DEEPEST, LONGEST = 100, 50_000  # levels and words of a config, which then takes seconds at most


def check(content: Any, origin: str | Path, trusted: Collection[str] = ()) -> None:
    """Refuse what a file would have built, at any depth, unless each callable is listed or trusted.

    Args:
        content: Plain containers as they were read.
        origin: Where from, for the sentence.
        trusted: Callables by their whole names, as in ["torchvision.models.resnet18"]; a package's name covers nothing.

    Raises:
        UserError: names the callables, or what the file may not hold.
    """
    check_plain(content, origin)
    refused = sorted({*targets(content)} - LISTED - {*trusted})
    if refused:
        names = ",".join(refused)
        raise UserError(
            f"{origin} names {', '.join(refused)}, which could run any code: only if you know what it does, add"
            f" {' '.join(f'--trust {name}' for name in refused)} (compress: trust=[{names}]; load_model: trusted=)"
        )


def check_plain(content: Any, origin: str | Path) -> None:
    """Refuse what OmegaConf or Hydra would work out: interpolations, and odd values of Hydra's own keys.

    Raises:
        UserError: names it.
    """
    for node in _nodes(content):
        if isinstance(node, str) and "${" in node:
            raise UserError(
                f"{origin} holds {node[:80]!r}, and in such a file nothing is looked up: write the value itself"
            )
        for key in ("_target_", "_args_", *_SWITCHES) if isinstance(node, dict) else ():
            if key in node and not _is_usual(key, node[key]):
                raise UserError(f"{origin} holds {key}={str(node[key])[:80]}, which has no such form: do not use it")


def _is_usual(key: str, value: Any) -> bool:
    if key in _SWITCHES:
        return any(value is one or (value == one and isinstance(one, str)) for one in _SWITCHES[key])
    return isinstance(value, str if key == "_target_" else list)


def targets(content: Any) -> Iterator[str]:
    """Every callable that plain containers name for Hydra's instantiate(), at any depth."""
    for node in _nodes(content):
        if isinstance(node, dict) and "_target_" in node:
            yield str(node["_target_"])


def _nodes(content: Any) -> Iterator[Any]:
    """Each container, key and value, however deep."""
    waiting = [content]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict):
            waiting += [*node, *node.values()]
        elif isinstance(node, list | tuple):
            waiting += node


def add_trust(parser: ArgumentParser) -> None:
    """Give a command the option --trust."""
    what = "a callable that files may name, as torchvision.models.resnet18; may be given several times"
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help=what)


def check_program(loader: str, file: Path, trusted: Collection[str]) -> None:
    """Refuse a file that its loader may take code from, unless that loader is trusted.

    Raises:
        UserError: names the loader.
    """
    if loader not in trusted:
        raise UserError(f"{file} may hold code, which {loader} runs: only if you trust its maker, add --trust {loader}")


def read_config(file: Path) -> dict[str, Any]:
    """A config.yaml as plain containers; nothing in it is looked up.

    Raises:
        UserError: if it is none, too large, or repeats parts by aliases, which can grow without end.
    """
    import yaml
    from omegaconf import OmegaConf  # takes a moment, which `checkpoints list` need not wait
    from omegaconf.errors import OmegaConfBaseException

    opening = (
        yaml.FlowSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.BlockMappingStartToken,
    )
    closing = yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken
    text = read_text(file, LARGEST_CONFIG)
    try:
        depth = 0
        for count, token in enumerate(yaml.scan(text)):
            depth += isinstance(token, opening) - isinstance(token, closing)
            if isinstance(token, yaml.AliasToken) or depth > DEEPEST or count > LONGEST:
                raise ValueError("it repeats a part, or is too deep or long")
        content = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{file} is no readable config ({type(error).__name__}): use another one") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is no config, which has options by name: use another one")
    return {str(key): value for key, value in content.items()}


def read_json(file: Path) -> dict[str, Any]:
    """A small JSON object.

    Raises:
        UserError: if the file is none.
    """
    with suppress(ValueError, RecursionError):
        content = json.loads(read_text(file, LARGEST_JSON))
        if isinstance(content, dict):
            return content
    raise UserError(f"{file} is no JSON object: it is damaged, or of another program")


def read_text(file: Path, largest: int) -> str:
    """A small file; of what is none, as a pipe, a device or a link, nothing is read.

    Raises:
        UserError: if it is missing, unreadable, no file or too large.
    """
    try:
        return files.read_bytes(file, largest).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text in UTF-8: it is damaged, or of another program") from error
    except OSError as error:
        raise files.access_error(error) or UserError(f"{file} cannot be read: {error.strerror}") from error
