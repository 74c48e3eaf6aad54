"""Base of all sections: they are frozen, refuse unknown keys, and a `kind` names a factory with
typed arguments.

The sentence under a field is its documentation: `Section.__get_pydantic_json_schema__` moves it
into the JSON Schema. It reads the source only when a schema is asked for, because reading it at
import would cost every `check` 60 ms.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
)
from pydantic_core import (
    CoreSchema,
    PydanticCustomError,
    PydanticKnownError,
    SchemaValidator,
    core_schema,
)

from framework import registry
from framework.errors import ConfigError


def _whole(value: Any) -> Any:
    """Let 5e8 be a count: YAML and JSON read it as a float, and bucket sizes are often written that
    way.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _as_text(value: Any) -> Any:
    """Let 10 be a range of one step."""
    if type(value) is int:
        return str(value)
    return value


Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
PositiveCount = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
# Limits stand before the validator: pydantic leaves limits after it out of the JSON Schema.
EvenCount = Annotated[int, Field(ge=2, multiple_of=2), BeforeValidator(_whole)]
CountFromTwo = Annotated[int, Field(ge=2), BeforeValidator(_whole)]
CountFromEight = Annotated[int, Field(ge=8), BeforeValidator(_whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]

_DOTTED_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_IMPORT_PATH: Final = f"^{_DOTTED_NAME}:{_DOTTED_NAME}$"
_STEP_RANGE: Final = r"^[1-9][0-9]{0,14}(-[1-9][0-9]{0,14})?$"
_RUN_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"
ImportPath = Annotated[str, StringConstraints(pattern=_IMPORT_PATH)]
RunName = Annotated[str, StringConstraints(pattern=_RUN_NAME)]
_Steps = Annotated[str, StringConstraints(pattern=_STEP_RANGE)]
StepRange = Annotated[
    _Steps, BeforeValidator(_as_text, json_schema_input_type=Annotated[int, Field(ge=1)] | _Steps)
]


def _suggest_import_path(text: str) -> str:
    file = re.fullmatch(r"(?:\./)?([\w./]+)\.py(?::(\w+))?", text)
    if file:
        return f"write {file[1].replace('/', '.')}:{file[2] or 'NAME'}"
    module, _, name = text.rpartition(".")
    guess = f"{module}:{name}"
    if re.match(_IMPORT_PATH, guess):
        return f"write {guess}"
    return "write package.module:name"


def _suggest_run_name(text: str) -> str:
    guess = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:100]).strip("-.")
    return f"write for example {guess or 'run'}"


# Pattern -> the reason of a text that does not match it, and a function that suggests a fix.
WORDS_OF_PATTERNS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    _IMPORT_PATH: ("not an import path", _suggest_import_path),
    _STEP_RANGE: (
        "not a range of steps",
        lambda text: "write 10-12, or 10 for one step; the first step is 1",
    ),
    _RUN_NAME: (
        "a name is 1 to 100 letters, digits, _, - and ., with no . or - first",
        _suggest_run_name,
    ),
}
# Keys that distinguish the members of a union: members with a name, and the user's own code.
TAG_KEYS: Final = ("kind", "dtype", "device")
OF_ONES_OWN: Final = ("target", "object")


