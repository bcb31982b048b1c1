"""Steps on the device: the thread that runs them, the KV pool, the persistent batch, and recorded forward passes."""
