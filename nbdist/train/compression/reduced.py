"""fp16 and bf16: gradients travel, and are summed, in half as many bits.

Bytes for N numbers: 2N of an all-reduce's, where float32 has 4N. There is no error feedback: what
rounding takes is noise of 2^-11 (fp16) or 2^-8 (bf16) of each number. fp16 ends at 65,504 and
begins at 6e-8; a sum beyond it is infinite on all ranks, and all skip the step. bf16 has the range
of float32. (Micikevicius et al. 2018, "Mixed precision training"; Kalamkar et al. 2019, "A study of
BFLOAT16 for deep learning training".) Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.train.compression.residual import Residual

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from nbdist.train.compression.parcel import Parcel
    from nbdist.train.compression.rounds import Wait


class Reduced:
    """Cast, sum, cast back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.residual = Residual()
        self._dtype = dtype

    def rounds(self, parcel: Parcel) -> Generator[Wait, None, None]:
        """One all-reduce; the vote has one beside it, in its own precision."""
        short = parcel.flat.to(self._dtype)
        yield from parcel.all_reduce(short, parcel.vote)
        parcel.put(short, parcel.vote, is_finite=bool(short.isfinite().all()))
