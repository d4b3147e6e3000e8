"""The `qknorm` command. Each sub-command imports what it needs when it is called."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from qknorm_fairseq import __version__
from qknorm_fairseq.errors import QKNormError, complaint, printable, reason

app = typer.Typer(
    name="qknorm",
    help="Query-Key Normalization for low-resource machine translation: corpora, translation, "
    "scores. Training is fairseq's own: fairseq-train --user-dir qknorm_fairseq.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="QKNORM_DATA", help="Folder of corpora and downloads.")
]
Local = Annotated[
    Path | None,
    typer.Option("--from", help="Take the published files from this folder, without network."),
]
Mirror = Annotated[
    str | None, typer.Option("--mirror", help="Download from this address instead of the usual.")
]
RegistryFile = Annotated[
    Path | None,
    typer.Option("--registry", help="Another file like data/corpora.yaml (for your own copies)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def say(line: str) -> None:
    """A line about the work itself; results go to standard output."""
    print(line, file=sys.stderr, flush=True)


def note(line: str) -> None:
    """A line about something that the user did not ask for and should know."""
    say(f"qknorm: {printable(line)}")


def print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on failure.")] = False,
) -> None:
    if debug:
        os.environ["QKNORM_DEBUG"] = "1"


@app.command("user-dir")
def user_dir() -> None:
    """Print the folder for fairseq's --user-dir."""
    print(Path(__file__).resolve().parent)


@app.command()
def fetch(
    corpus: Annotated[str, typer.Argument(help="catalogues, ted or iwslt15.")],
    pair: Annotated[
        str | None, typer.Option(help="en-vi, ar-en, en-he, gl-en or sk-en, as the corpus has it.")
    ] = None,
    local: Local = None,
    mirror: Mirror = None,
    registry: RegistryFile = None,
    data_dir: DataDir = Path("data"),
) -> None:
    """Fetch a corpus: download, verify, split.

    catalogues: translated message catalogues of free software, all five pairs. ted: TED talks
    (Qi et al. 2018), all but en-vi; 352 MB, downloaded once for all pairs. iwslt15: TED talks,
    en-vi; 32 MB.
    """
    from qknorm_fairseq import fetch as corpora
    from qknorm_fairseq.corpora import load_registry

    check_origin(local, mirror)
    known = load_registry(registry)
    folder = corpora.fetch(corpus, pair, data_dir, local=local, mirror=mirror, registry=known)
    say(f"Ready: {folder}; next: qknorm prepare --corpus {corpus} --pair {folder.name}")


def check_origin(local: Path | None, mirror: str | None) -> None:
    if local is not None and mirror is not None:
        raise typer.BadParameter("give either --from or --mirror")


