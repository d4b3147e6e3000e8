"""The ted corpus, from a small archive in the published format, to `score.json`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from conftest import PROJECT, Run, clean_environment
from faults import Fault
from publisher import Publisher, publishing, write_registry

from qknorm_fairseq import ted
from qknorm_fairseq.corpora import load_registry
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.fetch import fetch as fetch_corpus
from qknorm_fairseq.prepared_data import Description
from qknorm_fairseq.tokenization import detokenize, tokenize

SPLITS = ("train", "valid", "test")
TABLES = {
    "train": "all_talks_train.tsv",
    "valid": "all_talks_dev.tsv",
    "test": "all_talks_test.tsv",
}
HEADER = ["talk_name", "en", "es", "pt-br", "he", "ar", "sk", "gl"]
NULL = "__NULL__"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # on so small a model, several only wait for each other

NOUNS = {"house": "casa", "river": "río", "bridge": "ponte", "garden": "xardín", "table": "mesa"}
COLOURS = {"red": "vermello", "green": "verde", "blue": "azul", "white": "branco", "grey": "gris"}
SENTENCES = [
    (f"I &apos;m at the {c} {n} , and you ?", f"Estou no {m} {d} &quot; meu &quot; , e ti ?")
    for n, m in NOUNS.items()
    for c, d in COLOURS.items()
]


def row(talk: str, **texts: str) -> list[str]:
    return [talk, *(texts.get(language, NULL) for language in HEADER[1:])]


def table(*rows: Sequence[str], header: Sequence[str] = HEADER) -> bytes:
    return "".join("\t".join(cells) + "\n" for cells in (header, *rows)).encode()


def tables(count: int = 25) -> dict[str, bytes]:
    """Enough rows to train something on; a third of them is for other languages."""
    order = random.Random(1)
    found = {}
    for split, name in TABLES.items():
        rows = []
        for number in range(4 * count if split == "train" else count):
            english, galician = order.choice(SENTENCES)
            rows += [row(f"talk_{number}", en=english, gl=galician, es="¡ Ay !")]
            if number % 2:
                rows.append(row(f"talk_{number}", en=english, ar="مرحبا &quot; بك &quot;"))
        found[name] = table(*rows)
    return found


def archive(members: dict[str, bytes]) -> bytes:
    """ted_talks.tar.gz; in the order of the published one: dev, test, train."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(members):
            member = tarfile.TarInfo(name)
            member.size = len(members[name])
            tar.addfile(member, io.BytesIO(members[name]))
    return packed.getvalue()


def registry(
    tmp_path: Path, *addresses: str, counts: tuple[int, int, int] = (1, 1, 1), bound: int = 100_000
) -> Path:
    file = {"name": "ted_talks.tar.gz", "members": dict.fromkeys(TABLES.values(), bound)}
    pairs = {"gl-en": counts, "ar-en": counts, "en-he": counts}
    return write_registry(tmp_path / "corpora.yaml", "ted", [file], pairs, list(addresses))


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """Fetch a pair from an archive with these bytes, in a folder."""

    def call(content: bytes, pair: str = "gl-en", **settings: object) -> Path:
        local = tmp_path / "local"
        local.mkdir(exist_ok=True)
        (local / "ted_talks.tar.gz").write_bytes(content)
        known = load_registry(registry(tmp_path, **settings))  # type: ignore[arg-type]
        return fetch_corpus(
            "ted", pair, tmp_path / "data", local=local, registry=known, progress=False
        )

    return call


def sides(folder: Path, split: str) -> list[tuple[str, str]]:
    source, target = folder.name.split("-")
    lines = [
        (folder / f"{split}.{language}").read_text(encoding="utf-8").split("\n")
        for language in (source, target)
    ]
    assert all(each.pop() == "" for each in lines)
    return list(zip(*lines, strict=True))


def only(train: bytes) -> bytes:
    """An archive with this training table and others of one row."""
    rest = table(row("t", en="One .", gl="Un .", ar="واحد", he="אחת"))
    return archive(dict.fromkeys(TABLES.values(), rest) | {TABLES["train"]: train})


# --- what comes out -------------------------------------------------------------------------