@dataclass(frozen=True)
class Factory:
    """Something to import and call: ``module.path:name`` and its keyword arguments."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)


if TYPE_CHECKING:  # type checkers take a section's arguments from its fields
    from pydantic._internal._model_construction import ModelMetaclass

    _SectionType = ModelMetaclass
else:

    class _SectionType(type(BaseModel)):
        """Type of all sections; `explained` turns pydantic's error of a section that a program
        makes into a ConfigError, once `framework.sections` has set it.
        """

        explained = None

        def __call__(cls, **values: Any) -> Any:
            try:
                return super().__call__(**values)
            except ValidationError as error:
                if _SectionType.explained is None:
                    raise
                raise _SectionType.explained(error, cls) from None


class Section(BaseModel, metaclass=_SectionType):
    """One section of a run config."""

    # Group of `framework.registry` that has the kinds derived from this class.
    registered_in: ClassVar[str] = ""
    # defer_build: a section that no config names is never compiled, which saves every `check` 25
    # ms.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        defer_build=True,
    )

    @property
    def is_own_code(self) -> bool:
        """Check whether the trainer knows of what the section builds only how to call it: the
        user's own code, and kinds of installed packages.
        """
        return False

    def own_factory(self) -> Factory | None:
        """Return how the code of the user's own or of an installed package is called; None for
        built-in kinds, and for objects from Python.
        """
        return None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        paragraphs = schema["description"].split("\n\n")
        schema["description"] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        for name, sentence in _field_sentences(cls).items():
            if name in schema.get("properties", {}):
                schema["properties"][name].setdefault("description", sentence)
        return schema


class Kind(Section):
    """A named factory with typed arguments: every field except `kind` is a keyword argument of
    `builds`.
    """

    builds: ClassVar[str]
    if TYPE_CHECKING:
        kind: str  # a Literal in each kind
    own_fields: ClassVar[frozenset[str]] = frozenset({"kind"})

    @property
    def is_own_code(self) -> bool:
        return self.kind not in registry.BUILT_IN[self.registered_in]

    def own_factory(self) -> Factory | None:
        if self.is_own_code:
            return self.factory()
        return None

    def form(self) -> str | None:
        """Return the form of samples that it gives or takes (`framework.config.forms`); None: it is
        not known.
        """
        return None

    def factory(self) -> Factory:
        """Return the import path and keyword arguments that this section stands for."""
        return Factory(self.builds, self.model_dump(exclude=set(self.own_fields)))


class Target(Section):
    """The user's own code: an import path and the keyword arguments to call it with."""

    target: ImportPath
    """What to import and call, as ``package.module:name``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call."""

    @property
    def is_own_code(self) -> bool:
        return True

    def own_factory(self) -> Factory:
        return self.factory()

    def factory(self) -> Factory:
        return Factory(self.target, dict(self.args))


class Object(Section):
    """Stands in a resolved config for an object that was handed over from Python; a file cannot ask
    for it.
    """

    object: str
    """Type of the object, as ``module.name``."""

    @property
    def is_own_code(self) -> bool:
        return True

    def factory(self) -> Factory:
        raise LookupError(
            f"{self.object} was handed over from Python and cannot be built from a config"
        )


def targets_in(section: Any) -> Iterator[str]:
    """Yield the import path of every target of a section, also of those inside of it."""
    if isinstance(section, Target):
        yield section.target
    if isinstance(section, Section):
        for name in type(section).model_fields:
            yield from targets_in(getattr(section, name))
    elif isinstance(section, (list, tuple)):
        for item in section:
            yield from targets_in(item)
    elif isinstance(section, Mapping):
        for item in section.values():
            yield from targets_in(item)


