"""Downloads from a real server on this machine, which behaves well or badly."""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import socket
import threading
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest
from faults import Fault
from publisher import Publisher, write_registry

from qknorm_fairseq import downloads
from qknorm_fairseq.corpora import Corpus, load_registry
from qknorm_fairseq.errors import QKNormError

CONTENT = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(300_000)

Obtain = Callable[..., dict[str, Path]]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "downloads"


@pytest.fixture
def obtain(publisher: Publisher, tmp_path: Path, folder: Path) -> Obtain:
    """Obtain the file "data.bin", which the publisher has, by a registry with these entries."""
    publisher.files["/data.bin"] = CONTENT

    def call(
        local: Path | None = None,
        mirror: str | None = None,
        progress: bool = False,
        **entries: object,
    ) -> dict[str, Path]:
        known = corpus(tmp_path, publisher.address, **entries)
        return downloads.obtain(known, folder, local=local, mirror=mirror, progress=progress)

    return call


def corpus(tmp_path: Path, *addresses: str, **entries: object) -> Corpus:
    path = write_registry(
        tmp_path / "corpora.yaml",
        "some",
        [{"name": "data.bin", **entries}],
        {"gl-en": (1, 1, 1)},
        list(addresses),
    )
    return load_registry(path).corpus("some")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


# --- the ordinary way -----------------------------------------------------------------------


def test_a_file_is_downloaded_once_and_its_hash_recorded(
    publisher: Publisher, obtain: Obtain, folder: Path
) -> None:
    for _ in range(2):
        assert obtain() == {"data.bin": folder / "data.bin"}
        assert (folder / "data.bin").read_bytes() == CONTENT
    assert len(publisher.asked) == 1
    assert names(folder) == {"data.bin", "sha256.json"}
    assert json.loads((folder / "sha256.json").read_text()) == {"data.bin": sha256(CONTENT)}


def test_a_hash_in_the_registry_is_checked_and_not_recorded(obtain: Obtain, folder: Path) -> None:
    obtain(sha256=sha256(CONTENT))
    assert names(folder) == {"data.bin"}


def test_a_damaged_download_is_made_again(publisher: Publisher, obtain: Obtain) -> None:
    path = obtain()["data.bin"]
    path.write_bytes(CONTENT[:-1] + b"?")
    obtain()
    assert path.read_bytes() == CONTENT
    assert len(publisher.asked) == 2


def test_files_can_come_from_a_folder(
    publisher: Publisher, obtain: Obtain, folder: Path, tmp_path: Path
) -> None:
    local = tmp_path / "disk"
    local.mkdir()
    with pytest.raises(QKNormError, match=r"disk/data\.bin: no such file$"):
        obtain(local=local)
    (local / "data.bin").write_bytes(CONTENT)
    assert obtain(local=local) == {"data.bin": local / "data.bin"}
    with pytest.raises(QKNormError, match=r"data\.bin: larger than the 299,999 bytes that the reg"):
        obtain(local=local, max_bytes=len(CONTENT) - 1)
    with pytest.raises(QKNormError, match=r"data\.bin: not the published file: .* 000000000000$"):
        obtain(local=local, sha256="0" * 64)
    (local / "data.bin").write_bytes(OTHER)
    with pytest.raises(QKNormError, match=r"data\.bin: changed since the first time: "):
        obtain(local=local)
    assert names(folder) == {"sha256.json"}
    assert not publisher.asked


def test_the_first_address_that_has_the_file_is_taken(
    publisher: Publisher, obtain: Obtain, tmp_path: Path, folder: Path
) -> None:
    empty, full = f"{publisher.address}empty/", publisher.address
    known = corpus(tmp_path, empty, full)
    downloads.obtain(known, folder, progress=False)
    assert [path for path, _ in publisher.asked] == ["/empty/data.bin", "/data.bin"]


@pytest.mark.parametrize("end", ["", "/"])
def test_a_mirror_is_asked_instead(publisher: Publisher, obtain: Obtain, end: str) -> None:
    publisher.files = {"/copies/data.bin": OTHER}
    paths = obtain(mirror=f"{publisher.address}copies{end}")
    assert paths["data.bin"].read_bytes() == OTHER


MIRRORS = (
    *("ftp://example.org/", "file:///etc/", "example.org", "http:", "http://[", "http://[x]/"),
    *("http://:80/", "http://example.org:x/", "http://example.org:99999/"),
)


@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_mirror_is_an_http_address(obtain: Obtain, mirror: str, fault: Fault) -> None:
    with pytest.raises(QKNormError, match="is no http:// or https:// address") as error:
        obtain(mirror=mirror)
    fault("fetch", f"--mirror {mirror}", str(error.value))


