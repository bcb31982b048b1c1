"""The page for people who operate Quire: /ui."""
