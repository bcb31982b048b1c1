"""What all services of Quire share, and what its users import: see `quire.client`."""

from quire.version import VERSION

__version__ = VERSION

__all__ = ["__version__"]
