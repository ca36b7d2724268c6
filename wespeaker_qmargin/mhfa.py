"""Multi-head factorised attentive pooling: all layers of a pretrained encoder to one embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MHFA(nn.Module):
    """Hidden states of L layers, L x (B, T, D), to embeddings (B, embed_dim).

    With layer weights a, b (each L numbers), heads h and frames t::

        keys    = (sum_l softmax(a)_l hidden_l) K                         (B, T, compression_dim)
        values  = (sum_l softmax(b)_l hidden_l) V                         (B, T, compression_dim)
        pooled  = concat_h sum_t softmax_t(keys A)_{t, h} values_t        (B, head_nb * c)
        output  = pooled W                                                (B, embed_dim)

    K, V, A and W are affine. At D 768, 13 layers and the defaults: 2,302,554 parameters. Names of
    parameters and of options are those of the authors' public code, whose weights load.

    Args:
        feat_dim: D of the hidden states.
        embed_dim: size of the embedding.
        head_nb: number of attention heads.
        compression_dim: size of keys and values.
        nb_layer: L, the encoder's layers and its input to the first: 13 for Base, 25 for Large.

    Reference: Peng, Plchot, Stafylakis, Mosner, Burget, Cernocky 2022 (SLT), "An attention-based
    backend allowing efficient fine-tuning of transformer models for speaker verification",
    section 3.
    """

    def __init__(
        self,
        feat_dim: int = 768,
        embed_dim: int = 256,
        head_nb: int = 64,
        compression_dim: int = 128,
        nb_layer: int = 13,
    ):
        super().__init__()
        self.feat_dim, self.nb_layer = feat_dim, nb_layer
        self.weights_k = nn.Parameter(torch.ones(nb_layer))
        self.weights_v = nn.Parameter(torch.ones(nb_layer))
        self.cmp_linear_k = nn.Linear(feat_dim, compression_dim)
        self.cmp_linear_v = nn.Linear(feat_dim, compression_dim)
        self.att_head = nn.Linear(compression_dim, head_nb)
        self.pooling_fc = nn.Linear(head_nb * compression_dim, embed_dim)

    def forward(self, hidden: Sequence[Tensor], lens: Tensor | None = None) -> Tensor:
        """Return embeddings (B, embed_dim).

        Args:
            hidden: L tensors (B, T, D).
            lens: (B,) frames of each utterance, in [1, T]; what lies behind them does not count.
                None: all T.

        Raises:
            ValueError: another number of layers or another D than this was built for; ``lens``
                out of range.
        """
        self._check(hidden)
        keys = self.cmp_linear_k(_weighted_sum(hidden, self.weights_k))
        values = self.cmp_linear_v(_weighted_sum(hidden, self.weights_v))
        attention = self.att_head(keys)
        if lens is not None:
            attention = attention.masked_fill(~_valid(lens, attention)[:, :, None], -torch.inf)
        attention = attention.softmax(dim=1)
        return self.pooling_fc((attention.transpose(1, 2) @ values).flatten(1))

    def _check(self, hidden: Sequence[Tensor]) -> None:
        if isinstance(hidden, Tensor):
            found = f"one tensor {tuple(hidden.shape)}"
        elif len(hidden) != self.nb_layer or hidden[0].shape[-1] != self.feat_dim:
            found = f"{len(hidden)} x {tuple(hidden[0].shape)}"
        else:
            return
        raise ValueError(
            f"MHFA was built for a tuple of {self.nb_layer} hidden states (B, T, {self.feat_dim}), "
            f"found {found}; set model_args.nb_layer and feat_dim to what the front-end gives"
        )


def _weighted_sum(hidden: Sequence[Tensor], weights: Tensor) -> Tensor:
    # layer by layer: a stacked copy would hold all layers twice; in float32: L terms in bfloat16
    # lose digits
    total = torch.zeros_like(hidden[0], dtype=torch.float32)
    for weight, states in zip(weights.softmax(dim=0), hidden):
        total = total + weight * states
    return total


def _valid(lens: Tensor, attention: Tensor) -> Tensor:
    """(B, T) bool: which frames count."""
    num_utts, num_frames, _ = attention.shape
    if lens.shape != (num_utts,) or not 1 <= lens.min() <= lens.max() <= num_frames:
        raise ValueError(
            f"expected lens ({num_utts},) in [1, {num_frames}], found {tuple(lens.shape)} in "
            f"[{lens.min()}, {lens.max()}]"
        )
    return torch.arange(num_frames, device=attention.device) < lens.to(attention.device)[:, None]
