"""Ranks as processes: starting and watching them, here, under launchers and on several machines; who they are now."""
