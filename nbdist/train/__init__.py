"""Training on all ranks of a group that may change: the trainer, its strategies, evaluations.

Loaded by engines and by scripts; loads torch. Never loads the kernel's column or the supervisor.
"""

from nbdist.train.evaluate import Evaluate
from nbdist.train.strategies import DataParallel
from nbdist.train.trainer import Trainer

__all__ = ["DataParallel", "Evaluate", "Trainer"]
