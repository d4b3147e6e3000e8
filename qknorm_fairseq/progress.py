"""How far long work is, as stderr shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class Report(Protocol):
    """Hears how many of a download's bytes are here, and how many they are where that is known."""

    def __call__(self, name: str, done: int, size: int | None = None) -> None: ...


@contextmanager
def downloading(sizes: Mapping[str, int], progress: bool) -> Iterator[Report]:
    """One bar for all downloads on a terminal, otherwise a line for each; or nothing.

    Args:
        sizes: each download's name and bytes, as far as they are known beforehand.
        progress: False for nothing.
    """
    known = dict(sizes)
    console = Console(stderr=True, quiet=not progress)
    if not (progress and console.is_terminal):
        begun = set()

        def line(name: str, done: int, size: int | None = None) -> None:
            if progress and name not in begun:
                begun.add(name)
                rest = f", from {done / 1e6:.1f} MB on" if done else ""
                megabytes = (size or known[name]) / 1e6
                print(f"downloading {name} ({megabytes:.1f} MB{rest})", file=sys.stderr)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    arrived: dict[str, int] = {}
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(known.values()))

        def advance(name: str, done: int, size: int | None = None) -> None:
            known[name] = size or known[name]
            arrived[name] = done
            total, completed = sum(known.values()), sum(arrived.values())
            bar.update(task, description=name, total=total, completed=completed)

        yield advance


class Steps:
    """A line for each step that is done, with the time since the work began."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.begin = time.monotonic()

    def done(self, line: str) -> None:
        self.console.print(escape(f"[{self.elapsed()}] {line}"))

    def failed(self, line: str) -> None:
        self.console.print(escape(f"[{self.elapsed()}] {line}"), style="red")

    def elapsed(self) -> str:
        """ "12m03s", or "3h12m" where it has become hours."""
        minutes, seconds = divmod(int(time.monotonic() - self.begin), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes:2d}m{seconds:02d}s"
