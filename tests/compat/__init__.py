"""Messages between releases: the recorded messages of each release, and the messages of today's code."""
