"""What a model is tried on fits into its context, and what cannot is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.errors import ConfigError, PromptError, PromptTooLong
from mlxcel_nb.models.tokenizer import LONG
from mlxcel_nb.models.verifying.prompt import prompt_ids
from tests.tiny import make_tiny


def test_a_prompt_and_what_comes_to_it_fit_into_the_context(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    assert len(prompt_ids(folder, "a" * 2000, 48)) == 2000
    with pytest.raises(ConfigError, match="2000 tokens and 49 more, the model's context is 2048"):
        prompt_ids(folder, "a" * 2000, 49)
    with pytest.raises(PromptError, match="the prompt is empty"):
        prompt_ids(folder, "", 1)
    with pytest.raises(PromptTooLong, match=f"has {LONG + 1} characters"):
        prompt_ids(folder, "a" * (LONG + 1), 1)