def test_progress_is_a_plain_line_where_there_is_no_terminal(
    publisher: Publisher, obtain: Obtain, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher.breaks_off_after = 200_000
    with pytest.raises(QKNormError):
        obtain(progress=True)
    publisher.breaks_off_after = None
    obtain(progress=True)
    assert capsys.readouterr().err.splitlines() == [
        "downloading data.bin (0.3 MB)",
        "downloading data.bin (0.3 MB, from 0.2 MB on)",
    ]


def test_what_a_killed_call_left_half_written_is_taken_away(obtain: Obtain, folder: Path) -> None:
    folder.mkdir()
    (folder / ".sha256.json.x7_k2abc.tmp").write_text("{")
    obtain()
    assert names(folder) == {"data.bin", "sha256.json"}


def test_a_second_process_waits_for_the_first(
    obtain: Obtain, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=obtain, kwargs={"progress": True})
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert not (folder / "data.bin").exists()
    second.join(10)
    assert (folder / "data.bin").read_bytes() == CONTENT
    assert "waiting for another download" in capsys.readouterr().err


# --- going on -------------------------------------------------------------------------------


def cut_off(publisher: Publisher, obtain: Obtain, after: int = 100_000) -> None:
    publisher.breaks_off_after = after
    with pytest.raises(QKNormError, match="broke off after"):
        obtain()
    publisher.breaks_off_after = None


def test_a_download_goes_on_where_it_was_cut_off(
    publisher: Publisher, obtain: Obtain, folder: Path
) -> None:
    publisher.breaks_off_after = 100_000
    for arrived in ("100,000", "200,000"):
        with pytest.raises(QKNormError) as caught:
            obtain()
        assert str(caught.value) == (
            f"{publisher.address}data.bin: broke off after {arrived} of 300,000 bytes; they are "
            "kept: call it again to go on"
        )
    assert "data.bin" not in names(folder)
    obtain()
    assert (folder / "data.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in publisher.asked] == [None, "bytes=100000-", "bytes=200000-"]
    assert names(folder) == {"data.bin", "sha256.json"}


@pytest.mark.parametrize(
    ("attribute", "asked"),
    [("ranges", [None, "bytes=100000-"]), ("versions", [None, None])],
)
def test_what_cannot_go_on_starts_again(
    publisher: Publisher, obtain: Obtain, attribute: str, asked: list[str | None]
) -> None:
    setattr(publisher, attribute, False)
    cut_off(publisher, obtain)
    assert obtain()["data.bin"].read_bytes() == CONTENT
    assert [wanted for _, wanted in publisher.asked] == asked


@pytest.mark.parametrize("honours_if_range", [True, False])
def test_parts_of_two_versions_are_never_joined(
    publisher: Publisher, obtain: Obtain, honours_if_range: bool
) -> None:
    publisher.honours_if_range = honours_if_range
    cut_off(publisher, obtain)
    publisher.files["/data.bin"] = OTHER
    assert obtain()["data.bin"].read_bytes() == OTHER


def test_a_part_from_another_address_is_not_continued(publisher: Publisher, obtain: Obtain) -> None:
    cut_off(publisher, obtain)
    publisher.files["/copies/data.bin"] = CONTENT
    obtain(mirror=f"{publisher.address}copies")
    assert publisher.asked[-1] == ("/copies/data.bin", None)


def test_a_part_that_is_already_whole_is_made_again(
    publisher: Publisher, obtain: Obtain, folder: Path
) -> None:
    cut_off(publisher, obtain)
    (folder / "data.bin.part").write_bytes(CONTENT)  # as if stopped just before it got its name
    assert obtain()["data.bin"].read_bytes() == CONTENT
    assert [wanted for _, wanted in publisher.asked] == [None, "bytes=300000-", None]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"url": 1, "version": null}', '"url"', "[" * 100_000]
)
def test_a_damaged_note_about_a_part_starts_again(
    publisher: Publisher, obtain: Obtain, folder: Path, content: str
) -> None:
    cut_off(publisher, obtain)
    (folder / "data.bin.part.json").write_text(content)
    assert obtain()["data.bin"].read_bytes() == CONTENT


# --- servers that lie, files that are not the right ones ------------------------------------


def test_a_server_that_promises_more_than_it_sends(
    publisher: Publisher, obtain: Obtain, folder: Path, fault: Fault
) -> None:
    publisher.claims = 400_000
    with pytest.raises(
        QKNormError, match="after 300,000 of 400,000 bytes; they are kept"
    ) as caught:
        obtain()
    assert (folder / "data.bin.part").read_bytes() == CONTENT
    publisher.claims = None
    assert obtain()["data.bin"].read_bytes() == CONTENT
    fault("fetch", "a server that promises more than it sends", str(caught.value))


