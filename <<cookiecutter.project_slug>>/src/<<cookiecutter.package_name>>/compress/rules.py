"""Which values the options of conf/compress/ may have."""

from __future__ import annotations

from omegaconf import DictConfig

from ..errors import UserError
from ..options import NOT_NEGATIVE, POSITIVE, WHOLE, ListOf, Name, Number, OneOf, OrNull, Rule, check_options

RULES: dict[str, Rule] = {
    "name": Name(),
    "trust": ListOf("[my_package.mine.Net]"),
    "compress.layers": ListOf("[name]"),
    "compress.skip": ListOf("[name]"),
    "compress.sweep": OrNull(ListOf("[0.5,0.8]")),
    "compress.sparsity": Number(low=0, high=0.9999, real=True),
    "compress.scope": OneOf(("global", "layer")),
    "compress.schedule": OneOf(("one_shot", "gradual")),
    "compress.pattern": OneOf(("free", "2:4")),
    "compress.kind": OneOf(("static", "dynamic", "weight_only", "fp16", "bf16")),
    "compress.samples": WHOLE,
    "compress.rise": Number(low=1e-6, high=1, real=True),
    "compress.every": WHOLE,
    "compress.rank": OrNull(WHOLE),
    "compress.energy": Number(low=0, high=1, real=True),
    "compress.temperature": POSITIVE,
    "compress.weight": Number(low=0, high=1, real=True),
    "compress.feature_weight": NOT_NEGATIVE,
    "compress.measure.batch": WHOLE,
    "compress.measure.threads": WHOLE,
    "compress.measure.calls": WHOLE,
    "compress.require.max_accuracy_drop": OrNull(NOT_NEGATIVE),
    "compress.require.max_latency_ratio": OrNull(NOT_NEGATIVE),
    "compress.require.min_size_ratio": OrNull(NOT_NEGATIVE),
    "compress.require.min_gzip_ratio": OrNull(NOT_NEGATIVE),
}


def check(config: DictConfig) -> None:
    """Refuse what would give another result than is asked for; names of layers become text.

    Raises:
        UserError: names the option.
    """
    check_options(config, RULES)
    options = config.compress
    for key in ("layers", "skip"):
        if key in options:
            options[key] = [str(name) for name in options[key]]  # torch's may be numbers
    if options.method == "chain":
        return
    if (options.finetune is None) != (options.method == "quantize"):
        raise UserError(
            f"compress.finetune={options.finetune} does not go with compress.method={options.method}", agreed=True
        )
    if options.get("pattern") == "2:4" and options.schedule == "gradual":
        raise UserError("compress.schedule=gradual does not go with compress.pattern=2:4: use one_shot", agreed=True)
    if options.get("rank") is not None and options.sweep:
        raise UserError("compress.sweep is over energies, which compress.rank replaces: leave one out", agreed=True)
