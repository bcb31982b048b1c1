"""Constraints of generated text: their validation, and the engine that computes the allowed next tokens.

The gateway compiles each constraint once as a check, and workers enforce it. Both use this package, so they agree.
"""
