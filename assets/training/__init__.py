"""How assets/quire-tiny was made: its corpus, its training and the measure of its answers. No service imports it."""
