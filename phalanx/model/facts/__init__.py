"""Torch-free summaries of models (blocks, units, FLOPs, bytes, shapes), shipped for the zoo."""
