"""What a step tells as telemetry: which of its parts lasted from when to when.

Runs in the engine's main thread; costs some microseconds a step, and never waits.
"""

from __future__ import annotations

from time import perf_counter_ns

from nbdist.engine import emit
from nbdist.protocol.telemetry import Kind


class Stamps:
    """The parts of one attempt, in the order in which a rank comes to them."""

    def __init__(self) -> None:
        self._began_ns = self._last_ns = self._ready_ns = perf_counter_ns()
        self._compute_ns = self._slept_ns = 0
        self._num_batches = 0

    def next_part(self) -> None:
        """What was done since the last part is the user's own; the next begins now."""
        self._last_ns = perf_counter_ns()

    def data(self) -> None:
        """The next batch is there."""
        self._end(Kind.DATA, self._num_batches)

    def slept(self, seconds: float) -> None:
        """So long a part of the forward was no work, since the user has made this rank slow."""
        self._slept_ns += int(seconds * 1e9)

    @property
    def own_compute_s(self) -> float:
        """Forward and backward so far, without sleep."""
        return (self._compute_ns - self._slept_ns) * 1e-9

    def forward(self) -> None:
        """The loss of the present batch is there."""
        self._compute_ns += self._end(Kind.FORWARD, self._num_batches)

    def backward(self, ready_ns: int) -> None:
        """Its gradients are there, since `ready_ns`; since then others were waited for."""
        self._compute_ns += self._end(Kind.BACKWARD, self._num_batches, ready_ns)
        self._ready_ns = ready_ns
        self._num_batches += 1

    def computed(self, ready_ns: int, compute_ns: int) -> None:
        """A batch went forward and backward elsewhere, which told of it; gradients are there."""
        self._compute_ns += compute_ns
        self._ready_ns = self._last_ns = ready_ns
        self._num_batches += 1

    def vote(self) -> None:
        """The votes of all ranks are there, and their gradients."""
        self._end(Kind.VOTE)
        # Without what was waited for between batches, so it may begin later than the first of them.
        emit.span(Kind.COMPUTE, self._ready_ns - self._compute_ns, self._ready_ns)

    def norm(self, norm: float) -> None:
        """The norm of the global gradient is known."""
        emit.scalar(Kind.GRAD_NORM, norm)

    def update(self) -> None:
        """Parameters are updated."""
        self._end(Kind.OPTIMIZER)

    def committed(self, samples: int, loss: float) -> None:
        """The step is over.

        Args:
            samples: of this rank.
            loss: their mean.
        """
        emit.span(Kind.STEP, self._began_ns, perf_counter_ns())
        emit.scalar(Kind.SAMPLES, samples)
        emit.scalar(Kind.LOSS, loss)
        emit.tell_sent()

    def broken(self) -> None:
        """The attempt was given up."""
        emit.span(Kind.STEP, self._began_ns, perf_counter_ns())
        emit.instant(Kind.STEP_BROKEN)
        emit.tell_sent()

    def _end(self, kind: Kind, ident: int = 0, end_ns: int | None = None) -> int:
        """A part ends, and the next begins; how long it lasted."""
        began_ns = self._last_ns
        self._last_ns = perf_counter_ns() if end_ns is None else end_ns
        emit.span(kind, began_ns, self._last_ns, ident=ident)
        return self._last_ns - began_ns
