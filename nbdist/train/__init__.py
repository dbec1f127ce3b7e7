"""What runs inside `%%distributed` cells: the trainer, its strategies, and small models.

Loads torch. Works in engines, and without them in a script under torchrun.
"""

from nbdist.train.estimates import estimate
from nbdist.train.evaluate import Evaluate
from nbdist.train.models import GPT, GPTConfig, bench_model, next_token_loss
from nbdist.train.needs import Estimate
from nbdist.train.strategies.data_parallel import DataParallel
from nbdist.train.strategies.diloco import DiLoCo
from nbdist.train.strategies.local_sgd import LocalSGD
from nbdist.train.strategies.mesh import Mesh
from nbdist.train.strategies.parameter_server import ParameterServer
from nbdist.train.strategies.pipeline import Pipeline
from nbdist.train.strategies.sharded import Sharded
from nbdist.train.strategies.tensor_parallel import TensorParallel
from nbdist.train.trainer import Trainer

__all__ = [
    "GPT",
    "DataParallel",
    "DiLoCo",
    "Estimate",
    "Evaluate",
    "GPTConfig",
    "LocalSGD",
    "Mesh",
    "ParameterServer",
    "Pipeline",
    "Sharded",
    "TensorParallel",
    "Trainer",
    "bench_model",
    "estimate",
    "next_token_loss",
]
