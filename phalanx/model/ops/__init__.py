"""Operators of our own: attention, whole and of slices, and its kernels; dropout by key, cross entropy, products."""
