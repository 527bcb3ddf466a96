"""Engines behind one protocol (see protocol.py). Each engine's own package is imported by its module alone."""
