"""Training: `trainer.py` is the way in, `loop.py` what one rank does, the rest what these two need.

The public names are in `phalanx/__init__.py`; importing this package loads nothing.
"""
