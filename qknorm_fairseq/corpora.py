"""The corpora that `qknorm fetch` knows, as `data/corpora.yaml` describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qknorm_fairseq.errors import QKNormError, reason
from qknorm_fairseq.reading import Unreadable, read_yaml
from qknorm_fairseq.tokenization import NONE, TOKENIZATIONS

SPLITS = ("train", "valid", "test")
VOCAB_SIZE = 8000  # the paper's
HEXADECIMAL = (r"[0-9a-f]{64}", "64 lower-case hexadecimal digits")
MOST = 10**15  # of anything: sentences, bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Sentence pairs in each split."""

    train: int
    valid: int
    test: int

    def __str__(self) -> str:
        return f"train {self.train:,}, valid {self.valid:,}, test {self.test:,}"


@dataclass(frozen=True)
class Package:
    """A published wheel, pinned."""

    name: str
    version: str
    wheel: str  # the file's name
    sha256: str
    size: int  # bytes
    licence: str
    accelerators: bool  # its labels mark keyboard shortcuts, as in _File and Fi_lters

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class PublishedFile:
    """A file at an address, and how much of it is taken at most."""

    name: str
    sha256: str | None  # None: whatever it is at the first download
    max_bytes: int
    members: Mapping[str, int]  # an archive's files, and the most bytes of each


@dataclass(frozen=True)
class Corpus:
    """A corpus is made from `packages`, or from `files` at one of the `addresses`."""

    name: str
    about: str
    licence: str
    pairs: Mapping[str, Counts]  # "gl-en", source first: what must come out
    tokenization: str = NONE
    vocab_size: int = VOCAB_SIZE  # joint BPE subwords that suit its size
    packages: tuple[Package, ...] = ()
    addresses: tuple[str, ...] = ()  # the first one that answers is taken
    files: tuple[PublishedFile, ...] = ()

    def counts(self, pair: str) -> Counts:
        """The pair's expected counts.

        Raises:
            QKNormError: the corpus has no such pair; the message lists those it has.
        """
        if pair not in self.pairs:
            raise QKNormError(f"{self.name} has no pair {pair!r}; it has {', '.join(self.pairs)}")
        return self.pairs[pair]


@dataclass(frozen=True)
class Registry:
    path: Path
    corpora: Mapping[str, Corpus]

    def corpus(self, name: str) -> Corpus:
        """The corpus of that name.

        Raises:
            QKNormError: there is none; the message lists those there are.
        """
        if name not in self.corpora:
            raise QKNormError(f"no corpus {name!r}; there is {', '.join(self.corpora)}")
        return self.corpora[name]


def load_registry(path: Path | None = None) -> Registry:
    """Read `path`, or else this clone's data/corpora.yaml, or else the installed copy of it.

    Raises:
        QKNormError: the file is missing, isn't YAML, or an entry isn't what it should be; the
            message names the file and the entry.
    """
    if path is None:
        package = Path(__file__).resolve().parent
        path = package.parent / "data" / "corpora.yaml"
        if not path.is_file():
            path = package / "share" / "data" / "corpora.yaml"
    try:
        content = read_yaml(path)
    except OSError as error:
        raise QKNormError(f"{path}: {reason(error)}") from None
    except Unreadable as error:
        raise QKNormError(f"{path}: {error}") from None
    corpora = _Entry(content, str(path))
    return Registry(path, {name: _corpus(name, corpora.entry(name)) for name in corpora.names()})


def _corpus(name: str, entry: _Entry) -> Corpus:
    pairs = entry.entry("pairs")
    made_from = {"packages", "files"} & set(entry.names())
    if len(made_from) != 1:
        raise QKNormError(f"{entry.where}: give either packages, or addresses and files")
    published = "files" in made_from
    return Corpus(
        name=name,
        about=entry.value("about", str),
        licence=entry.value("licence", str),
        pairs={pair: _counts(pair, pairs) for pair in pairs.names()},
        tokenization=_tokenization(entry),
        vocab_size=entry.value("vocab_size", int) if entry.has("vocab_size") else VOCAB_SIZE,
        packages=() if published else tuple(map(_package, entry.entries("packages"))),
        addresses=_addresses(entry) if published else (),
        files=tuple(map(_file, entry.entries("files"))) if published else (),
    )


