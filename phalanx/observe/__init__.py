"""What is seen of runs and programs: logs, progress, metrics, trackers, traces, pictures."""
