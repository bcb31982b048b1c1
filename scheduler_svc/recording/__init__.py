"""Recordings of the core's inputs in files: written by `quire scheduler --record`, run again by `quire replay`."""
