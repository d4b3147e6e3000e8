"""Parallel text: two files, of which each line is the translation of the other's.

They are read anew, a part at a time, whenever their text is needed: memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.text import iter_lines
from qknorm_fairseq.tokenization import unescape

PART = 10_000  # lines read at a time

Pair = tuple[list[str], list[str]]
Say = Callable[[str], None]


class ParallelText:
    """A split, checked line by line; pairs that are empty on both sides are left out.

    Args:
        moses: the files hold Moses tokens, to be unescaped if need be.
        skip_empty: leave out pairs with one empty side too, instead of refusing them.
        limit: use only the first so many pairs.

    Attributes:
        count: the pairs that it has.

    Raises:
        QKNormError: the numbers of lines differ, a side is empty, or a file cannot be read; the
            message names file and line.
    """

    def __init__(
        self,
        split: str,
        files: tuple[Path, Path],
        *,
        moses: bool,
        skip_empty: bool,
        limit: int | None,
        say: Say,
    ) -> None:
        self.files, self.moses, self.limit = files, moses, limit
        source_file, target_file = files
        kept = left_out = lines = 0
        missing = False
        sides = (iter_lines(source_file), iter_lines(target_file))
        for left, right in zip_longest(*sides):
            lines += 1
            if left is None or right is None:
                missing = True
            elif left and right:
                kept += 1
            elif (left or right) and not (skip_empty or missing):
                self._refuse_if_aligned()
                empty = target_file if left else source_file
                raise QKNormError(
                    f"{empty}, line {lines}: empty, while its counterpart is not; mend it, or "
                    "leave such pairs out with --skip-empty"
                )
            else:
                left_out += 1
        if missing:
            self._refuse_if_aligned()
        if not lines:
            raise QKNormError(f"{source_file}: no lines at all in the {split} set")
        if not kept:
            raise QKNormError(f"{source_file}: nothing but empty lines")
        if left_out:
            say(f"{split}: {left_out:,} pairs with an empty side left out")
        self.count = kept if limit is None else min(kept, limit)

    def _refuse_if_aligned(self) -> None:
        """Complain of the numbers of lines, if that is what is wrong: it explains the rest."""
        source, target = (sum(1 for _ in iter_lines(file)) for file in self.files)
        if source != target:
            shorter, longer = self.files if source < target else self.files[::-1]
            raise QKNormError(
                f"{self.files[0]} has {source} lines and {self.files[1]} has {target}: "
                f"from line {min(source, target) + 1} on, {longer} has no counterpart in "
                f"{shorter}; parallel files need the same number of lines"
            )

    def parts(self) -> Iterator[Pair]:
        """All pairs, some thousands at a time."""
        both = zip(*map(iter_lines, self.files), strict=True)
        pairs = islice((pair for pair in both if all(pair)), self.limit)
        while part := list(islice(pairs, PART)):
            left, right = ([pair[side] for pair in part] for side in (0, 1))
            yield (unescape(left), unescape(right)) if self.moses else (left, right)

    def side(self, number: int) -> Iterator[list[str]]:
        """The lines of the source (0) or the target (1), some thousands at a time."""
        return (part[number] for part in self.parts())

    def lines(self) -> Iterator[str]:
        """All lines of the source, then all of the target."""
        return chain.from_iterable(chain(self.side(0), self.side(1)))
