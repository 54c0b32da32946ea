"""python -m <package>.compress: see command.py."""

from ..addresses import guarded
from ..errors import end_hydra_well
from ..ranks import launched_rank
from .command import main

end_hydra_well(guarded(main), launched_rank)
