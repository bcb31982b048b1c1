"""The PagedAttention paper (Kwon et al., SOSP 2023): a scheduler over paged blocks that runs by itself.

Imports the standard library, numpy and its own modules only. `docs/reading.md` sets the paper's paragraphs next to it.
"""