@app.command()
def prepare(
    corpus: Annotated[
        str | None, typer.Option(help="A fetched corpus, e.g. catalogues (with --pair).")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="Source-target, e.g. gl-en.")] = None,
    train: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Your own text: SOURCE TARGET.")
    ] = None,
    valid: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Development text: SOURCE TARGET.")
    ] = None,
    test: Annotated[tuple[Path, Path] | None, typer.Option(help="SOURCE TARGET.")] = None,
    source_lang: Annotated[
        str | None, typer.Option("--source-lang", "-s", help="(default: the file's suffix)")
    ] = None,
    target_lang: Annotated[
        str | None, typer.Option("--target-lang", "-t", help="(default: the file's suffix)")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to make (default: <data-dir>/prepared/<corpus or own>/<pair>)"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=5, help="Joint BPE subwords, at most (default: 8000; catalogues 4000)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first so many training pairs.")
    ] = None,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave out pairs with an empty side.")
    ] = False,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Your files hold Moses tokens, not raw text.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a folder made from something else.")
    ] = False,
    data_dir: DataDir = Path("data"),
    as_json: Json = False,
) -> None:
    """Make parallel text ready for fairseq: check, segment into subwords, binarize.

    Either a fetched corpus (--corpus catalogues --pair gl-en) or your own files, one sentence a
    line (--train a.gl a.en --valid b.gl b.en --test c.gl c.en).
    """
    from dataclasses import asdict

    from qknorm_fairseq import prepared_data
    from qknorm_fairseq.corpora import VOCAB_SIZE
    from qknorm_fairseq.tokenization import MOSES, NONE

    own = {"train": train, "valid": valid, "test": test}
    if corpus is not None:
        if any(own.values()):
            raise typer.BadParameter("give either --corpus or your own --train and --valid files")
        if tokenized:
            raise typer.BadParameter("--tokenized is for your own files: a corpus says it itself")
        description = prepared_data.prepare_corpus(
            corpus,
            "-".join(split_pair(pair)),
            data_dir=data_dir,
            out=out,
            vocab_size=vocab_size,
            limit=limit,
            skip_empty=skip_empty,
            force=force,
            say=say,
        )
    else:
        if train is None or valid is None:
            raise typer.BadParameter("give --corpus and --pair, or --train and --valid files")
        if pair is not None:
            source_lang, target_lang = split_pair(pair)
        source_lang = source_lang or train[0].suffix.removeprefix(".")
        target_lang = target_lang or train[1].suffix.removeprefix(".")
        files = {split: both for split, both in own.items() if both is not None}
        for split, (source, target) in files.items():
            if (source.suffix, target.suffix) == (f".{target_lang}", f".{source_lang}"):
                raise QKNormError(
                    f"--{split} {source} {target}: the other way round than {source_lang} to "
                    f"{target_lang}; give the source file first"
                )
        description = prepared_data.prepare(
            files,
            source_lang=source_lang,
            target_lang=target_lang,
            out=out or data_dir / "prepared" / "own" / f"{source_lang}-{target_lang}",
            vocab_size=vocab_size or VOCAB_SIZE,
            limit=limit,
            tokenization=MOSES if tokenized else NONE,
            skip_empty=skip_empty,
            force=force,
            say=say,
        )
    if as_json:
        print(json.dumps(asdict(description)))


def split_pair(pair: str | None) -> tuple[str, str]:
    source, dash, target = (pair or "").partition("-")
    if not (source and dash and target) or {"-", "/"} & {*source, *target}:
        raise typer.BadParameter(f"--pair is source-target, e.g. gl-en, not {pair!r}")
    return source, target


