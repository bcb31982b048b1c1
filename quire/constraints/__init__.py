"""Constraints of generated text: what a request may ask for, and the engine that finds the tokens that may follow.

The gateway checks constraints with it, and workers enforce them; so both compile alike.
"""
