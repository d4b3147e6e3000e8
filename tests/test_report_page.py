"""The page of `qknorm report` in a real browser: on a desk, on a phone, on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, Page, browser_page
from test_report import BASE, QKNORM, prepared_folder, run_folder, translations

from qknorm_fairseq.report import make

NARROW, PAPER = (320, 640), (700, 1000)  # an old phone; A4 between its margins


def overflowing(page: Page, width: int) -> list[str]:
    """What is wider than the window or than its own box. Plots may be pushed aside on a phone."""
    found: list[str] = page.run(
        f"""[...document.querySelectorAll('html, body *')].filter(element =>
  !element.closest('figure') && !element.closest('thead') &&
  (element.getBoundingClientRect().right > {width} + 0.5 || (element.scrollWidth >
    element.clientWidth + 1 && getComputedStyle(element).display != 'inline'))
).map(element => element.outerHTML.slice(0, 120))"""
    )
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all kinds of tables, and the longest texts that their cells have."""
    root = tmp_path_factory.mktemp("page")
    prepared_folder(root)
    for seed, wrong in enumerate((4, 8, 5), start=1):
        run_folder(root, BASE, seed, hypotheses=translations(5))
        run_folder(root, QKNORM, seed, hypotheses=translations(wrong))
    run_folder(root, f"{QKNORM}+fixed_g", 1, None)
    for model, bleu in ((BASE, 30), (QKNORM, 31)):
        run_folder(root, model, 1, bleu, corpus="iwslt15", pair="en-vi")
        run_folder(root, model.replace("_tiny", ""), 1, bleu, corpus="iwslt15", pair="en-vi")
        run_folder(root, model, 1, bleu, pair="sk-en")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        made = make(
            root / "runs",
            root / "out",
            command="qknorm report",
            attention=False,
            say=lambda _: None,
        )
    assert "1 better, 1 worse of 3" in (root / "out" / "report.md").read_text("utf-8")
    assert made.summary.averages and made.summary.unfinished
    return root / "out" / "report.html"


def test_the_page_in_a_browser(report: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with browser_page() as browser:
        colours = {}
        for scheme in ("light", "dark"):
            for size in (DESKTOP, PHONE, NARROW):
                browser.open(report, size, scheme)
                assert overflowing(browser, size[0]) == [], size
                heading = browser.run("getComputedStyle(document.querySelector('thead')).position")
                assert heading == ("absolute" if size != DESKTOP else "static")  # cards on a phone
                parts = browser.run(
                    "[...document.querySelectorAll('td')].map(td => td.children.length)"
                )
                assert set(parts) == {0, 1}  # a cell's text in one piece beside its label
            colours[scheme] = browser.run(background)
        assert colours["light"] == "rgb(255, 255, 255)"
        assert colours["dark"] != colours["light"]
        assert set(browser.requests) == {report.resolve().as_uri()}
        assert browser.complaints == []


def test_the_page_on_paper(report: Path) -> None:
    """Light also for a reader whose screen is dark, and as wide as the sheet."""
    with browser_page() as browser:
        browser.open(report, PAPER, "dark", media="print")
        assert overflowing(browser, PAPER[0]) == []
        assert browser.run("getComputedStyle(document.body).color") == "rgb(27, 27, 27)"
        assert browser.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        plots = "[...document.querySelectorAll('figure div')]"
        whole = browser.run(f"{plots}.map(box => box.scrollWidth <= box.clientWidth)")
        assert set(whole) == {True}  # there are plots, and none is cut off
        assert browser.complaints == []
