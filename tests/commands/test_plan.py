"""`plan` from a shell and from a cell: what it prints, for programs too, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.commands import parser, plan, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.errors import ModelError
from mlxcel_nb.plan.nodes import Speed
from tests.published import PUBLISHED
from tests.tiny import make_tiny

FAST = "@100GB/s@1TFLOPS"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json alone, under another name."""
    file = tmp_path / "llama-8b.json"
    file.write_text(json.dumps(PUBLISHED["8B dense"].config))
    return file


def ask(line: str, session: Session | None = None, where: Where = Where.SHELL) -> tuple[int, str]:
    out = io.StringIO()
    args = parser.parse(tree.build(where), parser.split(f"plan {line}"))
    status = run(args, Context(TerminalConsole(out, io.StringIO()), session or Session()))
    return status, out.getvalue()


def asked(line: str) -> Any:
    status, text = ask(f"{line} --json")
    told = json.loads(text)
    assert status == (0 if told["recommended"] else 1)
    return told


def test_a_config_alone_is_enough(config: Path) -> None:
    told = asked(f"{config} --nodes 16GB{FAST},16GB{FAST},8GB{FAST} --context 8192 --concurrency 2 --link 10Gbit,50us")
    assert told["weights_bytes"] == 2 * 8030261248
    assert told["asked"] == {"context": 8192, "concurrency": 2, "prompt": 512}
    assert [each["layout"] for each in told["layouts"]] == ["single", "pp2", "pp3", "tp2", "tp3"]
    single, pp2 = told["layouts"][:2]
    assert not single["fits"]
    assert "node-0 would need" in single["why_not"]
    assert pp2["fits"]
    for each in told["layouts"]:
        for part in each["parts"]:
            taken = sum(part[name] for name in ("weights_bytes", "cache_bytes", "activation_bytes", "headroom_bytes"))
            memory = next(node["memory_bytes"] for node in told["nodes"] if node["name"] == part["node"])
            assert 0 < memory - taken < 10**9  # the process itself
        assert each["max_context"] == min(part["max_context"] for part in each["parts"])
        assert each["max_concurrency"] == min(part["max_concurrency"] for part in each["parts"])
    best = next(each for each in told["layouts"] if each["recommended"])
    assert best["layout"] == told["recommended"]
    assert told["times"] == "estimates"
    assert told["link"] == {"latency_s": 50e-6, "bytes_per_s": 1.25e9}


def test_what_a_person_reads(config: Path) -> None:
    status, text = ask(f"{config} --nodes 16GB{FAST},16GB{FAST},8GB{FAST}")
    assert status == 0
    for words in ("16.1 GB of weights as bfloat16", "longest context", "KV a token", "headroom", "Times are estimates",
                  "No --link is given", "▸", "✕", "One node is not enough", "Take "):  # fmt: skip
        assert words in text


def test_too_many_ranks_are_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "six", num_attention_heads=6, num_key_value_heads=2)
    told = asked(f"{folder} --nodes 7x1GB{FAST}")
    refused = {each["layout"]: each["why"] for each in told["refused"]}
    assert all(number in refused["tp7"] for number in ("6", "2", "7", "1-6"))
    assert refused["pp6 to pp7"] == "6 stages for 5 layers"
    assert told["recommended"] == "single"


def test_where_nothing_fits_the_exit_status_is_one(config: Path) -> None:
    status, text = ask(f"{config} --nodes 4GB{FAST},4GB{FAST}")
    assert status == 1
    assert "No layout fits" in text
    assert "short" in text


def test_a_model_can_be_planned_as_if_it_were_converted(config: Path) -> None:
    told = asked(f"{config} --nodes 8GB{FAST} --bits 4")
    assert told["quantised"] == "4-bit, groups of 64"
    assert told["recommended"] == "single"
    assert asked(f"{config} --nodes 40GB{FAST} --dtype float32")["weights_bytes"] == 4 * 8030261248


def test_a_folder_is_planned_by_its_files(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", torch_dtype="bfloat16")  # its file holds float32
    told = asked(f"{folder} --nodes 1GB{FAST}")
    assert told["weights_bytes"] == 4 * 262912
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert asked(f"{folder} --nodes 1GB{FAST}")["weights_bytes"] == 2 * 262912


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nodes 16", "not an amount of memory"),
        ("--context 200000", "made for up to 131072"),
        ("--context 100 --prompt 200", "Give a --context"),
        ("--bits 3", "3"),
    ],
)
def test_what_it_refuses(config: Path, line: str, words: str) -> None:
    rest = "" if "--nodes" in line else f" --nodes 16GB{FAST}"
    with pytest.raises(UsageProblem, match=words):
        ask(f"{config} {line}{rest}")


def test_a_config_that_is_none(tmp_path: Path) -> None:
    wrong = tmp_path / "c.json"
    wrong.write_text("[]")
    with pytest.raises(ModelError, match="names no model_type"):
        ask(f"{wrong} --nodes 16GB{FAST}")
    wrong.write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="does not accept"):
        ask(f"{wrong} --nodes 16GB{FAST}")


def test_this_machine_is_measured_and_taken_where_nothing_is_said(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    status, text = ask(str(folder), where=Where.MAGIC)
    assert status == 0
    assert "measured just now" in text
    assert "Take single on this machine" in text


def test_in_a_notebook_the_engines_are_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "speed_here", lambda: Speed(8e9, 1e11, 0.0))
    session = Session()
    nodes = [SimpleNamespace(node_id=f"engine-{n}", address=Address("127.0.0.1", 9000 + n)) for n in range(2)]
    session._held["lab"] = Held(SimpleNamespace(name="lab", nodes=nodes, stop=lambda: None))  # type: ignore[arg-type]
    status, text = ask(str(make_tiny(tmp_path / "m")), session, Where.MAGIC)
    assert status == 0
    assert "the 2 engines of lab" in text
    assert "Take single on engine-0" in text
    assert "tp2" in text
    nodes[1].address = Address("10.0.0.2", 9000)
    with pytest.raises(UsageProblem, match="several hosts"):
        ask(str(tmp_path / "m"), session, Where.MAGIC)
