"""Measurements of hardware, of a model's segments and of data, and the store that keeps them."""
