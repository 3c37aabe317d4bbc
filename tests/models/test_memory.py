"""The tightest limit counts, and resident growth is the part's own bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.models import memory
from mlxcel_nb.models.memory import LOOK_S, WORTH, MemoryRoom, Slack, smallest
from tests.conftest import REPO
from tests.tiny import make_tiny


def test_the_tightest_limit_counts_less_the_reserve() -> None:
    rooms = [MemoryRoom(500, "host"), MemoryRoom(300, "group"), MemoryRoom(400, "address space")]
    assert smallest(rooms, reserve=100) == MemoryRoom(200, "group")
    assert smallest(rooms, reserve=1000) == MemoryRoom(0, "group")


def test_this_host_has_some_room() -> None:
    assert memory.room().available > 0


@pytest.mark.parametrize("limit", ["max", "1000", str(2**63)])
def test_a_control_group_counts_its_page_cache_as_free(tmp_path: Path, limit: str) -> None:
    """Case 36."""
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 50\n")
    rooms = memory._group_room(tmp_path, "memory.max", "memory.current")
    assert [room.available for room in rooms] == ([450] if limit == "1000" else [])
    assert memory._group_room(tmp_path / "absent", "memory.max", "memory.current") == []


LARGE: dict[str, Any] = {
    "hidden_size": 768, "head_dim": 96, "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 8000,
}  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("large") / "m", **LARGE, num_hidden_layers=6)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", ["whole", "stage", "rank", "half precision"])
def test_resident_growth_stays_within_15_percent_of_the_plan(large: Path, tmp_path: Path, case: str) -> None:
    """A fresh process, from a warmed-up interpreter to a loaded part of some 100 MB: the resident peak as well."""
    folder = large
    if case == "half precision":
        folder = make_tiny(tmp_path / "m", **LARGE, num_hidden_layers=4)
    layers = 4 if case == "half precision" else 6
    part = {"stage": "Part((0, 4), 6, 0, 2)", "rank": "Part((0, 6), 6, 0, 1, 1, 2)"}.get(case, f"whole({layers})")
    code = f"""
import json, mlx.core as mx
from pathlib import Path
from mlxcel_nb.models import architecture
from mlxcel_nb.models.loading import Part, load_part, whole
architecture.build({{**json.loads(Path({str(folder)!r}, "config.json").read_text()), "num_hidden_layers": 1}})
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
if {case == "half precision"}:
    weights = {{k: v.astype(mx.bfloat16) for k, v in mx.load({str(folder / "model.safetensors")!r}).items()}}
    mx.save_safetensors({str(folder / "model.safetensors")!r}, weights)
    del weights
    mx.clear_cache()
def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
part = load_part({str(folder)!r}, {part}, all_reduce=lambda x: x)
print(json.dumps([before, resident("VmRSS"), resident("VmHWM"), part.planned_bytes]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=REPO)
    assert done.returncode == 0, done.stderr
    before, after, peak, planned = json.loads(done.stdout.splitlines()[-1])
    assert planned > 80e6
    assert after - before < planned * 1.15
    assert peak - before < planned * 1.15


def test_slack_is_given_back_when_there_is_much_more_than_there_was() -> None:
    slack = Slack()
    assert not slack.is_worth(0.0, lambda: 300), "the first look is what there is anyway"
    assert not slack.is_worth(LOOK_S, lambda: 300 + WORTH)
    assert not slack.is_worth(LOOK_S + 0.1, lambda: 10 * WORTH), "it is looked at now and then"
    assert not slack.is_worth(2 * LOOK_S, lambda: 100)
    assert slack.is_worth(3 * LOOK_S, lambda: 101 + WORTH)
    slack.given_back(WORTH)
    assert not slack.is_worth(4 * LOOK_S, lambda: 2 * WORTH), "what is left then is the new measure"
    assert slack.is_worth(5 * LOOK_S, lambda: 2 * WORTH + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so at once")
def test_what_this_process_has_is_read() -> None:
    held = memory.resident()
    assert held is not None and held > 10 << 20
