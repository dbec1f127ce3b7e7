"""A made-up run whose replicas are looked at; one of them is changed on the way."""

from __future__ import annotations

from synthetic import SyntheticRun

PERIOD = 10
"""Steps from look to look; the first that differs is one of them."""
CHANGED_AT = 30
BLOCKS = 5
WHO, WHAT = 2, 3


class AgreeingRun(SyntheticRun):
    """From step `CHANGED_AT` on slot `WHO` differs in block `WHAT`."""

    def _step(self, at: float, step: int, generation: int) -> float:
        end = super()._step(at, step, generation)
        for slot in self._members(at) if step % PERIOD == 0 else ():
            does_differ = slot == WHO and step >= CHANGED_AT
            self._add(
                "agreement",
                end,
                at=end,
                step=step,
                differs=does_differ << WHAT,
                blocks=BLOCKS,
                stride=1,
                anchors=0,
                slot=slot,
                generation=generation,
            )
        return end
