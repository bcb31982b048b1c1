"""What releases say to each other: the messages that each of them wrote, and those that the code of today writes."""