@app.command()
def translate(
    file: Annotated[
        Path | None, typer.Argument(help="Text, one sentence a line (default: standard input).")
    ] = None,
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", "-c", help="What fairseq-train wrote."),
    ] = ...,  # type: ignore[assignment]
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared folder (default: beside the checkpoint, or where it trained)."),
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam size.")] = 4,
    lenpen: Annotated[
        float | None,
        typer.Option(help="Length penalty; more favours longer (default: the task's)."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences at a time.")] = 64,
    buffer_size: Annotated[
        int, typer.Option(min=1, help="Lines to read before translating (1 at a terminal).")
    ] = 1024,
    cpu: Annotated[bool, typer.Option("--cpu", help="Don't use a GPU.")] = False,
    tokenized: Annotated[
        bool,
        typer.Option("--tokenized", help="Moses tokens in and out, of a model trained on such."),
    ] = False,
) -> None:
    """Translate raw text to raw text: as many lines out as in, in the same order."""
    from qknorm_fairseq.text import decode_lines

    if lenpen is not None and not math.isfinite(lenpen):
        raise typer.BadParameter(f"--lenpen {lenpen}: a finite number, 1 or so")
    name: Path | str = file or "standard input"
    if file is None and sys.stdin is None:
        raise QKNormError("standard input is closed: name a file, or give the text in a pipe")
    try:
        stream = file.open("rb") if file else sys.stdin.buffer
    except OSError as error:
        raise QKNormError(f"{file}: {reason(error)}") from None
    from qknorm_fairseq.translator import Translator

    translator = Translator(
        checkpoint,
        data=data,
        beam=beam,
        lenpen=lenpen,
        max_sentences=batch_size,
        cpu=cpu,
        tokenized=tokenized,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # UTF-8 out as in, whatever the locale says
        sys.stdout.reconfigure(encoding="utf-8")
    if stream.isatty():
        buffer_size = 1
    with stream:
        lines = decode_lines(stream, name)  # type: ignore[arg-type]
        for translation in translator.translate_in_chunks(lines, buffer_size):
            print(translation, flush=buffer_size == 1)


@app.command()
def score(
    hyp: Annotated[Path, typer.Argument(help="Hypotheses, one a line.")],
    ref: Annotated[Path, typer.Argument(help="References, one a line.")],
    lang: Annotated[str, typer.Option(help="Target language, for Moses tokenization.")] = "en",
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="The files hold Moses tokens, not raw text.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenized and detokenized BLEU, chrF and TER, with sacreBLEU's signatures."""
    from dataclasses import asdict

    from qknorm_fairseq.scores import score_files

    scores = score_files(hyp, ref, lang=lang, tokenized=tokenized, say=note)
    if as_json:
        print(json.dumps(asdict(scores)))
        return
    for name, title in (
        ("bleu_tok", "BLEU (tokenized)"),
        ("bleu", "BLEU"),
        ("chrf", "chrF"),
        ("ter", "TER"),
    ):
        if (value := getattr(scores, name)) is not None:
            print(f"{title:<17}{value:6.2f}   {scores.signatures[name]}")


@app.command()
def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE.hyp", help="The baseline's hypotheses.")],
    system: Annotated[Path, typer.Argument(metavar="SYSTEM.hyp", help="The other system's.")],
    ref: Annotated[Path, typer.Argument(help="References, one a line.")],
    lang: Annotated[str, typer.Option(help="Target language, for Moses tokenization.")] = "en",
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="The files hold Moses tokens, not raw text.")
    ] = False,
    metric: Annotated[str, typer.Option(help="bleu, bleu_tok, chrf or ter.")] = "bleu",
    as_json: Json = False,
) -> None:
    """Is a system better than another by more than chance? Paired tests, by sacreBLEU.

    The same files give the same figures; SACREBLEU_SEED is the seed, as for sacreBLEU.
    """
    from dataclasses import asdict

    from qknorm_fairseq.significance import compare_files

    found = compare_files(base, system, ref, metric=metric, lang=lang, tokenized=tokenized)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    for name, value in ((base, found.base), (system, found.system)):
        print(f"{metric:<9}{value:7.2f}   {name}")
    print(
        f"{'change':<9}{found.difference:+7.2f}   95% interval {found.interval[0]:+.2f} to "
        f"{found.interval[1]:+.2f}; {found.differing:,} of {found.sentences:,} sentences differ"
    )
    print(f"p = {found.p_bootstrap:.4f}   paired bootstrap   {found.signatures['bootstrap']}")
    print(
        f"p = {found.p_randomization:.4f}   randomization      {found.signatures['randomization']}"
    )


@app.command()
def report(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="Folder of runs, of one corpus or of one pair.")
    ] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to (default: RUNS/report).")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with (default: transformer_scalenorm of the same size, else "
            "the first)."
        ),
    ] = None,
    attention: Annotated[
        bool, typer.Option("--attention/--no-attention", help="Statistics of the attention.")
    ] = True,
    cpu: Annotated[bool, typer.Option("--cpu", help="Don't use a GPU for these.")] = False,
    as_json: Json = False,
) -> None:
    """Compare all runs: tables, significance and plots, in report.html, report.md, report.json.

    The first time takes a while for each pair of runs; what was computed is kept with the run.
    """
    import shlex

    from qknorm_fairseq import report as reports
    from qknorm_fairseq.progress import Steps
    from qknorm_fairseq.training import console

    out = out or runs / "report"
    options = [*(["--base", base] if base else []), *([] if attention else ["--no-attention"])]
    made = reports.make(
        runs,
        out,
        command=shlex.join(["qknorm", "report", str(runs), *options]),
        base=base,
        attention=attention,
        cpu=cpu,
        say=Steps(console).done,
    )
    if as_json:
        print(json.dumps(made.as_json()))
    else:
        reports.show(made, out)
    say(f"Written: {out / 'report.html'}, report.md, report.json and plots/ beside it")


