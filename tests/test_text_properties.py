"""Any text: as many lines come out as went in, in the same order, whatever stands in them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qknorm_fairseq import cleaning
from qknorm_fairseq.errors import QKNormError, printable
from qknorm_fairseq.parallel_text import ParallelText
from qknorm_fairseq.scores import as_scored, score
from qknorm_fairseq.text import decode_lines, one_spaced
from qknorm_fairseq.tokenization import detokenize, tokenize, unescape
from qknorm_fairseq.translator import Translator

# What breaks lines elsewhere: Python's str.splitlines knows all of them.
SEPARATORS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]
ODD = [
    *SEPARATORS,
    "\ufeff",
    "\x00",
    "\x1b",
    "\u202e",
    "\u0301",
    "\u200d",
    "&quot;",
    "@-@",
    "<unk>",
]
CHARACTERS = st.characters(exclude_characters="\n", exclude_categories=("Cs",))
LINE = st.lists(st.sampled_from(ODD) | st.text(CHARACTERS, max_size=8), max_size=6).map("".join)
PLAIN = LINE.map(lambda line: line.replace("\0", ""))
anything = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read(text: str) -> list[str]:
    return list(decode_lines(io.BytesIO(text.encode()), "text"))


def expected(lines: list[str]) -> list[str]:
    """What is read of them: no byte-order mark before the first, one space for white space."""
    if lines:
        lines = [lines[0].removeprefix("\ufeff"), *lines[1:]]
    return [" ".join(line.split()) for line in lines]


@given(lines=st.lists(LINE, max_size=8), end=st.sampled_from(["\n", "\r\n"]))
@anything
def test_lines_are_read_as_they_are_or_refused_by_number(lines: list[str], end: str) -> None:
    text = "".join(line + end for line in lines)
    bad = [number for number, line in enumerate(lines, start=1) if "\0" in line]
    if bad:
        with pytest.raises(QKNormError, match=f"^text, line {bad[0]}: not text"):
            read(text)
    else:
        assert read(text) == expected(lines)


@given(content=st.binary(max_size=200))
@anything
def test_any_bytes_are_lines_or_one_message(content: bytes) -> None:
    try:
        lines = list(decode_lines(io.BytesIO(content), "text"))
    except QKNormError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("text, line ")
    else:
        ends = content.removeprefix(b"\xef\xbb\xbf")
        assert len(lines) == content.count(b"\n") + (not ends.endswith(b"\n") and ends != b"")
        assert all(line == one_spaced(line) for line in lines)


@given(pairs=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=8))
@anything
def test_pairs_stay_pairs(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    files = (tmp_path / "a.xx", tmp_path / "a.yy")
    for side, file in enumerate(files):
        file.write_bytes("".join(f"{pair[side]}\n" for pair in pairs).encode())
    sides = [expected([pair[side] for pair in pairs]) for side in (0, 1)]
    wanted = [both for both in zip(*sides, strict=True) if all(both)]
    options = {"moses": False, "skip_empty": True, "limit": None, "say": lambda line: None}
    if not wanted:
        with pytest.raises(QKNormError, match="nothing but empty lines"):
            ParallelText("train", files, **options)
        return
    text = ParallelText("train", files, **options)
    assert text.count == len(wanted)
    assert [both for part in text.parts() for both in zip(*part, strict=True)] == wanted


@given(lines=st.lists(PLAIN.map(one_spaced), max_size=5))
@anything
def test_tokens_and_text_have_as_many_lines(lines: list[str]) -> None:
    for made in (tokenize(lines, "en"), detokenize(lines, "zz"), unescape(lines)):
        assert len(made) == len(lines)
        assert not any("\n" in line for line in made)
    each = [detokenize(tokenize([line], "en"), "en")[0] for line in lines]
    assert detokenize(tokenize(lines, "en"), "en") == each  # a line by itself gives the same


@given(lines=st.lists(PLAIN.map(one_spaced), min_size=1, max_size=4), tokenized=st.booleans())
@anything
def test_any_lines_can_be_scored(lines: list[str], tokenized: bool) -> None:
    found = score(lines, lines, tokenized=tokenized)
    assert 0 <= found.bleu <= 100.01 and 0 <= found.chrf <= 100.01
    for metric in ("bleu", "bleu_tok"):
        assert len(as_scored(lines, metric, "en", tokenized=tokenized)) == len(lines)


@given(text=st.text())
@anything
def test_any_catalogue_text_is_one_tidy_line(text: str) -> None:
    tidy = cleaning.tidy(text)
    assert "\n" not in tidy
    assert cleaning.tidy(tidy) == tidy
    cleaning.refusal("Two words", tidy, "gl")


@given(text=st.text())
@anything
def test_a_message_is_one_line_without_control_characters(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    if text.isascii() and text.isprintable():
        assert shown == text


@pytest.fixture(scope="module")
def translator(checkpoint: Path) -> Translator:
    return Translator(checkpoint, cpu=True, beam=1)


@given(lines=st.lists(PLAIN, max_size=4), size=st.integers(1, 3))
@settings(anything, max_examples=15)
def test_as_many_translations_in_the_same_order(
    lines: list[str], size: int, translator: Translator
) -> None:
    """Between any lines a known one keeps its place, however many are read at a time."""
    known = "Kalo mitu."
    text = [part for line in lines for part in (one_spaced(line), known)]
    found = list(translator.translate_in_chunks(text, size))
    assert len(found) == len(text)
    assert set(found[1::2]) <= set(translator.translate([known]))
    assert [bool(line) for line in text[::2]] >= [bool(line) for line in found[::2]]
    assert not any("\n" in line or "\r" in line for line in found)
