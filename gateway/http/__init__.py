"""The HTTP front: the server, its connections, and what is not of one API."""
