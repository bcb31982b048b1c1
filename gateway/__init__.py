"""The gateway: text and chat in, text out; the only service that users talk to."""
