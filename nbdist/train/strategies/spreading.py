"""Two collectives of ranks that have rows each: all come to the whole, or each to a part of a sum.

What they wait for can be broken by a cut (`engine.works`). Runs in the engine's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.engine.works import WORKS

if TYPE_CHECKING:
    from torch import Tensor


def is_gloo(group: Any = None) -> bool:
    """Whether a group is; None: the default group."""
    return "gloo" in str(dist.get_backend_config(group))


def gather_(together: Tensor, mine: Tensor, group: Any) -> None:
    """What each rank has, one after the other, on all of them; blocks."""
    if is_gloo(group):
        WORKS.follow(dist.all_gather_single(together, mine, group, async_op=True)).wait()
    else:
        dist.all_gather_single(together, mine, group)


def scatter_sum_(mine: Tensor, whole: Tensor, group: Any) -> None:
    """A rank's part of the sum of what all have; blocks.

    Gloo has none, so there ranks exchange pieces, and each sums its own in rank order.
    """
    if is_gloo(group):
        pieces = torch.empty_like(whole)
        work = dist.all_to_all_single(pieces, whole, group=group, async_op=True)
        WORKS.follow(work).wait()
        torch.sum(pieces.view(-1, *mine.shape), 0, out=mine)
    else:
        dist.reduce_scatter_single(mine, whole, group=group)
