"""python -m <package>.checkpoints: see command.py."""

import sys

from ..errors import end_well
from .command import main

end_well(lambda: sys.exit(main()), lambda: 0)
