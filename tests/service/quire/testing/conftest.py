"""The fixtures of the kit, as a test suite of its users has them."""

from quire.testing.plugin import quire_scripted, quire_scripted_flags, quire_scripted_process

__all__ = ["quire_scripted", "quire_scripted_flags", "quire_scripted_process"]
