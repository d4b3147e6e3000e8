"""Reading checkpoints, and which classes they may hold.

torch (2.6 and later) refuses to load a checkpoint that holds anything but tensors and plain
values, since unpickling can run code. A checkpoint of fairseq-train holds its options as well.
Exactly the classes these need are allowed here; whatever else a file carries is refused by name.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qknorm_fairseq.errors import QKNormError

# The options of models without a dataclass (fairseq's own `transformer`) are a Namespace; a
# validation with BLEU leaves its n-gram counts as numpy arrays.
ALLOWED: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("int64")),
    type(np.dtype("float64")),
    np.empty(0).__reduce__()[0],  # numpy's own builder of arrays
]


def allow_fairseq_classes() -> None:
    """Let torch.load read what fairseq-train writes, with `weights_only` left on."""
    torch.serialization.add_safe_globals(ALLOWED)


def load(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's content, read with torch's safe loader.

    Raises:
        QKNormError: there is no such file, it is damaged, or it holds what no checkpoint needs.
    """
    allow_fairseq_classes()
    if checkpoint.is_dir():
        raise QKNormError(
            f"{checkpoint}: a folder; name the checkpoint in it, like "
            f"{checkpoint / 'checkpoint_best.pt'}"
        )
    if not checkpoint.is_file():
        raise QKNormError(f"{checkpoint}: no such checkpoint")
    check_bytes(checkpoint)
    try:
        state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ...
        name = _refused_name(error)
        if name:
            raise QKNormError(
                f"{checkpoint}: refused, since it carries {name}, which no fairseq checkpoint "
                "needs and which could run code"
            ) from None
        raise QKNormError(f"{checkpoint}: damaged, or no torch checkpoint") from None
    if not isinstance(state, dict) or "model" not in state:
        raise QKNormError(f"{checkpoint}: not a fairseq checkpoint (it has no model)")
    return state


def check_bytes(checkpoint: Path) -> None:
    """Compare the content with its checksums, which torch leaves out: wrong weights load as well.

    Raises:
        QKNormError: the file is damaged.
    """
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            damaged = archive.testzip() is not None
    except Exception:  # zipfile raises BadZipFile, zlib.error, EOFError, ...
        damaged = True
    if damaged:
        raise QKNormError(f"{checkpoint}: damaged, or no torch checkpoint; take another copy")


def _refused_name(error: Exception) -> str | None:
    """The class or function that torch's safe loader refused, or None if it failed otherwise."""
    match = re.search(r"[Uu]nsupported (?:global: GLOBAL|GLOBAL|class) (\S+)", str(error))
    return match[1] if match else None
