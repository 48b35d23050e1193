"""The device: banks, memory, pools and the kernels that read and write them.  numpy and numba, never torch."""
