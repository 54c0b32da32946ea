"""The checkpoint store: a folder in which every checkpoint is whole or does not exist.

    step-00001000/   the engine's files, meta.json, and MANIFEST.json (size and SHA-256 of each file), written last
    latest  best  tags/production    one line each: the name of the checkpoint meant

A checkpoint is written beside its place, made durable, renamed into it, and never changed again: a step that is
saved twice becomes step-00001000.1. Nothing here knows a framework or a rank: the one writing rank publishes,
all may read. No file is ever unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import UserError
from . import manifest, temporaries
from .checkpoint import META, Checkpoint, best_by, by_publication, is_name, metric_of, order, read_checkpoint
from .disk_errors import StoreError, storage_errors
from .lock import run_lock
from .manifest import MANIFEST
from .retention import Facts, Retention

log = logging.getLogger(__name__)

POINTERS = ("latest", "best")

_TAG = re.compile(r"(?!step-|\d+$)\w[\w.+-]*")

Writer = Callable[[Path], object]  # writes its files into the folder given


class DamagedError(UserError):
    """A checkpoint that was asked for fails its verification."""


@dataclass
class _View:
    """What is known of a store's folder; it holds as long as `stamp`, which tells when anything in it last changed."""

    rules: Retention
    sequence: int  # the highest
    stamp: tuple[int, int]


