"""Routers that ask a node for the hashes of a model's files: each is answered, whatever another one does."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.models.digest import folder_digests
from tests.net.helpers import run
from tests.runtime.nodes import answer, linked, running
from tests.tiny import make_tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("what", ["digest", "unload"])
def test_what_another_router_orders_does_not_end_a_hash(tmp_path: Path, what: str) -> None:
    folder, other = make_tiny(tmp_path / "m"), make_tiny(tmp_path / "n")
    meanwhile: dict[str, Any] = {"digest": {"model": str(other)}, "unload": {"instance": "of its own"}}[what]
    with running("a") as node:

        async def body() -> None:
            with (folder / "model.safetensors").open("rb") as held:
                fcntl.flock(held.fileno(), fcntl.LOCK_EX)  # as a process that reads it would
                async with linked(node, "one", "router") as one, linked(node, "two", "router") as two:
                    one.link.send({"type": "digest", "id": "1", "model": str(folder)})
                    news = await one.messages.get()
                    assert news["type"] == "progress"
                    assert (await answer(two, {"type": what, "id": "2", **meanwhile}))["type"] == "reply"
                    fcntl.flock(held.fileno(), fcntl.LOCK_UN)
                    while news["type"] == "progress":
                        news = await one.messages.get()
            assert (news["type"], news["id"]) == ("reply", "1"), news
            assert news["digests"] == folder_digests(folder)

        run(body(), 40)


def test_who_asks_again_is_told_that_the_first_was_given_up(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    with running("a") as node:

        async def body() -> None:
            with (folder / "model.safetensors").open("rb") as held:
                fcntl.flock(held.fileno(), fcntl.LOCK_EX)
                async with linked(node, "one", "router") as one:
                    one.link.send({"type": "digest", "id": "1", "model": str(folder)})
                    assert (await one.messages.get())["type"] == "progress"
                    first = await answer(one, {"type": "digest", "id": "2", "model": str(folder)})
                    assert (first["type"], first["id"], first["error"]["code"]) == ("error", "1", "cancelled")
                    fcntl.flock(held.fileno(), fcntl.LOCK_UN)
                    news = await one.messages.get()
                    while news["type"] == "progress":
                        news = await one.messages.get()
                    assert (news["type"], news["id"]) == ("reply", "2")

        run(body(), 40)
