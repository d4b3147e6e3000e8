"""`qknorm report`: what is in a folder of runs, as one page with plots, Markdown and JSON.

The outputs hold figures about the text, never the text itself.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape as markup_escape
from rich.table import Table as RichTable

import qknorm_fairseq
from qknorm_fairseq import report_tables as tables
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import write_json, write_text
from qknorm_fairseq.report_tables import Table
from qknorm_fairseq.results import Result, find
from qknorm_fairseq.sharpness import Attention, Sharpness, of_group, over_groups
from qknorm_fairseq.summary import Group, Summary, summarize
from qknorm_fairseq.test_set import Missing

Say = Callable[[str], None]
Key = tuple[str, str]  # corpus, pair


@dataclass(frozen=True)
class Plot:
    """A figure of a group: its file `plots/<name>.svg` and `.png`, and what it is of."""

    name: str
    title: str
    svg: str
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A corpus and pair with all that is shown of it."""

    group: Group
    plots: list[Plot]
    attention: Attention
    sharpness: list[Sharpness]


@dataclass(frozen=True)
class Report:
    summary: Summary
    sections: list[Section]
    command: str

    @property
    def sharpness(self) -> list[Sharpness]:
        """Over all pairs; see :func:`qknorm_fairseq.sharpness.over_groups`."""
        return over_groups({section.group.title: section.sharpness for section in self.sections})

    def as_json(self) -> dict[str, Any]:
        """`report.json`: the fields of :class:`qknorm_fairseq.summary.Summary`, and more."""
        content = asdict(self.summary)
        for group, section in zip(content["groups"], self.sections, strict=True):
            group["attention"] = section.attention
            group["attention_compared"] = [asdict(one) for one in section.sharpness]
        return {
            "version": qknorm_fairseq.__version__,
            "command": self.command,
            "metric_of_differences": "bleu_tok",
            **content,
            "attention_compared": [asdict(one) for one in self.sharpness],
        }


def make(
    runs: Path,
    out: Path,
    *,
    command: str,
    base: str | None = None,
    attention: bool = True,
    cpu: bool = False,
    say: Say = print,
) -> Report:
    """Read runs, compare them, and write report.html, report.md, report.json and plots/.

    Args:
        runs: a folder of runs, as for :func:`qknorm_fairseq.results.find`.
        command: what the report says that it was made with.
        base: the model to compare with, as for :func:`qknorm_fairseq.summary.summarize`.
        attention: compute statistics of the attention from the checkpoints, on the CPU with `cpu`.
        say: hears of each step that takes a while.

    Raises:
        QKNormError: there are no runs, or one of their files is damaged.
    """
    results, left_out = find(runs)
    summary = summarize(results, runs, base=base, say=say)
    summary.notes.extend(left_out)
    of_pair: dict[Key, list[Result]] = defaultdict(list)
    for result in results:
        of_pair[result.corpus, result.pair].append(result)
    sections = []
    for group in summary.groups:
        own = of_pair[group.corpus, group.pair]
        if going := sum(1 for run in own if run.score is None and run.history):
            group.notes.append(
                f"{going} runs without a score: thin lines among the curves, and in no mean"
            )
        found = _attention(own, group.notes, cpu=cpu) if attention else {}
        plots = _plots(group, own, found, out / "plots")
        sections.append(Section(group, plots, found, of_group(group, found)))
        say(f"{group.title}: plots")
    report = Report(summary, sections, command)
    write_json(out / "report.json", report.as_json())
    write_text(out / "report.md", markdown(report))
    write_text(out / "report.html", page(report))
    return report


def _attention(results: Sequence[Result], notes: list[str], *, cpu: bool) -> Attention:
    finished = [result for result in results if result.score is not None]
    if not finished:
        return {}
    from qknorm_fairseq.attention_statistics import of_run

    found = defaultdict(list)
    missing = Missing()
    for run in finished:
        try:
            statistics = of_run(run.folder, cpu=cpu, not_kept=partial(missing.add_unkept, run))
        except QKNormError as error:
            missing.add("attention statistics", run, error)
        else:
            found[run.model].append(statistics)
    notes += [line for line in missing.lines() if line not in notes]
    return dict(found)


