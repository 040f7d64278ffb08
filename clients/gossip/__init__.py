"""Decentralised methods: the client half."""
