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
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import ARCH_MODEL_REGISTRY, register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from omegaconf import II, DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from qknorm_fairseq import checkpoints
from qknorm_fairseq.modules.attention import QKNormMultiheadAttention, g0_from_length

logger = logging.getLogger(__name__)

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


def _transformer_fields() -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """The options of fairseq's `TransformerConfig`, with the nested ones written out.

    fairseq's argparse side knows flat options only: `encoder.layers` there is `encoder_layers`.
    """
    flat = []
    for outer in dataclasses.fields(TransformerConfig):
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


ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Henry et al. 2020, section 4: PreNorm, shared embeddings, dropout everywhere.
    "transformer_qknorm": {
        "encoder_normalize_before": True,
        "decoder_normalize_before": True,
        "share_all_embeddings": True,
        "dropout": 0.3,
        "attention_dropout": 0.3,
        "activation_dropout": 0.3,
        "decoder_input_dim": II("model.decoder_embed_dim"),
        "decoder_output_dim": II("model.decoder_embed_dim"),
    }
}
ARCHITECTURES["transformer_qknorm_tiny"] = {
    **ARCHITECTURES["transformer_qknorm"],
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_embed_dim": 256,
    "decoder_embed_dim": 256,
    "encoder_ffn_embed_dim": 512,
    "decoder_ffn_embed_dim": 512,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}


class QKNormEncoderLayer(TransformerEncoderLayerBase):  # type: ignore[misc]
    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return QKNormMultiheadAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
            g0=cfg.qknorm_g0,
        )


class QKNormDecoderLayer(TransformerDecoderLayerBase):  # type: ignore[misc]
    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        return QKNormMultiheadAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            dropout=cfg.attention_dropout,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=not cfg.cross_self_attention,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.decoder.xformers_att_config,
            g0=cfg.qknorm_g0,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return QKNormMultiheadAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
            g0=cfg.qknorm_g0,
        )


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """The layer as fairseq's own Transformer wraps it: recomputed, offloaded, sharded."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=min_params)  # type: ignore[no-any-return]


class QKNormEncoder(TransformerEncoderBase):  # type: ignore[misc]
    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _wrapped(QKNormEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class QKNormDecoder(TransformerDecoderBase):  # type: ignore[misc]
    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _wrapped(QKNormDecoderLayer(cfg, no_encoder_attn), cfg)


class TransformerQKNorm(TransformerModelBase):  # type: ignore[misc]
    """The Transformer of Henry et al. 2020, for fairseq's translation task."""

    options: type[QKNormOptions]  # with the architecture's defaults

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        # fairseq gives an option that is on by default a flag that switches it off, under the
        # same name. Here --encoder-normalize-before means what it says; --no-... switches it off.
        for option in dataclasses.fields(cls.options):
            if option.default is True:
                parser.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    action=argparse.BooleanOptionalAction,
                    help=f"{option.metadata['help']} (default: on)",
                )
        gen_parser_from_dataclass(parser, cls.options(), delete_default=True)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "TransformerQKNorm":
        """Build the model from its options, flat as `ARCHITECTURES` names them.

        Raises:
            ValueError: nothing tells where `g` starts, or L is under 2.
        """
        g0 = starting_g(cfg.qknorm_g0, cfg.qknorm_length, getattr(task.cfg, "data", None))
        _record(cfg, qknorm_g0=g0)
        logger.info(f"QKNorm: g starts from {g0:.4g}")
        flat: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        nested = TransformerConfig.from_namespace(Namespace(**flat))
        nested.qknorm_g0 = g0
        return super().build_model(nested, task)  # type: ignore[no-any-return]

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Module) -> QKNormEncoder:
        return QKNormEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Module) -> QKNormDecoder:
        return QKNormDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        known = sum(key.endswith("attn.g") for key in state_dict)
        super().upgrade_state_dict_named(state_dict, name)
        added = sum(key.endswith("attn.g") for key in state_dict) - known
        if added:
            logger.info(f"QKNorm: {added} attentions of the checkpoint have no g; it starts anew")


def starting_g(g0: float | None, length: float | None, data: str | None) -> float:
    """Where `g` starts: the given value, or from the given L, or from the prepared data's L.

    Args:
        data: fairseq's data directories, separated by colons; the first one counts.

    Raises:
        ValueError: none of the three is there, or L is under 2.
    """
    if g0 is not None:
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
        for key, annotation, spec in _transformer_fields()
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
