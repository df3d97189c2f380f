"""A plan: its fields as text, what may stand together, its mesh, what is filled in where it is open. No torch."""
