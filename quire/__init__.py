"""Code that all services of Quire share, and the package that users import: see `quire.client`."""

from quire.version import VERSION

__version__ = VERSION

__all__ = ["__version__"]
