"""The CUDA kernels: C++ without headers, compiled by NVRTC at first use and launched through the driver."""
