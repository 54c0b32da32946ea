"""python -m <package>.export: see command.py."""

from ..errors import end_well
from .command import main

end_well(main, lambda: 0)
