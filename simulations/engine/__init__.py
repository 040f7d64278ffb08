"""Engines, apps and runs."""
