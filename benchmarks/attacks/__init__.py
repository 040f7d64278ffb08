"""Attackers, and the cells in which each is measured; attack.py runs them."""
