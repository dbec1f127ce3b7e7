"""A made-up run that tells what its ranks send."""

from __future__ import annotations

from synthetic import BUCKET_BYTES, NUM_BUCKETS, SyntheticRun

PAYLOAD_BYTES = NUM_BUCKETS * BUCKET_BYTES


class SendingRun(SyntheticRun):
    """All ranks sum their gradients in each step; an engine in another's place goes on from it."""

    def _build(self) -> None:
        self._sent = dict.fromkeys(range(self.num_slots), 0.0)
        super()._build()

    def _step(self, at: float, step: int, generation: int) -> float:
        end, members = super()._step(at, step, generation), self._members(at)
        for slot in members:
            self._sent[slot] += PAYLOAD_BYTES * 2 * (len(members) - 1) / len(members)
            told = {"step": step, "slot": slot, "sent_bytes": self._sent[slot]}
            self._add("sent", end, at=end, **told)
        return end
