"""python -m <package>.launch: see command.py."""

from ..addresses import guarded
from ..errors import end_well
from .command import main

end_well(guarded(main), lambda: 0)