class Store:
    """The checkpoints in one folder, which need not exist yet.

    Args:
        folder: `runs/<name>/checkpoints`.
        keep_last: How many of the newest to keep, at least 1. The best and the tagged ones are always kept.
        keep_best: How many of the best by `metric` to keep.
        keep_every: Keep each checkpoint whose step is a multiple of this; 0 for none.
        metric: The key in `meta["metrics"]` that decides which is best; None for the one that was saved with.
        mode: Whether `max` or `min` of it is best.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        keep_every: int = 0,
        metric: str | None = None,
        mode: str = "max",
    ) -> None:
        for option, value, least in (("last", keep_last, 1), ("best", keep_best, 0), ("every", keep_every, 0)):
            if value < least:
                raise UserError(f"keep_{option}={value} must be at least {least}")
        if mode not in ("max", "min"):
            raise UserError(f"mode={mode} must be max or min")
        self.folder = Path(folder)
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every
        self.metric, self.mode = metric, mode
        self.pinned: set[str] = set()  # names that retention keeps, such as those being uploaded
        self._damaged: set[str] = set()  # names seen to be so; later looks are quick ones
        self._view: _View | None = None
        self._resumed: str | None = None
        self._parent: str | None = None

    # Reading

    def checkpoints(self) -> list[Checkpoint]:
        """All that are published, damaged ones too, by step (as a number).

        Raises:
            UserError: if the folder cannot be read.
        """
        return [read_checkpoint(self.folder / name) for name in self.names()]

    def names(self) -> list[str]:
        """The names of all that are published, damaged ones too, by step.

        Raises:
            UserError: if the folder cannot be read.
        """
        try:
            with os.scandir(self.folder) as entries:
                return sorted((one.name for one in entries if is_name(one.name) and one.is_dir()), key=order)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.access_error(error) or StoreError(f"{self.folder} cannot be read: {error.strerror}") from error

    def newest_good(self) -> Checkpoint | None:
        """The last published one whose every byte is right; a warning names each damaged one passed over.

        Raises:
            UserError: if one cannot be read for want of a right, which is no reason to pass it over.
        """
        for checkpoint in sorted(self.checkpoints(), key=by_publication, reverse=True):
            problems = self.verify(checkpoint)
            if not problems:
                return checkpoint
            self._set_damaged(checkpoint.name)
            log.warning("checkpoint %s is damaged and passed over: %s", checkpoint.folder, "; ".join(problems))
        return None

    def find(self, which: str | int) -> Checkpoint:
        """The checkpoint meant by `latest`, `best`, a step, a tag, a checkpoint's name, or a path; not verified.

        A path may be a checkpoint's folder, or a run's, which means its newest good one.

        Raises:
            UserError: if there is no such checkpoint; the sentence says what there is.
        """
        which = str(which)
        pointers = self.pointers()  # before the checkpoints: a run may publish meanwhile
        found = self.names()
        if which in pointers and pointers[which] not in found:
            raise UserError(f"{which} points to {pointers[which]!r}, which is gone: {_there_are(found, pointers)}")
        same_step = [name for name in found if which.isdecimal() and order(name)[0] == int(which)]
        name = same_step[-1] if same_step else pointers.get(which, which)
        checkpoint = read_checkpoint(self.folder / name) if name in found else _find_path(Path(which))
        if checkpoint is None:
            raise UserError(f"there is no checkpoint {which!r} in {self.folder}: {_there_are(found, pointers)}")
        return checkpoint

    def find_good(self, which: str | int) -> Checkpoint:
        """What find() gives, once its every byte is verified.

        Raises:
            UserError: if there is no such checkpoint, or it is damaged.
        """
        checkpoint = self.find(which)
        self.check(checkpoint)
        return checkpoint

    def verify(self, checkpoint: Checkpoint, hashes: bool = True) -> list[str]:
        """Every problem of a checkpoint, a sentence each.

        Without `hashes` only names, sizes and the content of meta.json are looked at, which takes milliseconds.
        """
        return manifest.verify(checkpoint.folder, None if hashes else {META})

    def check(self, checkpoint: Checkpoint) -> None:
        """Verify a checkpoint's every byte.

        Raises:
            DamagedError: if something is wrong with it.
        """
        if problems := self.verify(checkpoint):
            raise DamagedError(f"checkpoint {checkpoint.folder} is damaged ({'; '.join(problems)}): use another one")

    def pointers(self) -> dict[str, str]:
        """What `latest`, `best` and each tag point to, by name.

        Raises:
            UserError: if they cannot be read.
        """
        return self._read_pointers([self.folder / name for name in POINTERS] + self._tags())

    def _tags(self) -> list[Path]:
        folder = self.folder / "tags"
        try:
            files.check_folder(folder)
            return sorted(folder / name for name in os.listdir(folder) if _TAG.fullmatch(name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.access_error(error) or StoreError(f"no tag can be used: {error.strerror}") from error

    def _read_pointers(self, paths: Iterable[Path]) -> dict[str, str]:
        found = {}
        for path in paths:
            try:
                found[path.name] = files.read_bytes(path, limit=4096).decode(errors="replace").strip()
            except FileNotFoundError:
                continue
            except OSError as error:
                if refusal := files.access_error(error):
                    raise refusal from error
                log.warning("%s points to nothing: %s", path, error.strerror)
        return found

    # Writing

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the store for a run; clears away what dead runs left and mends the pointers first.

        Raises:
            UserError: if another job owns it; the sentence names its host and process.
            StoreError: if the folder cannot be written.
        """
        with ExitStack() as held:
            with storage_errors(f"{self.folder} cannot be used"):
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(run_lock(self.folder))
            self.sweep()
            self._tags()  # a run that could not read them would end them
            self._view = None
            self._point()
            yield

    def publish(self, step: int, write: Writer, meta: Mapping[str, object]) -> Checkpoint:
        """Save a checkpoint: afterwards it is durable, pointed to, and what retention drops is deleted.

        Args:
            step: Optimizer steps done.
            write: Writes the files into the folder given; its errors come through, except those of the disk.
            meta: For meta.json; `metrics` in it is a flat dictionary of numbers.

        Raises:
            StoreError: if it could not be written; nothing of it is left then.
        """
        with self._temporary(f"the checkpoint of step {step}") as temporary:
            self._check_space()
            write(temporary)
            text = json.dumps(self._complete(step, meta), indent=2, allow_nan=False)
            (temporary / META).write_text(text, "utf-8")
            manifest.seal(temporary)
            with self._own_change():
                folder = self._move_in(temporary, step)
        checkpoint = read_checkpoint(folder)
        self._parent = folder.name
        self._note(checkpoint)
        self._settle()
        return checkpoint

    def adopt(self, name: str, write: Writer) -> Checkpoint:
        """Take in a whole checkpoint from elsewhere, with its manifest, under its own name if that is free.

        Raises:
            DamagedError: if what arrived fails its verification.
            StoreError: if it could not be written.
        """
        step, revision = order(name)
        with self._temporary(name) as temporary:
            write(temporary)
            if problems := manifest.verify(temporary):
                raise DamagedError(f"{name} arrived damaged ({'; '.join(problems)}): use another one")
            manifest.sync_all(temporary)
            folder = self._move_in(temporary, step, revision)
        self._view = None
        self._point()
        return read_checkpoint(folder)

    def resumed_from(self, checkpoint: Checkpoint) -> None:
        """Note where the run goes on from: the parent of its first checkpoint, kept as long as the run lives."""
        local = checkpoint.folder.parent.resolve() == self.folder.resolve()
        self._resumed = checkpoint.name if local else None
        self._parent = checkpoint.name if local else str(checkpoint.folder.resolve())

    def tag(self, name: str, checkpoint: Checkpoint) -> None:
        """Let a tag point to a checkpoint of this store, which is then never deleted; moves an existing tag.

        Raises:
            UserError: if the name cannot be a tag's, or the checkpoint is gone.
        """
        if not _TAG.fullmatch(name) or name in POINTERS:
            raise UserError(f"a tag cannot be called {name!r}: use letters, digits, _ . + -, and not a step's name")
        with self._changing():
            if not (self.folder / checkpoint.name).is_dir():
                raise UserError(f"{checkpoint.folder} is not a checkpoint of {self.folder}: tag one that is")
            (self.folder / "tags").mkdir(exist_ok=True)
            self._tags()  # refuses a link, which would lead elsewhere
            self._replace(self.folder / "tags" / name, checkpoint.name)

    def untag(self, name: str) -> None:
        """Remove a tag.

        Raises:
            UserError: if there is none of this name.
        """
        tags = sorted(set(self.pointers()) - set(POINTERS))
        if name not in tags:
            raise UserError(f"there is no tag {name!r} in {self.folder}: there are {', '.join(tags) or 'none'}")
        with self._changing():
            (self.folder / "tags" / name).unlink(missing_ok=True)
            manifest.sync(self.folder / "tags")

    def prune(self, dry_run: bool = False) -> list[Checkpoint]:
        """Delete what retention does not keep, or only say what that would be; damaged ones are left alone.

        Raises:
            StoreError: if the folder cannot be read or written.
        """
        with self._changing():
            dropped = self._dropped()
            trash = [] if dry_run else [self._discard(checkpoint) for checkpoint in dropped]
        with self._own_change():
            for folder in trash:
                shutil.rmtree(folder, ignore_errors=True)
        return dropped

    def sweep(self) -> list[str]:
        """Remove temporaries that no live process owns, those of other hosts after a day; returns their names."""
        return temporaries.sweep(self.folder)

    # Behind it

    def _look(self) -> _View:
        """What is known of the folder, read again if somebody else has changed it."""
        stamp = self._stamp()
        if self._view is None or self._view.stamp != stamp:
            everything = self.checkpoints()
            sound = [item for item in everything if self._is_sound(item.name)]
            rules = Retention(self.keep_last, self.keep_best, self.keep_every)
            by = self._best_by(sound)
            for checkpoint in sound:
                rules.add(_facts(checkpoint, *by))
            sequence = max((int(by_publication(item)[0]) for item in everything if item.meta), default=0)
            self._view = _View(rules, sequence, stamp)
        return self._view

    def _stamp(self) -> tuple[int, int]:
        """Which folder this is, and when a name in it last changed; opening it makes NFS ask its server."""
        try:
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return (0, 0)
        try:
            about = os.fstat(handle)
            return (about.st_ino, about.st_mtime_ns)
        finally:
            os.close(handle)

    @contextmanager
    def _own_change(self) -> Iterator[None]:
        """What is done to the folder inside is known; a change by somebody else is still seen at the next look."""
        view = self._view if self._view and self._view.stamp == self._stamp() else None
        try:
            yield
        finally:
            if view and view is self._view:
                view.stamp = self._stamp()

    def _note(self, checkpoint: Checkpoint) -> None:
        """Take note of what was published."""
        if self._view is None or self.metric is None:  # the newest one says which metric decides
            self._view = None
            return
        self._view.rules.add(_facts(checkpoint, self.metric, self.mode))
        self._view.sequence = max(self._view.sequence, int(by_publication(checkpoint)[0]))

    def _set_damaged(self, *names: str) -> None:
        self._damaged.update(names)
        self._view = None

    def _is_sound(self, name: str) -> bool:
        return name not in self._damaged and not manifest.verify(self.folder / name, {META})

    def _best_by(self, sound: list[Checkpoint]) -> tuple[str | None, str]:
        return best_by(sound) if self.metric is None else (self.metric, self.mode)

    def _complete(self, step: int, meta: Mapping[str, object]) -> Any:
        """Add what the store knows. The sequence orders checkpoints without trusting a clock."""
        metrics = meta.get("metrics")
        if self.metric and isinstance(metrics, Mapping) and metrics and self.metric not in metrics:
            log.warning("no best checkpoint without %s: the metrics are %s", self.metric, ", ".join(metrics))
        sequence = 1 + self._look().sequence
        created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        own = {"step": step, "sequence": sequence, "parent": self._parent, "created": created}
        return _without_nan({**meta, **own, "metric": self.metric, "mode": self.mode})

    def _check_space(self) -> None:
        """Refuse a save that cannot end well, judged by the size of the newest one."""
        newest = self._look().rules.newest
        needed = read_checkpoint(self.folder / newest).size if newest else 0
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            sizes = f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free"
            raise OSError(errno.ENOSPC, f"{sizes}; free some space, or keep fewer checkpoints")

    @contextmanager
    def _temporary(self, what: str) -> Iterator[Path]:
        """A folder to write into, beside the checkpoints; gone afterwards unless it was renamed."""
        folder = self.folder / temporaries.own_name("tmp")
        try:
            with storage_errors(f"{what} could not be saved in {self.folder}", self.folder):
                with self._own_change():
                    folder.mkdir(parents=True)
                yield folder
        finally:
            with self._own_change():
                shutil.rmtree(folder, ignore_errors=True)

    def _move_in(self, temporary: Path, step: int, revision: int = 0) -> Path:
        """Rename a sealed folder to the first free name of its step: the moment at which it comes to exist."""
        for number in itertools.count(revision):
            folder = self.folder / f"step-{step:08d}{f'.{number}' if number else ''}"
            try:
                if not folder.exists():  # rename would replace an empty folder
                    temporary.rename(folder)
                    break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        manifest.sync(self.folder)
        return folder

    def _settle(self) -> None:
        """Point and prune after a publication, which stands even if these fail; pruning may make the space needed."""
        for action in (self._point, self.prune):
            try:
                action()
            except UserError as error:
                log.warning("the checkpoint is safe, but %s", error)

    def _point(self) -> None:
        rules = self._rules()
        now = self._read_pointers(self.folder / name for name in POINTERS)
        for name, wanted in (("latest", rules.newest), ("best", rules.best)):
            if wanted and now.get(name) != wanted:
                self._replace(self.folder / name, wanted)

    def _rules(self) -> Retention:
        """The rules, once it is sure that the newest and the best are whole: not every damage changes the folder."""
        rules = self._look().rules
        while bad := [name for name in (rules.newest, rules.best) if name and not self._is_sound(name)]:
            self._set_damaged(*bad)
            rules = self._look().rules
        return rules

    def _dropped(self) -> list[Checkpoint]:
        rules = self._rules()
        if not rules.unkept:
            return []
        kept = set(self.pointers().values()) | self.pinned | {self._resumed or ""}
        names = sorted(rules.unkept - kept, key=order)
        rules.unkept -= (damaged := {name for name in names if not self._is_sound(name)})
        return [read_checkpoint(self.folder / name) for name in names if name not in damaged]

    def _discard(self, checkpoint: Checkpoint) -> Path:
        """Take a checkpoint away by one rename, so that a half deleted one is never seen."""
        with self._own_change():
            trash = checkpoint.folder.rename(self.folder / temporaries.own_name("trash"))
        self._look().rules.unkept.discard(checkpoint.name)
        return trash

    def _replace(self, file: Path, text: str) -> None:
        temporary = self.folder / temporaries.own_name("tmp")
        with storage_errors(f"{file} could not be written"), self._own_change():
            try:
                manifest.write_durably(temporary, text + "\n")
                temporary.replace(file)
                manifest.sync(file.parent)
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep tags and deletions of several processes apart, so that no tag comes to point to nothing."""
        with storage_errors(f"{self.folder} could not be changed"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(files.open_file(self.folder / ".change", os.O_RDWR | os.O_CREAT), "r+") as file:
                with suppress(OSError):  # a file system without locks: go on
                    fcntl.lockf(file, fcntl.LOCK_EX)
                yield


def store_folder(path: str | Path) -> Path:
    """The store's folder of a run's folder, or of the store's own.

    Raises:
        UserError: if there is no such folder.
    """
    path = Path(path)
    if not _is_folder(path):
        raise UserError(f"there is no folder {path}: give a run's, such as runs/first")
    inner = path / "checkpoints"
    return inner if _is_folder(inner) else path


def _is_folder(path: Path) -> bool:
    """Whether this is a folder, or a link to one.

    Raises:
        UserError: if that cannot be told for want of a right.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except ValueError:
        return False
    except OSError as error:
        if refusal := files.access_error(error):
            raise refusal from error
        return False


def _find_path(path: Path) -> Checkpoint | None:
    if not _is_folder(path):
        return None
    if (path / MANIFEST).exists() or is_name(path.name):
        return read_checkpoint(path.resolve() if path.is_symlink() else path)
    return Store(store_folder(path)).newest_good()


def _there_are(found: Iterable[str], pointers: Iterable[str]) -> str:
    names = [*pointers, *found]
    return f"there are {', '.join(names[-12:])}" if names else "there are none yet"


def _facts(checkpoint: Checkpoint, metric: str | None, mode: str) -> Facts:
    """For retention. NaN was saved as null: it never ranks."""
    value = metric_of(checkpoint, metric)
    score = -value if value is not None and mode == "min" else value
    return Facts(checkpoint.name, checkpoint.step, by_publication(checkpoint), score)


def _without_nan(value: Any) -> Any:
    """Replace what JSON has no number for by null."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
