"""A page in a real browser: headless Chromium over its own pipe, so that no driver is needed.

It speaks the DevTools protocol: JSON messages that end with a zero byte, written to the browser's
file descriptor 3 and read from its 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE, DESKTOP = (390, 844), (1200, 900)


class Page:
    """One page; what it asked for and complained of is kept.

    Attributes:
        complaints: uncaught exceptions, console errors and warnings, and failures to load.
        requests: the addresses it asked for, its own included.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._buffer, self._last = to_browser, from_browser, b"", 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(
        self,
        file: Path,
        size: tuple[int, int] = DESKTOP,
        scheme: str = "light",
        media: str = "screen",
    ) -> None:
        """Load a file in a window of this size, where the reader's colours are light or dark.

        Args:
            media: "print" for what goes on paper.
        """
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": size[0] <= PHONE[0],
            },
        )
        scheme_of_reader = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=scheme_of_reader)
        self._call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + 20
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path) -> None:
        """The whole page, as far down as it goes."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._hear(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _hear(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" or (
            event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
        ):
            self.complaints.append(str(params))


@contextmanager
def browser_page() -> Iterator[Page]:
    """A page of a browser that is started for it; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)}): install one to test pages")
    theirs_read, ours_write = os.pipe()
    ours_read, theirs_write = os.pipe()

    def hand_over() -> None:  # in the child: our ends may have the numbers it wants
        ends = os.dup(theirs_read), os.dup(theirs_write)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--remote-debugging-pipe"),
                f"--user-data-dir={profile}",
            ],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        try:
            yield Page(ours_write, ours_read)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(ours_write)
            os.close(ours_read)
