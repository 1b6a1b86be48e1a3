"""Kernels in Triton, for GPUs. Importing one of its modules imports triton; importing this package does not.

All take contiguous tensors on one device and outputs that are there already: nothing is allocated and nothing waits,
so that they can be captured in a CUDA graph. Activations are bfloat16, float16 or float32; what is computed between
reading and writing them is float32.
"""
