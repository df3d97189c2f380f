"""From a module to blocks of graph: hooks and export, normal forms, losses, units, and graphs as text."""
