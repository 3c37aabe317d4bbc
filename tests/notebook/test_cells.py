"""A prompt in a cell, a model over two engines, tokens in the cell: one kernel, one cluster, the real model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxcel_nb.display.view import RUN_MIME
from tests.everywhere import EVERY_FUNCTION
from tests.notebook.kernels import Notebook, Ran, notebook
from tests.tiny import make_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def nb(smollm2: Path) -> Iterator[Notebook]:
    with notebook() as nb:
        nb.ok("%load_ext mlxcel_nb\nfrom mlxcel_nb import LLM, Cluster, SamplingParams")
        started = nb.ok("%mlxcel cluster start -n 2")
        assert "is up after" in started.plain and "engine" in started.plain
        nb.ok("from mlxcel_nb.commands.session import current\ncluster = current().get().cluster")
        loaded = nb.ok("%mlxcel load smollm2-135m --pp 2")
        assert "0-14" in loaded.plain and "15-29" in loaded.plain
        yield nb


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model; beside it, as `own`, one with Python code of its own."""
    folder = tmp_path_factory.mktemp("models")
    (make_tiny(folder / "own", model_file="own.py") / "own.py").write_text(
        "from mlx_lm.models.llama import Model, ModelArgs"
    )
    return make_tiny(folder / "tiny")


def test_an_answer_streams_into_its_cell_with_a_footer_and_figures(nb: Notebook) -> None:
    ran = nb.ok("%%mlxcel chat --reset --max-tokens 32\nWhat is the capital of France?")
    assert "Paris" in ran.text and ran.text.endswith("\n")
    footer = ran.of("display_data")[-1]
    assert "tokens/s" in footer["data"]["text/plain"] and "pp2" in footer["data"]["text/plain"]
    figures = footer["data"][RUN_MIME]
    assert figures["layout"] == "pp2" and figures["finish_reason"] == "stop" and figures["ttft_s"] > 0
    assert "Paris" not in str(figures)
    longer = nb.ok("%%mlxcel generate --max-tokens 64 --ignore-eos\n1, 2, 3, 4, 5,")
    assert len(longer.of("stream")) >= 3


def test_chat_remembers_until_it_is_reset(nb: Notebook) -> None:
    nb.ok("%%mlxcel chat --reset --max-tokens 32\nWhat is the capital of France?")
    nb.ok("%%mlxcel chat --max-tokens 8 -o second\nAnd of Spain?")
    nb.ok("%%mlxcel chat --reset --max-tokens 8 -o alone\nAnd of Spain?")
    assert nb.value("second.prompt_tokens - alone.prompt_tokens") > 10


def test_a_prompt_reaches_the_model_word_for_word(nb: Notebook) -> None:
    prompt = "x = 7; {x} $x %x {nb!r} '\"\\ \\n {{}} 🙂\n\n  indented {"
    nb.ok(f"x = 8\nprompt = {prompt!r}")
    nb.ok(f"%%mlxcel generate --max-tokens 4 -o cell\n{prompt}")
    nb.ok("code = cluster.generate(prompt, SamplingParams(max_tokens=4))")
    assert nb.value("(cell.prompt_tokens, cell.token_ids) == (code.prompt_tokens, code.token_ids)")


def test_a_template_is_filled_when_asked_for(nb: Notebook) -> None:
    nb.ok("land = 'France'")
    nb.ok("%%mlxcel generate --template --max-tokens 8 -o filled\nThe capital of {land} is")
    nb.ok("code = cluster.generate('The capital of France is', SamplingParams(max_tokens=8))")
    assert nb.value("filled.token_ids == code.token_ids")


def test_a_seed_gives_the_same_text_through_a_magic_and_python(nb: Notebook) -> None:
    """Case 14."""
    nb.ok("%%mlxcel generate --max-tokens 12 --temp 1 --seed 5 -o one\nOnce upon a time")
    nb.ok("two = cluster.generate('Once upon a time', SamplingParams(max_tokens=12, temperature=1.0, seed=5))")
    assert nb.value("one.text == two.text")


def test_an_interrupt_stops_within_a_second_keeps_the_text_and_the_cluster(nb: Notebook) -> None:
    took = []
    for _ in range(3):  # other tests share the machine: it must be possible
        ran = nb.run(
            "%%mlxcel generate --max-tokens 5000 --ignore-eos -o partial\nOnce upon a time",
            stop_when=lambda ran: len(ran.text) > 20,
        )
        took.append(ran.stopped_s)
        assert ran.status == "ok" and not ran.error
        assert "cancelled" in ran.plain
        assert nb.value("partial.text").rstrip("\n") == ran.text.rstrip("\n") and len(ran.text) > 20
        if took[-1] < 1.0:
            break
    assert min(took) < 1.0, took
    assert "Paris" in nb.ok("%%mlxcel generate --max-tokens 8\nThe capital of France is").text


