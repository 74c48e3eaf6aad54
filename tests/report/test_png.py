"""Charts as PNG: size, colours, words, and the message where they cannot be drawn."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.report import png
from framework.report.records import read_run
from framework.report.run_charts import charts_of
from tests.report.made_runs import write_run

pytest.importorskip("resvg_py", reason="resvg-py comes with the extras bench and dev")
image = pytest.importorskip("PIL.Image", reason="pillow comes with the train extra")


def test_a_chart_is_drawn_in_its_light_colours(tmp_path: Path) -> None:
    (chart,) = charts_of([read_run(write_run(tmp_path / "run"))])["Goodput"]
    found = image.open(io.BytesIO(png.png_of(chart.file()))).convert("RGB")
    assert found.width == 800
    colours = {colour for _, colour in found.getcolors(1 << 20)}
    # ground, training, words of the title
    assert {(255, 255, 255), (0x00, 0x72, 0xB2), (0x1B, 0x1F, 0x24)} <= colours
    assert (0x14, 0x17, 0x1B) not in colours  # the dark ground


def test_styles_without_variables_and_with_queries_go_too() -> None:
    style = "text{fill:#222}@media(prefers-color-scheme:dark){text{fill:#eee}.s{fill:#aaa}}rect{fill:#0072b2}"
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><style>{}</style>{}</svg>'
    found = image.open(
        io.BytesIO(png.png_of(frame.format(style, '<rect width="40" height="9"/>')))
    ).convert("RGB")
    assert (found.size, found.getpixel((40, 5)), found.getpixel((40, 30))) == (
        (80, 40),
        (0, 0x72, 0xB2),
        (255, 255, 255),
    )


def test_without_the_package_or_a_font_it_is_reported_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(png, "_drawn", lambda svg, family: b"the same without words")
        with pytest.raises(ConfigError, match=r"no font.*fonts-dejavu.*\[font-missing\]"):
            png.png_of("<svg/>")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(
        ConfigError, match=r"PNG needs the package resvg-py.*setup bench.*\[package-missing\]"
    ):
        png.png_of("<svg/>")
