"""From the short view to the lowered one: small pure functions from program to program, composed in `lower.py`."""