def test_an_interrupt_of_waiting_python_code_leaves_the_cluster_usable(nb: Notebook) -> None:
    code = "print('waiting', flush=True)\ncluster.generate('Once', SamplingParams(max_tokens=5000, ignore_eos=True))"
    took = []
    for _ in range(3):
        ran = nb.run(code, stop_when=lambda ran: "waiting" in ran.text)
        assert ran.status == "error" and "KeyboardInterrupt" in ran.error
        took.append(ran.stopped_s)
        if took[-1] < 1.5:
            break
    assert min(took) < 1.5, took
    nb.ok("%%mlxcel generate --max-tokens 2\nHello")


def test_every_token_lands_in_the_cell_that_reads_it(nb: Notebook) -> None:
    """Case 56: made in one cell, read in a second, with a third that prints in between."""
    nb.ok("stream = cluster.stream('1, 2, 3, 4,', SamplingParams(max_tokens=24))")
    other = nb.ok("print('other cell')")
    ran = nb.ok("for delta in stream:\n    print(delta.text, end='', flush=True)")
    third = nb.ok("print(stream.result().text == stream.text)")
    assert (other.text, third.text) == ("other cell\n", "True\n")
    assert ran.text.strip().startswith("5, 6, 7")
    first = nb.ok("%%mlxcel generate --max-tokens 6\n1, 2, 3, 4,")
    second = nb.ok("%%mlxcel generate --max-tokens 6\na, b, c, d,")
    assert "5" in first.text and "5" not in second.text


def test_status_says_who_holds_what_over_which_link(nb: Notebook) -> None:
    nb.ok("%%mlxcel generate --max-tokens 2\nHello")
    plain = nb.ok("%mlxcel status").plain
    for word in ("● alive", "stage 0", "stage 1", "0-14", "15-29", "AES-256-GCM", " ms", "router-", "tokens"):
        assert word in plain, plain
    assert "● alive" in nb.ok("%mlxcel cluster status").plain
    one = nb.ok("%mlxcel status engine-1").plain
    assert "15-29" in one and "engine-0" in one and "0-14" not in one
    assert nb.complete("%mlxcel status eng") == ["engine-0", "engine-1"]
    assert "no node is called engine-7. There is engine-0, engine-1" in nb.run("%mlxcel status engine-7").error
    listed = nb.ok("%mlxcel cluster list").plain
    assert nb.value("cluster.name") in listed and "this process" not in listed.replace("this process (", "")


def test_a_second_cluster_needs_a_name(nb: Notebook) -> None:
    ran = nb.run("%mlxcel cluster start -n 1")
    assert ran.status == "error"
    assert "is already running in this notebook. Stop it with %mlxcel cluster stop, or give the new one a --name." in (
        ran.error
    )


def test_a_wrong_split_is_refused_in_a_line(nb: Notebook) -> None:
    nb.ok("%mlxcel unload")
    ran = nb.run("%mlxcel load smollm2-135m --pp 5")
    assert ran.status == "error" and len(ran.error.strip().splitlines()) <= 2
    assert "no model is loaded" in nb.run("%%mlxcel generate\nhi").error
    nb.ok("%mlxcel load smollm2-135m --pp 2")


def test_a_list_of_prompts_has_a_bar_in_its_cell_and_none_where_nobody_wants_one(nb: Notebook) -> None:
    nb.ok("%mlxcel unload\nllm = LLM('smollm2-135m', pipeline_parallel_size=2, cluster=cluster)")
    nb.ok("short = SamplingParams(max_tokens=8, ignore_eos=True)")
    ran = nb.ok("answers = llm.generate(['One plus one is', 'The sky is', 'Once upon'], short)")
    assert any("widget-view" in mime for shown in ran.of("display_data") for mime in shown["data"])
    assert any("tokens/s" in str(content) for content in ran.of("comm_msg"))
    assert nb.value("[answer.generation_tokens for answer in answers]") == [8, 8, 8]
    for quiet in ("llm.generate(['a', 'b'], short, progress=False);", "llm.generate('a', short);"):
        assert not nb.ok(quiet).of("display_data", "stream")


@pytest.mark.parametrize(
    "code",
    [
        "sync()",
        "await awaited()",
        "await asyncio.sleep(0)\nsync()",
        "async def task():\n    sync()\nawait asyncio.create_task(task())",
        "await asyncio.create_task(awaited())",
        "await asyncio.to_thread(sync)",
        "await asyncio.sleep(0)\nget_ipython().run_cell_magic('mlxcel', 'generate --max-tokens 2', 'Hi')",
    ],
)
def test_every_function_works_in_a_cell_in_a_task_and_beside_a_loop(nb: Notebook, tiny: Path, code: str) -> None:
    """Case 60: from the start of a cluster to its end, beside another one."""
    nb.ok(EVERY_FUNCTION.replace("MODEL", repr(str(tiny))))
    nb.ok(code)


