"""Who drops a cluster stops it, a notebook sees every cluster of its process, and engines are not started in vain."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from mlxcel_nb.client.cluster import Cluster, running_clusters
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.commands.session import Session
from mlxcel_nb.errors import ConfigError, MlxcelError, ModelError
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import children, lives, nothing_left, wait_until
from tests.tiny import make_tiny
from tests.waiting import words_of


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(make_tiny(tmp_path / "tiny"))


def test_an_llm_that_nobody_holds_any_more_ends_its_engines(tiny: str) -> None:
    """A cell that makes one is run again: the engines of the first run go."""
    before = children()
    llm = LLM(tiny)
    assert llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].generation_tokens == 2
    pids = children() - before
    assert len(running_clusters()) == 1 and pids
    del llm
    gc.collect()
    wait_until(lambda: not any(lives(pid) for pid in pids), deadline_s=10, what="the engines to end")
    assert running_clusters() == []


def test_the_session_knows_and_stops_clusters_of_python_code() -> None:
    session = Session()
    with nothing_left(Cluster(1)) as cluster:
        assert session.get().cluster is cluster
        conversation = session.get(cluster.name).conversation
        conversation.keep("a", "b")
        assert session.get().conversation.turns == conversation.turns
        assert session.stop(cluster.name) == cluster.name
        assert not cluster.running
    with pytest.raises(MlxcelError, match="no cluster is running"):
        session.get()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tensor_parallel_size": 99}, ConfigError),
        ({"pipeline_parallel_size": 6}, ConfigError),
        ({"model": "no-such-model"}, ModelError),
    ],
)
def test_what_cannot_work_is_refused_before_an_engine_starts(
    tiny: str, options: dict[str, object], error: type[MlxcelError], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(Cluster, "start", lambda self, *_: started.append(self))
    with pytest.raises(error):
        LLM(**{"model": tiny, **options})  # type: ignore[arg-type]
    assert started == []


def test_a_slip_in_the_number_of_engines_is_not_obeyed() -> None:
    with pytest.raises(ConfigError, match=r"1000 engines\. Ask for 1 to"):
        Cluster(1000)


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(tiny: str) -> None:
    (Path(tiny) / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        LLM(tiny)
    assert not [child for child in psutil.Process().children() if "mlxcel_nb.launch" in " ".join(words_of(child))]
