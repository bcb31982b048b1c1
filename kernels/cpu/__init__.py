"""The operations in C++ for tensors on the CPU; `kernels.ops` documents and checks the arguments.

`api.h` is the C interface, `dispatch.cpp` picks the instruction set. `library.py` loads what the build made of them,
`bindings.py` calls it. Everything runs on torch's threads; nothing here starts one.
"""
