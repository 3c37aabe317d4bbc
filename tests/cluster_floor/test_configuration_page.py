"""docs/configuration.md says what the code does: every key, every role, and examples that are good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxcel_nb.cluster.config import ClusterConfig, parse_config
from mlxcel_nb.cluster.config_keys import TABLES, Key
from mlxcel_nb.cluster.roles import ALIASES, ROLES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

EXAMPLES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[str]:
    section = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, f"no section {heading}"
    return [line for line in section[1].splitlines() if line.startswith("| `")]


def default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is None:
        return "none"
    return f'"{key.default}"' if isinstance(key.default, str) else str(key.default).lower()


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_has_every_key(heading: str) -> None:
    wanted = [f"| `{key.name}` | {key.kind} | {default(key)} | {key.about} |" for key in TABLES[heading]]
    assert rows(f"`{heading}`") == wanted


def test_the_page_has_every_role_and_its_short_names() -> None:
    def short(role: str) -> str:
        return ", ".join(f"`{name}`" for name, meant in ALIASES.items() if meant == role)

    assert rows("Roles") == [f"| `{role}` | {short(role)} | {about} |" for role, about in ROLES.items()]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_are_good(example: str) -> None:
    config = parse_config(example, source="cluster.toml")
    assert config.meshes and len(config.nodes) > 1


def test_the_page_has_the_examples_people_look_for() -> None:
    shapes = [(config.pipeline_parallel_size, config.tensor_parallel_size) for config in map(_parsed, EXAMPLES)]
    assert shapes == [(2, 1), (2, 2), (1, 1)]


def _parsed(example: str) -> ClusterConfig:
    return parse_config(example, source="cluster.toml")
