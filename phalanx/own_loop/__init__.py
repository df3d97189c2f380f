"""A session inside a loop that the user owns: `phalanx.open` and what it returns."""
