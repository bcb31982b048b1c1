"""Operations of models that keep keys and values, or states, in pages; `quire_kernels.ops` is the public interface.

Its name is not `kernels`, since transformers needs a package of Hugging Face with that name.
"""