def choices_of(union: Any) -> tuple[str, list[str]]:
    """Return the key that distinguishes the members of a union, and its allowed values: of kinds
    that installed packages register as well.
    """
    members = members_of(union)
    choices = [tag for tag in members if tag not in OF_ONES_OWN]
    base = _registered_base(union)
    if base is None:
        fields = members[choices[0]].model_fields
        return next(key for key in TAG_KEYS if key in fields), choices
    for name in registry.installed(base.registered_in):
        if name not in choices:
            choices.append(name)
    return "kind", choices


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union of sections; the value of one key distinguishes its members.

    Where that is `kind`, the user's own code and an object from Python are distinguished by the
    presence of the key that names them. A base of kinds stands for all that are registered under
    it (`framework.registry`); of these only the one that a config names is imported.
    """

    key: str = "kind"

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's tagged union, or `_RegisteredUnion` for one with a base of kinds."""
        if _registered_base(union) is not None:
            return core_schema.no_info_plain_validator_function(_RegisteredUnion(union, self._tag))
        choices = {
            tag: handler.generate_schema(member) for tag, member in members_of(union).items()
        }
        return core_schema.tagged_union_schema(choices, self._tag)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if schema["type"] == "function-plain":
            union = schema["function"]["function"].union
            schema = core_schema.tagged_union_schema(
                {tag: _core_schema(member) for tag, member in members_of(union).items()}, self._tag
            )
        return handler(schema)

    def _tag(self, value: Any) -> str | None:
        """Return the tag of the member that a mapping or a section is of; None if it has none."""
        if isinstance(value, Mapping):
            get = value.get
        else:
            get = partial(getattr, value)
        if self.key == "kind":
            for key in OF_ONES_OWN:
                if get(key, None) is not None:
                    return key
        tag = get(self.key, None)
        if isinstance(tag, str):
            return tag
        return None


@dataclass(frozen=True)
class _RegisteredUnion:
    """Validator of a union with a base of registered kinds."""

    union: Any
    tag_of: Callable[[Any], str | None]

    def __call__(self, value: Any) -> Section:
        """Return the value as the section that its tag names, with errors as pydantic's own unions
        have them.
        """
        tag = self.tag_of(value)
        if tag is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "kind"})
        member = self._member(tag)
        if member is None:
            context = {"discriminator": "kind", "tag": tag, "expected_tags": ""}
            raise PydanticKnownError("union_tag_invalid", context)
        if isinstance(value, member):
            type(value).model_rebuild()  # deferred: pydantic before 2.14 cannot write it then
            return value
        section: Section = _validator(member, tag).validate_python(value)
        return section

    def _member(self, tag: str) -> type[Section] | None:
        """Return the member with a tag, for which a registered kind is imported; None if the tag is
        unknown. Raises pydantic's error ``plug_in`` if the import fails.
        """
        for member in get_args(self.union):
            if not _is_base(member):
                if _tag_of(member) == tag:
                    return cast(type[Section], member)
                continue
            try:
                kind = _registered_kind(member.registered_in, tag)
            except ConfigError as error:
                context = {"problem": error.problems[0]}
                raise PydanticCustomError("plug_in", "{problem}", context) from error
            if kind is not None and issubclass(kind, member):
                return kind
        return None


@cache
def _validator(member: type[Section], tag: str) -> SchemaValidator:
    """Return a validator whose errors have the tag in their places, as those of pydantic's own
    unions have.
    """
    schema = core_schema.no_info_plain_validator_function(member.model_validate)
    return SchemaValidator(core_schema.tagged_union_schema({tag: schema}, lambda _: tag))


def _core_schema(member: type[Section]) -> CoreSchema:
    member.model_rebuild()  # its building was deferred
    return member.__pydantic_core_schema__


def members_of(union: Any) -> dict[str, type[Section]]:
    """Return the members of a union of sections by their tags; empty for any other type.

    Kinds of installed packages are among them once a config has named them.
    """
    members: dict[str, type[Section]] = {}
    for member in get_args(union):
        if not (isinstance(member, type) and issubclass(member, Section)):
            return {}
        if _is_base(member):
            members |= _loaded_kinds(member)
        else:
            members[_tag_of(member)] = member
    return members


def _is_base(member: Any) -> bool:
    """Check whether a member of a union stands for all kinds that are registered under it."""
    return (
        isinstance(member, type)
        and issubclass(member, Section)
        and bool(member.registered_in)
        and "kind" not in member.model_fields
    )


def _registered_base(union: Any) -> type[Section] | None:
    for member in get_args(union):
        if _is_base(member):
            return cast(type[Section], member)
    return None


