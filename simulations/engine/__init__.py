"""Engines, apps and runs."""

import fedntk.ntk  # noqa: F401 - before torch: how its threads wait
