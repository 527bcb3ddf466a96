"""A whole region on one NATS in memory in virtual time, with faults from one seed, and what must hold whatever they do.

`simulate(seed)` of run.py is the way in. Doors, schedulers and workers are the product's own objects, each in a Process
(loop.py) that can be killed, stopped and started anew; callers are outside of them. One seed gives one run, to the last
message.
"""
