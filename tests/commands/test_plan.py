"""`plan` from a shell and from a cell: what it prints, for programs too, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel_nb.client.report import ClusterStatus, LoadReport, NodeReport
from mlxcel_nb.commands import parser, plan, plan_nodes, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.errors import ClusterError, ConfigError, ModelError
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
    assert "more or larger nodes, or fewer bits a weight: --bits 4" in text


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
        ("--nodes 16", "--nodes: '16' is not an amount of memory"),
        ("--nodes abc", "--nodes: 'abc' is not an amount of memory"),
        ("--context 200000", "made for up to 131072"),
        ("--context 100 --prompt 200", "Give a longer --context"),
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
    with pytest.raises(ModelError, match=r"names no model_type\. Give a model folder"):
        ask(f"{wrong} --nodes 16GB{FAST}")
    wrong.write_text("{")
    with pytest.raises(ModelError, match=r"is not JSON\. Give a model folder"):
        ask(f"{wrong} --nodes 16GB{FAST}")
    wrong.write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="does not accept"):
        ask(f"{wrong} --nodes 16GB{FAST}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number from 1"),
        ({"hidden_size": "896"}, "hidden_size is '896', not a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and models of up to 10000 are taken"),
        ({"vocab_size": True}, "vocab_size is True, not"),
        ({"vocab_size": 10**12}, "does not accept this config.json: Integer value"),
        ({"num_attention_heads": 0}, "does not accept this config.json: integer division"),
        ({"rope_scaling": "linear"}, "does not accept this config.json: 'str' object has no attribute"),
        (
            {"layer_types": ["sliding_attention", *["full_attention"] * 31]},
            "does not accept this config.json: unsupported operand",
        ),
        ({"text_config": {"hidden_size": -1}}, "hidden_size is -1, not"),
        ({"model_type": "llama9"}, r"'llama9' is not supported by mlx-lm\. A newer one may know it: pip install -U"),
        ({"quantization_config": {"quant_method": "fp8"}}, "by fp8 are not read here.*--bits 4"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_name(
    config: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    wrong = tmp_path / "changed.json"
    wrong.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=words) as refused:
        ask(f"{wrong} --nodes 16GB{FAST}")
    assert refused.value.advice


def test_this_machine_is_measured_and_taken_where_nothing_is_said(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    status, text = ask(str(folder), where=Where.MAGIC)
    assert status == 0
    assert "measured just now" in text
    assert "Take single on this machine" in text


def held(*nodes: NodeReport, model: LoadReport | None = None) -> Session:
    """A session with a cluster that says this of itself."""
    status = ClusterStatus(name="lab", router_id="r", state="", nodes=nodes, links=(), model=model)
    session = Session()
    session._held["lab"] = Held(SimpleNamespace(name="lab", status=lambda: status, stop=lambda: None))  # type: ignore[arg-type]
    return session


def engine(
    number: int, *, host: str = "h", free: int = 4 * 10**9, state: str = "alive", device: str = ""
) -> NodeReport:
    return NodeReport(node_id=f"engine-{number}", state=state, host=host, free_bytes=free, device=device)


@pytest.fixture
def speedless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "speed_here", lambda: Speed(8e9, 1e11, 0.0))


@pytest.mark.usefixtures("speedless")
def test_in_a_notebook_the_engines_are_the_nodes_by_what_each_has_free(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    nodes = [engine(0), engine(1, free=5 * 10**9), engine(2, host="other", free=7 * 10**9), engine(3, state="dead")]
    status, text = ask(str(folder), held(*nodes), Where.MAGIC)
    assert status == 0
    assert "the 3 engines of lab and what is free: 4 GB on h, 7 GB on other" in text
    assert "Take single on engine-" in text
    assert "tp3" in text
    (only,) = plan_nodes.asked_for(SimpleNamespace(config=None, nodes=None), Context(TerminalConsole(), held(*nodes)))  # type: ignore[arg-type]
    assert [(node.name, node.memory, node.host) for node in only.nodes] == [
        ("engine-0", 2 * 10**9, "h"), ("engine-1", 2 * 10**9, "h"), ("engine-2", 7 * 10**9, "other"),
    ]  # fmt: skip
    assert only.sharing == 2


@pytest.mark.usefixtures("speedless")
def test_engines_that_do_not_say_and_clusters_without_one_are_told(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    with pytest.raises(UsageProblem, match="engine-1 did not say how much"):
        ask(str(folder), held(engine(0), engine(1, free=0)), Where.MAGIC)
    _, text = ask(str(folder), held(engine(0)), Where.MAGIC)
    assert "Planned for the one engine of lab" in text
    with pytest.raises(ClusterError, match="no engine of lab lives"):
        ask(str(folder), held(engine(0, state="dead")), Where.MAGIC)


FILE = """
[cluster]
name = "desk"
secret_file = "cluster.secret"
elastic = "spare"
{sizes}
"""


def cluster_file(folder: Path, sizes: str, *nodes: str) -> Path:
    text = FILE.format(sizes=sizes)
    for number, node in enumerate(nodes):
        first, _, memory = node.partition("@")
        text += f'[[nodes]]\nid = "mac{number}"\naddress = "10.0.0.{number + 1}:9000"\n{first}\n'
        text += f"[nodes.resources]\nmemory_bytes = {memory}\n" if memory else ""
    (folder / "cluster.toml").write_text(text)
    return folder / "cluster.toml"


@pytest.mark.usefixtures("speedless")
def test_a_cluster_file_says_memory_roles_and_a_layout(config: Path, tmp_path: Path) -> None:
    file = cluster_file(
        tmp_path,
        "pipeline_parallel_size = 2",
        'role = "pipeline"\nstage = 1\nlayers = "12-31"@16_000_000_000',
        'role = "pipeline"\nstage = 0\nlayers = "0-11"@8_000_000_000',
        "spare = true@1_000_000_000",
    )
    told = asked(f"{config} --config {file}")
    assert told["mesh"] == "replica-0"
    assert [(node["name"], node["memory_bytes"]) for node in told["nodes"]] == [
        ("mac1", 8 * 10**9),
        ("mac0", 16 * 10**9),
    ]
    given = next(each for each in told["layouts"] if each["given"])
    assert given["layout"] == "pp2"
    assert given["stages"] == [[0, 12], [12, 32]]
    assert [part["node"] for part in given["parts"]] == ["mac1", "mac0"]
    assert given["fits"]
    assert any("mac2" in note for note in told["assumed"])
    status, text = ask(f"{config} --config {file}")
    assert status == 0
    assert "pipeline_stage" in text
    assert "pp2, the file's" in text
    assert "The file's own layout, pp2, fits." in text


@pytest.mark.usefixtures("speedless")
@pytest.mark.parametrize(
    ("layers", "words"),
    [(("0-19", "20-31"), "does not fit: mac0 would need"), (("0-9", "10-15"), "cannot be: its layers end at 15")],
)
def test_a_cluster_file_whose_layout_cannot_work_is_told_and_the_status_is_one(
    config: Path, tmp_path: Path, layers: tuple[str, str], words: str
) -> None:
    nodes = [
        f'role = "pipeline"\nstage = {n}\nlayers = "{span}"@{memory}'
        for n, (span, memory) in enumerate(zip(layers, (8 * 10**9, 16 * 10**9), strict=True))
    ]
    file = cluster_file(tmp_path, "pipeline_parallel_size = 2", *nodes, "spare = true@1")
    status, text = ask(f"{config} --config {file}")
    assert status == 1
    assert words in text
    assert "Take pp2" in text  # with other layers it fits


@pytest.mark.usefixtures("speedless")
def test_without_layers_by_hand_the_files_layout_gets_the_best(config: Path, tmp_path: Path) -> None:
    nodes = [f'role = "pipeline"\nstage = {n}@{memory}' for n, memory in enumerate((8 * 10**9, 16 * 10**9))]
    told = asked(f"{config} --config {cluster_file(tmp_path, 'pipeline_parallel_size = 2', *nodes, 'spare = true@1')}")
    given = next(each for each in told["layouts"] if each["given"])
    assert given["stages"][0][1] < 16
    assert [each["layout"] for each in told["layouts"]].count("pp2") == 1


@pytest.mark.usefixtures("speedless")
def test_groups_are_planned_each_for_itself(config: Path, tmp_path: Path) -> None:
    nodes = ['role = "prefill"@20_000_000_000', 'role = "decode"@24_000_000_000', 'role = "decode"@8_000_000_000']
    status, text = ask(f"{config} --config {cluster_file(tmp_path, '', *nodes, 'spare = true@1')} --json")
    meshes = json.loads(text)["meshes"]
    assert [each["mesh"] for each in meshes] == ["prefill-0", "decode-0", "decode-1"]
    assert [next(x["fits"] for x in each["layouts"] if x["given"]) for each in meshes] == [True, True, False]
    assert status == 1


@pytest.mark.usefixtures("speedless")
def test_memory_that_a_file_does_not_say_is_found_out_here_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    file = cluster_file(tmp_path, "", "", "@1000000000", "spare = true@1")
    with pytest.raises(ConfigError, match="how much memory node mac0 has"):
        ask(f"{folder} --config {file}")
    file.write_text(file.read_text().replace("10.0.0.", "127.0.0."))
    status, text = ask(f"{folder} --config {file}")
    assert status == 0
    assert "an equal part of what this machine has free" in text
    with pytest.raises(UsageProblem, match="Give one of the two"):
        ask(f"{folder} --config {file} --nodes 1GB")


def test_a_shared_vocabulary_is_planned_and_load_is_told(config: Path) -> None:
    line = f"{config} --nodes 12GB{FAST},12GB{FAST},12GB{FAST},12GB{FAST} --link 10Gbit,50us"
    plain, shared = asked(line), asked(f"{line} --vocab-parallel")
    assert (plain["vocab_parallel"], shared["vocab_parallel"]) == (False, True)
    one, other = ({each["layout"]: each for each in told["layouts"]} for told in (plain, shared))
    for name in one:
        weights = [[part["weights_bytes"] for part in each[name]["parts"]] for each in (one, other)]
        if one[name]["tp"] == 1:
            assert weights[0] == weights[1]
            assert "--vocab-parallel" not in other[name]["load_with"]
        else:
            assert sum(weights[1]) < sum(weights[0])
            assert f"--tp {one[name]['tp']}" in other[name]["load_with"]
            assert "--vocab-parallel" in other[name]["load_with"]
            assert "--vocab-parallel" not in one[name]["load_with"]
    _, text = ask(f"{line} --vocab-parallel")
    assert "Tensor ranks share the embedding and the head too." in text
    _, text = ask(f"{config} --nodes 40GB{FAST} --vocab-parallel")
    assert "No layout here has tensor ranks" in text
