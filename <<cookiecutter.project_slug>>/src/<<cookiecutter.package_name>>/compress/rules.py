"""Which values the options of conf/compress/ may have."""

from __future__ import annotations

from ..options import NOT_NEGATIVE, POSITIVE, WHOLE, ListOf, Name, Number, OneOf, Rule

RULES: dict[str, Rule] = {
    "name": Name(),
    "trust": ListOf("[my_package.mine.Net]"),
    "compress.layers": ListOf("[name]"),
    "compress.skip": ListOf("[name]"),
    "compress.sweep": ListOf("[0.5,0.8]"),
    "compress.sparsity": Number(low=0, high=0.9999, real=True),
    "compress.scope": OneOf(("global", "layer")),
    "compress.schedule": OneOf(("one_shot", "gradual")),
    "compress.pattern": OneOf(("free", "2:4")),
    "compress.kind": OneOf(("static", "dynamic", "weight_only", "fp16", "bf16")),
    "compress.samples": WHOLE,
    "compress.rise": Number(low=1e-6, high=1, real=True),
    "compress.every": WHOLE,
    "compress.rank": WHOLE,
    "compress.energy": Number(low=0, high=1, real=True),
    "compress.temperature": POSITIVE,
    "compress.weight": Number(low=0, high=1, real=True),
    "compress.feature_weight": NOT_NEGATIVE,
    "compress.measure.batch": WHOLE,
    "compress.measure.threads": WHOLE,
    "compress.measure.calls": WHOLE,
    "compress.require.max_accuracy_drop": NOT_NEGATIVE,
    "compress.require.max_latency_ratio": NOT_NEGATIVE,
    "compress.require.min_size_ratio": NOT_NEGATIVE,
    "compress.require.min_gzip_ratio": NOT_NEGATIVE,
}

NULLABLE = {
    "compress.sweep",
    "compress.rank",
    "compress.require.max_accuracy_drop",
    "compress.require.max_latency_ratio",
    "compress.require.min_size_ratio",
    "compress.require.min_gzip_ratio",
}
