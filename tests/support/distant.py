"""Made-up runs whose ranks are apart: updates that come late to a server, replicas that drift."""

from __future__ import annotations

from synthetic import SyntheticRun

from nbdist.protocol.telemetry import Kind

AGES = (0, 1, 1, 2, 1, 0, 2, 3, 1, 2, 7)
"""Of one update after the other, again and again."""
PERIOD = 5


class ServedRun(SyntheticRun):
    """Slot 0 is a parameter server."""

    def _step(self, at: float, step: int, generation: int) -> float:
        end = super()._step(at, step, generation)
        value = AGES[step % len(AGES)]
        self._add("distance", end, at=end, slot=0, kind=Kind.STALENESS, value=value)
        return end


class DriftingRun(SyntheticRun):
    """Every five steps there is an outer step; later slots drift further, and all less and less."""

    def _step(self, at: float, step: int, generation: int) -> float:
        end = super()._step(at, step, generation)
        for slot in range(self.num_slots if step % PERIOD == 0 else 0):
            value = 0.02 * (1 + slot) / (1 + 0.02 * step)
            self._add("distance", end, at=end, slot=slot, kind=Kind.DRIFT, value=value)
        return end
