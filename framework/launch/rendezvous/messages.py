"""Messages between agents: the types of everything that one agent reads of another.

The other end may be any program that found the port. So a value has exactly the type that an agent
sends, numbers have limits, and a message that is anything else ends its connection. Reasons and
names for the log are the exception: they are shortened where they are shown.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    OnErrorOmit,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from framework.doctor.node.start import Look
from framework.hosts.hostfile import is_host
from framework.launch.rendezvous.channel import foreign
from framework.launch.supervision import RestartState

_LEAST_PORT: Final = 1024
_PORT_LIMIT: Final = 1 << 16
_MOST_STARTS: Final = 1 << 31
_MOST_FACTS: Final = 100
_MOST_PROBLEMS: Final = 200
_LONGEST_PROBLEM_TEXT: Final = 300


def is_address(host: object) -> bool:
    """Check whether this is an address, and no name."""
    if not isinstance(host, str):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_node_address(text: str) -> str:
    address = ipaddress.ip_address(text)
    if address.is_multicast or address.is_unspecified:
        raise ValueError("no node has this address")
    return text


def _check_called_address(text: str) -> str:
    if text and not is_address(text):
        raise ValueError("this is no address")
    return text


def _check_host(name: str) -> str:
    """Check a host's name, which goes to the log: no character of it controls a terminal."""
    if not is_host(name):
        raise ValueError("no host has this name")
    return name


def _check_state(state: dict[str, Any]) -> dict[str, Any]:
    """Check the state of restarts, which is empty in a job without them."""
    if state:
        RestartState.model_validate(state)
    return state


def _refuse_null(value: object) -> object:
    """Refuse a null: a key without a value is left out."""
    if value is None:
        raise ValueError("it is null")
    return value


def _shorten(text: object) -> str:
    return str(text)[:_LONGEST_PROBLEM_TEXT]


NodeAddress = Annotated[str, AfterValidator(_check_node_address)]
NodePort = Annotated[int, Field(ge=_LEAST_PORT, lt=_PORT_LIMIT)]
# Other nodes will connect to it, so that names and ports of system services are refused.
NodeTarget = Annotated[tuple[NodeAddress, NodePort], Strict(False)]
CalledAddress = Annotated[str, AfterValidator(_check_called_address)]
# Number of the target, address that was reached or an empty text, reason.
FailedCall = Annotated[
    tuple[Annotated[int, Field(ge=0)], CalledAddress, str],
    Strict(False),
]
FailureName = Literal["rank", "node-lost", "folder-lost"]  # `peers.FailureKind`
ShortText = Annotated[str, BeforeValidator(_shorten)]


class _Message(BaseModel):
    """Base of the messages. Keys that a message does not name are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Hello(_Message):
    """Facts of a node, which node 0 compares; see `handshake`."""

    protocol: int
    job: str
    node_rank: Annotated[int, Field(ge=0)]
    nnodes: int
    spares: int
    slots: int
    master_port: int
    host: Annotated[str, AfterValidator(_check_host)]
    machine: str
    hosts: str
    clock: Annotated[float, Field(allow_inf_nan=False)]
    facts: Annotated[dict[str, str], Field(max_length=_MOST_FACTS)]
    look: Annotated[Look | None, BeforeValidator(_refuse_null)] = None
    echo: Annotated[NodeTarget | None, BeforeValidator(_refuse_null)] = None

    @model_validator(mode="after")
    def _check_rank(self) -> Hello:
        if self.node_rank >= self.nnodes + self.spares:
            raise ValueError("the job has no node of this rank")
        return self


class Challenge(_Message):
    """The first message of node 0; `token`: whether it has one."""

    type: Literal["challenge"]
    nonce: str
    token: bool = False


class Introduction(_Message):
    """The answer of a node: its HELLO, which is checked once the proof was."""

    type: Literal["hello"]
    hello: Any = None
    nonce: str
    proof: Any = None


class Reach(_Message):
    """A request of node 0 to call other nodes; `token` is what the node sends to them."""

    targets: list[NodeTarget]
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Reached(_Message):
    """The calls that failed."""

    token: str
    failed: list[FailedCall]


class Go(_Message):
    """A start. Nothing in it is a setting, a path or an address."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["go"]
    nodes: Annotated[list[int], Field(min_length=1)]
    resumes: bool
    epoch: Annotated[int, Field(gt=0, lt=_MOST_STARTS)]
    port: Annotated[int, Field(gt=0, lt=_PORT_LIMIT)]
    state: Annotated[dict[str, Any], AfterValidator(_check_state)]
    hosts: dict[str, Any] = {}


class Done(_Message):
    """The end of the job, with its exit code."""

    code: Annotated[int, Field(ge=0, lt=256)]


class Report(_Message):
    """A report of a node about the start: see `peers.Peers.send`."""

    why: str = ""
    what: str = ""
    code: int = 0
    at: ShortText = ""
    failure_kind: FailureName = "rank"


class FailureRecord(_Message):
    """A failure as node 0 passes it on."""

    model_config = ConfigDict(extra="forbid")

    node: int
    what: str
    code: int
    at: str
    kind: FailureName


class News(_Message):
    """What is new about the start, as node 0 passes it on."""

    stop: str = ""
    asked: str = ""
    cut: str = ""
    kill: bool = False
    failures: list[FailureRecord] = []
    ended: dict[str, int] = {}


@with_config(ConfigDict(strict=True))
class ProblemRecord(TypedDict, total=False):
    """A problem in a refusal, which a stranger may have sent as well: it is only shown."""

    kind: ShortText
    reason: ShortText
    fix: ShortText
    key: ShortText
    file: ShortText
    value: OnErrorOmit[str | int]


_PROBLEMS: Final = TypeAdapter(list[OnErrorOmit[ProblemRecord]])
_M = TypeVar("_M", bound=_Message)


def read_message(model: type[_M], message: object) -> _M:
    """Return a message with its types. Raises NoAgent if no agent of this release sends it."""
    try:
        return model.model_validate(message)
    except ValidationError:
        raise foreign() from None


def read_problems(refusal: Mapping[str, Any]) -> list[ProblemRecord]:
    """Return the problems of a refusal that can be shown."""
    problems = refusal.get("problems")
    if not isinstance(problems, list):
        return []
    return _PROBLEMS.validate_python(problems[:_MOST_PROBLEMS])
