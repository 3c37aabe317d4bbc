"""A folder is whole or absent, whatever happens to its builder (case 67)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.atomic import build_folder, remove_folder, require_room


def build_two_files(scratch: Path) -> Path:
    made = scratch / "made"
    made.mkdir()
    for name in ("a", "b"):
        (made / name).write_text(name)
    return made


def is_whole(folder: Path) -> bool:
    return (folder / "a").is_file() and (folder / "b").is_file()


def left_over(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if not path.name.endswith(".lock")]


def test_a_folder_is_built_once_and_found_again(tmp_path: Path) -> None:
    calls = []

    def build(scratch: Path) -> Path:
        calls.append(scratch)
        assert scratch.parent == tmp_path
        return build_two_files(scratch)

    for _ in range(2):
        assert build_folder(tmp_path / "model", build, needed_bytes=10, is_whole=is_whole) == tmp_path / "model"
    assert len(calls) == 1
    assert left_over(tmp_path) == ["model"]


def test_a_folder_that_is_not_whole_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("half")
    build_folder(tmp_path / "model", build_two_files, needed_bytes=10, is_whole=is_whole)
    assert is_whole(tmp_path / "model")
    assert left_over(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [ModelError("no"), KeyboardInterrupt(), OSError(errno.EIO, "bad disk")], ids=repr)
def test_a_builder_that_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def build(scratch: Path) -> Path:
        build_two_files(scratch)
        raise error

    with pytest.raises(type(error)):
        build_folder(tmp_path / "model", build, needed_bytes=10, is_whole=is_whole)
    assert left_over(tmp_path) == []
    build_folder(tmp_path / "model", build_two_files, needed_bytes=10, is_whole=is_whole)


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    needed = 1 << 60
    with pytest.raises(ModelError, match=r"not enough room .*1152922 TB are needed, [\d.]+ \w+ are free"):
        build_folder(tmp_path / "model", build_two_files, needed_bytes=needed, is_whole=is_whole)
    assert left_over(tmp_path) == []
    require_room(tmp_path, 1)


def test_a_disk_that_fills_up_midway_leaves_nothing_and_says_what_is_needed(tmp_path: Path) -> None:
    def build(scratch: Path) -> Path:
        build_two_files(scratch)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"4\.71 kB are needed"):
        build_folder(tmp_path / "model", build, needed_bytes=4711, is_whole=is_whole)
    assert left_over(tmp_path) == []


def test_threads_at_once_build_once(tmp_path: Path) -> None:
    building = threading.Event()
    waited = threading.Event()
    built = []

    def build(scratch: Path) -> Path:
        building.set()
        assert waited.wait(10)
        built.append(scratch)
        return build_two_files(scratch)

    def run() -> None:
        build_folder(tmp_path / "model", build, needed_bytes=1, is_whole=is_whole, waiting=waited.set)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert building.is_set()
    assert len(built) == 1
    assert left_over(tmp_path) == ["model"]


def test_a_wait_for_another_builder_has_an_end_and_names_it(tmp_path: Path) -> None:
    outcome: list[BaseException] = []

    def build(scratch: Path) -> Path:
        def second() -> None:
            try:
                build_folder(tmp_path / "model", build, needed_bytes=1, is_whole=is_whole, deadline_s=0.3)
            except ModelError as error:
                outcome.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
        return build_two_files(scratch)

    build_folder(tmp_path / "model", build, needed_bytes=1, is_whole=is_whole)
    assert [str(error) for error in outcome] == [f"waited 0.3 s for process {os.getpid()}, which is making model"]


BUILDER = """
import sys
from pathlib import Path
from mlxcel_nb.models.atomic import build_folder

def build(scratch):
    made = scratch / "made"
    made.mkdir()
    (made / "a").write_text("a")
    print("half", flush=True)
    sys.stdin.readline()
    (made / "b").write_text("b")
    return made

target = Path(sys.argv[1])
build_folder(target, build, needed_bytes=10, is_whole=lambda folder: (folder / "b").is_file())
print("whole", flush=True)
"""


def start_builder(target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_builder_killed_midway_leaves_nothing_that_is_seen_and_the_next_sweeps(
    tmp_path: Path, how: signal.Signals, no_children_left: None
) -> None:
    with start_builder(tmp_path / "model") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(how)
        process.wait(10)
    assert not (tmp_path / "model").exists()
    assert all(name.startswith(".") for name in left_over(tmp_path))
    build_folder(tmp_path / "model", build_two_files, needed_bytes=10, is_whole=is_whole, deadline_s=1)
    assert left_over(tmp_path) == ["model"]


def test_a_second_process_waits_and_takes_the_first_ones_folder(tmp_path: Path, no_children_left: None) -> None:
    with start_builder(tmp_path / "model") as first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "half\n"

        def waiting() -> None:
            assert first.stdin is not None
            first.stdin.write("\n")
            first.stdin.flush()

        def build(scratch: Path) -> Path:
            raise AssertionError("built twice")

        build_folder(tmp_path / "model", build, needed_bytes=1, is_whole=is_whole, waiting=waiting, deadline_s=20)
        assert first.stdout.readline() == "whole\n"
    assert left_over(tmp_path) == ["model"]


def test_removing_takes_the_whole_folder(tmp_path: Path) -> None:
    build_folder(tmp_path / "model", build_two_files, needed_bytes=1, is_whole=is_whole)
    remove_folder(tmp_path / "model")
    assert left_over(tmp_path) == []
    remove_folder(tmp_path / "model")
