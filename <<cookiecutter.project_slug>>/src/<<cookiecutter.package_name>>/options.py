"""Which values the options of conf/ may have, checked before Horovod starts and before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import trust
from .addresses import check_addresses
from .checkpoints.diff import flat
from .errors import UserError


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high`; whole unless `real`."""

    low: float = 1
    high: float = float("inf")
    real: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the value keeps the rule; true and false are no numbers."""
        kinds = (int, float) if self.real else (int,)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        kind = "a number" if self.real else "a whole number"
        return (
            f"{kind} of at least {self.low}" if self.high == float("inf") else f"{kind} from {self.low} to {self.high}"
        )


@dataclass(frozen=True)
class OneOf:
    """One of a few names or values, or a class by _target_ where that is `open`."""

    names: tuple[Any, ...]
    open: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the value is one of them."""
        return value in self.names or (self.open and OmegaConf.is_dict(value) and "_target_" in value)

    def __str__(self) -> str:
        names = ", ".join(str(name).lower() if isinstance(name, bool) else name for name in self.names)
        return f"one of {names}" + (", or {_target_: a class of yours}" if self.open else "")


@dataclass(frozen=True)
class ListOf:
    """A list; `example` is one."""

    example: str

    def accepts(self, value: Any) -> bool:
        """Whether the value is a list."""
        return OmegaConf.is_list(value)

    def __str__(self) -> str:
        return f"a list, as in {self.example}"


class Name:
    """A name for a folder, or a few of them with slashes between."""

    def accepts(self, value: Any) -> bool:
        """Whether the value is such a name: YAML and Hydra may have made a number of it."""
        return isinstance(value, str) and all(self._is_fit(part) for part in value.split("/"))

    def _is_fit(self, part: str) -> bool:
        begins_well = part != "" and part[0] not in ".-~ "
        return begins_well and part.isprintable() and "\\" not in part and len(part.encode()) <= 255

    def __str__(self) -> str:
        return (
            "a name for a folder in runs/, such as first or group/first, of which no part is empty, begins with '.',"
            " '-', '~' or a space, or is longer than 255 bytes; what would be a number needs quotes: \"name='1e3'\""
        )


@dataclass(frozen=True)
class OrNull:
    """What keeps another rule, or null."""

    rule: Number | OneOf | ListOf

    def accepts(self, value: Any) -> bool:
        """Whether the value is null or keeps that rule."""
        return value is None or self.rule.accepts(value)

    def __str__(self) -> str:
        return f"{self.rule}, or null"


Rule = Number | OneOf | ListOf | Name | OrNull

WHOLE, FROM_ZERO = Number(), Number(low=0)
POSITIVE, NOT_NEGATIVE = Number(low=1e-12, real=True), Number(low=0, real=True)
SWITCH = OneOf((True, False))

