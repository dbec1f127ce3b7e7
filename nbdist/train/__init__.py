"""Training on engines. What users name is public here; it loads torch."""

from __future__ import annotations

from nbdist.train.models import GPT, GPTConfig, bench_model, next_token_loss

__all__ = ["GPT", "GPTConfig", "bench_model", "next_token_loss"]
