"""Decentralised methods: the server half."""
