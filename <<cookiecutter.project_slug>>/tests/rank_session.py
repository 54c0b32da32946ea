"""One session of pytest on all ranks of a job: each runs the same tests, and what fails on any rank is shown.

    launch/local.sh -n 2 --command -- python tests/rank_session.py [-k WORDS] [other arguments of pytest]

Of the tests in ranks/ those run that are for the engine TESTED_ENGINE (by default the project's first) and, by
their mark `ranks`, for so many ranks. After each test the ranks wait for each other. When one has failed there and
another does not come, since it waits in a collective for the one that failed, all end; else the tests go on.
"""

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path

import pytest
from jobs import ENGINES, RANKS, current_engine
from waiting import wait_until

from << cookiecutter.package_name >>.ranks import Communicator, open_communicator

LIMIT_S = 120  # for a test on all ranks
PATIENCE_S = 5  # for the others, after one has failed


class RankSession:
    """A plugin of pytest; `ranks` and `tmp_path` are what the tests of several ranks need."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.folder = Path(communicator.on_writer(lambda: tempfile.mkdtemp(prefix="ranks-"), "session"))
        self.tests, self.failed = 0, False
        # While a test runs pytest keeps what is printed.
        self.output, self.errors = (os.fdopen(os.dup(number), "w") for number in (1, 2))

    @pytest.fixture
    def ranks(self) -> Communicator:
        """Those of this job."""
        return self.communicator

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder for this test, the same on all ranks."""
        folder = self.folder / str(self.tests)
        folder.mkdir(exist_ok=True)
        return folder

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "ranks(*numbers): for so many ranks, by default 2")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Tests of another engine, which would import it."""
        others = {*ENGINES} - {current_engine()}
        return True if any(name in collection_path.name for name in others) else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        two = pytest.mark.ranks(2).mark
        items[:] = [one for one in items if self.communicator.size in (one.get_closest_marker("ranks") or two).args]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.tests, self.failed = self.tests + 1, False
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=self.errors)
        result = yield
        self.meet(item.name)
        faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True
            self.say(f"{report.nodeid} failed in its {report.when}\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.config.option.tbstyle = "no"  # all has been said

    def meet(self, test: str) -> None:
        """Wait until this test has ended on all ranks; what failed on one may leave another waiting for ever."""
        self.record("failed" if self.failed else "passed")
        wait_until(lambda: self.all_are_here() or "failed" in self.outcomes(), test, LIMIT_S)
        with suppress(AssertionError):
            wait_until(self.all_are_here, test, PATIENCE_S)
        if not self.all_are_here():
            self.record("gave up")
            self.say(f"{test} has failed on one rank and has not ended on another: the tests after it do not run")
        if "gave up" in self.outcomes():
            os._exit(1)

    def record(self, outcome: str) -> None:
        (self.folder / f"{self.tests}-{self.communicator.rank}").write_text(outcome)

    def all_are_here(self) -> bool:
        return len(self.outcomes()) == self.communicator.size

    def outcomes(self) -> list[str]:
        """Of the ranks that have come to the end of this test."""
        return [file.read_text() for file in self.folder.glob(f"{self.tests}-*")]

    def say(self, text: str) -> None:
        print(f"\nrank {self.communicator.rank}: {text}", file=self.output, flush=True)


def main(arguments: list[str]) -> int:
    """Run the tests; 0 if all passed on all ranks, whose folder then goes."""
    session = RankSession(open_communicator(current_engine(), {"stall_shutdown_s": 60}))
    # Not the ordinary session's fixtures and limits: no signal ends a wait within Horovod.
    options = ["--noconftest", "--timeout=0", "--tb=short", "-p", "no:cacheprovider", *arguments]
    if not any(Path(argument).exists() for argument in arguments):
        options.append(str(RANKS))
    with ExitStack() as stack:
        if not session.communicator.writes:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        code = int(pytest.main(options, plugins=[session]))
    codes = session.communicator.gather(code, "end")
    if session.communicator.writes and not any(codes):
        shutil.rmtree(session.folder)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