@app.command()
def bench(
    kind: Annotated[str, typer.Argument(help="train, decode, run, growth or prepare.")],
    size: Annotated[str, typer.Option(help="tiny (2+2 layers, 256) or full (6+6, 512).")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    turns: Annotated[int, typer.Option(min=1, help="Measurements of each.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences at a time (decode).")] = 32,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the plots growth.svg and growth.png.")
    ] = None,
    pairs: Annotated[
        str, typer.Option(help="Sizes of the text (prepare).")
    ] = "10000,100000,1000000",
    data: Annotated[Path, typer.Option(help="Prepared data to train on (run).")] = Path(
        "data/prepared/catalogues/gl-en"
    ),
    updates: Annotated[int, typer.Option(min=1, help="Updates of each training (run).")] = 100,
    as_json: Json = False,
) -> None:
    """Speed against fairseq's own transformer: ratios, measured in turns on this machine.

    run: whole fairseq-train runs on real data, the start of the program included.

    growth: seconds and memory of an update as sentences get longer, and batches larger.
    prepare: those of `qknorm prepare` as the text gets larger.
    """
    from dataclasses import asdict

    from qknorm_fairseq import bench as benchmark
    from qknorm_fairseq.environment import machine

    kinds = ("train", "decode", "run", "growth", "prepare")
    for value, known in ((kind, kinds), (size, tuple(benchmark.SIZES))):
        if value not in known:
            raise typer.BadParameter(f"{value!r}: there is {', '.join(known)}")
    if out is not None and kind != "growth":
        raise typer.BadParameter("--out is for growth")
    if device != "cpu":
        import torch

        if device != "cuda" or not torch.cuda.is_available():
            raise QKNormError(f"--device {device}: not on this machine")
    if kind == "prepare":
        from qknorm_fairseq import growth_of_prepare

        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", pairs):
            raise typer.BadParameter(f"--pairs {pairs}: write numbers, like 10000,100000")
        sizes = [int(size) for size in pairs.split(",")]
        calls = growth_of_prepare.measure(sizes, say)
        if as_json:
            print(json.dumps({"calls": [asdict(call) for call in calls], "machine": machine()}))
        else:
            for call in calls:
                print(f"{call.pairs:>10,} pairs {call.seconds:8.1f} s {call.peak_mb:8,.0f} MB")
            print(machine_line(machine()))
        return
    if kind == "growth":
        from qknorm_fairseq import growth

        points = growth.measure(size=size, device=device, turns=turns, say=say)
        if out is not None:
            from qknorm_fairseq import plots

            plots.save(plots.growth(points), out / "growth")
        if as_json:
            print(json.dumps({"points": [asdict(point) for point in points], "machine": machine()}))
        else:
            print(growth.table(points), machine_line(machine()), sep="\n")
        return
    on = machine()
    found: dict[str, Any]
    if kind == "run":
        from qknorm_fairseq import whole_runs

        if not data.is_dir():
            raise QKNormError(f"{data}: no such folder; see `qknorm prepare --help`")
        given = {"size": size, "device": device, "turns": turns, "updates": updates}
        results = whole_runs.measure(data, **given, say=say)  # type: ignore[arg-type]
        found = {"kind": kind, **given, "unit": "updates/s", "results": results}
    else:
        given = {"size": size, "device": device, "turns": turns, "batch_size": batch_size}
        found = benchmark.bench(kind, **given, say=say)  # type: ignore[arg-type]
    if as_json:
        rows = [asdict(result) for result in found["results"]]
        print(json.dumps(found | {"results": rows, "machine": on}))
        return
    unit = found["unit"]
    profiled = found["results"][0].products is not None
    heading = "   products  bound" if profiled else ""
    print(f"{'':<22}{unit:>16}  ratio (least - most)   peak MB{heading}")
    for each in found["results"]:
        ratio, least, most = each.ratio
        shares = f"{each.products:>11.0%}   {each.bound:.2f}" if profiled else ""
        print(
            f"{each.variant:<22}{each.per_second:>16,.2f}  {ratio:.2f} ({least:.2f} - {most:.2f})"
            f"{each.peak_mb:>13,.0f}{shares}"
        )
    if profiled:
        print("products: share of matrix products; bound: the ratio if the rest took no time")
    padded = f"; {found['padding']:.0%} of the batches is padding" if "padding" in found else ""
    print(f"{turns} turns{padded}")
    print(machine_line(on))


