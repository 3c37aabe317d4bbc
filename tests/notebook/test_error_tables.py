"""An error that compares nodes has a table: drawn where a magic raised it, and text elsewhere."""

from __future__ import annotations

import pytest

from tests.notebook.kernels import notebook

pytestmark = pytest.mark.cluster

TABLED = """
import mlxcel_nb.commands.version as module
from mlxcel_nb.errors import ModelError, Table

def refuse(_args, _context):
    error = ModelError("has no model", node="mac2")
    error.table = Table("On each node", ("node", "path"), (("mac1", "/m/<b>"), ("mac2", None)))
    raise error

def python():
    refuse(None, None)

module.version = refuse
"""


def test_the_table_of_an_error_is_drawn_in_the_cell_and_is_text_where_python_raised_it() -> None:
    """Case 45."""
    with notebook() as nb:
        nb.ok("%load_ext mlxcel_nb")
        nb.ok(TABLED)
        ran = nb.run("%mlxcel version")
        raised = nb.run("python()").error
    assert ran.error == "ModelError: mac2: has no model"
    (shown,) = ran.of("display_data")
    assert "/m/&lt;b&gt;" in shown["data"]["text/html"] and "<b>" not in shown["data"]["text/html"]
    assert shown["data"]["text/plain"] == "On each node\nnode  path\nmac1  /m/<b>\nmac2  –"
    assert raised.splitlines() == [
        ran.error, "    On each node", "    node  path", "    mac1  /m/<b>", "    mac2  –",
    ]  # fmt: skip
