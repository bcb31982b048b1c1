"""Triton is published for some platforms only; elsewhere these kernels do not exist."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
