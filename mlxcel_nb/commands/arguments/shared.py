"""Types of command-line values, and arguments that several commands share. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mlxcel_nb.cluster.shape import LinkShape, parse_link
from mlxcel_nb.commands.parser import Kind, Tree
from mlxcel_nb.errors import ConfigError

ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


def _number(kind: Callable[[str], Any], low: float, high: float, what: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def shape(text: str) -> LinkShape:
    try:
        return parse_link(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


count = _number(int, 1, 2**31 - 1, "a whole number from 1 to 2147483647")
number = _number(int, 0, 2**31 - 1, "a whole number from 0 to 2147483647")
port = _number(int, 0, 65535, "a port from 0 to 65535")
seconds = _number(float, 0.001, 86400, "a time in seconds")
size = _number(int, 0, 2**20, "a size from 0 to 1048576 bytes")


def unescape(text: str) -> str:
    out, rest = [], text
    while rest:
        pair = rest[:2]
        out.append(ESCAPES.get(pair, rest[0]))
        rest = rest[2:] if pair in ESCAPES else rest[1:]
    return "".join(out)


def secret_file(leaf: Tree, about: str) -> None:
    names = ("--secret-file", "--cluster-secret-file")
    leaf.add(*names, dest="secret_file", metavar="FILE", completes=Kind.PATH, help=about)


def link(leaf: Tree, about: str) -> None:
    leaf.add("--link", action="append", default=[], metavar="SHAPE", help=about)


def on(leaf: Tree) -> None:
    leaf.add("--cluster", metavar="NAME", completes=Kind.CLUSTER, help="which cluster, where there are several")
