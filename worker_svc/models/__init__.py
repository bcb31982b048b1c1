"""The model families, one file each; `registry` loads them."""
