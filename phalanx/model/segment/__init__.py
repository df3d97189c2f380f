"""From a joint graph to the F, B and W functions of a segment: what is kept, what is computed again, compilers."""
