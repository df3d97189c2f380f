"""Changing what runs: another plan for the same run, while it runs."""
