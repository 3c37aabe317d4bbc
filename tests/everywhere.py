"""Every public function once, as code for a cell or a script: `sync()` and `awaited()`.

MODEL stands for the model; both functions leave nothing running.
"""

from __future__ import annotations

EVERY_FUNCTION = """
import asyncio, sys
from mlxcel_nb import LLM, Cluster, SamplingParams

params = SamplingParams(max_tokens=2, ignore_eos=True)
talk = [{"role": "user", "content": "Hi"}]

def sync():
    cluster = Cluster(1)
    cluster.start()
    try:
        cluster.load(MODEL)
        assert cluster.status().nodes[0].state == "alive"
        assert len("".join(delta.text for delta in cluster.stream("Hi", params))) == 2
        assert cluster.generate("Hi", params).generation_tokens == 2
        cluster.unload()
        with LLM(MODEL, cluster=cluster) as llm:
            answers = llm.generate(["Hi", "you"], params) + llm.chat(talk, params)
            assert [a.generation_tokens for a in answers] == [2] * 3
    finally:
        cluster.stop()
    assert not cluster.running

async def awaited():
    cluster = Cluster(1)
    await cluster.astart()
    try:
        await cluster.aload(MODEL)
        assert (await cluster.astatus()).nodes[0].state == "alive"
        assert len("".join([delta.text async for delta in await cluster.astream("Hi", params)])) == 2
        assert len("".join([delta.text async for delta in cluster.stream("Hi", params)])) == 2
        assert (await cluster.agenerate("Hi", params)).generation_tokens == 2
        await cluster.aunload()
        with LLM(MODEL, cluster=cluster) as llm:
            answers = await llm.agenerate(["Hi", "you"], params) + await llm.achat(talk, params)
            assert [a.generation_tokens for a in answers] == [2] * 3
    finally:
        await cluster.astop()
    assert not cluster.running
    async with Cluster(1) as cluster:
        assert cluster.running
"""
