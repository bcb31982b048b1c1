"""The scheduler's core against a modelled device, in virtual time.

`engine` runs the core itself, no stand-in for it; a cost model (`costs`) says how long each step takes. What comes out
is what `quire bench` reports of a real server, and what each step held in memory.
"""
