"""What `load`, `verify` and `plan` take and say of expert-parallel ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mlxcel_nb.commands import parser, plan, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.load import plan_model
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Session
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import catalogue, sizes
from mlxcel_nb.plan.nodes import Speed
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


FILE = """
[cluster]
name = "desk"
secret_file = "cluster.secret"
{sizes}
expert_parallel = true
"""
NODE = """
[[nodes]]
id = "mac{n}"
address = "10.0.0.{n}:9000"
{place}
[nodes.resources]
memory_bytes = {memory}
"""


def cluster_file(folder: Path, sizes: str, *nodes: tuple[str, int]) -> Path:
    text = FILE.format(sizes=sizes)
    text += "".join(NODE.format(n=n, place=place, memory=memory) for n, (place, memory) in enumerate(nodes, 1))
    (folder / "cluster.toml").write_text(text)
    return folder / "cluster.toml"


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config.json of four layers whose experts are nearly all of it: 18 GB of 19.3."""
    monkeypatch.setattr(plan, "speed_here", lambda: Speed(8e9, 1e11, 0.0))
    file = tmp_path / "moe.json"
    file.write_text(json.dumps({**PUBLISHED["mixture of experts"].config, "num_hidden_layers": 4}))
    return file


def test_a_cluster_file_that_spreads_experts_lays_one_model_over_its_replicas(mixture: Path, tmp_path: Path) -> None:
    file = cluster_file(tmp_path, "data_parallel_size = 3", *[("", 16 * 10**9)] * 3)
    status, text = ask(f"plan {mixture} --config {file} --json")
    told = json.loads(text)
    assert (status, told["mesh"]) == (0, "replica-0 to replica-2")
    (given,) = [each for each in told["layouts"] if each["given"]]
    assert (given["layout"], given["ep"], given["load_with"]) == ("ep3", 3, "--ep 3 --dtype native")
    assert [part["node"] for part in given["parts"]] == ["mac1", "mac2", "mac3"]
    facts = sizes.gather(json.loads(mixture.read_text()), name="moe", ranks=3)
    assert [part["weights_bytes"] for part in given["parts"]] == [
        rank.weights((0, 4), 0, 1) for rank in facts.spread[3]
    ]
    assert sum(each["layout"] == "ep3" for each in told["layouts"]) == 1
    _, text = ask(f"plan {mixture} --config {file}")
    assert "ep3, the file's" in text
    assert "The file's own layout, ep3, fits." in text
    assert "planned as one" in text


def test_a_cluster_files_experts_that_do_not_fit_or_are_not_there_are_told(mixture: Path, tmp_path: Path) -> None:
    small = cluster_file(tmp_path, "data_parallel_size = 2", ("", 16 * 10**9), ("", 8 * 10**9))
    status, text = ask(f"plan {mixture} --config {small}")
    assert status == 1
    assert "The file's own layout, ep2, does not fit: mac2 would need" in text
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps({**PUBLISHED["8B dense"].config, "num_hidden_layers": 4}))
    status, text = ask(f"plan {dense} --config {small}")
    assert status == 1
    assert "The file's own layout cannot be: 2 expert-parallel ranks for model type llama" in text
    assert "Split it by --tp or --pp" in text


ALONE = {
    "tp": ("which have attention whole, and 2 tensor ranks, which cut it", "Ask for one of the two."),
    "pp": ("in each of 2 pipeline stages are not there yet", "Ask for one of the two."),
}


@pytest.mark.parametrize("kind", ALONE)
def test_ranks_with_experts_of_their_own_beside_another_split_are_refused_wherever_they_are_asked_for(
    kind: str, mixture: Path, tmp_path: Path
) -> None:
    """By load, verify and plan, and by the cluster file: why, and what to do, in two lines at most."""
    why, advice = ALONE[kind]
    one = catalogue.entry("qwen3_moe")
    assert one is not None
    folder = catalogue.write(one, tmp_path / "m")
    write_tokenizer(folder)
    args = parser.parse(tree.build(Where.MAGIC), parser.split(f"load {folder} --ep 2 --{kind} 2"))
    with pytest.raises(ConfigError, match=why) as refused:
        plan_model(args, TerminalConsole(io.StringIO(), io.StringIO()))
    assert refused.value.advice == advice
    with pytest.raises(UsageProblem, match=f"{why}. {advice}"):
        ask(f"verify --model {folder} --layouts ep2x{kind}2")
    told = json.loads(ask(f"plan {mixture} --nodes 4x40GB --json")[1])
    (words,) = [each["why"] for each in told["refused"] if each["layout"] == f"{kind}2xep2 and more"]
    assert why in words
    assert words.endswith(advice)
    fewer = json.loads(ask(f"plan {mixture} --nodes 3x40GB --json")[1])
    assert not any("xep" in each["layout"] for each in fewer["refused"])
    size, role = {
        "tp": ("tensor_parallel_size", 'role = "tp"\nrank = {n}'),
        "pp": ("pipeline_parallel_size", 'role = "pipeline"\nstage = {n}'),
    }[kind]
    file = cluster_file(tmp_path, f"{size} = 2", *((role.format(n=n), 10**9) for n in range(2)))
    with pytest.raises(ConfigError, match=r"data_parallel_size = 2 alone, or leave expert_parallel out"):
        ask(f"plan {mixture} --config {file}")
    with pytest.raises(ConfigError, match="expert_parallel"):
        ask(f"config check {file}")
