"""The PagedAttention paper (Kwon et al., SOSP 2023) as a scheduler that runs by itself: see `docs/reading.md`."""