def _plots(
    group: Group, results: Sequence[Result], attention: Attention, folder: Path
) -> list[Plot]:
    from qknorm_fairseq import plots

    # The models in one order in all plots, as that gives them their colours.
    models = dict.fromkeys([*(row.model for row in group.rows), *(r.model for r in results)])
    finished, unfinished = (_histories(models, results, scored=of) for of in (True, False))
    figures: list[tuple[str, str, Any]] = []
    if finished or unfinished:
        curves = finished, unfinished
        figures += [
            ("training", "Loss in training and validation", plots.training(*curves)),
            ("dev_bleu", "Development BLEU while training", plots.dev_bleu(*curves)),
            ("learning_rate", "Learning rate", plots.learning_rate(*curves)),
            ("g", "The learned g of each attention", plots.g(*curves)),
        ]
    if group.lengths:
        of = group.lengths
        bleu = {model: of.bleu[model] for model in models if model in of.bleu}
        figure = plots.bleu_by_length(bleu, of.bins, of.sentences)
        title = "Tokenized BLEU by words of the source sentence (bars of 20 sentences or more)"
        figures.append(("bleu_by_length", title, figure))
    if attention:
        title = "Attention of the trained models over the test set"
        statistics = {model: attention[model] for model in models if model in attention}
        figures.append(("attention", title, plots.attention(statistics)))
    drawn = []
    for name, title, figure in figures:
        if figure is not None:
            stem = f"{group.corpus}_{group.pair}_{name}"
            plots.save(figure, folder / stem)
            width, height = figure.get_size_inches()
            svg = plots.svg(figure, f"{group.title}: {title}")
            drawn.append(Plot(stem, title, svg, wide=width > 2 * height))
    return drawn


def _histories(
    models: Iterable[str], results: Sequence[Result], *, scored: bool
) -> dict[str, list[list[dict[str, Any]]]]:
    """The records of each model's seeds that have a score, or of those that don't."""
    of = [result for result in results if result.history and (result.score is not None) == scored]
    found = {model: [run.history for run in of if run.model == model] for model in models}
    return {model: seeds for model, seeds in found.items() if seeds}


