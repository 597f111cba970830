"""Methods of single publications: kernels, choices of trained steps, surrogates."""
