"""How ranks share the work of a step: one strategy a file, all behind `strategies.base`.

Runs in the engine's main thread.
"""

from nbdist.train.strategies.base import Exchange, Place, Strategy, Summed, Turn
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.diloco import DiLoCo
from nbdist.train.strategies.local_sgd import LocalSGD
from nbdist.train.strategies.mesh import Mesh
from nbdist.train.strategies.parameter_server import ParameterServer
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.sharded import Sharded
from nbdist.train.strategies.tensor_parallel import TensorParallel

__all__ = [
    "DataParallel",
    "DiLoCo",
    "Exchange",
    "LocalSGD",
    "Mesh",
    "ParameterServer",
    "Pipeline",
    "Place",
    "Sharded",
    "Strategy",
    "Summed",
    "TensorParallel",
    "Turn",
]
