"""The PagedAttention paper (Kwon et al., SOSP 2023): a scheduler over paged blocks that runs by itself. It
imports the standard library and numpy only. `docs/reading.md` sets the paper's paragraphs next to it."""