def test_a_pair_is_the_rows_that_have_both(fetch: Fetch) -> None:
    content = only(
        table(
            row("a", en="First .", gl="Primeiro ."),
            row("b", en="No Galician ."),
            row("c", gl="Sen inglés ."),
            row("d", en="Spaces .", gl=f" {NULL} "),
            row("e", en="_ _ NULL _ _", gl="Partido ."),
            row("f", en="Partly .", gl="_ _ NULL _ _ Partido ."),
            row("g", en="Empty .", gl=""),
            row("h", en=" \u2003 ", gl="Baleiro ."),
            row("i", en="Last .", gl="Último ."),
        )
    )
    folder = fetch(content)
    assert sides(folder, "train") == [("Primeiro .", "First ."), ("Último .", "Last .")]
    assert sides(folder, "valid") == sides(folder, "test") == [("Un .", "One .")]


def test_the_source_comes_first(fetch: Fetch) -> None:
    folder = fetch(only(table(row("a", en="Peace .", he="שלום ."))), pair="en-he")
    assert sides(folder, "train") == [("Peace .", "שלום .")]


def test_all_sides_are_unescaped_once_and_one_spaced(fetch: Fetch) -> None:
    content = only(
        table(
            row(
                "a",
                en="&quot; It &apos;s &#91; so &#93; &quot; &lt; b &gt; &#124; &amp; &amp;lt;",
                gl="&quot; é &#91; así &#93; &quot; &lt; b &gt; &#124; &amp; &amp;lt;",
            ),
            row("b", en="one\u2028line \u00a0 only\u0085", gl='"non\u2029citado\x1c así'),
            row("c", en="CR at the end", gl="fin\r"),
        )
    )
    assert sides(fetch(content), "train") == [
        ('" é [ así ] " < b > | & &lt;', '" It \'s [ so ] " < b > | & &lt;'),
        ('"non citado así', "one line only"),
        ("fin", "CR at the end"),
    ]


