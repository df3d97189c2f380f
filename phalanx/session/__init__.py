"""A rank under a plan: the session that runs its steps, its change to another plan, what is left of it after a loss."""
