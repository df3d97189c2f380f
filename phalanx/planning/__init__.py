"""The choice of a plan: what there is, what a model asks for, what plans cost and hold, and the search. No torch."""
