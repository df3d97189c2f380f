"""`phalanx verify`: a proof, for a model and a plan, that the parallel step equals the plain single-process step.

`case.py` says what is compared, `plan_side.py` runs the plan, `plain_side.py` runs the plain model in a process of its
own, `verify.py` compares and tells. Nothing here is specific to one kind of parallelism.
"""