def test_a_server_that_promises_less_than_it_should(
    publisher: Publisher, obtain: Obtain, folder: Path, fault: Fault
) -> None:
    publisher.claims = 1000
    with pytest.raises(QKNormError, match="not the published file") as caught:
        obtain(sha256=sha256(CONTENT))
    assert not names(folder)
    fault("fetch", "a server that promises less than it should send", str(caught.value))


@pytest.mark.parametrize("claims", [None, -1], ids=["said", "not said"])
def test_too_large_a_file_is_refused(
    publisher: Publisher, obtain: Obtain, folder: Path, claims: int | None, fault: Fault
) -> None:
    publisher.claims = claims
    with pytest.raises(QKNormError) as caught:
        obtain(max_bytes=250_000)
    assert str(caught.value) == (
        f"{publisher.address}data.bin: larger than the 250,000 bytes that the registry allows"
    )
    assert not names(folder)
    fault(
        "fetch",
        f"a file too large, its length {'not ' * (claims is not None)}said",
        str(caught.value),
    )


def test_a_server_need_not_say_how_long_a_file_is(publisher: Publisher, obtain: Obtain) -> None:
    publisher.claims = -1
    assert obtain(max_bytes=len(CONTENT))["data.bin"].read_bytes() == CONTENT


def test_a_server_that_falls_silent(
    publisher: Publisher, obtain: Obtain, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 0.3)
    publisher.stalls_after = 131_072
    with pytest.raises(
        QKNormError, match=r"after 131,072 of 300,000 bytes \(timed out\); they are"
    ) as caught:
        obtain()
    fault("fetch", "a server that falls silent half-way", str(caught.value))


def test_a_wrong_hash_is_one_line_and_leaves_nothing(
    publisher: Publisher, obtain: Obtain, folder: Path, fault: Fault
) -> None:
    with pytest.raises(QKNormError) as caught:
        obtain(sha256="f" * 64)
    assert str(caught.value) == (
        f"{publisher.address}data.bin: not the published file: its sha256 begins with "
        f"{sha256(CONTENT)[:12]}, the registry's with ffffffffffff"
    )
    assert not names(folder)
    fault("fetch", "a file of another hash", str(caught.value))


def test_a_file_that_changed_since_the_first_download_is_refused(
    publisher: Publisher, obtain: Obtain, folder: Path, fault: Fault
) -> None:
    obtain()
    (folder / "data.bin").unlink()
    publisher.files["/data.bin"] = OTHER
    with pytest.raises(QKNormError) as caught:
        obtain()
    assert str(caught.value) == (
        f"{publisher.address}data.bin: changed since the first time: its sha256 began with "
        f"{sha256(CONTENT)[:12]}, now with {sha256(OTHER)[:12]}; if you trust the new file, "
        f"remove {folder}/sha256.json"
    )
    assert names(folder) == {"sha256.json"}
    (folder / "sha256.json").unlink()
    assert obtain()["data.bin"].read_bytes() == OTHER
    fault("fetch", "a file changed since its first download", str(caught.value))


@pytest.mark.parametrize("content", ["{", "[]", '{"data.bin": 1}', "\xff", "[" * 100_000])
def test_a_damaged_record_is_named(
    obtain: Obtain, folder: Path, content: str, fault: Fault
) -> None:
    folder.mkdir()
    (folder / "sha256.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(QKNormError, match=r"sha256\.json: damaged; remove it") as caught:
        obtain()
    fault("fetch", f"a damaged record of hashes: {content[:20]!r}", str(caught.value))


# --- addresses ------------------------------------------------------------------------------


def test_a_missing_file_is_one_line(publisher: Publisher, obtain: Obtain, fault: Fault) -> None:
    publisher.files.clear()
    with pytest.raises(QKNormError) as caught:
        obtain()
    assert str(caught.value) == f"{publisher.address}data.bin: the server says 404 Not Found"
    fault("fetch", "a file that the server has not", str(caught.value))


def test_no_connection_says_what_else_there_is(obtain: Obtain, fault: Fault) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            QKNormError, match=r"no connection \(Connection refused\); .* --from"
        ) as caught:
            obtain(mirror=mirror)
    fault("fetch", "a server that does not answer", str(caught.value))


