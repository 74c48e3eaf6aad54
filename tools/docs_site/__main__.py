"""Builds the documentation site: `./launch.sh docs`, or `python -m tools.docs_site [--out DIR]`.

The pages of `docs/` and those made from the code are put together in one folder, which zensical
turns into HTML by the settings of `mkdocs.yml`. Links that leave `docs/` become paths, because a
built site has no other files of the repository. Warnings are errors.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.docs_site.coming_from import coming_from_page
from tools.docs_site.deepspeed_features import deepspeed_features_page
from tools.docs_site.deepspeed_keys import deepspeed_keys_page
from tools.docs_site.kinds import ROOT
from tools.docs_site.reference import reference_pages

DOCS: Final = ROOT / "docs"
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")
# Pages whose entries are found by their whole name, and after other pages by a part of it.
_LISTS: Final = ("decisions/", "reference/problems/", "reference/deepspeed-keys")
_LIST: Final = re.compile(r"[-*] |\d+\. ")


def main() -> None:
    """Build the site, and print where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs_site", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "site", metavar="DIR", help="left out: site/"
    )
    out: Path = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        assemble(work)
        command = [
            sys.executable,
            "-m",
            "zensical",
            "build",
            "--strict",
            "--clean",
            "-f",
            str(work / "mkdocs.yml"),
        ]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            text = re.sub(
                r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr.partition("Traceback")[0]
            )
            sys.exit(f"{text}docs: the site was not built")
        rank_lists_last(work / "site")
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "site", out)
    print(f"docs: open {out / 'index.html'}; it needs no server and no network")


def assemble(work: Path) -> None:
    """Write settings and pages into `work`, as the builder reads them."""
    shutil.copy(ROOT / "mkdocs.yml", work)
    shutil.copytree(DOCS, work / "docs")
    made = {
        **reference_pages(),
        "coming-from.md": coming_from_page(),
        "reference/deepspeed-features.md": deepspeed_features_page(),
        "reference/deepspeed-keys.md": deepspeed_keys_page(),
        "decisions/index.md": decisions_page(),
    }
    for name, text in made.items():
        path = work / "docs" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
    for path in (work / "docs").rglob("*.md"):
        name = path.relative_to(work / "docs").as_posix()
        text = without_outer_links(path.read_text(encoding="utf-8"), name)
        text = with_consoles(with_bars(with_lists(text)))
        path.write_text(text, encoding="utf-8")


def rank_lists_last(site: Path) -> None:
    """Let the search rank pages above the long lists, whose titles are many short words.

    The search ranks a word in a title above one in a text. An invisible joiner before the words of
    a list's titles keeps them out of it, and the title also begins the text: the whole name of a
    kind still finds its entry first.
    """
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    for item in index["items"]:
        if item["location"].startswith(_LISTS):
            title = item["title"]
            item["text"] = f"<p>{title}</p> {item['text']}"
            item["title"] = re.sub(r"(?<!\S)(?=\S)|(?<=[.,:=`/()])(?=\w)", "\u2060", title)
    text = json.dumps(index)
    (site / "search.json").write_text(text, encoding="utf-8")
    (site / "search.js").write_text(f"var __index = {text};", encoding="utf-8")


def decisions_page() -> str:
    """The list of decision notes, newest first."""
    lines = [
        "# Decisions\n",
        "Why it is as it is: a short note for each decision that costs something, newest first.\n",
    ]
    for note in sorted((DOCS / "decisions").glob("[0-9]*.md"), reverse=True):
        title = note.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({note.name})")
    return "\n".join(lines)


def without_outer_links(text: str, name: str) -> str:
    """The text of `docs/name` with links to files outside `docs/` as their paths in the
    repository.
    """

    def path_of(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"`{target}`" if link[1].strip("`") in target else f"{link[1]} (`{target}`)"

    return _LINK.sub(path_of, text)


def with_bars(text: str) -> str:
    """The text with bars in the code of tables as they are: the builder, unlike others, shows what
    escapes them.
    """
    return re.sub(
        r"(?m)^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        text,
    )


def with_consoles(text: str) -> str:
    """The text with blocks of commands and their output as such: the site does not copy prompts and
    output.
    """
    return re.sub(r"(?m)^( *)```\n(?=\1\$ )", r"\1```console\n", text)


def with_lists(text: str) -> str:
    """The text as Python-Markdown wants lists: a blank line before the first item."""
    lines: list[str] = []
    is_code = False
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        is_first = (
            _LIST.match(line) and before.strip() and not before.startswith((" ", "-", "*", "#"))
        )
        if is_first and not is_code and not re.match(r"\d+\. ", before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
