"""fairseq's Transformer with Query-Key Normalization in all its attentions.

One model class; an architecture is a row of defaults in `ARCHITECTURES`. Each row is registered
as a fairseq model with a dataclass of its own, so that `--arch NAME` and Hydra's
`model._name=NAME` give the same model with the same options.
"""

# No `from __future__ import annotations` here: fairseq reads the options' annotations as types.

import argparse
import atexit
import dataclasses
import json
import logging
import math
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.logging import metrics
from fairseq.models import ARCH_MODEL_REGISTRY, register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules import LayerNorm
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from omegaconf import II, DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from qknorm_fairseq import accidents, checkpoints, literals, resume
from qknorm_fairseq.memory import keep_freed_memory
from qknorm_fairseq.modules.attention import (
    G_PER,
    NORMS,
    QKNormMultiheadAttention,
    g0_from_length,
)
from qknorm_fairseq.modules.decoding import DecoderCache, Reordered
from qknorm_fairseq.modules.dropout import FastDropout, dropout
from qknorm_fairseq.modules.embeddings import FixNormEmbedding, OutputProjection
from qknorm_fairseq.modules.initialization import small_init
from qknorm_fairseq.modules.linear import project
from qknorm_fairseq.modules.packing import Layout, Packed
from qknorm_fairseq.modules.scale_norm import ScaleNorm
from qknorm_fairseq.modules.smoothed_loss import Smoothing, smoothed_loss
from qknorm_fairseq.modules.word_dropout import drop_words
from qknorm_fairseq.vocabulary import fingerprint

logger = logging.getLogger(__name__)

CACHE = "qknorm_cache"  # in fairseq's incremental state
PREPARED = "qknorm.json"  # what `qknorm prepare` stores beside the binarized text


@dataclass
class QKNormOptions(FairseqDataclass):  # type: ignore[misc]
    """What this model adds to the options of fairseq's Transformer."""

    qknorm_g0: Optional[float] = field(  # noqa: UP045 - fairseq knows no `float | None`
        default=None,
        metadata={
            "help": "start value of g, the learned scale of each attention's logits (default: "
            "log2(L^2 - L), with L from --qknorm-length or from the prepared data)"
        },
    )
    qknorm_length: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "L, from which g starts: the 97.5th percentile of the training sequences' "
            "lengths in subwords (default: what `qknorm prepare` stored beside the data)"
        },
    )
    qknorm_g0_from: ChoiceEnum(["length", "head_dim"]) = field(  # type: ignore[valid-type]
        default="length",
        metadata={"help": "start g from log2(L^2 - L) (the paper) or from sqrt(head_dim)"},
    )
    attention_norm: ChoiceEnum(NORMS) = field(  # type: ignore[valid-type]
        default="l2",
        metadata={
            "help": "norm of queries and keys: l2 is QKNorm, none scaled dot-product attention"
        },
    )
    g_per: ChoiceEnum(G_PER) = field(  # type: ignore[valid-type]
        default="module",
        metadata={"help": "one g for each attention module (the paper) or head, or a fixed one"},
    )
    attention_norm_groups: int = field(
        default=1, metadata={"help": "normalize so many parts of each head by themselves (l2)"}
    )
    attention_norm_scale: bool = field(
        default=False,
        metadata={"help": "learn a scale for each head and dimension of the normalized q and k"},
    )
    residual_norm: ChoiceEnum(["layer", "scale"]) = field(  # type: ignore[valid-type]
        default="layer",
        metadata={"help": "norm of the residual blocks: LayerNorm, or the baseline's ScaleNorm"},
    )
    fixnorm: bool = field(
        default=False,
        metadata={"help": "divide each embedding by its length, at the input and the output"},
    )
    output_bias: bool = field(
        default=False, metadata={"help": "learn a bias for each token of the output"}
    )
    small_init: bool = field(default=False, metadata={"help": "start with SmallInit's weights"})
    word_dropout: float = field(
        default=0.0,
        metadata={"help": "probability of an input token to become <unk> in training, both sides"},
    )
    logit_mask: bool = field(
        default=False,
        metadata={
            "help": "predict only tokens that the target side of the training text has; with "
            "label smoothing this needs --criterion label_smoothed_cross_entropy_allowed"
        },
    )
    fast: bool = field(
        default=True,
        metadata={
            "help": "the fast path of training: no work on padding, dropout masks that cost "
            "little on a CPU; off, it is fairseq's own way, with the same results"
        },
    )
    bf16_autocast: bool = field(
        default=False,
        metadata={
            "help": "compute matrix products in bfloat16 (for --cpu, where fairseq's own "
            "--bf16 can't; weights, norms, softmax and loss stay in full precision)"
        },
    )


