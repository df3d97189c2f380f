"""State apart from ranks: boxes and moves between layouts, checkpoints, exports, remote copies."""
