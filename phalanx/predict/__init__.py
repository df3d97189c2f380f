"""A plan before it runs, from facts or measurements: seconds, memory and timelines of its programs. No torch."""