def _flat_fields() -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """Our options and those of fairseq's `TransformerConfig`, with the nested ones written out.

    fairseq's argparse side knows flat options only: `encoder.layers` there is `encoder_layers`.
    """
    flat = []
    for outer in (*dataclasses.fields(QKNormOptions), *dataclasses.fields(TransformerConfig)):
        if outer.name.startswith("_"):
            continue
        if outer.name not in ("encoder", "decoder", "quant_noise"):
            flat.append((outer.name, outer))
            continue
        nested: Any = outer.type
        for inner in dataclasses.fields(nested):
            if not inner.name.startswith("_"):
                flat.append((f"{outer.name}_{inner.name}", inner))
    return [
        (name, one.type, field(default=one.default, metadata=one.metadata)) for name, one in flat
    ]


# Henry et al. 2020, section 4; the values are those of the official repository.
PAPER: dict[str, Any] = {
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "share_all_embeddings": True,
    "dropout": 0.3,
    "attention_dropout": 0.3,
    "activation_dropout": 0.3,
    "decoder_input_dim": II("model.decoder_embed_dim"),
    "decoder_output_dim": II("model.decoder_embed_dim"),
    "fixnorm": True,
    "output_bias": True,
    "small_init": True,
    "word_dropout": 0.1,
    # The logit mask is the recipe's, not the architecture's: it needs a criterion that knows it.
}
# The baseline, Nguyen & Salazar 2019: the same with ScaleNorm and ordinary attention.
SCALENORM = {"attention_norm": "none", "residual_norm": "scale"}


def _sized(layers: int, heads: int, dim: int, ffn_dim: int) -> dict[str, Any]:
    sizes = {
        "layers": layers,
        "attention_heads": heads,
        "embed_dim": dim,
        "ffn_embed_dim": ffn_dim,
    }
    return {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in sizes.items()}


DROPOUT_04 = {"dropout": 0.4, "attention_dropout": 0.4, "activation_dropout": 0.4}
GL_EN = _sized(layers=4, heads=4, dim=512, ffn_dim=2048) | DROPOUT_04
TINY = _sized(layers=2, heads=4, dim=256, ffn_dim=512)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer_qknorm": PAPER,
    "transformer_qknorm_gl_en": PAPER | GL_EN,
    "transformer_qknorm_tiny": PAPER | TINY,
    "transformer_scalenorm": PAPER | SCALENORM,
    "transformer_scalenorm_gl_en": PAPER | SCALENORM | GL_EN,
    "transformer_scalenorm_tiny": PAPER | SCALENORM | TINY,
}


def _attention(
    embed_dim: int, heads: int, layer: Any, cfg: Any, **kind: Any
) -> QKNormMultiheadAttention:
    return QKNormMultiheadAttention(
        embed_dim,
        heads,
        dropout=cfg.attention_dropout,
        q_noise=layer.quant_noise,
        qn_block_size=layer.quant_noise_block_size,
        g0=cfg.qknorm_g0,
        norm=cfg.attention_norm,
        g_per=cfg.g_per,
        groups=cfg.attention_norm_groups,
        elementwise_scale=cfg.attention_norm_scale,
        **kind,
    )


