"""A plan as instructions over values, for every rank: schedules, lowering passes, binding, checks. No torch."""
