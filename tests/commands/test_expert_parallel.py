"""What `load`, `verify` and `plan` take and say of expert-parallel ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mlxcel_nb.commands import parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.load import plan_model
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Session
from mlxcel_nb.models import catalogue
from tests.published import PUBLISHED
from tests.tiny import make_tiny, write_tokenizer


def ask(line: str) -> tuple[int, str]:
    out = io.StringIO()
    args = parser.parse(tree.build(Where.SHELL), parser.split(line))
    return run(args, Context(TerminalConsole(out, io.StringIO()), Session())), out.getvalue()


def test_load_lays_a_mixture_over_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    one = catalogue.entry("qwen3_moe")
    assert one is not None
    folder = catalogue.write(one, tmp_path)
    write_tokenizer(folder)
    args = parser.parse(tree.build(Where.MAGIC), parser.split(f"load {folder} --ep 3"))
    plan = plan_model(args, TerminalConsole(io.StringIO(), io.StringIO()))
    assert (plan.layout.name, plan.layout.size, plan.layout.edges()) == ("ep3", 3, [(0, 1), (0, 2), (1, 2)])


@pytest.mark.timeout(120)
def test_verify_runs_a_mixture_of_the_catalogue_on_ranks() -> None:
    status, text = ask("verify --catalogue --arch qwen3_moe --arch llama --layouts ep2,ep3 --json")
    told = json.loads(text)
    llama, qwen = sorted(told["catalogue"], key=lambda each: each["name"])
    assert [(each["layout"], each["equal"]) for each in qwen["verdicts"]] == [("ep2", True), ("ep3", True)]
    assert all("no experts to spread" in each["refused"] for each in llama["verdicts"])
    assert (status, told["equal"]) == (0, True)


def test_verify_refuses_what_cannot_be_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="which have attention whole, and 2 tensor ranks, which cut it"):
        ask("verify --model x --layouts ep2xtp2")
    status, text = ask(f"verify --model {make_tiny(tmp_path)} --layouts ep2")
    assert status == 1
    assert "no experts to spread" in text
    assert "Nothing was run." in text


def test_plan_says_what_each_rank_takes(tmp_path: Path) -> None:
    config = {**PUBLISHED["mixture of experts"].config, "num_hidden_layers": 4}
    file = tmp_path / "moe.json"
    file.write_text(json.dumps(config))
    nodes = "16GB@100GB/s@1TFLOPS,16GB@100GB/s@1TFLOPS"
    told = json.loads(ask(f"plan {file} --nodes {nodes} --json")[1])
    single, ep2 = (next(each for each in told["layouts"] if each["layout"] == name) for name in ("single", "ep2"))
    experts = 4 * 3 * 128 * 1536 * 4096 * 2
    assert [part["weights_bytes"] for part in ep2["parts"]] == [single["parts"][0]["weights_bytes"] - experts // 2] * 2
    assert "ep2" in ask(f"plan {file} --nodes {nodes}")[1]
