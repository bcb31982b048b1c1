"""The operations in C++ for tensors on the CPU; `quire_kernels.ops` documents and checks the arguments.

`runtime/api.h` is the C interface, `runtime/isas.cpp` chooses the instruction set. `library.py` loads the library that
was built of them, `bindings.py` calls it. Everything runs on torch's threads; nothing here starts one.
"""
