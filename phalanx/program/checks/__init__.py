"""What makes a lowered program right, one kind of rule per file; `program/check.py` asks them all."""
