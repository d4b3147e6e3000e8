"""The weights of every attention in a Transformer, head by head, while it reads sentence pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fairseq.data import LanguagePairDataset
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from qknorm_fairseq.errors import QKNormError


def attention_modules(model: nn.Module) -> dict[str, MultiheadAttention]:
    """Each attention by name, numbered from 1: encoder_1_self, decoder_1_self, decoder_1_cross.

    Raises:
        QKNormError: the model is no Transformer with fairseq's attention, or one made from it.
    """
    found: dict[str, MultiheadAttention] = {}
    for side, kind, attribute in (
        ("encoder", "self", "self_attn"),
        ("decoder", "self", "self_attn"),
        ("decoder", "cross", "encoder_attn"),
    ):
        layers = getattr(getattr(model, side, None), "layers", ())
        for number, layer in enumerate(layers, start=1):
            module = getattr(layer, attribute, None)
            if isinstance(module, MultiheadAttention):
                found[f"{side}_{number}_{kind}"] = module
    if not found:
        raise QKNormError(f"a {type(model).__name__} has no attention that could be looked at")
    return found


class AttentionRecorder:
    """Keeps what every attention of a model weighed in its latest forward pass.

    Inside `with recorder:` each module is asked for the weights of all heads, and its caller gets
    what it asked for; afterwards the modules are as they were. The model must be in eval mode:
    there is no dropout then, and no fast path that makes no weights.

    Attributes:
        weights: for each module by name H x B x T x S, in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Raises:
            QKNormError: the model has no attention of the known kinds.
        """
        self.modules = attention_modules(model)
        self.weights: dict[str, Tensor] = {}
        self._changed: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> AttentionRecorder:
        for name, module in self.modules.items():
            # fairseq's module leaves its self-attention to torch, which averages over the heads,
            # unless sizes are not to be checked; and a search has told it that so many sentences
            # in a row are hypotheses of one.
            for attribute, value in (("skip_embed_dim_check", True), ("beam_size", 1)):
                self._changed.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, value)
            module.forward = self._recorded(name, module.forward)
        return self

    def __exit__(self, *exception: object) -> None:
        for module in self.modules.values():
            del module.forward  # the instance's; the class has its own
        for module, attribute, value in self._changed:
            setattr(module, attribute, value)
        self._changed = []

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            *args: Any, need_weights: bool = True, need_head_weights: bool = False, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            output, weights = original(*args, need_weights=True, need_head_weights=True, **kwargs)
            self.weights[name] = weights.float()
            if need_head_weights:
                return output, weights
            return output, weights.mean(dim=0) if need_weights else None

        return forward


def pair_dataset(
    task: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> LanguagePairDataset:
    """Sentence pairs, each a row of indices that ends with </s>, as fairseq batches its own."""
    return LanguagePairDataset(
        sources,
        [len(source) for source in sources],
        task.source_dictionary,
        targets,
        [len(target) for target in targets],
        task.target_dictionary,
        left_pad_source=task.cfg.left_pad_source,
        left_pad_target=task.cfg.left_pad_target,
    )
