"""`verify` from a shell and from a cell: what it prints, for programs too, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlxcel_nb.client import plans, verifying
from mlxcel_nb.commands import parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Session
from mlxcel_nb.commands.verify import judged, passed
from mlxcel_nb.display.verify import catalogue_view, count, model_view
from mlxcel_nb.errors import ClusterError, ConfigError, MlxcelError
from mlxcel_nb.models.verifying import job
from mlxcel_nb.models.verifying.catalogued import Finding
from mlxcel_nb.models.verifying.comparing import Verdict
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def ask(line: str, where: Where = Where.SHELL) -> tuple[int, str]:
    out = io.StringIO()
    args = parser.parse(tree.build(where), parser.split(f"verify {line}"))
    status = run(args, Context(TerminalConsole(out, io.StringIO()), Session()))
    return status, out.getvalue()


def test_a_folder_is_verified_in_one_process(tiny: Path) -> None:
    status, text = ask(f"--model {tiny} --in-process --layouts tp2,pp2xtp2 --tokens 4 --prompt abc --json")
    told = json.loads(text)
    assert status == 0
    assert told["equal"]
    assert told["on"] == "one process"
    assert [each["layout"] for each in told["layouts"]] == ["tp2", "tp2xpp2"]
    for each in told["layouts"]:
        assert each["equal"]
        assert each["judged"]
        assert (each["tokens"], each["token"], each["forced_token"], each["layer"]) == (4, None, None, None)
        assert each["delta"] <= 1e-4
        assert len(each["layer_deltas"]) == 5


def test_the_catalogue_is_verified_by_name() -> None:
    status, text = ask("--catalogue --arch llama --layouts pp2", Where.MAGIC)
    assert status == 0
    assert "1 architecture: 1 equal." in text
    assert not psutil.Process().children()


def test_a_cell_may_ask_for_json_as_well() -> None:
    status, text = ask("--catalogue --arch llama --layouts pp2 --json", Where.MAGIC)
    assert status == 0
    assert json.loads(text)["equal"]


def test_what_the_catalogue_gave_is_told_to_programs() -> None:
    """Of olmo mlx-lm prints a line when it is brought, which is no answer."""
    status, text = ask("--catalogue --arch llama --arch bitnet --arch olmo --layouts pp2,tp2 --json")
    told = json.loads(text)
    assert (status, told["equal"], told["untested"]) == (0, True, [])
    assert told["versions"]["mlx_lm"] == importlib.metadata.version("mlx-lm")
    bitnet, llama, olmo = sorted(told["catalogue"], key=lambda each: each["name"])
    assert [each["layout"] for each in llama["verdicts"]] == ["pp2", "tp2"]
    assert [each["delta"] == 0 for each in llama["verdicts"]] == [True, False]
    assert max(each["delta"] for each in llama["verdicts"]) <= 1e-4
    assert bitnet["cannot"] or mx.metal.is_available()
    assert "needs a package that is not installed" in olmo["cannot"] or importlib.util.find_spec("hf_olmo")


def test_a_layout_that_cannot_be_is_refused_with_its_reason_and_the_others_are_verified(tiny: Path) -> None:
    status, text = ask(f"--model {tiny} --in-process --layouts pp2,ep2,pp9 --tokens 2")
    assert status == 1
    table, why = text.split("Why")
    assert [table.count(words) for words in ("● equal", "○ refused")] == [1, 2]
    assert "9 pipeline stages for a model of 5 layers" in why
    assert "ep2" in why
    told = json.loads(ask(f"--model {tiny} --in-process --layouts pp2,ep2,pp9 --tokens 2 --json")[1])
    assert [bool(each["refused"]) for each in told["layouts"]] == [False, True, True]
    assert [each["equal"] for each in told["layouts"]] == [True, False, False]
    assert not told["equal"]


def test_nothing_is_started_where_every_layout_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    for how in ("", "--in-process"):
        status, text = ask(f"--model {tiny} {how} --layouts ep2,pp9")
        assert status == 1
        assert "Nothing was run." in text
        assert text.count("○ refused") == 2
    monkeypatch.setattr(verifying, "check_count", lambda n: plans.check_count(n if n < 4 else 10_000))
    status, text = ask(f"--model {tiny} --layouts pp4")
    assert "pp4 needs 4 engines. Ask for 1 to" in text


def test_a_refused_layout_counts_where_it_was_named() -> None:
    equal = Verdict(layout="pp2", dtype="float32", tokens=9, delta=1e-6)
    refused, failed = Verdict(layout="tp2", refused="no"), Verdict(layout="tp2", failed="no")
    assert passed([equal], named=True)
    assert passed([equal, refused], named=False)
    assert not passed([equal, refused], named=True)
    assert not passed([refused], named=False)
    assert not passed([equal, failed], named=False)


def test_a_prompt_that_leaves_no_room_is_an_error(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="the model's context is 2048"):
        ask(f"--model {tiny} --in-process --layouts pp2 --tokens 3000")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--model or the --catalogue"),
        ("--model x --catalogue", "--model or the --catalogue"),
        ("--model x --arch llama", "--arch names an architecture of the --catalogue"),
        ("--catalogue --dtype float32", "--dtype belongs to a --model"),
        ("--catalogue --in-process", "--in-process belongs to a --model"),
        ("--catalogue --arch lama", "no architecture 'lama'"),
        ("--model x --layouts tp2,dp2", "dp2: data parallel replicas are whole copies"),
        ("--model x --layouts ,", "no layout in it"),
    ],
)
def test_what_makes_no_sense_is_a_usage_problem(line: str, words: str) -> None:
    with pytest.raises(UsageProblem, match=words):
        ask(line)


@pytest.mark.parametrize(("where", "see"), [(Where.SHELL, "mlxcel-nb verify -h"), (Where.MAGIC, "%mlxcel verify -h")])
@pytest.mark.parametrize("line", ["", "--model x --arch llama", "--catalogue --tokens 4"])
def test_a_usage_problem_names_the_help_of_its_place(line: str, where: Where, see: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        ask(line, where)
    assert refused.value.advice == f"See: {see}"


def test_what_the_process_raises_is_raised_here_and_the_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MlxcelError):
        list(job.run_job({"model": "/nowhere", "layouts": [], "prompt": [1], "tokens": 1}, lambda *_: None))
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with pytest.raises(ClusterError, match="ended with status 1"):
        list(job.run_job({}, lambda *_: None))
    assert not psutil.Process().children()


def test_a_reader_that_leaves_ends_the_process() -> None:
    findings = job.run_job({"catalogue": ["llama"] * 50, "layouts": ["pp2"]}, lambda *_: None)
    assert "finding" in next(findings)
    findings.close()
    assert not psutil.Process().children()


def test_weights_that_stay_quantised_are_not_judged(tiny: Path, tmp_path: Path) -> None:
    """Case 12."""
    packed = make_tiny(tmp_path / "packed", quantization={"group_size": 32, "bits": 4})
    assert [judged(packed, dtype) for dtype in ("auto", "float32", "native")] == [True, True, False]
    assert judged(tiny, "native")


def test_a_table_says_where_two_runs_part() -> None:
    verdicts = [
        Verdict(layout="tp2", dtype="float32", tokens=64, delta=2e-5),
        Verdict(layout="pp2", dtype="float32", tokens=64, token=3, forced_token=2, delta=0.5, layer=7, member="node-1"),
        Verdict(layout="tp3", dtype="bfloat16", judged=False, tokens=64, delta=0.1),
        Verdict(layout="pp9", refused="too many stages"),
    ]
    view = model_view("m", verdicts, "Run somewhere.", [])
    for text in (view.text, view.html):
        for words in (
            "● equal", "the same 64", "2.0e-05", "✕ not equal", "first differs at 3 of 64", "first differs at 2 of 64",
            "layer 7, seen by node-1", "● same tokens", "○ refused", "too many stages", "Run somewhere.",
        ):  # fmt: skip
            assert words in text


def findings() -> list[Finding]:
    equal = Verdict(layout="tp2", dtype="float32", tokens=9, delta=1e-6)
    wrong: Any = Verdict(layout="tp2", dtype="float32", tokens=9, delta=0.5, layer=1, member="rank 1", forced_token=4)
    refused = Verdict(layout="ep2", refused="no such thing")
    return [
        Finding(name="a", verdicts=(equal, refused)),
        Finding(name="b", verdicts=(wrong, refused)),
        Finding(name="c", verdicts=(refused,)),
        Finding(name="d", untested=True),
    ]


def test_the_table_of_the_catalogue_gives_reasons() -> None:
    text = catalogue_view(findings(), ["tp2", "ep2"]).text
    assert (
        count(findings()) == "4 architectures: 1 equal, 1 of them not in every layout, 1 not, "
        "1 in none of these layouts, 1 untested."
    )
    assert "✕ 5e-01" in text
    assert "layer 1, seen by rank 1, first token that differs 4 of 9" in text
    assert "no such thing" in text


def test_what_was_compared_with_nothing_is_not_called_equal() -> None:
    refused = findings()[2]
    assert not refused.wrong
    assert "○ refused" in (text := catalogue_view([refused], ["ep2"]).text)
    assert "●" not in text
