"""`phalanx verify`: a proof, for a model and a plan, that the parallel step equals the plain single-process step.

`case.py` says what is compared, `plan_side.py` runs the plan, `plain_side.py` runs the plain model in a process of its
own, `verify.py` compares (`compare.py`) and tells (`report.py`); `verify_session.py` does so for a session of a loop of
the user's own. Nothing here is specific to one kind of parallelism.
"""
