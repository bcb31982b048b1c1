"""Simulates the scheduler's core on a modelled device, in virtual time.

`engine` runs the real core, not a model of it; a cost model (`costs`) says how long each step takes. The results are
the report of `quire bench` for a real server, and the memory that each step held.
"""
