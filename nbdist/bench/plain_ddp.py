"""A plain script: a loop of torch's own around DistributedDataParallel, without nbdist.

Run as a module, once for each rank, with the rank, the number of ranks and a file to meet at. For
each line of its input, a number of steps, it prints how many seconds a step took. What it does in a
step is the least that a script can do: its share of the batch is cut out of tensors by indices, no
sampler and no loader; forward, backward, AdamW; it never looks at the loss.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.train.models import BENCH_CLASSES, BENCH_FEATURES, bench_model

NUM_SAMPLES = 4096
GLOBAL_BATCH = 64
LEARNING_RATE = 3e-4


def tensors() -> tuple[Tensor, Tensor]:
    """Inputs and targets: random, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, BENCH_FEATURES, generator=generator)
    targets = torch.randint(0, BENCH_CLASSES, (NUM_SAMPLES,), generator=generator)
    return inputs, targets


def main(rank: int, num_ranks: int, meeting: str) -> None:
    """Train as the input says, until it ends."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(bench_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loss_of = nn.CrossEntropyLoss()
    inputs, targets = tensors()
    order = torch.randperm(NUM_SAMPLES)
    size, step = GLOBAL_BATCH // num_ranks, 0
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(line)):
            start = step % (NUM_SAMPLES // GLOBAL_BATCH) * GLOBAL_BATCH + rank * size
            indices = order[start : start + size]
            optimizer.zero_grad()
            loss_of(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            step += 1
        seconds = time.perf_counter() - began
        sys.stdout.write(f"{seconds / int(line)}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
