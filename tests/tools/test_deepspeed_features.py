"""The page "DeepSpeed, feature by feature" names all that the installed DeepSpeed has: its keys with
their defaults, its public Python names and its commands. A new release shows here what is new.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.keys import load_table
from tests.places import ROOT
from tools.docs_site.deepspeed_features import MEANINGS, covers, deepspeed_features_page, features
from tools.docs_site.reference import config_keys

FEATURES = list(features())
# Sections of DeepSpeed's JSON that its inference engine alone reads.
OF_INFERENCE = ("inference/", "model_implementations/")


def deepspeed_folder() -> Path:
    deepspeed = pytest.importorskip("deepspeed")
    return Path(deepspeed.__file__).parent


def test_no_feature_is_unknown_or_inert() -> None:
    lost = [feature.name for feature in FEATURES if feature.state not in MEANINGS]
    assert lost == []
    assert len(FEATURES) >= 77
    assert [
        name for name, count in Counter(row.name for row in FEATURES).items() if count > 1
    ] == []


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_row_has_its_answer_and_its_test(feature: Any) -> None:
    assert feature.here
    assert (ROOT / "tests" / feature.test).is_file()
    if feature.state == "gone":
        assert re.match(r"\d+\.\d+\.\d+", feature.here), "the release that it is gone since"
    if feature.state == "refused":
        assert feature.why, "DeepSpeed's file and function, and the reason"
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", feature.here):
        if not key.startswith(("framework.", "engine.", "state.")):
            assert key in config_keys(), f"{key} is no key of a run config"


def test_what_refuses_is_where_the_row_says() -> None:
    folder = deepspeed_folder()
    for feature in FEATURES:
        if feature.why:
            place, _, _ = feature.why.partition(" ")
            file, _, name = place.partition(":")
            source = (folder / file).read_text(encoding="utf-8")
            assert re.search(rf"(?:def|class) {name}\b", source), place


def test_every_key_of_the_newest_table_belongs_to_a_feature() -> None:
    prefixes = [key for feature in FEATURES for key in feature.keys]
    table = load_table()
    new = [path for path in table if not any(covers(prefix, path) for prefix in prefixes)]
    # a section whose keys are named one by one
    new = [path for path in new if not any(covers(path, prefix) for prefix in prefixes)]
    assert new == [], "features of DeepSpeed that the page does not name"
    assert [prefix for prefix in prefixes if not any(covers(prefix, path) for path in table)] == []


def config_models() -> Iterator[type[Any]]:
    """Yield the pydantic sections of the installed DeepSpeed's JSON."""
    base = importlib.import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel
    importlib.import_module("deepspeed.runtime.config")
    waiting = list(base.__subclasses__())
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        if model.__module__.startswith("deepspeed."):
            yield model


def test_fields_and_defaults_of_the_installed_release_are_those_of_the_table() -> None:
    deepspeed_folder()
    table = load_table()
    known = {}
    for path in table:
        key = table.exact(path)
        assert key is not None
        known[key.source] = key
    new = []
    changed = []
    models = list(config_models())
    assert len(models) > 15
    for model in models:
        file = f"{model.__module__.removeprefix('deepspeed.').replace('.', '/')}.py"
        if file.startswith(OF_INFERENCE):
            continue
        for name, field in model.model_fields.items():
            key = known.get(f"{file}:{model.__name__}.{name}")
            if key is None:
                new.append(f"{file}:{model.__name__}.{name}")
            elif type(field.default) in (bool, int, float, str) and key.default != field.default:
                changed.append((key.path, key.default, field.default))
    assert new == []
    assert changed == []


def public_names(file: Path) -> set[str]:
    """Return the names without an underscore that a package's ``__init__.py`` defines or takes from
    modules of its own.
    """
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_") and name != "*"}


def test_every_public_name_and_command_of_the_installed_release_has_a_row() -> None:
    folder = deepspeed_folder()
    named = {name for feature in FEATURES for name in feature.python}
    helpers = {
        *("TORCH_DISTRIBUTED_DEFAULT_PORT", "get_accelerator", "git_branch", "git_hash", "version"),
        *("load_ds_config", "log_dist", "logger", "merge_tp_model_init_into_config"),
        *(
            "record_tp_model_init_args",
            "set_optimizer_flags",
            "resolve_per_head_muon_after_sharding",
        ),
    }
    names = public_names(folder / "__init__.py") - helpers
    names |= {f"zero.{name}" for name in public_names(folder / "runtime/zero/__init__.py")}
    safe = {name for name in public_names(folder / "utils/__init__.py") if name.startswith("safe_")}
    local = {name for name in safe if "local" in name or "vectorized" in name}  # a rank's own parts
    names |= {f"utils.{name}" for name in safe - local}
    assert names - named == set(), "public names of DeepSpeed that the page does not have"


def test_the_page_has_a_table_for_each_area() -> None:
    page = deepspeed_features_page()
    assert page.count("| feature | state | here | test |") == page.count("\n## ")
    assert "| ZeRO 1, 2, 3 | typed | `zero.stage` |" in page
    assert "unknown" not in page
    assert "inert" not in page
