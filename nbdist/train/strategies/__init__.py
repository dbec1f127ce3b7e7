"""How ranks share the work of a step: one strategy a file, all behind `strategies.base`.

Runs in the engine's main thread.
"""

from nbdist.train.strategies.base import Exchange, Place, Strategy, Summed
from nbdist.train.strategies.data_parallel import DataParallel

__all__ = ["DataParallel", "Exchange", "Place", "Strategy", "Summed"]