def _tokenization(entry: _Entry) -> str:
    if not entry.has("tokenization"):
        return NONE
    return entry.text("tokenization", "|".join(TOKENIZATIONS), " or ".join(TOKENIZATIONS))


def _addresses(entry: _Entry) -> tuple[str, ...]:
    addresses = tuple(entry.value("addresses", list))
    if not addresses:
        raise QKNormError(f"{entry.where}: addresses has none")
    for address in addresses:
        if not re.fullmatch(r"https?://[^/\s]+/(\S*/)?", str(address)):
            problem = f"{address!r} in addresses is no http(s):// address with a / at its end"
            raise QKNormError(f"{entry.where}: {problem}")
    return addresses


def _file(entry: _Entry) -> PublishedFile:
    # The name goes into a path and an address.
    name = entry.text("name", r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "a file name")
    pinned = entry.content.get("sha256", "missing") is not None
    members = entry.entry("members") if entry.has("members") else None
    return PublishedFile(
        name=name,
        sha256=entry.text("sha256", *HEXADECIMAL) if pinned else None,
        max_bytes=entry.value("max_bytes", int),
        members={each: members.value(each, int) for each in members.names()} if members else {},
    )


def _package(entry: _Entry) -> Package:
    # Name, version and hash go into pip's requirements file, the file name into a path.
    return Package(
        name=entry.text("name", r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "a package name"),
        version=entry.text("version", r"[A-Za-z0-9.!+]+", "a quoted version"),
        wheel=entry.text("wheel", r"[A-Za-z0-9_][A-Za-z0-9_.!+-]*\.whl", "a wheel's file name"),
        sha256=entry.text("sha256", *HEXADECIMAL),
        size=entry.value("bytes", int),
        licence=entry.value("licence", str),
        accelerators=entry.has("accelerators") and entry.value("accelerators", bool),
    )


def _counts(pair: str, pairs: _Entry) -> Counts:
    languages = pair.split("-")
    if not re.fullmatch(r"[a-z]{2,3}-[a-z]{2,3}", pair) or languages.count("en") != 1:
        raise QKNormError(f"{pairs.where}: {pair!r} is no pair with English, such as gl-en")
    entry = pairs.entry(pair)
    return Counts(*(entry.value(split, int) for split in SPLITS))


class _Entry:
    """A mapping in the registry, together with where it stands, for the messages."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise QKNormError(f"{where}: must be a mapping of names")
        self.content: dict[str, Any] = content
        self.where = where

    def names(self) -> list[str]:
        return list(self.content)

    def has(self, name: str) -> bool:
        return name in self.content

    def entry(self, name: str) -> _Entry:
        return _Entry(self.value(name, dict), f"{self.where}: {name}")

    def entries(self, name: str) -> list[_Entry]:
        items = self.value(name, list)
        return [_Entry(item, f"{self.where}: {name}[{index}]") for index, item in enumerate(items)]

    def text(self, name: str, pattern: str, what: str) -> str:
        value = self.value(name, str)
        if not re.fullmatch(pattern, value):
            raise QKNormError(f"{self.where}: {name} must be {what}, not {value!r}")
        return value

    def value(self, name: str, kind: type[T]) -> T:
        if name not in self.content:
            raise QKNormError(f"{self.where}: {name} is missing")
        value = self.content[name]
        if kind is int and type(value) is int and not 0 <= value <= MOST:
            raise QKNormError(f"{self.where}: {name} must be from 0 to {MOST:,}")
        # type(), not isinstance(): YAML's true would pass for a number.
        if type(value) is not kind:
            found = type(value).__name__
            raise QKNormError(f"{self.where}: {name} must be {kind.__name__}, not {found}")
        return value