class _FastLayer:
    """The layers' dropout by masks that cost little, together with what stands beside it."""

    def make_fast(self, cfg: Any) -> None:
        layer: Any = self
        layer.residual_dropout = FastDropout(layer.dropout_module)
        layer.dropout_module = nn.Identity()  # residual_connection does it
        relu = cfg.activation_fn == "relu"
        layer.activation_dropout_module = FastDropout(
            layer.activation_dropout_module, after_relu=relu
        )
        if relu:
            layer.activation_fn = nn.Identity()
        for attention in (layer.self_attn, getattr(layer, "encoder_attn", None)):
            if attention is not None:
                attention.dropout_module = FastDropout(attention.dropout_module)

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        layer: Any = self
        if hasattr(layer, "residual_dropout"):
            return layer.residual_dropout.add(x, residual)  # type: ignore[no-any-return]
        return super().residual_connection(x, residual)  # type: ignore[misc, no-any-return]


class QKNormEncoderLayer(_FastLayer, TransformerEncoderLayerBase):  # type: ignore[misc]
    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if cfg.fast:
            self.make_fast(cfg)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        heads, xformers = cfg.encoder.attention_heads, cfg.encoder.xformers_att_config
        return _attention(
            embed_dim, heads, self, cfg, self_attention=True, xformers_att_config=xformers
        )


