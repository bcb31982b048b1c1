"""Metrics, common flags, and checks that two processes fit together, as all services share them."""
