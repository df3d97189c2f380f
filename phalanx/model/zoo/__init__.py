"""Named configurations, and the way from whatever the user calls a model to a module."""
