"""Operations of models that keep keys and values, or states, in pages; `kernels.ops` is the public interface.

This module imports neither torch nor triton: transformers looks for a package of this name when it is imported, and
must find a harmless one.
"""

__version__ = "0.1.0"
