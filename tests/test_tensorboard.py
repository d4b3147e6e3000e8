"""fairseq's own --tensorboard-logdir, with what the plugin logs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run, train

pytest.importorskip("tensorboardX")


def events(file: Path) -> Iterator[bytes]:
    """The records of a file of events: each has its length in front and checksums around."""
    content = file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def test_validations_and_g_are_in_the_event_files(run: Run, prepared: Path, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    logdir = tmp_path / "tensorboard"
    options = ("--arch", "transformer_qknorm_tiny", "--tensorboard-logdir", logdir)
    train(run, prepared, tmp_path / "run", *options, updates=100)
    found: dict[str, list[tuple[int, float]]] = {}
    for file in (logdir / "valid").iterdir():
        for event in map(Event.FromString, events(file)):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert [step for step, _ in found["loss"]] == [50, 100]
    for attention in ("encoder_1_self", "decoder_1_self", "decoder_1_cross"):
        (_, early), (_, late) = found[f"g_{attention}"]
        assert early > 0
        assert early != late
