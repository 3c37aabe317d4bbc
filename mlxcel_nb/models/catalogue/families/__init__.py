"""The entries, a file for each family of decoders. Pure data; what is special in an architecture stands beside it."""

from __future__ import annotations

from mlxcel_nb.models.catalogue.entry import Entry
from mlxcel_nb.models.catalogue.families import dense, experts, gemma, hybrid, latent, older, recurrent

FAMILIES = (dense, older, gemma, experts, latent, recurrent, hybrid)

ENTRIES: dict[str, Entry] = {entry.name: entry for family in FAMILIES for entry in family.ENTRIES}
