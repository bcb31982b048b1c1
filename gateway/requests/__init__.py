"""Requests, whichever front they came by: what is asked and allowed, what runs, what its client still has to get."""