def machine_line(on: dict[str, Any]) -> str:
    """What a bench was measured on, for people."""
    packages = ", ".join(f"{name} {v}" for name, v in on["packages"].items() if v)
    return f"{on['processor']}, {on['cores']} cores; Python {on['python']}; {packages}"


@app.command()
def attention(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", "-c", help="What was trained.")],
    source: Annotated[str, typer.Option(help="A sentence.")],
    target: Annotated[
        str | None, typer.Option(help="Its translation (default: the model's own, beam 4).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files (default: attention; with --json none)."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="encoder, decoder (self-attention) or cross.")
    ] = "cross",
    layer: Annotated[int | None, typer.Option(help="From 1 on (default: the last).")] = None,
    head: Annotated[int | None, typer.Option(help="From 1 on (default: all).")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared folder (default: beside the checkpoint, or where it trained)."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Don't use a GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Show which subwords attend to which: a heat map (PNG, SVG) and a page with all of them."""
    if kind not in ("encoder", "decoder", "cross"):
        raise typer.BadParameter(f"--kind {kind!r}: there is encoder, decoder and cross")
    if not source.strip():
        raise typer.BadParameter("--source is empty: give it a sentence")
    from qknorm_fairseq import attention_maps
    from qknorm_fairseq.figures import save
    from qknorm_fairseq.translator import Translator

    maps = attention_maps.attend(Translator(checkpoint, data=data, cpu=cpu), source, target)
    try:
        layer, heads = maps.chosen(kind, layer, head)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(attention_maps.as_json(maps, kind, layer, heads))
        if out is None:
            return
    out = out or Path("attention")
    stem = out / (f"{kind}_layer{layer}" + (f"_head{head}" if head else ""))
    save(attention_maps.figure(maps, kind, layer, heads), stem)
    page = out / "attention.html"
    attention_maps.write_page(page, maps, kind, layer, head, model=str(checkpoint))
    say(f"Written: {stem}.png, {stem}.svg and, with all layers and heads, {page}")


def main() -> None:
    """The `qknorm` command."""
    run_app(app)


def run_app(command: Callable[[], object]) -> None:
    """Run a command: exit 0 if it worked, 1 if it failed, 2 if it was called wrongly.

    After Ctrl-C it is 130, as in a shell.
    """
    # Threads that wait by spinning slow each other down tenfold when something else needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Before fairseq is imported, so that its notes about itself stay out of the user's terminal.
    logging.basicConfig(level=logging.WARNING, format="qknorm: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no UTF-8
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here a full disk can still be told of
    except QKNormError as error:
        _fail(str(error))
    except BrokenPipeError:  # whoever read our output has stopped reading
        _drop_output()
        sys.exit(1)
    except SystemExit as done:
        if done.code == 130:  # typer has caught a KeyboardInterrupt
            print("qknorm: interrupted", file=sys.stderr)
        raise
    except OSError as error:
        _drop_output()
        _fail(complaint(error))


def _drop_output() -> None:
    """Forget what could not be written, or Python tries again when it ends, and complains."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> None:
    if os.environ.get("QKNORM_DEBUG"):
        raise
    print(f"qknorm: {printable(message)}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
