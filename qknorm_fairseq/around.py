"""Layers around fairseq's functions, for what no option of fairseq's reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, layer: Callable[..., Any]) -> None:
    """Let `layer(inner, its arguments...)` take the place of a function; once, if repeated.

    Args:
        owner: the class or module that has it; `inner` is the function as it was.
    """
    inner = getattr(owner, name)
    if getattr(inner, "layer", None) is layer:
        return

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return layer(inner, *args, **kwargs)

    outer.layer = layer  # type: ignore[attr-defined]
    setattr(owner, name, outer)
