"""A publisher of corpora for the tests: an HTTP server on this machine, and a registry of it.

The server can be told to behave as badly as servers do: see its attributes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


class Publisher(ThreadingHTTPServer):
    """Serves `files` (by their paths, such as "/a/b.txt")."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.ranges = True  # answers a Range with that part
        self.honours_if_range = True
        self.versions = True  # says which version of a file it sends
        self.breaks_off_after: int | None = None  # bytes of a body
        self.stalls_after: int | None = None
        self.claims: int | None = None  # a false Content-Length; -1 for none at all
        self.asked: list[tuple[str, str | None]] = []  # path, Range
        self.finished = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        publisher, wanted = self.server, self.headers.get("Range")
        publisher.asked.append((self.path, wanted))
        if self.path in publisher.redirects:
            self.send_response(302)
            self.send_header("Location", publisher.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path not in publisher.files:
            self.send_error(404)
            return
        body = publisher.files[self.path]
        version = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        same = not publisher.honours_if_range or self.headers.get("If-Range") == version
        first = 0
        if wanted and publisher.ranges and same:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if first >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if publisher.versions:
            self.send_header("ETag", version)
        length = len(body) - first if publisher.claims is None else publisher.claims
        if length >= 0:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        for limit in (publisher.breaks_off_after, publisher.stalls_after):
            if limit is not None:
                body = body[: first + limit]
        self.wfile.write(body[first:])
        self.wfile.flush()
        if publisher.stalls_after is not None:
            publisher.finished.wait(20)
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def publishing() -> Iterator[Publisher]:
    publisher = Publisher()
    thread = threading.Thread(target=publisher.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield publisher
    finally:
        publisher.finished.set()
        publisher.shutdown()
        thread.join()
        publisher.server_close()


def write_registry(
    path: Path,
    corpus: str,
    files: list[dict[str, object]],
    pairs: Mapping[str, tuple[int, int, int]],
    addresses: list[str] | None = None,
) -> Path:
    """A registry of one corpus that is published as files; what a file lacks is made up."""
    content = {
        "about": "invented",
        "licence": "none",
        "tokenization": "moses",
        "addresses": addresses or ["http://127.0.0.1:9/"],  # nobody listens there
        "files": [{"sha256": None, "max_bytes": 1_000_000, **file} for file in files],
        "pairs": {
            pair: dict(zip(("train", "valid", "test"), counts, strict=True))
            for pair, counts in pairs.items()
        },
    }
    path.write_text(yaml.safe_dump({corpus: content}, sort_keys=False), encoding="utf-8")
    return path