def test_an_engine_that_is_killed_is_named_in_the_cell_in_two_lines_at_most(nb: Notebook) -> None:
    """Case 29: the leader, in the middle of an answer; the text so far stays."""
    nb.ok("%mlxcel cluster start -n 2 --name doomed")
    nb.ok("%mlxcel load smollm2-135m --pp 2")
    (pid,) = nb.value("[n.pid for n in current().get('doomed').cluster.nodes if n.node_id == 'engine-0']")
    struck: list[int] = []

    def strike(ran: Ran) -> bool:
        if len(ran.text) > 20 and not struck:
            struck.append(pid)
            os.kill(pid, signal.SIGKILL)
        return False

    asked = "%%mlxcel generate --max-tokens 5000 --ignore-eos -o half\nOnce upon a time"
    ran = nb.run(asked, stop_when=strike)
    assert nb.value("(half.finish_reason, half.text)") == ("error", ran.text.removesuffix("\n"))
    assert ran.status == "error" and struck and len(ran.text) > 20
    assert "EngineLost: engine-0: was killed by SIGKILL" in ran.error and len(ran.error.strip().splitlines()) <= 2
    assert "SIGKILL" in nb.ok("%mlxcel status").plain
    again = nb.run("%%mlxcel generate\nand once more")
    assert "EngineLost: engine-0: was killed by SIGKILL" in again.error and len(again.error.strip().splitlines()) <= 2
    nb.ok("%mlxcel cluster stop")


def test_net_test_shows_every_pair_of_the_notebook_s_own_cluster(nb: Notebook) -> None:
    ran = nb.ok("%mlxcel net test --seconds 0.1 --pings 5")
    shown = ran.plain
    for row in ("here", "engine-0", "engine-1"):
        assert any(line.startswith(row) and "bit/s" in line for line in shown.splitlines()), shown
    assert "Round trip, median" in shown and "Median of the pairs of nodes" in shown and "✕" not in shown
    page = ran.of("display_data", "update_display_data")[-1]["data"]["text/html"]
    assert page.count("<table") == 2 and "rgba(" in page
    stopped = nb.run("%mlxcel net test --seconds 10", stop_when=lambda ran: " to " in ran.plain)
    assert "interrupted: %mlxcel net test" in stopped.error and stopped.stopped_s < 10
    assert "✕" not in nb.ok("%mlxcel net test --seconds 0.1 --pings 5").plain  # nobody is still measuring


def test_a_second_cluster_with_a_name_is_the_one_that_is_meant_until_it_stops(nb: Notebook, tiny: Path) -> None:
    nb.ok("%mlxcel cluster start -n 1 --name second --link 2ms,1Gbit")
    refused = nb.run(f"%mlxcel load {tiny.with_name('own')}")
    assert "own Python code (own.py)" in refused.error and "--allow-code" in refused.error  # case 65
    assert len(refused.error.strip().splitlines()) == 1
    assert "Python code of its own" in nb.ok(f"%mlxcel load {tiny.with_name('own')} --allow-code").plain
    shown = nb.ok("%mlxcel status").plain
    assert "Cluster second" in shown and "tcp, shaped 2 ms, 1 Gbit/s" in shown
    assert nb.value("cluster.name") in nb.ok("%mlxcel status --cluster {}".format(nb.value("cluster.name"))).plain
    assert nb.complete("%mlxcel status --cluster s") == ["second"]
    assert "Stopped second" in nb.ok("%mlxcel cluster stop").plain
    assert nb.value("cluster.name") in nb.ok("%mlxcel status").plain


def test_stopping_interrupting_a_start_and_unloading_leave_no_engine(nb: Notebook) -> None:
    pids = nb.value("[node.pid for node in cluster.nodes]")
    assert "Stopped" in nb.ok("%mlxcel cluster stop").plain
    assert not any(psutil.pid_exists(pid) for pid in pids)
    stopped = nb.run("%mlxcel cluster start -n 1", stop_when=lambda ran: ran.of("display_data"))
    assert stopped.status == "error" and "Cancelled: interrupted: %mlxcel cluster start" in stopped.error
    assert not psutil.Process(nb.value("__import__('os').getpid()")).children(recursive=True)
    nb.ok("%mlxcel cluster start -n 1")
    pids = nb.value("[node.pid for node in current().get().cluster.nodes]")
    assert nb.ok("%reload_ext mlxcel_nb").text.startswith("Stopped mlxcel-")
    assert not any(psutil.pid_exists(pid) for pid in pids)
