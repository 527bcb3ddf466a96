"""Recorded and made-up traffic against a whole region in virtual time: what verdicts said, and what came of it.

Door, scheduler and workers are the product's own, on one NATS in memory (tests/sim/system); engines are simulated steps
whose answers are as long as the trace says. `replay` is the way in.
"""
