"""Decisions as pure functions of values and `now`."""
