"""What the words of a corpus are: text as people write it, or Moses tokens.

    none    He said: "It's [not] here."
    moses   He said : " It 's [ not ] here ."

Published corpora are often Moses-tokenized, with some characters written as `&quot;` and the like.
Here tokens are never escaped: whoever reads some unescapes them first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sacremoses import MosesDetokenizer, MosesTokenizer

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.text import one_spaced

NONE = "none"
MOSES = "moses"
TOKENIZATIONS = (NONE, MOSES)

# All that Moses' tokenizer.perl escapes.
ESCAPES = {
    "&quot;": '"',
    "&apos;": "'",
    "&lt;": "<",
    "&gt;": ">",
    "&#91;": "[",
    "&#93;": "]",
    "&#124;": "|",
    "&amp;": "&",
}
ESCAPE = re.compile("|".join(ESCAPES))


def unescape(lines: Sequence[str]) -> list[str]:
    """Moses tokens with their escapes as the characters they stand for (each taken once only)."""
    return [ESCAPE.sub(lambda found: ESCAPES[found[0]], line) for line in lines]


def tokenize(lines: Sequence[str], lang: str) -> list[str]:
    """Text to Moses tokens, joined by spaces, nothing escaped."""
    moses = _moses(MosesTokenizer, lang)
    return [moses.tokenize(line, return_str=True, escape=False) for line in lines]


def detokenize(lines: Sequence[str], lang: str) -> list[str]:
    """Moses tokens to text."""
    moses = _moses(MosesDetokenizer, lang)
    return [one_spaced(moses.detokenize(line.split(), unescape=False)) for line in lines]


def check_language(code: str) -> None:
    """
    Raises:
        QKNormError: this can't be a language's code. Those that Moses has no rules for are good:
            it takes its general ones.
    """
    if not re.fullmatch(r"\w{1,20}(-\w{1,20})*", code):
        raise QKNormError(f"language code {code!r}: write one such as en or pt-br")


@lru_cache
def _moses(tool: type[Any], lang: str) -> Any:
    return tool(lang=lang)
