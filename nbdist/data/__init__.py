"""Datasets: what to train on, without any network. Importing this loads neither numpy nor torch."""

from __future__ import annotations

from nbdist.data.text import VOCABULARY, ByteText, pydoc_text

__all__ = ["VOCABULARY", "ByteText", "pydoc_text"]
