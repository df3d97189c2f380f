"""Tensor parallelism as a pass over graphs: placements, rules, one rank's segments and redistributions."""
