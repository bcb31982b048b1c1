"""Tortures any server with OpenAI's API: ordinary requests while processes die and links break, and each answer is
compared with the answer of an undisturbed run.

`traffic`, `answers`, `oracle`, `statistics` and `shrinking` are pure; `client`, `link`, `processes`, `faults` and `run`
do the I/O. Imports nothing of Quire, so that no server has an advantage.
"""
