"""Plays a trace against a live stack, as callers would, and notes what each of them got.

Calls RPCs alone. What it gives is the same `Run` that a simulation gives, so that both are judged by the same code.
"""
