"""The web page for operators: /ui."""
