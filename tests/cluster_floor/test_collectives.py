"""The choice of who adds partial sums up, and what ranks agree on before MLX forms a group of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxcel_nb.cluster.collectives import (
    BACKENDS,
    COLLECTIVES,
    MAX_WORD_BYTES,
    Word,
    check_collectives,
    devices_trouble,
    dials,
    host_file,
    keeps,
    marked,
    settings,
    warning,
)
from mlxcel_nb.errors import ClusterError, ConfigError, WireError

ADDRESSES = ["10.0.0.1:5001", "10.0.0.2:5002", "10.0.0.3:5003"]
NEW = [Word(node=f"engine-{rank}", available=("ring",), address=ADDRESSES[rank]) for rank in range(3)]
IN = [replace(word, group="a", backend="ring", rank=rank, size=3) for rank, word in enumerate(NEW)]


def test_whatever_is_not_ours_is_marked() -> None:
    assert ("own", *BACKENDS) == COLLECTIVES
    assert marked("own") == "own" and warning("own", 2) == []
    for name in BACKENDS:
        assert marked(name) == f"{name}, UNENCRYPTED" and "UNENCRYPTED" in warning(name, 2)[0]
        assert "nothing to do" in warning(name, 1)[0]
    assert check_collectives("mlx-ring") == "mlx-ring"
    with pytest.raises(ConfigError, match=r"'ring' are not a choice. Choose from own, mlx-ring"):
        check_collectives("ring")


def test_a_group_is_formed_once_and_kept_by_the_same_ranks() -> None:
    assert not keeps(NEW, "mlx-ring")
    assert keeps(IN, "mlx-ring")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([*IN[:2], NEW[2]], "engine-0: it is rank 0 of 3 in a ring group"),
        ([IN[1], IN[0], IN[2]], "engine-1: it is rank 1 of 3"),
        (IN[:2], "engine-0: it is rank 0 of 3"),
        ([*IN[:2], replace(IN[2], group="b")], "engine-0: it is rank 0 of 3"),
        ([replace(word, backend="jaccl") for word in IN], "engine-0: it is rank 0 of 3 in a jaccl group"),
        (
            [IN[0], replace(IN[1], broken="connection lost"), IN[2]],
            "engine-1: its ring group is broken: connection lost",
        ),
    ],
)
def test_a_process_has_one_group_in_its_life(words: list[Word], what: str) -> None:
    with pytest.raises(ClusterError, match=f"^{what}.*MLX keeps a group for the life of the process"):
        keeps(words, "mlx-ring")


def test_a_rank_that_cannot_take_part_is_named() -> None:
    without = [NEW[0], replace(NEW[1], available=("mpi",)), NEW[2]]
    with pytest.raises(ConfigError, match=r"^engine-1: this MLX has no ring \(it has mpi\). Take collectives own"):
        keeps(without, "mlx-ring")
    with pytest.raises(ConfigError, match=r"^engine-0: this MLX has no jaccl \(it has ring\)"):
        keeps(NEW, "mlx-jaccl")
    with pytest.raises(ConfigError, match=r"^engine-2: no port"):
        keeps([*NEW[:2], replace(NEW[2], trouble="no port")], "mlx-ring")


def test_a_word_comes_back_as_it_went_and_others_are_refused() -> None:
    for word in (NEW[1], IN[2]):
        assert Word.from_bytes(word.to_bytes(), word.node) == word
    assert Word.from_bytes(NEW[1].to_bytes(), "engine-9").node == "engine-9"  # the link knows whose it is
    whole = json.loads(NEW[0].to_bytes())
    for bent in (
        b"",
        b"[]",
        b"\xff",
        b"{}",
        json.dumps({**whole, "more": 1}).encode(),
        json.dumps({**whole, "address": 7}).encode(),
        json.dumps({**whole, "available": [1]}).encode(),
        json.dumps({**whole, "rank": "0"}).encode(),
        b" " * MAX_WORD_BYTES + NEW[0].to_bytes(),
    ):
        with pytest.raises(WireError, match="engine-0: its word"):
            Word.from_bytes(bent, "engine-0")


def test_each_back_end_gets_the_settings_that_it_reads() -> None:
    assert settings("ring", 1, ADDRESSES, "/private/hosts.json") == {
        "MLX_RANK": "1", "MLX_HOSTFILE": "/private/hosts.json",
    }  # fmt: skip
    assert settings("jaccl", 2, ADDRESSES, "") == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:5001"}
    assert settings("nccl", 0, ADDRESSES, "") == {
        "MLX_RANK": "0", "MLX_WORLD_SIZE": "3", "NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "5001",
    }  # fmt: skip
    assert json.loads(host_file(ADDRESSES)) == [[each] for each in ADDRESSES]
    assert [dials("ring", rank, ADDRESSES) for rank in range(3)] == [*ADDRESSES[1:], ADDRESSES[0]]
    assert [dials("nccl", rank, ADDRESSES) for rank in range(3)] == ["", ADDRESSES[0], ADDRESSES[0]]


def test_jaccl_needs_the_users_devices() -> None:
    named = {"MLX_IBV_DEVICES": "/devices.json"}
    matrix = [[None, "rdma_en3"], ["rdma_en4", None]]
    assert devices_trouble(named, json.dumps(matrix), 2) == ""
    assert "jaccl needs MLX_IBV_DEVICES in the engines' environment" in devices_trouble({}, None, 2)
    assert "cannot be read" in devices_trouble(named, None, 2)
    assert "not JSON" in devices_trouble(named, "rdma_en3", 2)
    for other in (matrix[:1], [*matrix, []], {"rdma": 1}, [[None], ["rdma_en4", None]], ["rdma_en4", None]):
        assert "no matrix of 2 ranks by 2" in devices_trouble(named, json.dumps(other), 2)
