"""The worker service: holds the KV pool and the model of one rank and runs the scheduler's steps."""