def _loaded_kinds(base: type[Section]) -> dict[str, type[Section]]:
    """Return the built-in kinds of a base, and those of packages that are loaded."""
    kinds: dict[str, type[Section]] = {}
    for name in registry.BUILT_IN[base.registered_in]:
        kind = _registered_kind(base.registered_in, name)
        if kind is not None and issubclass(kind, base):
            kinds[name] = kind
    for (_, name), plug_in in _PLUG_INS.items():
        if issubclass(plug_in, base):
            kinds[name] = plug_in
    return kinds


# (group, name) -> section of a kind of an installed package, once it is loaded.
_PLUG_INS: Final[dict[tuple[str, str], type[Section]]] = {}


@cache
def _registered_kind(group: str, name: str) -> type[Section] | None:
    """Return the section of a registered kind; None if the name is unknown.

    Raises:
        ConfigError: it cannot be imported, is no section of this group, or two packages register
            it.
    """
    registered = registry.find(group, name)
    if registered is None:
        return None
    section = registered.load()
    if name in registry.BUILT_IN[group]:
        return cast(type[Section], section)
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise registered.broken("that is no section of framework.config")
    if section.registered_in != group:
        raise registered.broken(f"that is a kind of {section.registered_in or 'no group'}")
    if "kind" not in section.model_fields or section.model_fields["kind"].default != name:
        raise registered.broken(f'its field kind is not Literal["{name}"] = "{name}"')
    _PLUG_INS[group, name] = section
    return section


def load_all_kinds() -> None:
    """Load the kinds of all installed packages, so that the schema has them.

    Raises:
        ConfigError: one of them cannot be loaded, or two packages register one name.
    """
    for group in registry.KINDS:
        for registered in registry.all_registered(group):
            _registered_kind(group, registered.name)


def _tag_of(member: type[Section]) -> str:
    """Return the value of the key that distinguishes a union's member, or that key itself for the
    user's own code and for objects.
    """
    for key in TAG_KEYS:
        if key in member.model_fields:
            tag: str = member.model_fields[key].default
            return tag
    if issubclass(member, Target):
        return "target"
    return "object"


def _field_sentences(section: type[Section]) -> dict[str, str]:
    """Return the string literal under each field, by the field's name, of a class and its bases."""
    sentences: dict[str, str] = {}
    for cls in reversed([cls for cls in section.__mro__ if issubclass(cls, Section)]):
        sentences |= _own_sentences(cls)
    return sentences


@cache
def _own_sentences(section: type[Section]) -> dict[str, str]:
    """Return the string literals under the fields that a class adds to its bases."""
    sentences: dict[str, str] = {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    for lines in pairwise(definition.body):  # type: ignore[attr-defined]
        match lines:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                sentences[name] = " ".join(text.split())
    return sentences


class ModelKind(Kind):
    """A model that the framework builds, without torch."""

    registered_in: ClassVar[str] = "dsf.models"
    # Function that lists the layers on a tape (`framework.plan.layers`), so that work and memory
    # are known without torch; empty: the model is traced.
    work: ClassVar[str] = ""
    # Table of transformers' names for it (`framework.checkpoint.huggingface`), as package:file.
    transformers_table: ClassVar[str] = ""
    has_batch_norm: ClassVar[bool] = False
    has_convolutions: ClassVar[bool] = False


def plain_values(value: Any) -> Any:
    """Convert values of a Python program to those that a file can hold: lists for tuples, text for
    paths, Python's numbers for numpy's.

    Values under ``args`` stay as they are: the user's own code is called with them.
    """
    if isinstance(value, Mapping):
        plain = dict(value)
        for name, item in value.items():
            if name != "args":
                plain[name] = plain_values(item)
        return plain
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return _plain_number(value)


def _plain_number(value: Any) -> Any:
    """Return Python's number for another one; other values as they are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return value


def is_plain(value: Any) -> bool:
    """Check whether JSON can hold a value, tuples as lists: so it can be compared, and written into
    a config.
    """
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))
