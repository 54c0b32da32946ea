"""Manage the checkpoints of a run: python -m <package>.checkpoints list runs/first (see docs/checkpoints.md)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import Parser
from ..tables import print_table
from .checkpoint import Checkpoint, best_by, metric_of
from .diff import changes, flat, read_flat, weight_changes
from .manifest import read_manifest
from .store import Store, store_folder

# The libraries that only some commands need are imported there: `list` must answer at once.

DAMAGED = 1


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 if a checkpoint is damaged."""
    options = _parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def list_(options: argparse.Namespace) -> int:
    """All checkpoints of a run, by step."""
    store = _store(options)
    tags = _tags(store)  # before the checkpoints: a run may publish meanwhile
    checkpoints = store.checkpoints()
    metric, _ = best_by(checkpoints)
    rows = [_row(store, item, metric, tags.get(item.name, []), options.verify) for item in checkpoints]
    if options.json:
        return _print_json(rows)
    columns = ("step", "epoch", metric or "metric", "size", "age", "tags", "state", "commit")
    print_table(columns, (_cells(row) for row in rows))
    return 0


def show(options: argparse.Namespace) -> int:
    """Everything about one checkpoint: its meta.json, its files, and where it came from."""
    store = _store(options)
    checkpoint = store.find(options.which)
    try:
        files = {name: size for name, (size, _) in read_manifest(checkpoint.folder).items()}
    except (OSError, ValueError):
        files = {}
    about = {
        "folder": str(checkpoint.folder),
        "tags": _tags(store).get(checkpoint.name, []),
        "problems": store.verify(checkpoint, hashes=False),
        "ancestors": list(_ancestors(store, checkpoint)),
        "files": files,
        "meta": checkpoint.meta,
    }
    if options.json:
        return _print_json(about)
    print_table(("what", "value"), ((key, _text(value)) for key, value in flat(about)))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read every byte of some checkpoints, or of all."""
    store = _store(options)
    chosen = [store.find(which) for which in options.which] or store.checkpoints()
    results = {checkpoint.name: store.verify(checkpoint) for checkpoint in chosen}
    if options.json:
        _print_json(results)
    else:
        print_table(("checkpoint", "state"), ((name, "\n".join(found) or "good") for name, found in results.items()))
    return DAMAGED if any(results.values()) else 0


def diff(options: argparse.Namespace) -> int:
    """What differs between two checkpoints: config, metrics, weights."""
    store = _store(options)
    old, new = store.find_good(options.old), store.find_good(options.new)
    found = {
        "config": changes(*(read_flat(item.folder / "config.yaml") for item in (old, new))),
        "metrics": changes(old.meta.get("metrics") or {}, new.meta.get("metrics") or {}),
        "weights": weight_changes(old, new),
    }
    if options.json:
        return _print_json(found)
    rows = ((part, key, _text(a), _text(b)) for part, keys in found.items() for key, (a, b) in keys.items())
    print_table(("part", "key", old.name, new.name), rows)
    return 0


def tag(options: argparse.Namespace) -> int:
    """Give a checkpoint a tag, or move the tag to it."""
    store = _store(options)
    checkpoint = store.find_good(options.which)
    store.tag(options.name, checkpoint)
    return _report(options, {options.name: checkpoint.name})


def untag(options: argparse.Namespace) -> int:
    """Remove a tag; the checkpoint stays until retention drops it."""
    _store(options).untag(options.name)
    return _report(options, {options.name: None})


def prune(options: argparse.Namespace) -> int:
    """Delete what the given rules do not keep; never the latest, the best or a tagged one."""
    limits = {"keep_last": options.keep_last, "keep_best": options.keep_best, "keep_every": options.keep_every}
    store = Store(store_folder(options.run), **limits)
    with store.lock():  # a live run prunes by itself and knows what it still needs
        dropped = store.prune(dry_run=options.dry_run)
    verb = "would delete" if options.dry_run else "deleted"
    return _report(options, {checkpoint.name: verb for checkpoint in dropped})


def push(options: argparse.Namespace) -> int:
    """Upload a checkpoint and the tags to an address that fsspec knows."""
    from .mirror import Remote

    store = _store(options)
    checkpoint = store.find_good(options.which)
    Remote(options.url).push(store, checkpoint)
    return _report(options, {checkpoint.name: options.url})


def pull(options: argparse.Namespace) -> int:
    """Download a checkpoint into a run's folder, verified."""
    from .mirror import download

    checkpoint = download(options.url, Path(options.run) / "checkpoints", options.which)
    return _report(options, {checkpoint.name: str(checkpoint.folder)})


