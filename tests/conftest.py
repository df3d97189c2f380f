"""Settings that hold for every test."""

from __future__ import annotations

from hypothesis import settings

# A busy machine must not fail a test: what is too slow is caught by pytest's timeout, not per example.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
