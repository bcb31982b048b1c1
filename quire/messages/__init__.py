"""Values that services exchange in messages: arrays, log probabilities, hashes of blocks, and roles."""
