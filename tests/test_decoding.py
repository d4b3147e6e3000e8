"""Decoding token by token against the plain path: the same hypotheses and scores."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Text, build, larger_text, randomize, write_data
from torch import Tensor

from qknorm_fairseq.modules.decoding import DecoderCache, Reordered
from qknorm_fairseq.modules.linear import FEW, MANY, SOME, linear

TEXTS: Text = larger_text(train=12, valid=2)  # sentences of 2 to 9 words: much padding

ROUNDING = 1e-3  # of single precision, made larger by the sine
BONUS = 6  # for ending now and then: a random model would do so never, or at once


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), TEXTS)


def built(data: Path, *options: object, arch: str = "transformer_qknorm") -> Any:
    made = build(data, "--word-dropout", 0, *options, arch=arch)
    randomize(made.model)
    made.model.eval()
    log_probs, eos = made.model.get_normalized_probs, made.task.target_dictionary.eos()

    def ending_sooner(*arguments: Any, **more: Any) -> Tensor:
        probabilities: Tensor = log_probs(*arguments, **more)
        probabilities[..., eos] += BONUS * torch.sin(30 * probabilities[..., eos + 1])
        return probabilities

    made.model.get_normalized_probs = ending_sooner
    return made


@torch.inference_mode()
def hypotheses(
    made: Any, *, beam: int = 4, rows: int = 12, prefix: int = 0, models: int = 1
) -> list[dict[str, Tensor]]:
    """Of the first training sentences; they end at different lengths."""
    made.task.load_dataset("train")
    dataset = made.task.dataset("train")
    sample = dataset.collater([dataset[number] for number in range(rows)])
    generator = made.task.build_generator(
        [made.model] * models, Namespace(beam=beam, max_len_a=1, max_len_b=20)
    )
    given = sample["target"][:, :prefix] if prefix else None
    found = made.task.inference_step(generator, [made.model] * models, sample, prefix_tokens=given)
    return [hypothesis for sentence in found for hypothesis in sentence]


VARIANTS = [
    ("transformer_qknorm", ()),
    ("transformer_qknorm", ("--g-per", "head", "--attention-norm-scale")),
    ("transformer_qknorm", ("--g-per", "fixed", "--attention-norm-groups", 2)),
    ("transformer_qknorm", ("--attention-norm", "layer", "--residual-norm", "scale")),
    ("transformer_qknorm", ("--no-encoder-normalize-before", "--no-decoder-normalize-before")),
    ("transformer_qknorm", ("--no-fixnorm", "--no-output-bias", "--layernorm-embedding")),
    ("transformer_qknorm", ("--activation-fn", "gelu")),
    ("transformer_qknorm", ("--left-pad-source", "--decoder-learned-pos")),
    ("transformer_scalenorm", ()),
]


@pytest.mark.parametrize(
    ("arch", "options", "final"),
    [*((*variant, False) for variant in VARIANTS), (*VARIANTS[0], True)],
)
def test_hypotheses_are_those_of_the_plain_path(
    data: Path, arch: str, options: tuple[object, ...], final: bool
) -> None:
    found = []
    for switch in ((), ("--no-fast",)):
        made = built(data, *options, *switch, arch=arch)
        assert made.model.decoder.steps == (not switch)
        if final:
            made.model.make_generation_fast_()
        found.append(hypotheses(made))
    fast, plain = found
    if not options:
        assert len({len(hypothesis["tokens"]) for hypothesis in plain}) > 2  # they end apart
    assert len(fast) == len(plain) == 48
    for one, other in zip(fast, plain, strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()
        assert torch.allclose(one["positional_scores"], other["positional_scores"], atol=ROUNDING)
        assert one["attention"].shape == other["attention"].shape
        assert torch.allclose(one["attention"], other["attention"], atol=1e-5)


@pytest.mark.parametrize("how", ["beam 1", "one sentence", "prefix", "two models"])
def test_other_searches_too(data: Path, how: str) -> None:
    fast, plain = built(data), built(data, "--no-fast")
    given: dict[str, Any] = {
        "beam 1": {"beam": 1},
        "one sentence": {"rows": 1},
        "prefix": {"prefix": 2},
        "two models": {"models": 2},
    }[how]
    pairs = zip(hypotheses(fast, **given), hypotheses(plain, **given), strict=True)
    for one, other in pairs:
        assert one["tokens"].tolist() == other["tokens"].tolist()
        assert torch.allclose(one["positional_scores"], other["positional_scores"], atol=ROUNDING)


@torch.inference_mode()
def test_any_reordering_gives_what_the_whole_prefix_gives(data: Path) -> None:
    """Against decoding each prefix anew; also for orders that mix sentences, and many tokens."""
    model = built(data).model
    source, lengths = (
        torch.tensor([[4, 5, 6, 2], [7, 8, 2, 1], [9, 2, 1, 1]]),
        torch.tensor([4, 3, 2]),
    )
    orders = ([0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 4, 5], [0, 1, 4, 5], [2, 0, 0, 3], [3, 1, 1])
    state: dict[str, Any] = {}
    encoded: Any = model.encoder(source, lengths)
    rows = torch.randint(4, 10, (3, 40), generator=torch.Generator().manual_seed(1))
    for step in range(1, 41):
        if step <= len(orders):
            order = torch.tensor(orders[step - 1])
            rows = rows[order]
            encoded = model.encoder.reorder_encoder_out(encoded, order)
            if step > 1:
                model.decoder.reorder_incremental_state_scripting(state, order)
            rows[:, step - 1] = torch.arange(4, 4 + len(rows))  # so that all hypotheses differ
        found, _ = model.decoder(rows[:, :step], encoder_out=encoded, incremental_state=state)
        whole, _ = model.decoder(rows[:, :step], encoder_out=encoded)
        assert torch.allclose(found, whole[:, -1:], atol=1e-4), step
    assert isinstance(state["qknorm_cache"], DecoderCache)


def test_an_order_put_off_is_made_once_and_reads_as_fairseqs() -> None:
    calls = []

    def reorder(out: Mapping[str, Any], order: Tensor) -> Mapping[str, Any]:
        calls.append(order.tolist())
        return {key: [value.index_select(1, order) for value in out[key]] for key in out}

    out = {"encoder_out": [torch.arange(6).view(1, 3, 2)]}
    lazy = Reordered(out, torch.tensor([2, 0, 1]), reorder).reordered(torch.tensor([1, 1, 0]))
    assert calls == []
    assert lazy["encoder_out"][0].tolist() == [[[0, 1], [0, 1], [4, 5]]]
    assert list(lazy) == ["encoder_out"]
    assert "encoder_states" not in lazy
    assert calls == [[0, 0, 2]]


@pytest.mark.parametrize("outputs", [40, MANY])
@pytest.mark.parametrize("rows", [1, 4, FEW, FEW + 1, SOME, SOME + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_are_multiplied_as_many_are(rows: int, bias: bool, outputs: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 24), torch.randn(outputs, 24)
    offset = torch.randn(outputs) if bias else None
    found = linear(x, weight, offset)
    assert found.is_contiguous()
    assert torch.allclose(found, torch.nn.functional.linear(x, weight, offset), atol=1e-5)
