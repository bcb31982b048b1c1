"""Reads model files without torch: directories, GGUF files, adapters, and models of a hub."""