def page(report: Report) -> str:
    """report.html: one file that loads nothing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("qknorm_fairseq"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: Markup(_breakable(str(escape(text))))
    return environment.get_template("report.html").render(
        report=report,
        tables=tables,
        signatures=signatures(report.summary),
        over_pairs=_over_pairs(report),
        version=qknorm_fairseq.__version__,
    )


def _breakable(html: str) -> str:
    """Names of models and folders may be broken where a part of them ends, `gl-en` never."""
    html = re.sub(r"\b[a-z]{2,3}-[a-z]{2,3}\b", r'<span class="whole">\g<0></span>', html)
    return re.sub(r"([_+]|(?<!<)/)", r"\1<wbr>", html)


def markdown(report: Report) -> str:
    """report.md, with the plots beside it."""
    lines = ["# Results", "", f"Made by `{report.command}`.", ""]
    if report.summary.averages:
        lines += _markdown_table(tables.of_averages(report.summary.averages))
    lines += _sentences(_over_pairs(report))
    lines += [tables.PAPER_LINE, ""]
    for section in report.sections:
        group = section.group
        count = f" ({group.test_sentences:,} test sentences)" if group.test_sentences else ""
        lines += [f"## {group.title}{count}", ""]
        for table in tables.of_group(group):
            lines += _markdown_table(table)
        lines += _bullets([line for row in group.rows if (line := tables.seed_line(row))])
        lines += _sentences(map(tables.attention_line, section.sharpness))
        for table in tables.of_attention(section.sharpness):
            lines += _markdown_table(table)
        flagged = [row for row in group.rows if row.flags]
        for row in flagged:
            lines += [f"**`{row.model}` differs in more than what is compared:**", ""]
            lines += _bullets([f"`{flag}`" for flag in row.flags])
        lines += _bullets(group.notes)
        commands = [command for row in group.rows for command in row.commands]
        if commands:
            lines += ["```bash", *commands, "```", ""]
        for plot in section.plots:
            lines += [f"![{plot.title}](plots/{plot.name}.svg)", ""]
    if report.summary.unfinished:
        lines += _markdown_table(tables.of_unfinished(report.summary.unfinished))
    lines += _bullets(report.summary.notes)
    lines += _bullets(f"{name}: `{signature}`" for name, signature in signatures(report.summary))
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    rules = ["---" if n < table.left else "---:" for n in range(len(table.columns))]
    rows = [table.columns, rules, *table.rows]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [f"**{table.title}**", "", *(f"| {' | '.join(row)} |" for row in cells), ""]
    return [*lines, table.note, ""] if table.note else lines


def _over_pairs(report: Report) -> list[str]:
    return [tables.attention_line(one, " over all pairs") for one in report.sharpness]


def _sentences(lines: Iterable[str]) -> list[str]:
    return [text for line in lines for text in (f"{line}.", "")]


def _bullets(items: Any) -> list[str]:
    lines = [f"- {item}" for item in items]
    return [*lines, ""] if lines else []


def signatures(summary: Summary) -> list[tuple[str, str]]:
    """(metric or test, sacreBLEU's signature), each that occurs."""
    rows = [row for group in summary.groups for row in group.rows]
    found = [each for row in rows for each in row.signatures.items()]
    tests = [test for row in rows if row.difference for test in row.difference.tests]
    found += [each for test in tests for each in test.signatures.items()]
    return list(dict.fromkeys(found))


def show(report: Report, out: Path) -> None:
    """The tables, what is wrong with them, what is missing, and how to repeat it.

    Args:
        out: where the rest is.
    """
    terminal = Console()
    # In a file or a pipe rich assumes 80 columns; there lines may be longer, and are not wrapped.
    fixed = terminal.is_terminal or "COLUMNS" in os.environ
    width = terminal.width if fixed else 140
    console = Console(width=width, highlight=False)
    say = partial(console.print, markup=False, soft_wrap=not fixed)
    verbatim = partial(console.print, markup=False, soft_wrap=True)  # to be copied

    def show_table(table: Table) -> None:
        say(f"\n{table.title}", style="italic")
        for number, part in enumerate(_fitted(table, width)):
            console.print(*([""] if number else []), part, sep="\n", soft_wrap=True)
        if table.note:
            say(table.note)

    for section in report.sections:
        group = section.group
        say(f"\n{group.title}", style="bold")
        for table in tables.of_group(group):
            show_table(table)
        for one in section.sharpness:
            say(f"{tables.attention_line(one)}.")
        for row in group.rows:
            for flag in row.flags:
                say(f"! {row.model}: {flag}", style="yellow")
        for note in group.notes:
            say(f"! {note}", style="yellow")
    if report.summary.averages:
        show_table(tables.of_averages(report.summary.averages))
    for line in _over_pairs(report):
        say(f"{line}.")
    if report.summary.unfinished:
        show_table(tables.of_unfinished(report.summary.unfinished))
    for note in report.summary.notes:
        say(note)
    for name, signature in signatures(report.summary):
        verbatim(f"{name}: {signature}")
    if any(row.commands for section in report.sections for row in section.group.rows):
        say(
            f"The commands that reproduce the rows: below each pair's tables in {out / 'report.md'}"
        )


def _fitted(table: Table, width: int) -> list[RichTable]:
    """The table in so many columns: words and names wrapped, and in parts where that isn't enough.

    Each part has the columns of words. Only a word that is wider than the whole is wider.
    """
    for longest in (width, 40, 24, 16):
        rows = [[_wrapped(cell, longest) for cell in row] for row in table.rows]
        widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
        heads = [_wrapped(n, max(w, 12)) for n, w in zip(table.columns, widths, strict=True)]
        widths = [max(w, _width(head)) for w, head in zip(widths, heads, strict=True)]
        if sum(widths) + 2 * len(widths) <= width:
            break
    words = list(range(table.left))
    parts: list[list[int]] = [[]]
    for number in range(table.left, len(widths)):
        shown = [*words, *parts[-1], number]
        if parts[-1] and sum(widths[n] + 2 for n in shown) > width:
            parts.append([])
        parts[-1].append(number)
    return [_rich(heads, rows, [*words, *part], table.left) for part in parts]


def _wrapped(text: str, longest: int) -> str:
    """Broken between words and where a part of a name ends, never within them."""
    lines = [""]
    for piece in re.split(r"(?<=[_/ ])|(?=\+)", text):
        if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > longest:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _rich(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int], left: int
) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number in numbers:
        side: Literal["left", "right"] = "left" if number < left else "right"
        shown.add_column(markup_escape(heads[number]), justify=side, no_wrap=True)
    for row in rows:
        shown.add_row(*(markup_escape(row[number]) for number in numbers))
    return shown
