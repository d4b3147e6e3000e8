"""`adam_fused` is fairseq's `adam` in fewer steps."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.optim.adam import FairseqAdam
from torch import nn

import qknorm_fairseq

qknorm_fairseq.register()
from qknorm_fairseq.optimizer import FusedAdam  # noqa: E402


def optimizers(**changed: Any) -> list[tuple[Any, list[nn.Parameter]]]:
    options = {
        "adam_betas": "(0.9, 0.98)",
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "lr": [0.01],
        "use_old_adam": True,
        "fp16_adam_stats": False,
        "tpu": False,
    }
    made = []
    for kind in (FairseqAdam, FusedAdam):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(3))]
        made.append((kind(Namespace(**(options | changed)), parameters), parameters))
    return made


def steps(optimizer: Any, parameters: list[nn.Parameter], first: int, last: int) -> None:
    """Gradients of very different sizes, some of them exactly 0, under a changing rate."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            exponent = torch.randint(-9, 1, parameter.shape, generator=generator)
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0**exponent
            parameter.grad = gradient * (torch.rand(parameter.shape, generator=generator) > 0.2)
        optimizer.set_lr(0.01 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"adam_eps": 1e-4}, {"adam_betas": "(0.9, 0.999)"}],
)
def test_it_computes_what_fairseqs_adam_does(options: dict[str, Any]) -> None:
    (reference, expected), (fused, found) = optimizers(**options)
    start = [parameter.detach().clone() for parameter in found]
    steps(reference, expected, 0, 30)
    steps(fused, found, 0, 30)
    for one, other, before in zip(found, expected, start, strict=True):
        assert (one - before).abs().mean() > 1e-3  # they moved
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_it_goes_on_from_its_state() -> None:
    _, (through, expected) = optimizers()
    steps(through, expected, 0, 20)
    _, (before, half) = optimizers()
    steps(before, half, 0, 10)
    state = before.state_dict()
    _, (after, found) = optimizers()
    with torch.no_grad():
        for parameter, value in zip(found, half, strict=True):
            parameter.copy_(value)
    after.load_state_dict(state)
    steps(after, found, 10, 20)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_betas_that_are_no_pair_are_named() -> None:
    with pytest.raises(ValueError, match=r"--adam-betas '0\.9': write two numbers"):
        FusedAdam(Namespace(adam_betas="0.9", adam_eps=1e-8, weight_decay=0, lr=[1]), [])
