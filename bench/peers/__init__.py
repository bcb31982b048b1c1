"""Servers of other engines that come without one, each for an interpreter in which the engine is installed.

They import nothing of Quire, and speak the part of OpenAI's API that `quire bench --backend openai` calls.
"""
