"""Small groups of processes without engines: forked, on gloo, gone after each call."""

import contextlib
import multiprocessing
import os
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # an optimizer's first step would import it in every process
import torch.distributed as dist
import torch.nn.parallel

CONTEXT = multiprocessing.get_context("fork")
LIMIT_S = 120.0
GROUP_TIMEOUT = timedelta(seconds=20)
GRACE_S = 2.0
"""For the other ranks, when one has failed."""


class RankError(Exception):
    """What a rank raised, as text; `errors` has the text by rank, None where there was no error."""

    def __init__(self, errors):
        super().__init__("\n".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e))
        self.errors = errors


def _be_rank(rank, num, meeting, body, pipe):
    """What a forked process does, from its first line to its last."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if meeting is not None and num > 1:
            dist.init_process_group(
                "gloo", f"file://{meeting}", rank=rank, world_size=num, timeout=GROUP_TIMEOUT
            )
        pipe.send((body(rank), None))
    except BaseException as error:  # noqa: BLE001 - told to the test
        pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)


def _gather(pipes):
    """What the ranks have answered; those that do not in time are said to hang."""
    answers = [(None, "no answer: it hangs")] * len(pipes)
    deadline, left = time.monotonic() + LIMIT_S, set(range(len(pipes)))
    while left and time.monotonic() < deadline:
        for rank in sorted(left):
            if pipes[rank].poll(0.02):
                answers[rank] = (None, "the process ended")
                with contextlib.suppress(EOFError):
                    answers[rank] = pipes[rank].recv()
                left.discard(rank)
                if answers[rank][1] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


@pytest.fixture
def together(tmp_path):
    """`together(num, body)`: what `body(rank)` returns in each of so many processes, by rank.

    They have a default group, if there are two or more; `has_group=False`: none. Where one raises,
    so does this: `RankError`.
    """
    num_calls = 0

    def call(num, body, *, has_group=True):
        nonlocal num_calls
        num_calls += 1
        meeting = tmp_path / f"meeting-{num_calls}" if has_group else None
        pipes, processes = [], []
        try:
            for rank in range(num):
                mine, theirs = CONTEXT.Pipe(duplex=False)
                process = CONTEXT.Process(target=_be_rank, args=(rank, num, meeting, body, theirs))
                process.start()
                theirs.close()
                pipes.append(mine)
                processes.append(process)
            answers = _gather(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = [error for _, error in answers]
        if any(errors):
            raise RankError(errors)
        return [value for value, _ in answers]

    call.failure = RankError
    return call
