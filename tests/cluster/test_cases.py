"""Cases of CASES.md that need whole engines: sampling, threads, stops, readiness, memory, files, sleep."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from mlxcel_nb.client import cluster as cluster_module
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.errors import ClusterError, MlxcelError, ModelError, NodeFailed, OutOfMemory, RequestError
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.store import resolve
from tests.cluster.harness import nothing_left, on_engine, pid_of, raise_in_forward, wait_until
from tests.tiny import make_tiny

LAYOUTS = [{"tp": 2}, {"pp": 2}]
HOT = 30.0
"""Tiny echoes its last token with great certainty; this much heat makes every token likely."""
WARM = SamplingParams(temperature=HOT, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


@pytest.fixture(params=LAYOUTS, ids=["tp2", "pp2"])
def loaded(request: pytest.FixtureRequest, engines: Cluster, tiny: str) -> Iterator[Cluster]:
    """The module's engines with tiny on them."""
    engines.load(tiny, **request.param)
    yield engines
    engines.unload()


def record_steps() -> None:
    """On an engine: keep the ids of every decode step from now on."""
    from mlxcel_nb.runtime import execution

    run = execution.Execution.run
    execution.seen = []  # type: ignore[attr-defined]

    def recording(self: Any, step: Any) -> Any:
        if not step.prefill:
            execution.seen.append((step.epoch, step.step, tuple(step.tokens)))  # type: ignore[attr-defined]
        return run(self, step)

    execution.Execution.run = recording  # type: ignore[method-assign]


def recorded_steps() -> list[tuple[int, int, tuple[int, ...]]]:
    from mlxcel_nb.runtime import execution

    return list(execution.seen)  # type: ignore[attr-defined]


def test_every_rank_runs_the_same_tokens_also_after_a_cancelled_request(engines: Cluster, tiny: str) -> None:
    """Case 13."""
    engines.load(tiny, tp=2)
    for node in ("engine-0", "engine-1"):
        on_engine(engines, node, record_steps)
    stream = engines.stream("first", WARM)
    wait_until(lambda: stream.next(1.0), deadline_s=10, what="the first text")
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    answer = engines.generate("second", WARM)
    assert answer.generation_tokens == 200
    leader, follower = (on_engine(engines, node, recorded_steps) for node in ("engine-0", "engine-1"))
    last = leader[-1][0]
    ran = [ids[0] for epoch, _, ids in leader if epoch == last]
    assert ran == list(answer.token_ids[:-1])
    assert [step for step in follower if step[0] == last] == [step for step in leader if step[0] == last]
    engines.unload()


def test_a_seed_repeats_the_text_and_no_seed_does_not(loaded: Cluster) -> None:
    """Case 14."""
    seeded = SamplingParams(temperature=HOT, max_tokens=40, seed=11, ignore_eos=True)
    free = SamplingParams(temperature=HOT, max_tokens=40, ignore_eos=True)
    assert loaded.generate("x", seeded).token_ids == loaded.generate("x", seeded).token_ids
    assert loaded.generate("x", free).token_ids != loaded.generate("x", free).token_ids


def test_any_thread_may_ask(loaded: Cluster) -> None:
    """Case 15: loaded in one thread, asked from a second, a third, and the first again."""
    ask = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = []

    def run() -> None:
        answers.append(loaded.generate("thread", ask).token_ids)

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
    run()
    assert len(answers) == 3 and len(set(answers)) == 1


def test_the_smallest_requests_are_answered_or_refused_and_the_next_one_works(loaded: Cluster) -> None:
    """Case 19."""
    ask = SamplingParams(max_tokens=4, ignore_eos=True)
    whole = loaded.generate("next", ask).token_ids
    none = loaded.generate("next", SamplingParams(max_tokens=0))
    assert (none.text, none.token_ids, none.finish_reason) == ("", (), "length")
    one = loaded.generate("next", SamplingParams(max_tokens=1, ignore_eos=True))
    assert one.token_ids == whole[:1] and one.finish_reason == "length"
    for prompt in ("", []):
        with pytest.raises(RequestError, match="empty"):
            loaded.generate(prompt, ask)
    with pytest.raises(RequestError, match="empty"):
        loaded.generate(messages=[], params=ask)
    assert loaded.generate("   ", ask).generation_tokens == 4
    assert loaded.generate("next", ask).token_ids == whole


def test_prompts_up_to_the_context_run_and_longer_ones_are_refused_before_any_rank(loaded: Cluster) -> None:
    """Case 20, of which the model's context is 2048 tokens."""
    ask = SamplingParams(max_tokens=2, ignore_eos=True)
    assert loaded.generate([7] * 2047, ask).generation_tokens == 2
    assert loaded.generate([7] * 2048, ask).generation_tokens == 1
    for length in (2049, 20480):
        with pytest.raises(RequestError, match=f"{length} tokens, the model's context is 2048"):
            loaded.generate([7] * length, ask)
    assert loaded.generate("next", ask).generation_tokens == 2


