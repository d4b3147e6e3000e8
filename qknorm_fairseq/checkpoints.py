"""Which classes a checkpoint may hold.

torch (2.6 and later) refuses to load a checkpoint that holds anything but tensors and plain
values, since unpickling can run code. A checkpoint of fairseq-train holds its options as well.
Exactly the classes these need are allowed here; whatever else a file carries is refused by name.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import numpy as np
import torch

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


def refused_name(error: Exception) -> str | None:
    """The class or function that torch's safe loader refused, or None if it failed otherwise."""
    match = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
    return match[1] if match else None
