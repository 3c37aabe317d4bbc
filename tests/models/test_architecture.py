"""mlx-lm's models come without its front door, which still opens for whoever knocks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.conftest import REPO


def fresh(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_is_built_without_transformers() -> None:
    assert fresh(
        "import json, sys\nfrom mlxcel_nb.models import architecture\nfrom tests.tiny import CONFIG\n"
        "model = architecture.build(CONFIG)\nimport mlx_lm.models.cache\n"
        "print(json.dumps([type(model).__module__, 'transformers' in sys.modules, 'mlx_lm.utils' in sys.modules]))"
    ) == ["mlx_lm.models.llama", False, False]


def test_mlx_lm_itself_can_still_be_used_in_the_same_process() -> None:
    assert fresh(
        "import json\nfrom mlxcel_nb.models import architecture\nfrom tests.tiny import CONFIG\n"
        "model = architecture.build(CONFIG)\n"
        "from mlx_lm import load\nimport mlx_lm, mlx_lm.models.llama\nfrom mlx_lm.utils import load_model\n"
        "print(json.dumps([callable(load), callable(mlx_lm.generate), mlx_lm.models.llama.Model is type(model),"
        " hasattr(mlx_lm, 'nothing'), mlx_lm.__version__ != '']))"
    ) == [True, True, True, False, True]


def test_mlx_lm_that_is_imported_already_is_left_alone() -> None:
    assert fresh(
        "import json, mlx_lm\nfrom mlxcel_nb.models import architecture\nfrom tests.tiny import CONFIG\n"
        "before = mlx_lm\nmodel = architecture.build(CONFIG)\nimport sys\n"
        "print(json.dumps(sys.modules['mlx_lm'] is before))"
    )