def test_corpus_json_says_what_it_is(fetch: Fetch) -> None:
    content = archive(tables())
    folder = fetch(content)
    description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(content).hexdigest()
    assert description["published"] == [{"name": "ted_talks.tar.gz", "sha256": digest}]
    assert description["tokenization"] == "moses"
    assert description["counts"] == {split: len(sides(folder, split)) for split in SPLITS}
    assert {path.name for path in folder.iterdir()} == {"corpus.json", *description["files"]}
    for name, digest in description["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_other_counts_are_a_warning_with_both(
    fetch: Fetch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(archive(tables()), counts=(10_017, 682, 1_007))
    assert capsys.readouterr().err == (
        "warning: ted gl-en: train 100, valid 25, test 25; the registry has train 10,017, "
        "valid 682, test 1,007\n"
    )


def test_expected_counts_are_no_warning(fetch: Fetch, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(archive(tables()), counts=(100, 25, 25))
    assert capsys.readouterr().err == ""


def test_pairs_share_a_download_and_a_made_corpus_needs_none(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.files["/ted_talks.tar.gz"] = archive(tables())
    known = load_registry(registry(tmp_path, publisher.address))
    data = tmp_path / "data"
    fetch_corpus("ted", "gl-en", data, registry=known, progress=False)
    arabic = fetch_corpus("ted", "ar-en", data, registry=known, progress=False)
    assert all(source == 'مرحبا " بك "' for source, _ in sides(arabic, "train"))
    (data / "downloads/ted/ted_talks.tar.gz").unlink()
    fetch_corpus("ted", "gl-en", data, registry=known, progress=False)
    assert len(publisher.asked) == 1

    (arabic / "train.ar").write_text("changed\n")
    fetch_corpus("ted", "ar-en", data, registry=known, progress=False)
    assert len(publisher.asked) == 2
    assert "changed" not in (arabic / "train.ar").read_text()


def test_the_registry_of_this_repository_has_the_paper_s_counts() -> None:
    corpus = load_registry().corpus("ted")
    counts = {pair: (c.train, c.valid, c.test) for pair, c in corpus.pairs.items()}
    assert counts == {
        "ar-en": (214_111, 4_714, 5_953),
        "en-he": (211_819, 4_515, 5_508),
        "gl-en": (10_017, 682, 1_007),
        "sk-en": (61_470, 2_271, 2_445),
    }
    (file,) = corpus.files
    assert file.name == ted.ARCHIVE
    assert set(file.members) == set(TABLES.values())
    assert corpus.tokenization == "moses"


# --- archives that are not the published one ------------------------------------------------


def with_member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """The archive with one more member of that kind."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for each, content in tables().items():
            member = tarfile.TarInfo(each)
            member.size = len(content)
            if each != name:
                tar.addfile(member, io.BytesIO(content))
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        tar.addfile(member, io.BytesIO())
    return packed.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        with_member("../all_talks_train.tsv"),
        with_member("/tmp/all_talks_train.tsv"),
        with_member("./all_talks_train.tsv/../../x"),
        with_member("x.tsv"),
        with_member("folder", tarfile.DIRTYPE),
        with_member("all_talks_train.tsv", tarfile.SYMTYPE, "/etc/passwd"),
        with_member("all_talks_train.tsv", tarfile.LNKTYPE, "all_talks_dev.tsv"),
        with_member("all_talks_train.tsv", tarfile.CHRTYPE),
        with_member("all_talks_train.tsv", tarfile.BLKTYPE),
        with_member("all_talks_train.tsv", tarfile.FIFOTYPE),
        with_member("all_talks_train.tsv", tarfile.DIRTYPE),
    ],
    ids=[
        *("parent", "absolute", "inner", "unknown", "folder"),
        *("symlink", "hardlink", "character device", "block device", "fifo", "directory"),
    ],
)
def test_an_archive_with_anything_else_in_it_is_refused(
    fetch: Fetch, tmp_path: Path, content: bytes, request: pytest.FixtureRequest, fault: Fault
) -> None:
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents}
    with pytest.raises(
        QKNormError, match=r"ted_talks\.tar\.gz: refused, since '.*' in it is no"
    ) as refusal:
        fetch(content)
    assert {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents} == before
    assert not (tmp_path / "data/corpora").exists()
    what = request.node.callspec.id
    fault("strangers' archives", f"a member that it should not have: {what}", str(refusal.value))


def test_a_table_that_is_there_twice_is_refused(fetch: Fetch) -> None:
    content = gzip.decompress(archive(tables()))
    first = content[: content.index(b"all_talks_test.tsv\0")]  # all_talks_dev.tsv
    with pytest.raises(QKNormError, match=r"'all_talks_dev\.tsv' in it is there twice"):
        fetch(gzip.compress(first + content))


def test_a_missing_table_is_named(fetch: Fetch) -> None:
    found = tables()
    del found["all_talks_test.tsv"]
    with pytest.raises(QKNormError, match=r"ted_talks\.tar\.gz: has no all_talks_test\.tsv$"):
        fetch(archive(found))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def zeros(megabytes: int, before: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(before)
        for _ in range(megabytes):
            file.write(bytes(1_000_000))
    return packed.getvalue()


def test_a_bomb_is_refused_before_it_is_unpacked(fetch: Fetch, fault: Fault) -> None:
    bomb = zeros(50, header("all_talks_dev.tsv", 50_000_000_000))
    with pytest.raises(
        QKNormError, match="has more than the 100,000 bytes that the registry all"
    ) as refusal:
        fetch(bomb)
    fault("strangers' archives", "a bomb: a table of 50 GB", str(refusal.value))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_bomb_in_a_header_is_refused(fetch: Fetch, kind: bytes, fault: Fault) -> None:
    with pytest.raises(QKNormError, match=r"damaged .*implausible size") as refusal:
        fetch(zeros(50, header("x", 5_000_000_000, kind)))
    fault("strangers' archives", f"a header of 5 GB, type {kind.decode()}", str(refusal.value))


def test_headers_without_end_are_refused(fetch: Fetch, fault: Fault) -> None:
    attribute = b"16 comment=abcd\n".ljust(512, b"\0")
    endless = (header("x", 16, tarfile.XHDTYPE) + attribute) * 20_000
    with pytest.raises(QKNormError, match=r"ted_talks\.tar\.gz: damaged") as refusal:
        fetch(gzip.compress(endless))
    fault("strangers' archives", "headers without end", str(refusal.value))


def test_a_row_without_end_is_refused(fetch: Fetch, fault: Fault) -> None:
    too_long = r"train\.tsv, line 2: longer than 4,194,304 bytes"
    with pytest.raises(QKNormError, match=too_long) as refusal:
        fetch(only(table() + b"x" * 5_000_000), bound=6_000_000)
    fault("fetch", "ted: a row without end", str(refusal.value))


WHOLE = archive(tables())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b""),
        gzip.compress(b"no tar" * 1000),
        WHOLE[:-200],
        WHOLE[:40],
    ],
    ids=["empty", "no gzip", "nothing in it", "no tar", "cut off", "cut off early"],
)
def test_a_damaged_archive_is_one_line(
    fetch: Fetch, tmp_path: Path, content: bytes, request: pytest.FixtureRequest, fault: Fault
) -> None:
    with pytest.raises(QKNormError, match=r"ted_talks\.tar\.gz: (damaged|has no) ") as caught:
        fetch(content)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data/corpora").exists()
    fault("fetch", f"ted: an archive, {request.node.callspec.id}", str(caught.value))


def test_damage_anywhere_is_one_line_or_harmless(tmp_path: Path) -> None:
    corpus = load_registry(registry(tmp_path)).corpus("ted")
    order = random.Random(3)
    plain = gzip.decompress(WHOLE)
    refused = 0
    for _ in range(200):
        broken = bytearray(plain)
        where = order.randrange(512) if order.random() < 0.7 else order.randrange(len(plain))
        broken[where] = order.randrange(256)
        path = tmp_path / "ted_talks.tar.gz"
        path.write_bytes(gzip.compress(bytes(broken), 0))
        try:
            ted.read(corpus, {path.name: path}, "gl-en")
        except QKNormError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        (b"", "line 1: must begin with talk_name and have the languages gl and en"),
        (table(header=["talk", "en", "gl"]), "line 1: must begin with talk_name and have"),
        (table(header=["talk_name", "en", "pt"]), "line 1: must begin with talk_name and have"),
        (table(row("a", en="A", gl="B")[:-1]), "line 2: 7 cells, but the first line has 8"),
        (table([*row("a"), "more"]), "line 2: 9 cells, but the first line has 8"),
        (
            table(row("a"), row("b", en="A", gl="é")).replace("é".encode(), b"\xe9"),
            "line 3: not valid UTF-8 (byte 1 is 0xe9)",
        ),
    ],
)
def test_a_table_in_another_format_says_where(
    fetch: Fetch, train: bytes, problem: str, fault: Fault
) -> None:
    with pytest.raises(QKNormError) as caught:
        fetch(only(train))
    assert f"ted_talks.tar.gz: all_talks_train.tsv, {problem}" in str(caught.value)
    fault("fetch", f"ted: a table beginning {train[:24]!r}", str(caught.value))


def test_an_empty_line_is_no_row(fetch: Fetch) -> None:
    train = table(row("a", en="A .", gl="B .")) + b"\n\r\n"
    assert sides(fetch(only(train)), "train") == [("B .", "A .")]


# --- the command ----------------------------------------------------------------------------


def test_the_command_says_what_goes_wrong_in_one_line(run: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "ted_talks.tar.gz").write_bytes(WHOLE)
    fetch = ("qknorm", "fetch", "ted", "--pair", "gl-en", "--data-dir", tmp_path / "data")
    done = run(*fetch, "--from", local)  # with the registry's own hash
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"qknorm: {local}/ted_talks.tar.gz: not the published file: its")
    assert done.stderr.count("\n") == 1

    done = run(*fetch, "--from", local, "--mirror", "http://x.example")
    assert done.returncode == 2
    assert "give either --from or --mirror" in done.stderr


def test_an_unknown_pair_names_the_known_ones(fetch: Fetch) -> None:
    with pytest.raises(QKNormError, match="ted has no pair 'en-vi'; it has gl-en, ar-en, en-he"):
        fetch(WHOLE, pair="en-vi")


# --- the whole way --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fetch (from a server), prepare, and the experiment runner: a very small model."""
    tmp_path = tmp_path_factory.mktemp("ted")
    with publishing() as publisher:
        publisher.files["/copies/ted_talks.tar.gz"] = WHOLE
        known = registry(tmp_path, counts=(100, 25, 25))
        options = ("--mirror", f"{publisher.address}copies", "--registry", known)
        done = run(
            "qknorm",
            "fetch",
            "ted",
            "--pair",
            "gl-en",
            *options,
            cwd=tmp_path,
            env={"no_proxy": "127.0.0.1"},
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "downloading ted_talks.tar.gz (0.0 MB)\n"
        "Ready: data/corpora/ted/gl-en; next: qknorm prepare --corpus ted --pair gl-en\n"
    )
    prepare = ("--corpus", "ted", "--pair", "gl-en", "--vocab-size", 100)
    done = run("qknorm", "prepare", *prepare, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokenization"] == "moses"

    sizes = {"layers": 1, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 2}
    command = [sys.executable, "-m", "qknorm_fairseq.experiment", "demo", "corpus=ted"]
    command += ["--config-dir", str(PROJECT / "configs"), "optimization.max_update=30"]
    command += ["optimization.lr=[0.02]", "lr_scheduler.warmup_updates=5"]
    command += [f"model.{s}_{key}={n}" for s in ("encoder", "decoder") for key, n in sizes.items()]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment() | ONE_THREAD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return tmp_path / "runs/ted/gl-en/transformer_qknorm_tiny/seed1"


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_tokens_are_scored_as_the_model_wrote_them(run_folder: Path, run: Run) -> None:
    score = json.loads((run_folder / "score.json").read_text())
    assert score["pair"] == "gl-en"
    assert score["test_sentences"] == 25
    assert "tok:none" in score["signatures"]["bleu_tok"]
    assert "tok:13a" in score["signatures"]["bleu"]

    tokens, texts = lines(run_folder / "hyp.tok.txt"), lines(run_folder / "hyp.detok.txt")
    assert len(tokens) == len(texts) == 25
    assert texts == detokenize(tokens, "en")
    data = run_folder.parents[4] / "data/prepared/ted/gl-en"
    done = run(
        "qknorm", "score", "--tokenized", "--json", run_folder / "hyp.tok.txt", data / "test.en"
    )
    again = json.loads(done.stdout)
    assert {key: score[key] for key in again} == again


def test_the_model_of_tokens_translates_text_and_tokens(run_folder: Path, run: Run) -> None:
    from qknorm_fairseq.translator import Translator

    data = run_folder.parents[4] / "data/prepared/ted/gl-en"
    tokens = lines(data / "test.gl")
    assert all(' " meu " ,' in line for line in tokens)
    texts = detokenize(tokens, "gl")
    assert all(' "meu",' in line for line in texts)
    assert tokenize(texts, "gl") == tokens  # so both ways must give the same
    checkpoint = run_folder / "checkpoint_best.pt"
    assert Translator(checkpoint, cpu=True).translate(texts) == lines(run_folder / "hyp.detok.txt")

    escaped = "".join(line.replace('"', "&quot;") + "\n" for line in tokens)
    command = ("qknorm", "translate", "--tokenized", "--cpu", "--checkpoint", checkpoint)
    done = run(*command, input=escaped, env=ONE_THREAD)
    assert done.stdout.split("\n")[:-1] == lines(run_folder / "hyp.tok.txt"), done.stderr


def test_tokens_are_not_for_a_model_of_text(run_folder: Path, tmp_path: Path) -> None:
    from qknorm_fairseq.translator import Translator

    shutil.copytree(run_folder, tmp_path / "run")
    file = tmp_path / "run/qknorm.json"
    description = json.loads(file.read_text())
    del description["tokenization"]  # as an older version wrote it
    file.write_text(json.dumps(description))
    checkpoint = tmp_path / "run/checkpoint_best.pt"
    with pytest.raises(QKNormError) as caught:
        Translator(checkpoint, cpu=True, tokenized=True)
    assert str(caught.value) == (
        f"{checkpoint}: trained on text, not on tokens (see {file}); give it text, without "
        "--tokenized"
    )


def test_an_unknown_tokenization_is_refused(run_folder: Path, tmp_path: Path) -> None:
    description = json.loads((run_folder / "qknorm.json").read_text())
    (tmp_path / "qknorm.json").write_text(json.dumps(description | {"tokenization": "penn"}))
    with pytest.raises(QKNormError, match=r"qknorm\.json: not written by this version"):
        Description.load(tmp_path)


def test_the_configuration_names_the_corpus_folders() -> None:
    for name in ("ted", "iwslt15"):
        settings = yaml.safe_load((PROJECT / f"configs/corpus/{name}.yaml").read_text())
        assert settings["task"]["data"].startswith(f"data/prepared/{name}/")
        assert settings["checkpoint"]["save_dir"].startswith(f"runs/{name}/")
