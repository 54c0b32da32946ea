"""How a command ends: one sentence for what the user can mend, a non-zero code for everything else."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import active_children
from typing import Any, NoReturn

log = logging.getLogger(__name__)

USER_ERROR = 2
FAILURE = 1
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later; schedulers can requeue on it
BURST_S = 1.0  # signals that come closer are one: to the rank, to its group, by the launcher
NO_FOLDER = (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)  # what making a run's folder can end in


class UserError(Exception):
    """Something that the user can mend; its text is one sentence: the value, the rule, the way out.

    `agreed` is true when all ranks raise the same error at the same point, so that one need print it.
    """

    code = USER_ERROR  # of the process

    def __init__(self, sentence: str, *, agreed: bool = False) -> None:
        super().__init__(sentence)
        self.agreed = agreed


class Parser(argparse.ArgumentParser):
    """A command line of which one sentence says what is wrong, and on which no option is guessed from its beginning."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """What argparse calls; its own message is six lines."""
        raise UserError(f"{message.removeprefix('argument ')}: --help lists the options")


class _Output(io.FileIO):
    """Standard output or error that nobody need read: what is written to a closed pipe or terminal is lost, no more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return len(data)


def need_no_reader() -> None:
    """Let this process go on when stdout or stderr is closed, as by `| head`, or was so from the beginning."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper) and not isinstance(_raw(stream), _Output):
            with suppress(OSError):
                stream.flush()
            raw = _Output(number, "w", closefd=False)
            buffer: Any = io.BufferedWriter(raw) if stream.buffer is not _raw(stream) else raw  # PYTHONUNBUFFERED
            settings = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(buffer, **settings))


def _raw(stream: io.TextIOWrapper) -> Any:
    return getattr(stream.buffer, "raw", stream.buffer)


def check_arguments(arguments: list[str]) -> None:
    """Refuse in one sentence what Hydra's command line would refuse in many lines, or guess from its beginning.

    Raises:
        UserError: names the argument.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False
    parser.error = Parser.error.__get__(parser)  # type: ignore[method-assign]
    parser.parse_args(arguments)


def end_hydra_well(main: Callable[[], object], rank: Callable[[], int]) -> None:
    """Run Hydra's entry of a command as end_well() does."""

    def command() -> None:
        check_arguments(sys.argv[1:])
        main()

    end_well(command, rank)


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as an exit does, so that nothing of it stays: temporary files, other processes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def end_well(command: Callable[[], object], rank: Callable[[], int]) -> None:
    """Run a command; on an error print its sentence and end this process at once.

    The process ends by `os._exit`: an orderly exit would wait for ranks that will never answer,
    and the launcher takes the other ranks down as soon as this one is gone.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # lets Hydra's errors reach us
    need_no_reader()
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # a full disk is an error of the command too
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        sentence = user_sentence(error)
        if sentence is not None:
            _end(sentence, getattr(error, "code", USER_ERROR), silent=_is_agreed(error) and rank() != 0)
        log.exception("failed")
        _end(_failure_sentence(error), FAILURE)


def _is_agreed(error: Exception) -> bool:
    """Whether rank 0 says the same: the config is one for all."""
    return error.agreed if isinstance(error, UserError) else not isinstance(error, OSError)


def _end(sentence: str, code: int, *, silent: bool = False) -> NoReturn:
    if logging.root.handlers:  # else logging would print it a second time
        log.error(sentence)
    if silent:
        time.sleep(1)  # rank 0 speaks for all, and the launcher ends it as soon as this one is gone
    else:
        sys.stderr.write(f"error: {sentence}\n")  # at once: the launcher looks for the whole line
    logging.shutdown()
    for child in active_children():  # those that read data would wait for this process for ever
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _failure_sentence(error: Exception) -> str:
    if type(error).__name__ == "HorovodInternalError":
        return f"stopped because another rank is gone, or did not come to a collective in time ({error})"
    return f"{type(error).__name__}: {error}"


def user_sentence(error: BaseException) -> str | None:
    """The sentence of an error that the user can mend: a UserError, or what Hydra says about an option."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        where = f" at {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}: make room or set its rights, or choose another folder with hydra.run.dir=..."
    if isinstance(error, OSError) and error.errno in NO_FOLDER:
        return f"{error.strerror} at {error.filename}: choose another name=..., or a folder with hydra.run.dir=..."
    if not type(error).__module__.startswith(("hydra.", "omegaconf.", "yaml.", "antlr4.")):
        return None
    if isinstance(error.__cause__, UserError):
        return str(error.__cause__)
    text = re.sub(r"\s+", " ", str(error)).strip()
    if unquoted := re.search(r"LexerNoViableAltException: ([^=]+)=(.*?) \^", text):
        option, value = unquoted.groups()
        return f"{option}={value} has letters that need quotes: write it as \"{option}='{value}'\""
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"unknown option '{unknown[1]}'{_nearest(unknown[1], error.__cause__)}; --cfg job lists all"
    if unknown := re.search(r"is not in struct full_key: (\S+)", text):
        return f"unknown option '{unknown[1]}'{_nearest(unknown[1], error)}"
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"option '{missing[1]}' has no value: give one, as in {missing[1]}=..."
    if target := re.search(r"Error locating target '(.+?)'", text):
        return f"_target_={target[1]} cannot be imported: correct its name, or put its package where Python finds it"
    if choice := re.search(r"Could not find '(.+)/(.+?)' Available options in '.+?': (.*?)( Config search|$)", text):
        return f"{choice[1]}={choice[2]} is no choice: it must be one of {', '.join(choice[3].split())}"
    return text


def _nearest(option: str, cause: BaseException | None) -> str:
    """Name the options beside the unknown one that look like it, else all of them."""
    parent, _, key = option.rpartition(".")
    known = [str(name) for name in getattr(cause, "parent_node", None) or []]
    near = difflib.get_close_matches(key, known, n=1) or known
    names = ", ".join(f"{parent}.{name}" if parent else name for name in near)
    return f": did you mean {names}?" if names else ""
