"""How the short view becomes the lowered one: small pure functions from program to program, composed in `lower.py`."""
