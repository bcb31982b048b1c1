"""The systems that the paper compares itself with, as block managers of the same scheduler."""
