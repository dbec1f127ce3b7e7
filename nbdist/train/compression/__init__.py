"""How gradients are made smaller on their way between ranks: one idea a module.

`Courier` takes the buckets of a backward pass and has a codec sum each. Runs in the engine's main
thread.
"""

from nbdist.train.compression.codec import Codec
from nbdist.train.compression.courier import Courier, take
from nbdist.train.compression.lowrank import LowRank
from nbdist.train.compression.quantise import Quantise
from nbdist.train.compression.reduced import Reduced
from nbdist.train.compression.sparse import Sparse

__all__ = ["Codec", "Courier", "LowRank", "Quantise", "Reduced", "Sparse", "take"]
