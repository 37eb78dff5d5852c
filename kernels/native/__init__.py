"""The CPU kernels: a small C++ library that knows nothing of torch, called through ctypes."""
