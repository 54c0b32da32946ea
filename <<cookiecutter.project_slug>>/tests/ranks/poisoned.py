"""Run on 2 ranks by test_two_ranks.py: a training in which nothing may be unpickled once it is loaded."""

import importlib
import pickle
import sys
from typing import Any, NoReturn

from jobs import current_engine

from << cookiecutter.package_name >>.errors import end_well
from << cookiecutter.package_name >>.ranks import launched_rank
from << cookiecutter.package_name >>.train import main


class Refusing(pickle.Unpickler):
    """Stands for the class itself, of which what is imported later makes others."""

    def load(self) -> NoReturn:
        refuse()


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise RuntimeError("something was unpickled")


importlib.import_module(f"<< cookiecutter.package_name >>.{current_engine()}.engine")
importlib.import_module(f"horovod.{current_engine()}")
for module in (pickle, importlib.import_module("cloudpickle")):
    vars(module).update(load=refuse, loads=refuse)
pickle.Unpickler = Refusing  # type: ignore[misc]
sys.argv.append(f"engine={current_engine()}")
end_well(main, launched_rank)