class QKNormDecoderLayer(_FastLayer, TransformerDecoderLayerBase):  # type: ignore[misc]
    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if cfg.fast:
            self.make_fast(cfg)

    def can_step(self) -> bool:
        """Whether it has nothing but what `step` does."""
        more = (self.attn_ln, self.c_attn, self.ffn_layernorm, self.w_resid)
        return self.encoder_attn is not None and all(each is None for each in more)

    def step(
        self, x: Tensor, layer: int, cache: DecoderCache, *, need_attn: bool
    ) -> tuple[Tensor, Tensor | None]:
        """fairseq's forward for the newest token of N hypotheses, N x C, when decoding."""
        before = self.normalize_before
        y = self.self_attn_layer_norm(x) if before else x
        x = x + self.self_attn.attend_to_past(y, layer, cache)
        x = x if before else self.self_attn_layer_norm(x)
        y = self.encoder_attn_layer_norm(x) if before else x
        y, weights = self.encoder_attn.attend_to_source(y, layer, cache, need_weights=need_attn)
        x = x + y
        x = x if before else self.encoder_attn_layer_norm(x)
        y = self.final_layer_norm(x) if before else x
        y = self.activation_dropout_module(self.activation_fn(project(self.fc1, y)))
        x = x + project(self.fc2, y)
        return x if before else self.final_layer_norm(x), weights

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        return _attention(
            embed_dim,
            cfg.decoder.attention_heads,
            self,
            cfg,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=not cfg.cross_self_attention,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return _attention(
            embed_dim,
            cfg.decoder.attention_heads,
            self,
            cfg,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            encoder_decoder_attention=True,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """The layer as fairseq's own Transformer wraps it: recomputed, offloaded, sharded."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=min_params)  # type: ignore[no-any-return]


def _embedded(side: Any, tokens: Tensor, layout: Layout) -> Tensor:
    """An encoder's or decoder's input, N x 1 x C, as fairseq makes it with padding."""
    x = side.embed_scale * side.embed_tokens(layout.pack(tokens.unsqueeze(2)).squeeze(1))
    if side.embed_positions is not None:
        x = x + layout.pack(side.embed_positions(tokens))
    if side.layernorm_embedding is not None:
        x = side.layernorm_embedding(x)
    return dropout(x, side.dropout_module.p).unsqueeze(1)


class QKNormEncoder(TransformerEncoderBase):  # type: ignore[misc]
    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _wrapped(QKNormEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward_packed(self, tokens: Tensor, layout: Layout) -> Tensor:
        """B x T tokens to their N x 1 x C states, while training."""
        x = _embedded(self, tokens, layout)
        mask = layout.padding[:, None, None, :] if len(layout.pads) else None
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=Packed(layout, layout, mask))
        return x if self.layer_norm is None else self.layer_norm(x)

    def reorder_encoder_out(self, encoder_out: Any, new_order: Tensor) -> Any:
        if isinstance(encoder_out, Reordered):
            return encoder_out.reordered(new_order)
        return Reordered(encoder_out, new_order, super().reorder_encoder_out)


class QKNormDecoder(TransformerDecoderBase):  # type: ignore[misc]
    steps = False  # whether it decodes by `_step`

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """fairseq's, but for the usual decoding token by token."""
        usual = alignment_layer is None and alignment_heads is None and encoder_out is not None
        if self.steps and usual and incremental_state is not None and not self.training:
            return self._step(prev_output_tokens, encoder_out, incremental_state)
        return super().extract_features_scriptable(  # type: ignore[no-any-return]
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )

    def _step(
        self, tokens: Tensor, encoder_out: Any, incremental_state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """N x T tokens, of which only the last are new, to N x 1 x C features."""
        cache: DecoderCache | None = incremental_state.get(CACHE)
        if cache is None:
            cache = incremental_state[CACHE] = DecoderCache.begin(encoder_out, self.layers)
        x = self.embed_scale * self.embed_tokens(tokens[:, -1])
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens, incremental_state=incremental_state)[:, -1]
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        for number, layer in enumerate(self.layers):
            # As in fairseq, the last layer's weights are there for whoever aligns with them.
            last = number == len(self.layers) - 1
            x, attn = layer.step(x, number, cache, need_attn=last)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.unsqueeze(1), {"attn": [attn.unsqueeze(1)], "inner_states": None}

    def output_layer(self, features: Tensor) -> Tensor:
        if not self.steps or self.training or features.size(1) > 1:
            return super().output_layer(features)  # type: ignore[no-any-return]
        return project(self.output_projection, features.squeeze(1)).unsqueeze(1)

    def reorder_incremental_state_scripting(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        if CACHE in incremental_state:
            incremental_state[CACHE].reorder(new_order)
        else:
            super().reorder_incremental_state_scripting(incremental_state, new_order)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _wrapped(QKNormDecoderLayer(cfg, no_encoder_attn), cfg)

    def forward_packed(
        self, tokens: Tensor, layout: Layout, encoded: Tensor, source: Layout
    ) -> Tensor:
        """B x T tokens and the encoder's states to N x C features, while training."""
        x = _embedded(self, tokens, layout)
        size = (layout.length, layout.length)
        mask = torch.ones(size, dtype=torch.bool, device=x.device).triu(1)
        # Behind padding at the end of a sentence no token looks at it anyway.
        if not bool((layout.padding[:, 1:] >= layout.padding[:, :-1]).all()):
            # Each still attends to itself: a row of softmax without anything would be NaN.
            mask = mask | layout.padding[:, None, None, :] & ~torch.eye(
                layout.length, dtype=torch.bool, device=x.device
            )
        own = Packed(layout, layout, mask)
        across = Packed(
            layout, source, source.padding[:, None, None, :] if len(source.pads) else None
        )
        for layer in self.layers:
            x, _, _ = layer(x, encoded, across, self_attn_padding_mask=own)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.squeeze(1)


class TransformerQKNorm(TransformerModelBase):  # type: ignore[misc]
    """The Transformer of Henry et al. 2020, for fairseq's translation task."""

    options: type[QKNormOptions]  # with the architecture's defaults
    unk: int
    pad: int
    packs: bool  # whether it trains without padding

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        # fairseq gives an option that is on by default a flag that switches it off, under the
        # same name. Here --encoder-normalize-before means what it says; --no-... switches it off.
        own = {option.name for option in dataclasses.fields(QKNormOptions)}
        for option in dataclasses.fields(cls.options):
            if option.default is True or (option.type is bool and option.name in own):
                state = "on" if option.default else "off"
                parser.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    action=argparse.BooleanOptionalAction,
                    help=f"{option.metadata['help']} (default: {state})",
                )
        gen_parser_from_dataclass(parser, cls.options(), delete_default=True)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "TransformerQKNorm":
        """Build the model from its options, flat as `ARCHITECTURES` names them.

        Raises:
            ValueError: options don't go together, nothing tells where `g` starts, or L is under 2.
        """
        _record(
            cfg,
            languages=f"{task.cfg.source_lang}-{task.cfg.target_lang}",
            vocabulary=fingerprint(task.source_dictionary, task.target_dictionary),
        )
        flat: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        nested = TransformerConfig.from_namespace(Namespace(**flat))
        if nested.attention_norm == "l2":
            if cfg.qknorm_g0 is None and nested.qknorm_g0_from == "head_dim":
                nested.qknorm_g0 = (
                    nested.encoder.embed_dim / nested.encoder.attention_heads
                ) ** 0.5
            else:
                data = getattr(task.cfg, "data", None)
                nested.qknorm_g0 = starting_g(cfg.qknorm_g0, cfg.qknorm_length, data)
            _record(cfg, qknorm_g0=nested.qknorm_g0)
            logger.info(f"QKNorm: g starts from {nested.qknorm_g0:.4g}")
        model: TransformerQKNorm = super().build_model(nested, task)
        model.unk, model.pad = task.source_dictionary.unk(), task.source_dictionary.pad()
        model.packs = nested.fast and not _unpackable(nested)
        model.decoder.steps = model.packs and all(
            isinstance(layer, QKNormDecoderLayer) and layer.can_step()
            for layer in model.decoder.layers
        )
        if nested.residual_norm == "scale":
            replace_layer_norms(model)
        if nested.fixnorm or nested.output_bias or nested.logit_mask:
            if nested.adaptive_softmax_cutoff is not None:
                raise ValueError("an adaptive softmax has no FixNorm, output bias or logit mask")
            model.decoder.output_projection = OutputProjection(
                model.decoder.output_projection.weight,
                fixnorm=nested.fixnorm,
                bias=nested.output_bias,
                allowed=target_tokens(task) if nested.logit_mask else None,
            )
        if nested.small_init:
            small_init(model)
        return model

    @classmethod
    def build_embedding(
        cls, cfg: Any, dictionary: Any, embed_dim: int, path: str | None = None
    ) -> nn.Embedding:
        if not cfg.fixnorm:
            return super().build_embedding(cfg, dictionary, embed_dim, path)  # type: ignore[no-any-return]
        embedding = FixNormEmbedding(len(dictionary), embed_dim, dictionary.pad())
        if path:
            utils.load_embedding(utils.parse_embedding(path), dictionary, embedding)
        return embedding

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Any,
        prev_output_tokens: Tensor,
        smoothing: Smoothing | None = None,
        **kwargs: Any,
    ) -> Any:
        """fairseq's forward, with word dropout on both inputs while training.

        Given `smoothing` (if it `fuses_loss`), it returns loss and nll instead of logits.
        """
        p = self.cfg.word_dropout
        if self.training and p > 0:
            src_tokens = drop_words(src_tokens, p, unk=self.unk, pad=self.pad)
            prev_output_tokens = drop_words(prev_output_tokens, p, unk=self.unk, pad=self.pad)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cfg.bf16_autocast):
            if self.training and self.packs and not kwargs:
                return self._forward_packed(src_tokens, prev_output_tokens, smoothing)
            if not self.training:
                self._log_g()
            return super().forward(src_tokens, src_lengths, prev_output_tokens, **kwargs)

    def _log_g(self) -> None:
        """Have each attention's `g` among the numbers of a validation: g_decoder_1_cross, ..."""
        for side in ("encoder", "decoder"):
            for number, layer in enumerate(getattr(self, side).layers, start=1):
                for kind, name in (("self", "self_attn"), ("cross", "encoder_attn")):
                    g = getattr(getattr(layer, name, None), "g", None)
                    if g is not None:
                        key = f"g_{side}_{number}_{kind}"
                        metrics.log_scalar(key, g.mean().item(), round=4)

    @property
    def fuses_loss(self) -> bool:
        """Whether it can make the loss together with its last product: on CPUs, in training."""
        projection = self.decoder.output_projection
        weight = projection.weight
        return (
            self.packs
            and type(projection) in (nn.Linear, OutputProjection)
            and weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.float64)
        )

    def _forward_packed(
        self, src_tokens: Tensor, prev_output_tokens: Tensor, smoothing: Smoothing | None
    ) -> Any:
        """The same, but for what is made of padding: its logits are 0."""
        if src_tokens.device.type == "cpu":
            keep_freed_memory()
        # oneDNN, which does bfloat16, compiles its kernels for each size and keeps them.
        multiple = 64 if self.cfg.bf16_autocast else 1
        source = Layout(src_tokens.eq(self.pad), multiple)
        target = Layout(prev_output_tokens.eq(self.pad), multiple)
        encoded = self.encoder.forward_packed(src_tokens, source)
        if self.cfg.bf16_autocast:  # once for all layers
            encoded = encoded.bfloat16()
        features = self.decoder.forward_packed(prev_output_tokens, target, encoded, source)
        if smoothing is not None:
            table = self.decoder.output_projection
            weight, allowed = table.weight, None
            if isinstance(table, OutputProjection):
                weight, allowed = table.rows(), table.allowed
            golden = target.pack(smoothing.target.unsqueeze(2)).squeeze(1)
            golden[target.tokens :] = self.pad  # the copies of the first
            return smoothed_loss(features, weight, table.bias, allowed, golden, smoothing)
        logits = target.unpack(self.decoder.output_layer(features))
        return logits, {"attn": [None], "inner_states": None}

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Module) -> QKNormEncoder:
        return QKNormEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Module) -> QKNormDecoder:
        return QKNormDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        known = sum(key.endswith("attn.g") for key in state_dict)
        super().upgrade_state_dict_named(state_dict, name)
        # Weights of a model without a logit mask or output bias: these then start as in a new one.
        for key, value in self.state_dict().items():
            if key.endswith(("output_projection.allowed", "output_projection.bias")):
                state_dict.setdefault(key, value)
        added = sum(key.endswith("attn.g") for key in state_dict) - known
        if added:
            logger.info(f"QKNorm: {added} attentions of the checkpoint have no g; it starts anew")