RULES: dict[str, Rule] = {
    "name": Name(),
    "engine": OneOf(trust.ENGINES),
    "epochs": WHOLE,
    "seed": FROM_ZERO,
    "device": OneOf(("auto", "cpu", "cuda")),
    "precision": OneOf(("fp32", "bf16", "fp16")),
    "compile": SWITCH,
    "channels_last": SWITCH,
    "sync_batch_norm": SWITCH,
    "label_smoothing": Number(low=0, high=1, real=True),
    "clip_norm": OrNull(POSITIVE),
    "on_nan": OneOf(("stop", "skip")),
    "evaluate_every": WHOLE,
    "patience": OrNull(WHOLE),
    "data.batch_size": WHOLE,
    "data.global_batch": OrNull(WHOLE),
    "data.evaluation_batch": WHOLE,
    "data.classes": WHOLE,
    "data.distribution": OneOf(("shard", "replicate")),
    "data.workers": FROM_ZERO,
    "data.on_error": OneOf(("fail", "skip")),
    "optimizer.lr": POSITIVE,
    "schedule.decay": OneOf(("constant", "step", "cosine", "polynomial")),
    "schedule.scaling": OneOf(("linear", "sqrt", "adasum", "none")),
    "schedule.warmup_epochs": NOT_NEGATIVE,
    "schedule.final": NOT_NEGATIVE,
    "schedule.gamma": POSITIVE,
    "schedule.power": POSITIVE,
    "checkpoint.every_epochs": WHOLE,
    "checkpoint.every_steps": OrNull(WHOLE),
    "checkpoint.keep_last": WHOLE,
    "checkpoint.keep_best": FROM_ZERO,
    "checkpoint.keep_every": FROM_ZERO,
    "checkpoint.asynchronous": SWITCH,
    "checkpoint.max_failures": WHOLE,
    "horovod.compression": OneOf(("none", "fp16", "powersgd"), open=True),
    "horovod.powersgd_rank": WHOLE,
    "horovod.op": OneOf(("average", "adasum")),
    "horovod.accumulation": WHOLE,
    "horovod.predivide_factor": POSITIVE,
    "horovod.groups": OrNull(WHOLE),
    "horovod.fusion_threshold_mb": OrNull(NOT_NEGATIVE),
    "horovod.cycle_time_ms": OrNull(POSITIVE),
    "horovod.cache_capacity": OrNull(FROM_ZERO),
    "horovod.autotune": OrNull(SWITCH),
    "horovod.stall_check_s": FROM_ZERO,
    "horovod.stall_shutdown_s": FROM_ZERO,
    "tracking.log_every": WHOLE,
    "tracking.tensorboard": SWITCH,
}
MODEL_AND_DATA = ("model", "data.source")
BUILT = (*MODEL_AND_DATA, "optimizer", "horovod.compression")  # the options of which an engine is built
ABSENT = object()  # an option that what was chosen does not have


def check_options(config: DictConfig, rules: Mapping[str, Rule] = RULES) -> None:
    """Check every option that has a rule, and that what holds it still holds options.

    Raises:
        UserError: for the first option that breaks its rule, or an address with a password, the same on every rank.
    """
    check_addresses(str(value) for _, value in flat(OmegaConf.to_container(config)))
    for option, rule in rules.items():
        group = option.rpartition(".")[0]
        held, value = (OmegaConf.select(config, key, throw_on_missing=True, default=ABSENT) for key in (group, option))
        if held is not ABSENT and not OmegaConf.is_dict(held):
            raise UserError(f"{group}={held} is no choice: set a single option, as in {option}=...", agreed=True)
        if value is not ABSENT and not rule.accepts(value):
            shown = "null" if value is None else value
            raise UserError(f"{option}={shown} must be {rule}", agreed=True)


def read_options(
    file: Path, changes: Sequence[str], trusted: Sequence[str] = (), built: Sequence[str] = BUILT
) -> DictConfig:
    """The config that a run has written, with some options changed, as in ["data.batch_size=64"].

    Args:
        file: The config.
        changes: What the user says, and so trusts.
        trusted: What else may be built, see trust.check().
        built: The options of which something is built.

    Raises:
        UserError: if a value breaks its rule, or the file names what is not trusted; OmegaConf's own error if an option
            does not exist.
    """
    content = trust.read_config(file)
    trust.check_plain(content, file)
    config, said = OmegaConf.create(content), OmegaConf.from_dotlist(list(changes))
    OmegaConf.set_struct(config, True)
    config.merge_with_dotlist(list(changes))
    OmegaConf.resolve(config)  # only the user's words have anything to look up
    parts = [plain(OmegaConf.select(config, option)) for option in built]
    trust.check(parts, file, {*trusted, *trust.targets(plain(said))})
    check_options(config)
    return config


def plain(node: Any, resolve: bool = False) -> Any:
    """A part of a config as plain containers and values."""
    return OmegaConf.to_container(node, resolve=resolve) if OmegaConf.is_config(node) else node
