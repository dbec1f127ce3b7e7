"""Small models for tutorials, tests and benchmarks: a byte-level GPT, and an MLP that steps fast.

Plain torch modules, made in an engine's main thread or in any process that has torch; they know
nothing of groups or recovery, only where they can be cut.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BENCH_FEATURES = 64
"""Inputs of the bench model."""

BENCH_CLASSES = 10
"""Outputs of the bench model."""

_BENCH_WIDTH = 128
_BENCH_HIDDEN_LAYERS = 6


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a `GPT`. As it stands: 875 thousand parameters."""

    num_layers: int = 4
    """Blocks, each attention and an MLP."""
    num_heads: int = 4
    """Attention heads of a block; must divide `width`."""
    width: int = 128
    """Features of each token between the blocks."""
    context: int = 128
    """The most tokens that a sequence may have."""
    vocabulary: int = 256
    """Distinct tokens; 256 is every byte."""
    dropout: float = 0.0
    """Share of activations dropped in training; 0: none."""
    tied: bool = False
    """Whether the embedding of tokens also reads them out: one weight instead of two."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the field, the value and what is allowed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name}={value!r}: an integer, at least 1")
        if self.width % self.num_heads:
            raise ValueError(
                f"width={self.width}: must be a multiple of num_heads={self.num_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: at least 0 and less than 1")


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and pre-norm blocks.

    `forward` takes tokens `(batch, length)`, int64, with `length <= config.context`, and returns
    logits `(batch, length, vocabulary)`; those at place i have seen the tokens 0 … i only. Weights
    start as torch's layers make them.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            # Read out with, torch's embeddings of variance 1 would start with logits far too large.
            for embedding in (self.token_embedding, self.position_embedding):
                nn.init.normal_(embedding.weight, std=config.width**-0.5)
            self.head.weight = self.token_embedding.weight

    @property
    def num_parameters(self) -> int:
        """Trainable numbers; a weight with two uses counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(batch, length, vocabulary)` of tokens `(batch, length)`."""
        stream = self._embed(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    @property
    def _embed(self) -> _Embedding:
        return _Embedding(self.token_embedding, self.position_embedding, self.dropout)

    def pipeline_blocks(self) -> list[nn.Module]:
        """Blocks that, applied one after the other, are `forward`: for `Pipeline` to cut between.

        They share their parameters with the model.
        """
        return [self._embed, *self.blocks, nn.Sequential(self.norm, self.head)]

    def tensor_plan(self, num_ranks: int) -> dict[str, Any]:
        """How `TensorParallel` cuts its layers: each rank has some heads, and some of each MLP.

        Embeddings, norms and the head stay whole.

        Raises:
            ValueError: heads cannot be shared out to so many ranks alike.
        """
        if self.config.num_heads % num_ranks:
            raise ValueError(
                f"num_heads={self.config.num_heads}, which {num_ranks} ranks cannot share alike: "
                "the number of ranks must divide it"
            )
        from torch.distributed.tensor import parallel  # noqa: PLC0415 - it takes a second

        by_columns, by_rows = parallel.ColwiseParallel, parallel.RowwiseParallel
        return {
            "blocks.*.attention.query_key_value": by_columns(),
            "blocks.*.attention.onto_stream": by_rows(),
            "blocks.*.mlp.widen": by_columns(),
            "blocks.*.mlp.onto_stream": by_rows(),
        }


class _Embedding(nn.Module):
    """From tokens `(batch, length)` to the stream `(batch, length, width)`."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Dropout) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = tokens, positions
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[-1], self.position_embedding.num_embeddings
        if length > context:
            raise ValueError(
                f"a sequence of {length} tokens, and context={context}: pass shorter "
                "sequences, or make the model with a larger context"
            )
        places = torch.arange(length, device=tokens.device)
        stream: Tensor = self.token_embedding(tokens) + self.position_embedding(places)
        dropped: Tensor = self.dropout(stream)
        return dropped


class _Block(nn.Module):
    """Attention, then an MLP, each added to the stream `(batch, length, width)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = _MLP(config)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        grown: Tensor = stream + self.mlp(self.mlp_norm(stream))
        return grown


class _Attention(nn.Module):
    """Causal attention of several heads over `(batch, length, width)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.dropout = config.dropout
        # Rows come head by head, each with its query, key and value: a piece of them has heads.
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.onto_stream = nn.Linear(config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        # (batch, length, 3 · width) → three of (batch, heads, length, width / heads). There are as
        # many heads as this rank has: `tensor_plan`.
        parted = self.query_key_value(stream).view(batch, length, -1, 3, self.head_width)
        query, key, value = parted.permute(3, 0, 2, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        joined = seen.transpose(1, 2).reshape(batch, length, -1)
        added: Tensor = self.drop(self.onto_stream(joined))
        return added


class _MLP(nn.Module):
    """Two layers, four times as wide between them, over `(batch, length, width)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.onto_stream = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        added: Tensor = self.drop(self.onto_stream(functional.gelu(self.widen(stream))))
        return added


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats: logits `(batch, length, vocabulary)`, targets `(batch, length)`.

    The `loss` that a trainer of a `GPT` takes: all samples have the same length, so the mean over
    tokens is the mean over samples.
    """
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bench_model() -> nn.Module:
    """An MLP for benchmarks of recovery, where a step should cost little.

    Takes `(batch, BENCH_FEATURES)`, returns logits `(batch, BENCH_CLASSES)`; 109 thousand
    parameters. DDP reduces its gradients in one bucket, or in two with `bucket_mb=0.25`.
    """
    layers: list[nn.Module] = [nn.Linear(BENCH_FEATURES, _BENCH_WIDTH), nn.GELU()]
    for _ in range(_BENCH_HIDDEN_LAYERS):
        layers += [nn.Linear(_BENCH_WIDTH, _BENCH_WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(_BENCH_WIDTH, BENCH_CLASSES))