def _unpackable(cfg: Any) -> bool:
    """Options whose code in fairseq needs the padded shape."""
    return bool(
        cfg.adaptive_softmax_cutoff is not None
        or cfg.no_cross_attention
        or cfg.cross_self_attention
        or cfg.quant_noise.pq
        or cfg.quant_noise.scalar
        or cfg.base_layers
        or cfg.decoder.input_dim != cfg.decoder.embed_dim
        or cfg.decoder.output_dim != cfg.decoder.embed_dim
    )


def starting_g(g0: float | None, length: float | None, data: str | None) -> float:
    """Where `g` starts: the given value, or from the given L, or from the prepared data's L.

    Args:
        data: fairseq's data directories, separated by colons; the first one counts.

    Raises:
        ValueError: none of the three is there, L is under 2, or the given value not above 0.
    """
    if g0 is not None:
        if not 0 < g0 < math.inf:
            raise ValueError(f"--qknorm-g0: g starts from a number above 0, not {g0}")
        return float(g0)
    source = "--qknorm-length"
    if length is None and data:
        file = Path(data.split(":")[0]) / PREPARED
        if file.is_file():
            source = str(file)
            length = json.loads(file.read_text(encoding="utf-8"))["length"]
    if length is None:
        raise ValueError(
            f"QKNorm does not know where g starts: {data or 'the data directory'} holds no "
            f"{PREPARED} (`qknorm prepare` writes it). Give L with --qknorm-length "
            "(model.qknorm_length=...) or g itself with --qknorm-g0 (model.qknorm_g0=...)"
        )
    try:
        return g0_from_length(length)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def replace_layer_norms(model: nn.Module) -> None:
    """Put a ScaleNorm wherever the model has a LayerNorm."""
    kind = type(LayerNorm(1))  # torch's, or apex's where that is installed
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kind):
                setattr(parent, name, ScaleNorm(child.normalized_shape[0]))


