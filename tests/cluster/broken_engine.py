"""An engine that dies as soon as it has imported enough to be one."""

from __future__ import annotations

raise ImportError("libwhatever.so.7: cannot open shared object file")
