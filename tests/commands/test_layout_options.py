"""What commands that bring a model take of replicas and micro-batches, and what `verify` says of replicas."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from mlxcel_nb.commands import parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.load import plan_model
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.errors import ConfigError
from tests.tiny import make_tiny


def planned(line: str, where: Where) -> object:
    args = parser.parse(tree.build(where), parser.split(line))
    plan = plan_model(args, TerminalConsole(io.StringIO(), io.StringIO()))
    return plan.name, plan.engines, plan.replicas, plan.micro_batches


@pytest.mark.parametrize("command", ["load {}", "generate --model {}", "chat --model {}", "serve {}"])
def test_every_command_that_brings_a_model_takes_replicas_and_micro_batches(command: str, tmp_path: Path) -> None:
    line = command.format(make_tiny(tmp_path))
    where = Where.MAGIC if command.startswith("load") else Where.SHELL
    assert planned(line, where) == ("single", 1, 1, 0)
    assert planned(f"{line} --dp 2", where) == ("dp2", 2, 2, 0)
    assert planned(f"{line} --dp 2 --tp 2 --pp 2 --micro-batches 3", where) == ("dp2xtp2xpp2", 8, 2, 3)
    with pytest.raises(UsageProblem, match="0"):
        planned(f"{line} --dp 0", where)
    with pytest.raises(ConfigError, match="one stage, which is always at work"):
        planned(f"{line} --micro-batches 2", where)


@pytest.mark.parametrize("layout", ["dp2", "dp2xtp2", "tp2xdp3"])
def test_verify_says_that_replicas_are_no_split(layout: str) -> None:
    with pytest.raises((UsageProblem, ConfigError), match="replicas are whole copies"):
        parser.parse(tree.build(Where.SHELL), parser.split(f"verify --model m --layouts {layout}"))
