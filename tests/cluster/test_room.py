"""A model that has loaded says for how many tokens and requests there is room, node by node and as a whole."""

from __future__ import annotations

from pathlib import Path

import psutil

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.display.reports import load_view, node_view, status_view
from mlxcel_nb.models import device
from tests.tiny import make_tiny


def test_room_is_told_when_a_model_has_loaded(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", max_position_embeddings=1 << 23)
    with Cluster(n=2) as cluster:
        report = cluster.load(str(folder), layers="0-3,4")
        assert [part.kv_per_token for part in report.parts] == [4 * 256, 256]  # keys and values of 4 heads of 8
        # Two engines share this machine, so the one with four layers has room for a quarter of what the other has.
        first, second = (part.kv_tokens for part in report.parts)
        assert first
        assert second
        assert report.kv_tokens == first <= second
        assert first * 4 * 256 <= psutil.virtual_memory().total / 2
        assert first == 1 << 23 or abs(second / first - 4) < 0.1 or second == 1 << 23
        assert report.request_tokens == 4096
        assert report.requests
        assert abs(report.requests * 4096 * 4 * 256 / (first * 4 * 256) - 1) < 0.1 or first == 1 << 23
        assert f"Room for a request of {first} tokens" in load_view(report).text
        assert f"{first}" in status_view(cluster.status()).text
        assert all(0 < node.free_bytes <= psutil.virtual_memory().total for node in cluster.status().nodes)
        assert {node.device for node in cluster.status().nodes} == {device.kind()}
        for text in (load_view(report).text, status_view(cluster.status()).text):
            assert f"{report.requests} at once of 4096, by the node with least" in text
            assert "at once" in text.splitlines()[1], "each node has its own"
        assert report.parts[0].requests == report.requests <= (report.parts[1].requests or 0)
        assert f"{report.requests} at once of 4096" in node_view(cluster.status(), "engine-0").text
        cluster.unload()
        spread = cluster.load(str(folder), tp=2)
        assert [part.kv_per_token for part in spread.parts] == [5 * 128, 5 * 128]
        cluster.unload()
        # Where the model itself is the end, the words say so, and what memory would have room for.
        short = cluster.load(str(make_tiny(tmp_path / "short", max_position_embeddings=64)))
        assert short.kv_tokens == short.request_tokens == 64
        assert short.memory_tokens
        assert short.memory_tokens > 64
        words = f"Room for a request of 64 tokens (the model's context; memory has room for {short.memory_tokens}"
        assert words in load_view(short).text
        assert words in status_view(cluster.status()).text
        title, row = load_view(short).text.splitlines()[1:3]
        column = title.index("longest request")
        assert row[column : column + len("longest request")].strip() == "64", "and no word of memory's room"
        assert "a request of 64 tokens at most, or " in node_view(cluster.status(), "engine-0").text
