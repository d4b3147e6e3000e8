"""SmallInit (Nguyen & Salazar 2019, arXiv 1910.05895, section 3.2)."""

from __future__ import annotations

from math import sqrt

from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn


def small_init(model: nn.Module) -> None:
    """Draw a Transformer's weights anew, smaller than Xavier's in its attentions.

    Attention projections: normal(0, sqrt(2 / (5 d))); feed-forward layers: normal(0,
    sqrt(2 / (d + d_ff))); their biases: 0.
    """
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            std = sqrt(2 / (5 * module.embed_dim))
            layers = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
        elif isinstance(module, TransformerEncoderLayerBase | TransformerDecoderLayerBase):
            std = sqrt(2 / (module.fc1.in_features + module.fc1.out_features))
            layers = [module.fc1, module.fc2]
        else:
            continue
        for layer in layers:
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
