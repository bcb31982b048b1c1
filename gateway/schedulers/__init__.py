"""Messages of quire.scheduler.v1 to values and back."""
