"""Laneway's own discipline: the functions of laneway.policy as doors, scheduler and workers apply them; no NATS."""