def test_no_http_is_no_connection(obtain: Obtain, fault: Fault) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"220 smtp.example.org ready\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            QKNormError, match=r"no connection \(220 smtp\.example\.org ready\)"
        ) as caught:
            obtain(mirror=f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    fault("fetch", "a server that speaks no HTTP", str(caught.value))


def test_redirects_are_followed_a_few_times(publisher: Publisher, obtain: Obtain) -> None:
    publisher.redirects = {f"/{n}/data.bin": f"/{n + 1}/data.bin" for n in range(10)}
    publisher.files["/10/data.bin"] = OTHER
    assert obtain(mirror=f"{publisher.address}5")["data.bin"].read_bytes() == OTHER
    with pytest.raises(QKNormError, match=r"4/data\.bin: redirects to nowhere, or too often$"):
        obtain(mirror=f"{publisher.address}4", sha256=sha256(CONTENT))


def test_redirects_in_a_circle_end(publisher: Publisher, obtain: Obtain, fault: Fault) -> None:
    publisher.redirects = {"/data.bin": "/data.bin"}
    with pytest.raises(
        QKNormError, match=r"data\.bin: redirects to nowhere, or too often$"
    ) as caught:
        obtain()
    fault("fetch", "a redirect in a circle", str(caught.value))


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://127.0.0.1/data.bin", "gopher://x/"])
def test_redirects_lead_to_http_only(
    publisher: Publisher, obtain: Obtain, folder: Path, to: str, fault: Fault
) -> None:
    publisher.redirects = {"/data.bin": to}
    with pytest.raises(QKNormError, match=r"data\.bin: redirects to ") as caught:
        obtain()
    assert not names(folder)
    fault("fetch", f"a redirect to {to}", str(caught.value))


@pytest.mark.parametrize(
    ("origin", "to", "followed"),
    [("http", "https", True), ("https", "https", True), ("https", "http", False)],
)
def test_no_redirect_leads_from_https_to_http(origin: str, to: str, followed: bool) -> None:
    request = urllib.request.Request(f"{origin}://example.org/a")
    arguments = (request, None, 302, "Found", Message(), f"{to}://example.org/b")
    if followed:
        assert downloads._Redirects().redirect_request(*arguments) is not None  # type: ignore[arg-type]
    else:
        with pytest.raises(
            QKNormError, match=r"redirects to http://example\.org/b, which is not fol"
        ):
            downloads._Redirects().redirect_request(*arguments)  # type: ignore[arg-type]


# --- the registry ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: data.bin", "name: ../data.bin", r"files\[0\]: name must be a file name"),
        ("name: data.bin", "name: .lock", r"files\[0\]: name must be a file name"),
        ("sha256: null", "sha256: ABC", r"files\[0\]: sha256 must be 64 lower-case hexadecimal"),
        ("sha256: null", "sha: null", r"files\[0\]: sha256 is missing"),
        ("max_bytes: 1000000", "max_bytes: 1e6x", r"files\[0\]: max_bytes must be int, not str"),
        ("http://127", "ftp://127", "in addresses is no http.* address with a / at its end"),
        ("http://127.0.0.1:1/", "http://x/y", "in addresses is no http.* address with a / at its"),
        ("addresses:\n  - http://127.0.0.1:1/", "addresses: []", "addresses has none"),
        (
            "tokenization: moses",
            "tokenization: penn",
            "tokenization must be none or moses, not 'pe",
        ),
        ("files:", "packages:", r"packages\[0\]: version is missing"),
        ("files:", "file:", "give either packages, or addresses and files"),
    ],
)
def test_a_malformed_registry_says_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    corpus(tmp_path, "http://127.0.0.1:1/")
    path = tmp_path / "corpora.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(QKNormError, match=rf"corpora\.yaml: some.*{message}"):
        load_registry(path)


REGISTRIES = {
    "no date": b"some: {about: 2024-13-45}",
    "no UTF-8": b"some: \xff",
    "nested without end": b"[" * 5000,
    "no number": b"some: 0x",
    "a number of 5,000 digits": b"some: " + b"9" * 5000,
    "code": b"some: !!python/object/apply:os.system [touch ran]",
    "unhashable": b"{[1]: 2, {3: 4}: 5}",
    "empty": b"",
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_what_is_no_registry(name: str, tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "corpora.yaml"
    path.write_bytes(REGISTRIES[name])
    with pytest.raises(QKNormError) as error:
        load_registry(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 500
    fault("fetch", f"a registry that is none: {name}", message)


@pytest.mark.parametrize("number", ["0x" + "f" * 9000, "-1"], ids=["huge", "negative"])
@pytest.mark.parametrize("old", ["max_bytes: 1000000", "train: 1"])
def test_a_number_in_the_registry_that_counts_nothing(
    old: str, number: str, tmp_path: Path, fault: Fault
) -> None:
    corpus(tmp_path, "http://127.0.0.1:1/")
    path = tmp_path / "corpora.yaml"
    key = old.partition(":")[0]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, f"{key}: {number}"))
    with pytest.raises(QKNormError, match=rf"{key} must be from 0 to 1,000,") as error:
        load_registry(path)
    fault("fetch", f"the registry's {key} is {number[:10]}", str(error.value))
