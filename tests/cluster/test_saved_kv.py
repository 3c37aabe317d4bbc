"""Keys and values saved in one layout and loaded in others: the next request does not read them again, and its answer
is what a cold run gives. What does not fit the model is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.errors import ClusterError, ConfigError, MlxcelError, ModelError, RequestError
from mlxcel_nb.models import catalogue, kv_file
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.scheduling.step_plan import BLOCK
from tests.cluster.harness import nothing_left, on_engine, raise_in_layer, this_node, wait_until
from tests.tiny import make_tiny, write_tokenizer

READ = [3 + (n * 7) % 90 for n in range(5 * BLOCK + 9)]
"""Five blocks and some."""
HOT = SamplingParams(max_tokens=12, temperature=30.0, seed=5, ignore_eos=True)
"""Much heat makes every token likely, and the text depends on every bit that is kept."""


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with nothing_left(Cluster(3)) as cluster:
        yield cluster


@pytest.fixture
def engines(started: Cluster) -> Iterator[Cluster]:
    yield started
    if started.model is not None:
        started.unload()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path))
    return tmp_path / "kv"


def reused() -> int:
    """On the leader: tokens of prompts that were not read, so far."""
    return int(this_node()._worker.engine.ledger.counts.reused_tokens)


def staged() -> int:
    """On an engine: bytes that have come and are not kept."""
    return int(this_node()._worker.instance.staging.nbytes)


def leases() -> int:
    """On the leader: transfers for which blocks are held."""
    return len(this_node()._worker.engine.kept._leases)


def numbers() -> list[int]:
    """On an engine: the numbers of the blocks that it keeps."""
    worker = this_node()._worker
    execution = (worker.engine or worker.follower).execution
    return sorted(execution._blocks)


def blocks() -> int:
    """On an engine: how many it keeps."""
    return len(numbers())


def cold(engines: Cluster, model: str, layout: dict[str, int], prompt: list[int]) -> tuple[int, ...]:
    engines.load(model, **layout)  # type: ignore[arg-type]
    answer = engines.generate(prompt, HOT).token_ids
    engines.unload()
    return answer


@pytest.mark.timeout(240)
@pytest.mark.parametrize("source", [{"tp": 2}, {"tp": 3}, {"pp": 2}], ids=str)
def test_what_one_layout_saved_another_goes_on_with(
    source: dict[str, int], engines: Cluster, tiny: str, store: Path
) -> None:
    asked = [*READ, 11, 12]
    engines.load(tiny, **source)  # type: ignore[arg-type]
    first = engines.generate(READ, HOT)
    report = engines.save_kv("talk", conversation=[{"role": "user", "content": "hello"}])
    read = [*READ, *first.token_ids[:-1]]  # the last one was not read any more
    assert report.tokens == report.saved_tokens == len(read) // BLOCK * BLOCK
    assert on_engine(engines, "engine-0", leases) == 0
    engines.unload()
    with kv_file.KvReader(store / "talk.safetensors") as reader:
        assert reader.tokens() == read[: report.tokens]
        assert (reader.header.layout, reader.header.dtype) == (report.saved_layout, "float32")
    for layout in ({}, {"tp": 2}, {"pp": 2}, {"tp": 3}):
        expected = cold(engines, tiny, layout, asked)
        engines.load(tiny, **layout)  # type: ignore[arg-type]
        loaded = engines.load_kv("talk")
        assert (loaded.tokens, loaded.saved_layout) == (report.tokens, report.layout)
        assert loaded.messages == ({"role": "user", "content": "hello"},)
        answer = engines.generate(asked, HOT)
        assert answer.token_ids == expected
        assert on_engine(engines, "engine-0", reused) == 5 * BLOCK
        members = [node.node_id for node in engines.nodes][: max([1, *layout.values()])]
        assert {on_engine(engines, node, staged) for node in members} == {0}
        counts = {on_engine(engines, node, blocks) for node in members}
        assert counts == {report.tokens // BLOCK}
        engines.unload()


@pytest.mark.timeout(120)
def test_a_prompt_is_read_and_saved_and_loading_it_twice_keeps_it_once(
    engines: Cluster, tiny: str, store: Path
) -> None:
    engines.load(tiny, pp=2)
    with pytest.raises(RequestError, match="nothing has been read yet"):
        engines.save_kv("early")
    told: list[tuple[int, int]] = []
    report = engines.save_kv("doc", READ, on_progress=lambda done, of: told.append((done, of)))
    assert report.tokens == 5 * BLOCK and told == [(n * BLOCK, 5 * BLOCK) for n in range(1, 6)]
    assert engines.load_kv("doc").tokens == engines.load_kv("doc").tokens == 5 * BLOCK
    assert on_engine(engines, "engine-0", blocks) == 5
    with pytest.raises(RequestError, match="it has 4 tokens, and 32 is the least that is kept"):
        engines.save_kv("short", [1, 2, 3])
    engines.unload()


@pytest.mark.timeout(120)
def test_what_is_loaded_gets_numbers_of_its_own_beside_what_is_kept(engines: Cluster, tiny: str, store: Path) -> None:
    """Case 41, on real caches: some of another prompt are kept already. A request that begins with what was loaded
    leaves as many as there were, and its text is that of a cold run.
    """
    engines.load(tiny, pp=2)
    engines.save_kv("doc", READ)
    engines.unload()
    expected = cold(engines, tiny, {"pp": 2}, [*READ, 11, 12])
    engines.load(tiny, pp=2)
    members = [node.node_id for node in engines.nodes][:2]
    engines.generate([200 - n for n in range(3 * BLOCK + 1)], HOT)
    kept = on_engine(engines, members[0], numbers)
    assert len(kept) == 3
    engines.load_kv("doc")
    held = on_engine(engines, members[0], numbers)
    assert len(held) == 3 + 5 and held[:3] == kept and held[3] > kept[-1]
    assert engines.generate([*READ, 11, 12], HOT).token_ids == expected
    assert on_engine(engines, members[0], reused) == 5 * BLOCK
    assert [on_engine(engines, node, numbers) for node in members] == [held, held]


@pytest.mark.timeout(120)
def test_what_is_of_another_model_or_bent_is_refused_and_nothing_is_kept(
    engines: Cluster, tiny: str, store: Path, tmp_path: Path
) -> None:
    engines.load(tiny)
    engines.save_kv("doc", READ)
    engines.unload()
    other = make_tiny(tmp_path / "other", seed=1)
    engines.load(str(other), tp=2)
    with pytest.raises(ConfigError, match=r"doc was saved of .*tiny \(sha256 [0-9a-f]{12}\), and .*other \(sha256"):
        engines.load_kv("doc")
    assert on_engine(engines, "engine-1", blocks) == 0
    engines.unload()
    engines.load(tiny, dtype="float16")
    with pytest.raises(ConfigError, match="saved in float32, and the model computes in float16"):
        engines.load_kv("doc")
    engines.unload()
    engines.load(tiny)
    with pytest.raises(ModelError, match="nothing is saved as docs"):
        engines.load_kv("docs")
    file = store / "doc.safetensors"
    whole = file.read_bytes()
    for bent in (whole[:-1], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        file.write_bytes(bent)
        with pytest.raises(ModelError, match="no whole file"):
            engines.load_kv("doc")
    assert on_engine(engines, "engine-0", blocks) == 0
    assert len(engines.generate(READ, HOT).token_ids) == 12
    engines.unload()


@pytest.mark.timeout(120)
def test_a_model_whose_caches_have_no_place_for_every_token_says_so(
    engines: Cluster, tiny: str, store: Path, tmp_path: Path
) -> None:
    one = catalogue.entry("gemma3_text")
    assert one is not None
    write_tokenizer(folder := catalogue.write(one, tmp_path / "windows"))
    engines.load(str(folder), pp=2)
    refusal = "cannot be saved or loaded: a RotatingKVCache has no place of its own for every token"
    with pytest.raises(RequestError, match=refusal):
        engines.save_kv("doc", READ)
    assert not store.exists()
    engines.unload()


@pytest.mark.timeout(240)
def test_expert_parallel_ranks_and_replicas_each_get_what_they_keep(
    engines: Cluster, tiny: str, store: Path, tmp_path: Path
) -> None:
    one = catalogue.entry("qwen3_moe")
    assert one is not None
    write_tokenizer(folder := catalogue.write(one, tmp_path / "experts"))
    expected = cold(engines, str(folder), {"tp": 2}, READ)
    engines.load(str(folder), ep=2)
    assert engines.generate(READ, HOT, rank=1).token_ids == expected
    saved = engines.save_kv("experts")
    engines.unload()
    for layout in ({"ep": 2}, {"tp": 2}):
        engines.load(str(folder), **layout)  # type: ignore[arg-type]
        assert engines.load_kv("experts").tokens == saved.tokens
        assert engines.generate(READ, HOT).token_ids == expected
        assert on_engine(engines, "engine-0", reused) == 5 * BLOCK
        engines.unload()
    engines.load(tiny, dp=2)
    engines.save_kv("both", READ)
    assert engines.load_kv("both").tokens == 5 * BLOCK
    assert [on_engine(engines, node, blocks) for node in ("engine-0", "engine-1")] == [5, 5]


@pytest.mark.timeout(120)
def test_saving_and_loading_go_on_beside_requests(engines: Cluster, tiny: str, store: Path) -> None:
    """Each of them is what it would be alone, whatever the others do meanwhile."""
    asked = [*READ, 11]
    expected = cold(engines, tiny, {"pp": 2}, asked)
    engines.load(tiny, pp=2)
    long = SamplingParams(max_tokens=400, temperature=30.0, seed=1, ignore_eos=True)
    alone = engines.generate([5, 6, 7], long).token_ids
    stream = engines.stream([5, 6, 7], long)
    assert engines.save_kv("beside", READ).tokens == 5 * BLOCK
    assert engines.load_kv("beside").tokens == 5 * BLOCK
    assert engines.generate(asked, HOT).token_ids == expected
    assert stream.result().token_ids == alone


@pytest.mark.timeout(120)
def test_a_step_that_fails_meanwhile_ends_a_save_with_the_reason_and_leaves_no_file(
    engines: Cluster, tiny: str, store: Path
) -> None:
    engines.load(tiny, tp=2)
    engines.generate(READ, HOT)

    def strike(done: int, _of: int) -> None:
        if done == BLOCK:
            on_engine(engines, "engine-1", raise_in_layer, 1, 1)
            with pytest.raises(MlxcelError):
                engines.generate([1, 2, 3], HOT)

    with pytest.raises(ClusterError, match="had to make room"):
        engines.save_kv("broken", on_progress=strike)
    assert list(store.iterdir()) == []
    assert engines.save_kv("whole", READ).tokens == 5 * BLOCK


@pytest.mark.timeout(120)
def test_blocks_are_let_go_when_the_saving_notebook_is_gone(engines: Cluster, tiny: str, store: Path) -> None:
    """Whoever asks for blocks and never says that it is done does not keep them from being evicted for ever."""
    from mlxcel_nb.client.router import Router
    from mlxcel_nb.client.saved_kv import Members

    engines.load(tiny)
    engines.generate(READ, HOT)
    model = engines._held()
    assert model._latest is not None
    replica, request = model._latest
    with pytest.raises(RequestError, match="not remembered"):
        other = Router(engines.name, engines.secret)
        try:
            other.connect({node.node_id: node.address for node in engines.nodes})
            Members(other, replica.order).until("engine-0", "find", request=request)
        finally:
            other.close()
    members = Members(engines._running(), replica.order)
    members.until("engine-0", "find", request=request)
    assert on_engine(engines, "engine-0", leases) == 1
    members.done()
    wait_until(lambda: on_engine(engines, "engine-0", leases) == 0, deadline_s=10, what="the lease to end")
    engines.unload()
