"""The CPU kernels: a small C++ library that does not depend on torch, called through ctypes."""
