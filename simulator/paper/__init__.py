"""The evaluation of the paper (Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, SOSP 2023), run again: `python -m simulator.paper`, or `make paper`.

`systems` runs one system under one load at one rate, `curves` finds the rates and compares them, `figures` has a module
for each kind of figure, and `page` writes docs/paper/README.md.
"""
