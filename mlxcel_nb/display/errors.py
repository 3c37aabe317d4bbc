"""The table that an error carries, drawn. Pure: from `errors.Table` to a `View`."""

from __future__ import annotations

from mlxcel_nb import errors
from mlxcel_nb.display.view import Column, View, table


def table_view(shown: errors.Table) -> View:
    """A column without a cell in any row is left out."""
    columns = [Column(title, number=title in shown.numbers) for title in shown.columns]
    return table(shown.title, columns, shown.rows, shown.notes)