def target_tokens(task: Any) -> Tensor:
    """Which tokens may be predicted: those of the training text's target side, <unk> and </s>.

    Where there is no training text (a checkpoint is being loaded elsewhere) all may; the
    checkpoint then says which.

    Returns:
        V booleans.
    """
    dictionary = task.target_dictionary
    allowed = torch.ones(len(dictionary), dtype=torch.bool)
    source, target = task.cfg.source_lang, task.cfg.target_lang
    # As fairseq finds its data: train, train1, ...; prepared for this direction or the other.
    parts = [
        file.with_suffix("")
        for folder in (task.cfg.data or "").split(":")
        for pair in (f"{source}-{target}", f"{target}-{source}")
        for file in Path(folder).glob(f"train*.{pair}.{target}.idx")
    ]
    if not parts:
        return allowed
    allowed.zero_()
    allowed[[dictionary.unk(), dictionary.eos()]] = True
    for part in parts:
        dataset = data_utils.load_indexed_dataset(str(part), dictionary)
        for start in range(0, len(dataset), 10_000):
            stop = min(start + 10_000, len(dataset))
            allowed[torch.cat([dataset[number] for number in range(start, stop)]).long()] = True
    return allowed


def _record(cfg: Any, **values: Any) -> None:
    """Store resolved options in the configuration that fairseq saves in each checkpoint.

    A checkpoint must be readable where the training data is not; and what g started from is
    part of what a run was. fairseq hands `build_model` a merged copy that keeps its parent.
    """
    parent = cfg._get_parent() if isinstance(cfg, DictConfig) else None
    original = parent.get("model") if isinstance(parent, DictConfig) else None
    if isinstance(original, DictConfig):
        with open_dict(original):
            original.update(values)


