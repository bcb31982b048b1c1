"""What the core was told, in a file: written by `quire scheduler --record`, run again by `quire replay`."""
