"""What completes a `%mlxcel` line; `test_kernel.py` asks a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.commands.parser import Kind
from mlxcel_nb.notebook.completion import TREE, complete, paths

SOURCES = {
    Kind.MODEL: lambda prefix: [m for m in ("smollm2-135m", "my model") if m.startswith(prefix)],
    Kind.CACHED: lambda prefix: ["cached"],
    Kind.CLUSTER: lambda prefix: ["mlxcel"],
    Kind.PATH: lambda prefix: ["secret.key"],
    Kind.NODE: lambda prefix: ["engine-0", "engine-1"],
}


def texts(before: str) -> list[str]:
    return [suggestion.text for suggestion in complete(TREE, before, SOURCES).found]


@pytest.mark.parametrize(
    ("before", "fragment", "found"),
    [
        ("cl", "cl", ["cluster"]),
        ("cluster ", "", ["start", "status", "stop", "list"]),
        ("cluster st", "st", ["start", "status", "stop"]),
        ("load ", "", ["smollm2-135m", "'my model'"]),
        ("load smo", "smo", ["smollm2-135m"]),
        ("load 'my", "'my", ["'my model"]),
        ("load smollm2-135m --d", "--d", ["--dp", "--decode", "--decode-layout", "--dtype"]),
        ("load smollm2-135m --dtype ", "", ["auto", "native", "float32", "float16", "bfloat16"]),
        ("load smollm2-135m --dtype=f", "f", ["float32", "float16"]),
        ("cluster stop --cluster ", "", ["mlxcel"]),
        ("cluster start --secret-file s", "s", ["secret.key"]),
        ("status ", "", ["engine-0", "engine-1"]),
        ("generate --max-tokens ", "", []),
        ("generate --max-tokens 5 --max", "--max", []),
        ("generate --stop a --st", "--st", ["--stop"]),
        ("model info ", "", ["smollm2-135m", "'my model'"]),
        ("model rm ", "", ["cached"]),
        ("cluster start --name ", "", []),
        ("nonsense ", "", []),
    ],
)
def test_what_can_follow(before: str, fragment: str, found: list[str]) -> None:
    result = complete(TREE, before, SOURCES)
    assert result.fragment == fragment
    assert [s.text for s in result.found][: len(found)] == found
    assert bool(found) == bool(result.found) or before.startswith("nonsense")


def test_all_commands_at_the_start() -> None:
    assert texts("") == list(TREE.commands())


def test_options_are_offered_once_the_model_is_given() -> None:
    assert {"--tp", "--pp", "--layers", "--dtype"} <= set(texts("load smollm2-135m "))


def test_paths_are_listed_with_a_slash_on_folders(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "model.gguf").touch()
    (tmp_path / ".hidden").touch()
    assert paths(f"{tmp_path}/mo") == [f"{tmp_path}/model.gguf", f"{tmp_path}/models/"]
    assert paths(f"{tmp_path}/.h") == [f"{tmp_path}/.hidden"]
    assert paths(f"{tmp_path}/none/x") == []