def _parser() -> Parser:
    parser = Parser(prog=f"python -m {__package__}", description="Manage the checkpoints of a run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], int], *positionals: str) -> argparse.ArgumentParser:
        name = command.__name__.rstrip("_")
        sub = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        for positional in positionals:
            sub.add_argument(positional, metavar=positional.upper(), help=_HELP[positional])
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command)
        return sub

    add(list_, "run").add_argument("--verify", action="store_true", help="read every byte")
    add(show, "run").add_argument("which", metavar="WHICH", nargs="?", default="latest", help=_HELP["which"])
    add(verify, "run").add_argument("which", metavar="WHICH", nargs="*", help=_HELP["which"] + "; default: all")
    add(diff, "run", "old", "new")
    add(tag, "run", "name", "which")
    add(untag, "run", "name")
    pruning = add(prune, "run")
    pruning.add_argument("--keep-last", type=int, required=True, help="how many of the newest to keep")
    pruning.add_argument("--keep-best", type=int, default=1, help="how many of the best to keep (default: 1)")
    pruning.add_argument("--keep-every", type=int, default=0, help="keep the steps that are multiples of this")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add(push, "run", "url").add_argument("which", metavar="WHICH", nargs="?", default="latest", help=_HELP["which"])
    add(pull, "url", "run").add_argument("which", metavar="WHICH", nargs="?", default="latest", help=_HELP["which"])
    return parser


_WHICH = "latest, best, a step, a tag, a checkpoint's name or a path"
_HELP = {
    "run": "the run's folder, such as runs/first",
    "which": _WHICH,
    "old": _WHICH,
    "new": _WHICH,
    "name": "the tag, such as production",
    "url": "an address for fsspec, such as s3://bucket/runs/first",
}


def _store(options: argparse.Namespace) -> Store:
    return Store(store_folder(options.run))


def _row(store: Store, checkpoint: Checkpoint, metric: str | None, tags: list[str], hashes: bool) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "epoch": checkpoint.meta.get("epoch"),
        "metric": metric_of(checkpoint, metric),
        "bytes": checkpoint.size,
        "created": checkpoint.meta.get("created"),
        "tags": tags,
        "problems": store.verify(checkpoint, hashes),
        "git_commit": checkpoint.meta.get("git_commit"),
        "git_dirty": checkpoint.meta.get("git_dirty"),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    revision = row["name"].partition(".")[2]
    commit = _text(row["git_commit"])[:8] + ("+" if row["git_dirty"] else "")
    return (
        f"{row['step']}{'.' + revision if revision else ''}",
        _text(row["epoch"]),
        _text(row["metric"]),
        _size(row["bytes"]),
        _age(row["created"]),
        " ".join(row["tags"]),
        "damaged: " + "\n".join(row["problems"]) if row["problems"] else "good",
        commit,
    )


def _tags(store: Store) -> dict[str, list[str]]:
    """The pointers to each checkpoint."""
    tags: dict[str, list[str]] = {}
    for pointer, name in store.pointers().items():
        tags.setdefault(name, []).append(pointer)
    return tags


def _ancestors(store: Store, checkpoint: Checkpoint) -> Iterator[str]:
    """The parents as far back as they are still there, and the first that is not."""
    by_name = {item.name: item for item in store.checkpoints()}
    parent = checkpoint.meta.get("parent")
    while isinstance(parent, str):
        found = by_name.pop(parent, None)
        yield parent if found else f"{parent} (not here)"
        parent = found.meta.get("parent") if found else None


def _report(options: argparse.Namespace, done: dict[str, Any]) -> int:
    if options.json:
        return _print_json(done)
    for name, what in done.items():
        print(f"{name}: {what or 'removed'}")
    return 0


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _age(created: str | None) -> str:
    """How long ago; a clock that went back counts as now."""
    try:
        seconds = max(0, int(time.time() - datetime.fromisoformat(created or "").timestamp()))
    except (TypeError, ValueError):
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
