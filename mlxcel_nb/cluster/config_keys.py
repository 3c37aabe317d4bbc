"""Every key of the cluster file: its type, its limits, its default, and what it is for. Pure; any thread.

The one place where they stand: the reader, the nearest-key suggestions, the summary and docs/configuration.md all go
by these tables. A reader turns a value as TOML has it into ours, and raises `ConfigError` with what is wrong
and the mend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.collectives import COLLECTIVES
from mlxcel_nb.cluster.layout import LayerRange, parse_range
from mlxcel_nb.cluster.names import check_given_name, has_control
from mlxcel_nb.cluster.places import TRANSPORTS
from mlxcel_nb.cluster.roles import HYBRID, ROLES, parse_role
from mlxcel_nb.errors import ConfigError

Reader = Callable[[object], Any]

FORMAT = 1
"""The format of the file that this version reads."""

DEFAULT_CLUSTER = "mlxcel"
"""Name of a cluster nobody named."""

MAX_SIZE = 512
"""Most ranks, stages or replicas, and most nodes of a file: a listener keeps as many established connections."""

MAX_LAYER = 9999
MAX_TEXT = 4096
MAX_BYTES = 1 << 50
MAX_UNITS = 1 << 20

TYPES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Key:
    """One key of a table.

    Args:
        read: from TOML's value to ours.
        kind: the type and its limits, in words.
        default: what counts when the key is absent, or `REQUIRED`.
        about: what it is for, in one sentence.
    """

    name: str
    read: Reader
    kind: str
    default: Any
    about: str

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


REQUIRED = object()


def _expect(kind: type, value: object, example: str) -> Any:
    if type(value) is not kind:
        found = next((name for cls, name in TYPES.items() if type(value) is cls), "a date or a time")
        raise ConfigError(f"is {found}, not {TYPES[kind]}", advice=f"Write it like {example}.")
    return value


def _whole(low: int, high: int, example: str) -> Reader:
    def read(value: object) -> int:
        number: int = _expect(int, value, example)
        if not low <= number <= high:
            shown = str(number) if abs(number) <= 1 << 64 else "this"
            raise ConfigError(f"{shown} is out of range", advice=f"Write a whole number from {low} to {high}.")
        return number

    return read


def _flag(value: object) -> bool:
    return bool(_expect(bool, value, "true"))


def _one_of(*choices: str) -> Reader:
    def read(value: object) -> str:
        text: str = _expect(str, value, f'"{choices[0]}"')
        if text.casefold() not in choices:
            named = ", ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f"{text[:64]!r} is not a choice", advice=f"Choose from {named}.")
        return text.casefold()

    return read


def _name(example: str) -> Reader:
    def read(value: object) -> str:
        text: str = _expect(str, value, example)
        try:
            return check_given_name("it", text)
        except ConfigError as error:
            cause = error.cause.removeprefix("it ")
            raise ConfigError(cause, advice=f"Write 1 to 128 bytes of printable text, like {example}.") from None

    return read


def _text(example: str) -> Reader:
    def read(value: object) -> str:
        text: str = _expect(str, value, example)
        if not text or len(text) > MAX_TEXT or has_control(text):
            advice = f"Write 1 to {MAX_TEXT} printable characters, like {example}."
            raise ConfigError("is empty, too long, or holds a control character", advice=advice)
        return text

    return read


def _address(value: object) -> Address:
    """Port 0 stands for one that is left out; whether it may be is for `config_checks` to say."""
    return parse_address(_expect(str, value, '"10.0.0.1:9000"'), default_port=0)


def _role(value: object) -> str:
    return parse_role(_expect(str, value, f'"{HYBRID}"'))


def _layers(value: object) -> LayerRange:
    text: str = _expect(str, value, '"0-15"')
    advice = f'Write the first and the last layer, from 0 to {MAX_LAYER}, like "0-15".'
    try:
        first, end = parse_range(text)
    except ConfigError as error:
        raise ConfigError(error.cause, advice=advice) from None
    if not first < end <= MAX_LAYER + 1:
        raise ConfigError(f"{text[:64]!r} is not a layer range", advice=advice)
    return first, end


def parse_port_range(text: str) -> tuple[int, int]:
    """First and last port of "9000-9010", or of "9000".

    Raises:
        ConfigError: no such range.
    """
    first, dash, last = text.partition("-")
    ends = [part.strip() for part in ([first, last] if dash else [first, first])]
    if all(end.isascii() and end.isdigit() and len(end) <= 5 for end in ends):
        low, high = int(ends[0]), int(ends[1])
        if 1 <= low <= high <= 65535:
            return low, high
    advice = 'Write the first and the last port, from 1 to 65535, like "9000-9010".'
    raise ConfigError(f"{text[:64]!r} is not a range of ports", advice=advice)


def _port_range(value: object) -> tuple[int, int]:
    return parse_port_range(_expect(str, value, '"9000-9010"'))


_SIZE = f"1 to {MAX_SIZE}"
_NAME = "1 to 128 bytes of printable text"
DISCOVERIES = ("static", "beacon")
ELASTICS = ("off", "spare", "replan")


def _choices(choices: tuple[str, ...]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


CLUSTER_KEYS = (
    Key("name", _name('"lab"'), _NAME, DEFAULT_CLUSTER, "Name of the cluster; nodes of another one are refused."),
    Key("tensor_parallel_size", _whole(1, MAX_SIZE, "2"), _SIZE, 1, "Ranks in every stage of a mesh."),
    Key("pipeline_parallel_size", _whole(1, MAX_SIZE, "2"), _SIZE, 1, "Stages of a mesh."),
    Key("data_parallel_size", _whole(1, MAX_SIZE, "2"), _SIZE, 1, "Replicas of the mesh."),
    Key("expert_parallel", _flag, "true or false", False, "Spread experts over the replicas, of one node each."),
    Key(
        "secret_file",
        _text('"cluster.secret"'),
        "path, relative to this file's folder",
        None,
        "The cluster secret, mode 0600, where no option or variable names one.",
    ),
    Key(
        "previous_secret_file",
        _text('"old.secret"'),
        "path, relative to this file's folder",
        None,
        "An older secret that is still good while it is replaced.",
    ),
    Key("transport", _one_of(*TRANSPORTS), _choices(TRANSPORTS), "auto", "What links may use; TCP is the fall-back."),
    Key("discovery", _one_of(*DISCOVERIES), _choices(DISCOVERIES), "static", "How nodes learn each other's ports."),
    Key(
        "collectives",
        _one_of(*COLLECTIVES),
        _choices(COLLECTIVES),
        "own",
        "Who adds partial sums up; all but own are unencrypted.",
    ),
    Key("model", _text('"smollm2-135m"'), "a known name, a folder or a hub id", None, "The model to load."),
    Key("port_range", _port_range, '"FIRST-LAST", ports from 1 to 65535', None, "Ports that nodes may listen on."),
    Key("elastic", _one_of(*ELASTICS), _choices(ELASTICS), "off", "What carries the layers of a node that is lost."),
)

NODE_KEYS = (
    Key("id", _name('"mac1"'), _NAME, REQUIRED, "The node's name, unlike any other's."),
    Key(
        "address",
        _address,
        "HOST:PORT, [IPV6]:PORT",
        REQUIRED,
        "Where it listens and is reached; the port may be left out with beacons.",
    ),
    Key("role", _role, ", ".join(ROLES), HYBRID, "What it does; short names are in the table of roles."),
    Key("stage", _whole(0, MAX_SIZE - 1, "0"), "0 to pipeline_parallel_size - 1", None, "Its pipeline stage."),
    Key("rank", _whole(0, MAX_SIZE - 1, "0"), "0 to tensor_parallel_size - 1", None, "Its tensor rank in the stage."),
    Key("layers", _layers, '"FIRST-LAST"', None, "Layers of its stage by hand, both ends included."),
    Key("group", _name('"prefill-0"'), _NAME, None, "Which prefill or decode group it belongs to."),
    Key("replica", _whole(0, MAX_SIZE - 1, "0"), "0 to data_parallel_size - 1", None, "Which replica it belongs to."),
    Key("spare", _flag, "true or false", False, "Holds nothing until a node is lost."),
)

RESOURCE_KEYS = (
    Key("memory_bytes", _whole(0, MAX_BYTES, "16000000000"), "0 to 2^50", 0, "Memory for a model; 0 finds out."),
    Key("compute_units", _whole(0, MAX_UNITS, "8"), "0 to 2^20", 0, "Cores that compute; 0 finds out."),
)

TABLES = {"[cluster]": CLUSTER_KEYS, "[[nodes]]": NODE_KEYS, "[nodes.resources]": RESOURCE_KEYS}
