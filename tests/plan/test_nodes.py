"""Nodes as a user writes them."""

from __future__ import annotations

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.nodes import Speed, alike, parse_nodes


def test_memory_hosts_and_speeds() -> None:
    nodes = parse_nodes("16GB, 2x8GiB@400GB/s@14TFLOPS,512MB@50GB/s")
    assert [node.memory for node in nodes] == [16 * 10**9, 8 << 30, 8 << 30, 512 * 10**6]
    assert [node.host for node in nodes] == ["host-0", "host-1", "host-1", "host-2"]
    assert [node.bandwidth for node in nodes] == [None, 400e9, 400e9, 50e9]
    assert nodes[1].speed(Speed(1.0, 2.0, 3.0)) == Speed(400e9, 14e12)
    assert nodes[3].speed(Speed(1.0, 2.0, 3.0)) == Speed(50e9, 2.0, 3.0)


def test_alike_is_memory_and_speed() -> None:
    assert alike(parse_nodes("16GB,16GB"))
    assert not alike(parse_nodes("16GB,8GB"))
    assert not alike(parse_nodes("16GB@100GB/s,16GB@50GB/s"))


@pytest.mark.parametrize(
    "wrong", ["", "16", "16GB,", "GB", "0GB", "16GB@4TFLOPS", "16GB@1GB", "0x8GB", "33x1GB", "-1GB"]
)
def test_what_is_not_understood_is_refused_with_how_to_write_it(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"Write|up to 32"):
        parse_nodes(wrong)
