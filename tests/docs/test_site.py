"""The site is built without warnings and without a network, and is whole: pages, links, reference,
search.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import framework
from framework import errors
from framework.config.deepspeed_words import PASSED_THROUGH
from tests.places import ROOT
from tests.report.browser import PROGRAM, browser
from tools.docs_site.__main__ import with_bars, with_lists, without_outer_links
from tools.docs_site.kinds import _COMPUTED, find_kinds
from tools.docs_site.reference import (
    config_keys,
    config_page,
    exit_codes_page,
    parsers,
    problem_pages,
    python_page,
)

DOCS = ROOT / "docs"
# In brackets in tests, and no kinds: mypy's, those that a test makes up, parts of patterns.
MADE_UP = re.compile(
    r"(arg-type|attr-defined|import-untyped|method-assign|no-any-return|union-attr|type-var|no-untyped-\w+|a-z.*|"
    r"dataset-torn|image-damaged|training-failed|worker-0)"
)


class Links(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loaded += [values[name] for name in ("src", "data-src") if name in values]
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="zensical comes with the dev extra")
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "tools.docs_site", "--out", str(out)]
    alone = ["unshare", "--map-root-user", "--net"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode
    ):
        alone = []
    built = subprocess.run(
        [*alone, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_comes_from_the_network(site: Path) -> None:
    pages = {
        page.relative_to(site).as_posix(): Links(page)
        for page in site.rglob("*.html")
        if page.name != "404.html"
    }
    assert len(pages) > 60
    wrong = []
    for name, page in pages.items():
        wrong += [f"{name} loads {link}" for link in page.loaded if re.match(r"(https?:)?//", link)]
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (site / name).parent.joinpath(path).resolve() if path else site / name
            target = target / "index.html" if target.is_dir() else target
            found = (
                pages.get(target.relative_to(site.resolve()).as_posix())
                if target.suffix == ".html"
                else None
            )
            if not target.exists() or (anchor and found and anchor not in found.anchors):
                wrong.append(f"{name} -> {link}")
    assert wrong == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", styles) == []


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
def test_the_search_works_from_files_without_a_server(site: Path, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python comes with the dev extra")
    axe_script = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    with browser(tmp_path) as tab:
        for page, width in (("launch.html", 1300), ("reference/config.html", 390)):
            tab.open(site / page, width=width)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            tab.evaluate(f"{axe_script}; 0")
            assert tab.evaluate(AXE) == []
        astray = {}
        for words, page in SEARCHES.items():
            tab.open(site / "index.html", width=1300)
            found = tab.evaluate(SEARCH.replace("WORDS", words))
            if not found or page not in found[0]:
                astray[words] = found[:3]
        assert astray == {}
        requests = [each["request"]["url"] for each in tab.happened("Network.requestWillBeSent")]
        assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert tab.happened("Runtime.exceptionThrown") == []


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
def test_what_is_copied_of_a_transcript_is_its_commands(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        tab.open(site / "tutorials/first-run.html", width=1300)
        copied = tab.evaluate(COPIED)
        lines = [line for text in copied for line in text.splitlines() if line]
        assert "dsf check first.yaml --num_gpus 2" in lines
        assert [
            line for line in lines if not line.startswith(("dsf ", "./launch.sh", "echo "))
        ] == []


AXE = "axe.run().then(all => all.violations.map(one => [one.id, one.nodes.map(n => n.html)]))"
# What the copy button takes of each transcript, as the theme does it.
COPIED = """
[...document.querySelectorAll("code:has(.gp)")].map((code) => {
  code.setAttribute("data-md-copying", "");
  const text = code.innerText;
  code.removeAttribute("data-md-copying");
  return text;
})
"""
# What people type, and the page that the first result is of.
SEARCHES = {
    "zero-with-pipeline": "reference/problems/",
    "early stopping": "callbacks",
    "mixed precision": "how-do-i",
    "multi-gpu": "how-do-i",
    "hyperparameter search": "sweep",
    "AUROC": "custom-metrics",
    "onnx": "how-do-i",
    "save best model": "how-do-i",
    "gradient clipping": "how-do-i",
    "out of memory": "planner",
    "wandb": "monitors",
    "custom dataset": "how-do-i",
    "ema": "how-do-i",
    "hostfile": "launch",
    "checkpoint format": "checkpoints",
    "batch size": "how-do-i",
    "fp8": "performance",
    "resume training": "how-do-i",
    "offload": "offload",
    "LayerSpec": "pipeline",
}
# Types into the search as a person does, and waits for what it finds; its elements are in a tree of
# their own.
SEARCH = """
(async () => {
  const all = (node, name, found = []) => {
    if (node.localName === name) found.push(node);
    for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) all(child, name, found);
    return found;
  };
  const until = async (get) => {
    const deadline = Date.now() + 25000;
    while (Date.now() < deadline) {
      const found = get();
      if (found && found.length !== 0) return found;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    return [];
  };
  const root = document.documentElement;
  const input = await until(() => {
    document.querySelector(".md-search__button").click();
    return all(root, "input").find((each) => each.ariaLabel === "Search");
  });
  const links = () => all(root, "a").map((each) => each.href).filter((link) => /[?&]h=/.test(link));
  input.focus();
  input.value = "WORDS";
  input.dispatchEvent(new Event("input", {bubbles: true, composed: true}));
  return await until(links);
})()
"""


def test_every_page_is_in_the_navigation() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)

    def pages(nav: Any) -> Iterator[str]:
        for value in (
            nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
        ):
            yield from [value] if isinstance(value, str) else pages(value)

    named = set(pages(settings["nav"]))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in there - named if not page.startswith("decisions/")} == set(), (
        "give it a line in mkdocs.yml"
    )
    assert {page for page in named - there if not page.startswith("reference/")} == {
        "coming-from.md",
        "decisions/index.md",
    }


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_every_named_kind_is_described() -> None:
    """Kinds in brackets in tests and pages are seen where problems are reported; the page finds
    them in the source.
    """
    page = problem_pages()["reference/problems.md"]
    files = [*(ROOT / "tests").rglob("*.py"), *DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"]
    seen = {
        kind
        for path in files
        for kind in re.findall(
            r"(?<![\w\]])\[([a-z]+(?:-[a-z0-9]+)+)\](?!\()", path.read_text(encoding="utf-8")
        )
        if not MADE_UP.fullmatch(kind)
    }
    assert len(seen) > 100
    assert sorted(kind for kind in seen if f"`{kind}`" not in page) == []
    kinds = find_kinds()
    assert len(kinds) > 500
    assert [kind for kind in kinds.values() if " " not in kind.sentence] == []


def test_sentences_by_hand_are_of_kinds_that_there_are() -> None:
    for name, (room, _) in _COMPUTED.items():
        source = "".join(
            path.read_text(encoding="utf-8")
            for folder in (ROOT / room, ROOT / "framework" / room)
            for path in folder.rglob("*.py")
        )
        parts = (
            name,
            name.removeprefix("model-data-").replace("-", "_"),
            name.replace("-", "_"),
        )
        is_pair = name.endswith("-mismatch") and "-mismatch" in source
        assert is_pair or any(part in source for part in parts), name


def test_every_key_is_described() -> None:
    page = config_page()
    keys = config_keys()
    assert len(keys) > 180
    assert [key for key, about in keys.items() if not about] == []
    assert [
        key
        for key in keys
        if f"`{key}`" not in page and not key.endswith((".kind", ".dtype", ".device"))
    ] == []


def test_what_is_rendered_is_on_the_page() -> None:
    """Every key of the JSON of every shipped config, but those that no key of a run config
    decides.
    """
    decided = set(re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`", config_page())) | PASSED_THROUGH

    def leaves(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict) and path not in PASSED_THROUGH:
            for name, item in value.items():
                yield from leaves(item, f"{path}.{name}".strip("."))
        else:
            yield path

    rendered = {
        leaf
        for path in (ROOT / "ds_configs/rendered").glob("*.json")
        for leaf in leaves(json.loads(path.read_text(encoding="utf-8")), "")
    }
    assert len(rendered) > 30
    own = {
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "managed_gradient_accumulation",
    }
    assert sorted(rendered - decided - own) == []


def test_every_option_that_a_page_names_is_an_option() -> None:
    found = parsers()
    assert len(found) == 25
    options = {
        name
        for parser in found.values()
        for action in parser._actions
        for name in action.option_strings
    }
    named: set[str] = set()
    for path in [*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md"), ROOT / "README.md"]:
        for line in re.findall(
            r"^(?:\$ )?(?:dsf|\./launch\.sh) .*$",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            words = line.partition("    #")[0].split(" -- ")[0]
            named |= {
                word.partition("=")[0] for word in re.findall(r"(?<=[\s\[])--[a-z][\w-]*=?", words)
            }
    assert len(named) > 35
    assert sorted(named - options - {"--help"}) == []


def test_exit_codes_are_those_of_the_source() -> None:
    page = exit_codes_page()
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    rows = re.findall(r"^\| (\d+) \| `(EXIT_\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert {name: int(code) for code, name, _ in rows} == codes
    assert all(len(about.strip()) > 5 for _, _, about in rows)


def test_every_public_name_is_described() -> None:
    page = python_page()
    assert re.findall(r"^## framework\.(\w+)$", page, re.MULTILINE) == framework.__all__
    for argument in ("model", "train_data", "eval_data", "task", "optimizer"):
        assert f"    {argument}: " in page


def test_lists_and_links_are_as_the_builder_wants_them() -> None:
    assert with_lists("text:\n- a\n- b") == "text:\n\n- a\n- b"
    assert with_lists("1. a\n2. b\n```\nx\n- y\n```") == "1. a\n2. b\n```\nx\n- y\n```"
    assert with_bars("| `a\\|b` | c\\|d |\n`e\\|f`") == "| `a|b` | c\\|d |\n`e\\|f`"
    assert without_outer_links("[`cli.py`](../framework/cli.py)", "a.md") == "`framework/cli.py`"
    assert without_outer_links("[the list](../framework/)", "a.md") == "the list (`framework`)"
    assert without_outer_links("[b](../b.md#c)", "tutorials/a.md") == "[b](../b.md#c)"