def test_a_stop_string_ends_the_text_where_it_begins(loaded: Cluster) -> None:
    """Case 18, end to end: whatever the model says, its own third character on is made a stop."""
    ask = SamplingParams(max_tokens=40, ignore_eos=True, temperature=HOT, seed=5)
    text = loaded.generate("stop", ask).text
    stop = text[5:7]
    cut = loaded.generate("stop", replace(ask, stop=(stop,)))
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_ready_is_said_only_after_a_token(engines: Cluster, tiny: str) -> None:
    """Case 33: a model that loads but cannot make a token does not become ready."""
    on_engine(engines, "engine-1", break_next_part)
    with pytest.raises(NodeFailed, match="engine-1: ZeroDivisionError"):
        engines.load(tiny, pp=2)
    assert engines.model is None
    engines.load(tiny, pp=2)
    assert engines.generate("works", SamplingParams(max_tokens=2, ignore_eos=True)).generation_tokens == 2
    engines.unload()


def break_next_part() -> None:
    """On an engine: the next part that is loaded raises at its first step."""
    import importlib

    loading: Any = importlib.import_module("mlxcel_nb.runtime.loading")
    load_part = loading.load_part

    def broken(*args: Any, **kwargs: Any) -> Any:
        loading.load_part = load_part
        part = load_part(*args, **kwargs)
        forward = part.forward

        def once(*_: Any, **__: Any) -> Any:
            part.forward = forward
            raise ZeroDivisionError("cannot make a token")

        part.forward = once
        return part

    loading.load_part = broken


def test_too_little_memory_on_a_rank_is_found_before_the_layer_that_does_not_fit(smollm2: Path) -> None:
    """Case 36."""
    with nothing_left(Cluster(2)) as cluster:
        victim = psutil.Process(pid_of(cluster, "engine-1"))
        room = victim.memory_info().vms + 400_000_000
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (room, room))
        with pytest.raises(OutOfMemory) as caught:
            cluster.load(str(smollm2), pp=2)
        assert re.search(
            r"^engine-1: out of memory loading (layer \d+|the final norm and head), needs .*, has ", str(caught.value)
        )
        cluster.load(str(smollm2))
        assert cluster.generate("The", SamplingParams(max_tokens=1, ignore_eos=True)).generation_tokens == 1


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_file_broken_on_a_node_is_named_with_the_node(
    damage: str, engines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 44: the files went bad after the notebook looked at them."""
    folder = make_tiny(tmp_path / "tiny")
    path, info = resolve(str(folder)), model_info(folder)
    monkeypatch.setattr(cluster_module, "resolve", lambda _model: path)
    monkeypatch.setattr(cluster_module, "model_info", lambda _path: info)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"^engine-[01]: .*"):
        engines.load(str(folder), pp=2)


def end_mlx_thread() -> None:
    """On an engine: the thread that owns the model ends at its next command."""
    import gc

    from mlxcel_nb.runtime.node import Node

    worker: Any = next(o for o in gc.get_objects() if isinstance(o, Node))._worker

    def leave(_command: Any) -> None:
        raise SystemError("the thread is gone")

    worker._generate = leave


def test_a_dead_generation_thread_is_an_error_never_an_empty_answer(tiny: str) -> None:
    """Case 15, second half: for the request it takes down, and for the next."""
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(tiny)
        on_engine(cluster, "engine-0", end_mlx_thread)
        for _ in range(2):
            with pytest.raises(MlxcelError, match="engine-0: SystemError: the thread is gone"):
                cluster.generate("x", SamplingParams(max_tokens=2))


def test_a_sleep_of_the_whole_machine_ends_in_the_same_text_or_one_clear_error(tiny: str) -> None:
    """Case 67: everything stops for longer than a peer may be silent, then goes on."""
    script = Path(__file__).with_name("sleeping_owner.py")
    command = [sys.executable, str(script), tiny]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None and owner.stderr is not None
        line = owner.stdout.readline()
        assert line.startswith("streaming"), owner.stderr.read()
        tree = psutil.Process(owner.pid)
        family = [tree, *tree.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        threading.Event().wait(8.0)  # longer than the 6 s after which a silent peer is dead
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)
        out, err = owner.communicate(timeout=40)
        assert owner.returncode == 0, err
        assert out.strip() in ("same", "one error"), out


def test_a_cluster_that_is_not_running_says_so() -> None:
    cluster = Cluster(1)
    for call in (cluster.unload, lambda: cluster.generate("x"), lambda: cluster.load("x"), lambda: cluster.router_id):
        with pytest.raises(ClusterError, match="not running"):
            call()
    cluster.stop()
    assert cluster.status().state == "stopped"


def test_raise_in_forward_strikes_the_part_it_is_told_to(loaded: Cluster) -> None:
    """The tool of the failure tests is itself able to fail a request."""
    on_engine(loaded, "engine-1", raise_in_forward, 1)
    with pytest.raises(NodeFailed, match="engine-1"):
        loaded.generate("x", SamplingParams(max_tokens=2))
