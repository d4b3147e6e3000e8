"""The iwslt15 corpus, from six small files in the published format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Run
from faults import Fault
from publisher import Publisher, write_registry

from qknorm_fairseq.corpora import load_registry
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.fetch import fetch as fetch_corpus
from qknorm_fairseq.prepared_data import prepare

ENGLISH = [f"We &apos;re at stop {n} &#91; again &#93; ." for n in range(40)]
VIETNAMESE = [f"Chúng tôi ở trạm {n} &quot; nữa &quot; ." for n in range(40)]
STEMS = {"train": "train", "valid": "tst2012", "test": "tst2013"}
COUNTS = (40, 10, 5)

Published = dict[str, bytes]


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def published() -> Published:
    return {
        f"{stem}.{language}": text(lines[:count])
        for stem, count in zip(STEMS.values(), COUNTS, strict=True)
        for language, lines in (("en", ENGLISH), ("vi", VIETNAMESE))
    }


def registry(tmp_path: Path, *addresses: str, counts: tuple[int, int, int] = COUNTS) -> Path:
    files: list[dict[str, object]] = [{"name": name} for name in published()]
    pairs = {"en-vi": counts}
    return write_registry(tmp_path / "corpora.yaml", "iwslt15", files, pairs, list(addresses))


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """Fetch from a folder with these files instead of the usual ones; None is for no file."""

    def call(changed: dict[str, bytes | None] | None = None) -> Path:
        local = tmp_path / "local"
        local.mkdir(exist_ok=True)
        for name, content in (published() | (changed or {})).items():
            if content is not None:
                (local / name).write_bytes(content)
        known = load_registry(registry(tmp_path))
        return fetch_corpus("iwslt15", "en-vi", tmp_path / "data", local=local, registry=known)

    return call


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_the_whole_way_from_a_server_to_prepared_data(
    run: Run, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.files = {f"/{name}": content for name, content in published().items()}
    # The first call breaks off in the first file; the second one goes on and gets the rest.
    known = registry(tmp_path, publisher.address)
    fetch = ("qknorm", "fetch", "iwslt15", "--registry", known)
    environment = {"no_proxy": "127.0.0.1"}
    publisher.breaks_off_after = 500
    done = run(*fetch, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        f"qknorm: {publisher.address}train.en: broke off after 500 of "
        f"{len(text(ENGLISH)):,} bytes; they are kept: call it again to go on"
    ]
    publisher.breaks_off_after = None
    done = run(*fetch, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert publisher.asked[1] == ("/train.en", "bytes=500-")
    assert "warning" not in done.stderr

    folder = tmp_path / "data/corpora/iwslt15/en-vi"
    assert lines(folder / "train.en") == [f"We 're at stop {n} [ again ] ." for n in range(40)]
    assert lines(folder / "test.vi") == [f'Chúng tôi ở trạm {n} " nữa " .' for n in range(5)]
    description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    assert description["counts"] == dict(zip(STEMS, COUNTS, strict=True))
    assert description["tokenization"] == "moses"
    assert {each["name"] for each in description["published"]} == set(published())
    for each in description["published"]:
        assert each["sha256"] == hashlib.sha256(published()[each["name"]]).hexdigest()

    again = run(*fetch, cwd=tmp_path, env=environment)
    assert again.stderr == (
        "Ready: data/corpora/iwslt15/en-vi; next: qknorm prepare --corpus iwslt15 --pair en-vi\n"
    )
    options = ("--corpus", "iwslt15", "--pair", "en-vi", "--vocab-size", 90)
    done = run("qknorm", "prepare", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    prepared = tmp_path / "data/prepared/iwslt15/en-vi"
    assert json.loads((prepared / "qknorm.json").read_text())["tokenization"] == "moses"
    assert lines(prepared / "valid.en") == lines(folder / "valid.en")

    done = run("qknorm", "prepare", *options, "--tokenized", cwd=tmp_path)
    assert done.returncode == 2
    assert "--tokenized is for your own files" in done.stderr


def test_pairs_with_an_empty_side_count_but_are_left_out(
    fetch: Fetch, capsys: pytest.CaptureFixture[str]
) -> None:
    holes = [line if n % 10 else " \u00a0" for n, line in enumerate(VIETNAMESE)]
    folder = fetch({"train.vi": text(holes)})
    assert capsys.readouterr().err == "iwslt15 en-vi: 4 pairs with an empty side left out\n"
    assert len(lines(folder / "train.en")) == len(lines(folder / "train.vi")) == 36
    assert lines(folder / "train.en")[0] == "We 're at stop 1 [ again ] ."
    description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    assert description["counts"]["train"] == 36
    assert description["dropped"] == {"empty": 4}


def test_other_counts_are_a_warning_with_both(
    fetch: Fetch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch({"tst2013.en": text(ENGLISH[:4]), "tst2013.vi": text(VIETNAMESE[:4])})
    assert capsys.readouterr().err == (
        "warning: iwslt15 en-vi: train 40, valid 10, test 4; the registry has train 40, valid 10, "
        "test 5\n"
    )


def test_different_numbers_of_lines_are_an_error(
    fetch: Fetch, tmp_path: Path, fault: Fault
) -> None:
    with pytest.raises(QKNormError) as caught:
        fetch({"tst2012.vi": text(VIETNAMESE[:9])})
    assert str(caught.value) == (
        f"{tmp_path}/local/tst2012.en has 10 lines and {tmp_path}/local/tst2012.vi has 9: these "
        "are not the two sides of one text"
    )
    assert not (tmp_path / "data/corpora").exists()
    fault("fetch", "iwslt15: different numbers of lines", str(caught.value))


def test_several_at_once(run: Run, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "local").mkdir()
    for name, content in published().items():
        (tmp_path / "local" / name).write_bytes(content)
    options = ("--from", tmp_path / "local", "--registry", registry(tmp_path))
    call = ("qknorm", "fetch", "iwslt15", *options, "--data-dir", tmp_path / "data")
    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(lambda _: run(*call), range(4)):
            assert done.returncode == 0, done.stderr
    folder = tmp_path / "data/corpora/iwslt15"
    assert [path.name for path in folder.iterdir()] == ["en-vi"]
    assert len(lines(folder / "en-vi" / "train.vi")) == 40
    fault("files", "four fetches of one corpus at once", "one waits for the other; all succeed")


def test_a_unicode_separator_does_not_break_a_line(fetch: Fetch) -> None:
    separators = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1e"
    odd = [f"one{separators}line \r", *ENGLISH[1:]]
    folder = fetch({"train.en": text(odd)})
    assert lines(folder / "train.en")[0] == "one line"
    assert len(lines(folder / "train.en")) == 40


def test_bytes_that_are_no_utf8_are_found(fetch: Fetch, fault: Fault) -> None:
    with pytest.raises(
        QKNormError, match=r"tst2013\.en, line 2: not valid UTF-8 \(byte 3 is 0xe9"
    ) as caught:
        fetch({"tst2013.en": b"One .\nTo\xe9 .\n"})
    fault("fetch", "iwslt15: invalid UTF-8", str(caught.value))


def test_a_missing_file_is_named(fetch: Fetch, fault: Fault) -> None:
    with pytest.raises(QKNormError, match=r"local/tst2013\.vi: no such file$") as caught:
        fetch({"tst2013.vi": None})
    fault("fetch", "iwslt15: a file is missing", str(caught.value))


def test_the_registry_of_this_repository_has_the_paper_s_counts() -> None:
    corpus = load_registry().corpus("iwslt15")
    (pair,) = corpus.pairs
    counts = corpus.counts(pair)
    assert (pair, counts.train, counts.valid, counts.test) == ("en-vi", 133_317, 1_553, 1_268)
    assert {file.name for file in corpus.files} == set(published())
    assert corpus.tokenization == "moses"


def test_a_registry_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    file: dict[str, object] = {"name": "train.en"}
    path = write_registry(tmp_path / "corpora.yaml", "iwslt15", [file], {"en-vi": COUNTS})
    message = r"corpora\.yaml: iwslt15 has no file train\.vi or tst2012\.en or "
    with pytest.raises(QKNormError, match=message):
        fetch_corpus("iwslt15", "en-vi", tmp_path / "data", registry=load_registry(path))


# --- tokens of one's own --------------------------------------------------------------------


def test_own_tokens_are_unescaped_and_marked(run: Run, tmp_path: Path) -> None:
    for name, content in published().items():
        (tmp_path / name).write_bytes(content)
    files = ("--train", "train.en", "train.vi", "--valid", "tst2012.en", "tst2012.vi")
    options = ("--tokenized", "--vocab-size", 90, "--out", "out")
    done = run("qknorm", "prepare", *files, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "out/valid.en")[0] == "We 're at stop 0 [ again ] ."
    assert json.loads((tmp_path / "out/qknorm.json").read_text())["tokenization"] == "moses"

    splits = {"train": ("train.en", "train.vi"), "valid": ("tst2012.en", "tst2012.vi")}
    again = {split: tuple(tmp_path / name for name in names) for split, names in splits.items()}
    settings = {"source_lang": "en", "target_lang": "vi", "out": tmp_path / "out", "vocab_size": 90}
    said: list[str] = []
    prepare(again, **settings, tokenization="moses", say=said.append)  # type: ignore[arg-type]
    assert said == [f"{tmp_path}/out: already prepared from these files"]
    with pytest.raises(QKNormError, match="not from these files and options"):
        prepare(again, **settings)  # type: ignore[arg-type]


def test_escaped_and_plain_tokens_score_the_same(run: Run, tmp_path: Path) -> None:
    escaped, plain = tmp_path / "escaped.en", tmp_path / "plain.en"
    escaped.write_bytes(text(ENGLISH))
    plain.write_bytes(text([f"We 're at stop {n} [ again ] ." for n in range(40)]))
    done = run("qknorm", "score", "--tokenized", "--json", plain, escaped)
    scores = json.loads(done.stdout)
    assert scores["bleu_tok"] == scores["bleu"] == pytest.approx(100)
    assert scores["ter"] == 0