def _register(name: str, defaults: dict[str, Any]) -> None:
    fields = [
        (
            key,
            annotation,
            dataclasses.field(default=defaults.get(key, spec.default), metadata=spec.metadata),
        )
        for key, annotation, spec in _flat_fields()
    ]
    camel = "".join(part.capitalize() for part in name.split("_"))
    options = dataclasses.make_dataclass(f"{camel}Config", fields, bases=(QKNormOptions,))
    register_model(name, dataclass=options)(type(camel, (TransformerQKNorm,), {"options": options}))


def _show_options_with_help(arguments: list[str]) -> None:
    """Let `fairseq-train --help --arch NAME` show what NAME adds to fairseq's options.

    fairseq prints its help and ends before it asks the architecture for options; so they are
    printed when it ends.
    """
    words = {word for argument in arguments for word in argument.split("=")}
    if words.isdisjoint(("-h", "--help")):
        return
    for name in words & ARCHITECTURES.keys():
        parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
        ARCH_MODEL_REGISTRY[name].add_args(parser.add_argument_group(f"Options of {name}"))
        atexit.register(parser.print_help)


for _name, _defaults in ARCHITECTURES.items():
    _register(_name, _defaults)
_show_options_with_help(sys.argv[1:])
checkpoints.allow_fairseq_classes()
literals.install()
resume.install()
accidents.install()
