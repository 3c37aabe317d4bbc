"""`config check`: a table and 0, or every mistake and 1; the same for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel_nb.cluster.config import parse_config
from mlxcel_nb.commands.config import config_view
from tests.cluster_floor.config_files import cluster, mesh, node


def check(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mlxcel_nb", "config", "check", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.toml"
    nodes = mesh(2, 2, "2d")
    file.write_text(cluster(*nodes, tensor_parallel_size=2, pipeline_parallel_size=2, name="lab", secret_file="s"))
    return file


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.toml"
    file.write_text(cluster(node("a", "h"), nmae="x", tensor_parallel_size="2"))
    return file


def test_a_good_file_is_a_table_of_nodes_and_places(good: Path) -> None:
    ran = check(str(good))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0] == "Cluster lab: 4 nodes, 2 stages by 2 ranks"
    assert lines[1].split() == ["node", "role", "stage", "rank", "address"]
    assert [line.split() for line in lines[2:6]] == [
        [f"n{s}{r}", "pipeline_tensor_parallel", str(s), str(r), f"10.0.{s}.{r + 1}:9000"]
        for s in (0, 1)
        for r in (0, 1)
    ]
    assert lines[-1] == f"{good} is good."


def test_a_bad_file_shows_all_its_mistakes(bad: Path) -> None:
    ran = check(str(bad))
    assert (ran.returncode, ran.stdout) == (1, "")
    head, *mistakes = ran.stderr.splitlines()
    assert head == f"error: {bad} has 3 mistakes. More may show when these are mended:"
    assert [line.split(":")[0].strip() for line in mistakes] == ["line 3", "line 4", "line 7"]


def test_programs_get_json(good: Path, bad: Path) -> None:
    ran = check(str(good), "--json")
    found = json.loads(ran.stdout)
    assert ran.returncode == 0 and found["good"] and found["mistakes"] == []
    assert found["cluster"]["meshes"][0]["members"] == ["n00", "n01", "n10", "n11"]
    assert found["cluster"]["nodes"][3]["address"] == "10.0.1.2:9000"
    ran = check(str(bad), "--json")
    found = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr, found["good"]) == (1, "", False)
    assert [mistake["line"] for mistake in found["mistakes"]] == [3, 4, 7]
    assert all(mistake["mend"] for mistake in found["mistakes"])


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    ran = check(str(tmp_path / "none"))
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1 and "does not exist" in ran.stderr


def test_what_is_not_encrypted_is_said(tmp_path: Path) -> None:
    def notes(**keys: object) -> str:
        text = cluster(node("a", "h1:1"), node("b", "h2:1"), **keys)
        return config_view(parse_config(text, source=tmp_path / "c"), "c").text

    assert "Collectives are mlx-ring: UNENCRYPTED" in notes(collectives="mlx-ring")
    assert "UNENCRYPTED" not in notes()


def test_the_state_of_the_secret_is_said_and_never_the_secret(tmp_path: Path) -> None:
    two = [node("a", "h1:1"), node("b", "h2:1")]

    def shown(text: str) -> str:
        return config_view(parse_config(text, source=tmp_path / "c"), "c").text

    assert f"'{tmp_path / 's'}' does not exist" in shown(cluster(*two, secret_file="s"))
    (tmp_path / "s").write_text("a secret of the test, long enough")
    (tmp_path / "s").chmod(0o644)
    assert "may be read by others" in shown(cluster(*two, secret_file="s"))
    (tmp_path / "s").chmod(0o600)
    assert f"Secret: {tmp_path / 's'}" in shown(cluster(*two, secret_file="s"))
    assert "long enough" not in shown(cluster(*two, secret_file="s"))
    assert "it reads no cluster secret" in shown(cluster(two[0], secret_file="nowhere"))
    assert "to be given by --secret-file" in shown(cluster(*two))
