"""The page in headless Chromium: it asks for nothing, draws everything, fits every screen, and
everyone can read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.report.bench_page import bench_page
from framework.report.page import page
from framework.report.records import read_run
from framework.report.repeats import compare
from tests.report.browser import PROGRAM, Tab, browser
from tests.report.made_runs import CONFIG, write_run
from tests.report.test_repeats import variant

LONG = "a-run-with-a-name-that-goes-on-and-on-" * 4 + "<b>&"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium"),
]

# Charts whose curves, areas or bars are missing, empty or outside their view box; hidden ones have
# no size.
FAULTY = """[...document.querySelectorAll('svg.chart')].filter(svg => svg.getBoundingClientRect().width).map(svg => {
  const box = svg.viewBox.baseVal, drawn = [...svg.querySelectorAll(':scope > .l, :scope > .a')];
  const faults = drawn.filter(one => {
    const b = one.getBBox();
    const isOutside = b.x < -1 || b.x + b.width > box.width + 1 || b.y < -1 || b.y + b.height > box.height + 1;
    return isOutside || !(b.width > 0 || b.height > 0);
  });
  const far = [...svg.querySelectorAll('text')].filter(one => {
    const a = one.getBoundingClientRect(), b = svg.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  });
  const title = svg.querySelector('title').textContent;
  return drawn.length && !faults.length && !far.length ? '' :
    `${title}: ${drawn.length} drawn, ${faults.length} faulty, outside: ${far.map(one => one.textContent)}`;
}).filter(Boolean)"""
SHOWN = "[...document.querySelectorAll('svg.chart')].filter(svg => svg.getBoundingClientRect().width).length"
TOO_WIDE = """[document.documentElement.scrollWidth - document.documentElement.clientWidth,
  ...[...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll') && !one.closest('svg')
    && one.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(one => one.tagName)]"""
# Texts whose contrast to the paper is below the 4.5 of WCAG AA; nothing here lies on another
# ground.
UNREADABLE = """(() => {
  const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = text => parse(text).reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor), found = new Set();
  for (const one of document.querySelectorAll('body *')) {
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    if (one.tagName === 'title' || one.tagName === 'desc') continue;
    const ink = light(getComputedStyle(one)[one.closest('svg') ? 'fill' : 'color']);
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (ratio < 4.5) found.add(`${one.tagName} ${one.textContent.slice(0, 30)}: ${ratio.toFixed(1)}`);
  }
  return [...found];
})()"""
# What a reader of the screen is given a name for: images, regions that scroll, links.
NAMELESS = """[...document.querySelectorAll('svg[role=img], [tabindex], a, summary')].filter(one => !(
  one.getAttribute('aria-label') || one.textContent.trim()
  || (one.getAttribute('aria-labelledby') || '').split(' ').every(id => document.getElementById(id))
)).map(one => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        write_run(folder / "one"),
        write_run(folder / LONG, config=CONFIG | {"model": {"kind": "W" * 300}}),
    ]
    lacking = write_run(
        folder / "lacking", lines=[{"step": 1, "train/loss": None}], events=None, plan={}, config={}
    )
    found = {"one": [runs[0]], "several": runs, "many": runs * 4, "lacking": [lacking]}
    for name, folders in found.items():
        (folder / f"{name}.html").write_text(page([read_run(each) for each in folders]))
    (folder / "bench.html").write_text(made_bench())
    return {name: folder / f"{name}.html" for name in [*found, "bench"]}


def made_bench() -> str:
    """A page of a bench: three variants that ran, and one that did not."""
    parts = {"time/forward_ms": 30.0, "time/backward_ms": 50.0, "memory/host_peak_bytes": 5e8}
    ran = [
        variant(name, [rate, 1.2 * rate], [0.9 * rate])
        for name, rate in (("A", 100.0), ("B", 130.0), (LONG, 60.0))
    ]
    for window in (window for each in ran for start in each.rounds for window in start):
        window.update(parts)
    variants = [*ran, variant("F", failure=f"exit code 70: {'no memory ' * 30}[out-of-memory]")]
    sentences = [each["sentence"] for each in compare(variants)]
    return bench_page(
        "made", variants, sentences, ["Other work took 1 core"], {"versions": {"torch": "2.15.0"}}
    )


@pytest.mark.parametrize("name", ["one", "several", "many", "lacking", "bench"])
@pytest.mark.parametrize(
    ("width", "dark"), [(375, False), (800, True), (1440, False), (1440, True)]
)
def test_it_is_drawn_and_readable(
    name: str, width: int, dark: bool, tab: Tab, pages: dict[str, Path]
) -> None:
    tab.open(pages[name], width=width, dark=dark)
    assert tab.evaluate(FAULTY) == []
    assert (
        tab.evaluate(SHOWN)
        == {"one": 14, "several": 13, "many": 13, "lacking": 0, "bench": 2}[name]
    )
    assert tab.evaluate(TOO_WIDE) == [0]
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.evaluate(TOO_WIDE) == [0]
    assert tab.evaluate(UNREADABLE) == []
    assert tab.evaluate(NAMELESS) == []
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
    )
    requested = {event["request"]["url"] for event in tab.happened("Network.requestWillBeSent")}
    assert requested <= {pages[name].absolute().as_uri(), "data:,"}
    assert (
        tab.happened("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown") == []
    )


def test_it_prints_in_light(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["one"], width=1440, dark=True)
    tab.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(tab.call("Page.printToPDF")["data"]) > 20_000
    tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("name", ["one", "several", "lacking", "bench"])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(name: str, dark: bool, tab: Tab, pages: dict[str, Path]) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python comes with the dev extra")
    tab.open(pages[name], width=1440, dark=dark)
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    tab.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8") + "; 0")
    found = tab.evaluate(
        "axe.run().then(all => all.violations.map(one => [one.impact, one.id, one.nodes.map(n => n.html)]))"
    )
    assert found == []
