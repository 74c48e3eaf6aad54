"""Names of kinds and commands: built-in ones, and those of installed packages, by their metadata."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework import registry
from framework.config import base
from framework.config.load import config_from_values
from framework.config.schema import run_schema
from framework.errors import ConfigError

Install = Callable[..., None]

KINDS = '''
from typing import ClassVar, Literal

from framework.config.base import ModelKind, PositiveCount


class TinyNet(ModelKind):
    """A net of a stranger."""

    builds: ClassVar[str] = "tiny_nets:build"
    kind: Literal["tiny_net"] = "tiny_net"
    width: PositiveCount = 16
    """Units of the hidden layer."""
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a package where Python finds it, as pip does: a module, and metadata with entry
    points.
    """
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def install(name: str, code: str, **groups: str) -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[dsf.{group}]\n{entry}\n" for group, entry in groups.items()]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        _forget()
        importlib.invalidate_caches()

    _forget()
    yield install
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    _forget()


def _forget() -> None:
    registry.installed.cache_clear()
    base._registered_kind.cache_clear()
    base._validator.cache_clear()
    base._PLUG_INS.clear()


def problem_of(values: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_values(values)
    (problem,) = caught.value.problems
    return str(problem)


def test_every_built_in_name_is_the_kind_of_its_section() -> None:
    for group, entries in registry.BUILT_IN.items():
        for name, path in entries.items():
            section = registry.Registered(group, name, path).load()
            if group in registry.KINDS:
                assert section.registered_in == group
                assert section.model_fields["kind"].default == name


def test_a_config_with_built_in_kinds_searches_no_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(registry, "installed", refuse)
    config_from_values({"model": {"kind": "mlp"}, "optimizer": {"kind": "sgd"}})


def test_a_kind_of_a_package_has_its_typed_section(install: Install) -> None:
    install("tiny-nets", KINDS, models="tiny_net = tiny_nets:TinyNet")
    config = config_from_values({"model": {"kind": "tiny_net"}})
    assert config.to_dict()["model"] == {"kind": "tiny_net", "width": 16}
    assert config.model.factory() == base.Factory("tiny_nets:build", {"width": 16})
    assert "did you mean 'width'?" in problem_of({"model": {"kind": "tiny_net", "widht": 8}})
    wrong = problem_of({"model": {"kind": "tiny_net", "width": "8"}})
    assert wrong.startswith('model.width = "8": text where a whole number belongs')


def test_a_kind_of_a_package_is_named_for_one_like_it(install: Install) -> None:
    install("tiny-nets", KINDS, models="tiny_net = tiny_nets:TinyNet")
    assert "did you mean 'tiny_net'? known: lenet, " in problem_of({"model": {"kind": "tiny_nett"}})
    assert "tiny_nets" not in sys.modules


@pytest.mark.slow
def test_the_schema_has_kinds_of_packages(install: Install) -> None:
    install("tiny-nets", KINDS, models="tiny_net = tiny_nets:TinyNet")
    base.load_all_kinds()
    definition = run_schema()["$defs"]["TinyNet"]
    assert definition["properties"]["width"]["description"] == "Units of the hidden layer."


@pytest.mark.parametrize(
    ("code", "entry", "reason"),
    [
        ("import no_such_module", "TinyNet", "importing that failed: ModuleNotFoundError"),
        ("raise SystemExit(3)", "TinyNet", "importing that failed: SystemExit: 3"),
        (KINDS, "TinyNett", "importing that failed: AttributeError"),
        (KINDS, "PositiveCount", "that is no section of framework.config"),
        (KINDS.replace('"tiny_net"', '"net"'), "TinyNet", "its field kind is not Literal"),
        (KINDS.replace("ModelKind", "Kind"), "TinyNet", "that is a kind of no group"),
    ],
)
def test_a_broken_package_is_one_line_with_its_name(
    install: Install, code: str, entry: str, reason: str
) -> None:
    install("tiny-nets", code, models=f"tiny_net = tiny_nets:{entry}")
    line = problem_of({"model": {"kind": "tiny_net"}})
    assert line.startswith("model.kind = tiny_net: the package tiny-nets 1.0 registers tiny_net")
    assert reason in line
    assert line.endswith(
        "; fix or upgrade tiny-nets, or uninstall it: pip uninstall tiny-nets [plug-in-broken]"
    )


def test_what_is_built_in_is_not_to_be_uninstalled() -> None:
    broken = registry.Registered("dsf.models", "net", "framework.no_such_module:Net")
    with pytest.raises(ConfigError) as caught:
        broken.load()
    (problem,) = caught.value.problems
    assert problem.fix.startswith("install ")
    assert problem.fix.endswith(" again")


def test_a_broken_package_does_not_hide_other_problems(install: Install) -> None:
    install("tiny-nets", "import no_such_module", models="tiny_net = tiny_nets:TinyNet")
    with pytest.raises(ConfigError) as caught:
        config_from_values({"model": {"kind": "tiny_net"}, "zero": {"stge": 1}})
    assert {problem.kind for problem in caught.value.problems} == {"plug-in-broken", "unknown-key"}


def test_two_packages_with_one_kind_are_both_named(install: Install) -> None:
    install("tiny-nets", KINDS, models="tiny_net = tiny_nets:TinyNet")
    install("other-nets", KINDS, models="tiny_net = other_nets:TinyNet")
    line = problem_of({"model": {"kind": "tiny_net"}})
    assert "tiny-nets 1.0 as tiny_nets:TinyNet" in line
    assert "other-nets 1.0 as other_nets:TinyNet" in line
    assert line.endswith("[plug-ins-clash]")


def test_a_built_in_name_is_not_replaced(install: Install) -> None:
    install("tiny-nets", KINDS, models="lenet = tiny_nets:TinyNet")
    assert config_from_values({"model": {"kind": "lenet"}}).to_dict()["model"]["num_classes"] == 10
    with pytest.raises(ConfigError, match=r"dsf-trainer as framework.*tiny-nets 1.0 as tiny_nets"):
        base.load_all_kinds()
