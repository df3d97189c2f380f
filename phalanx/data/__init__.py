"""Data: corpora as token streams and samples, and the function (seed, samples consumed) → batch.

Importing this package loads nothing.
"""
