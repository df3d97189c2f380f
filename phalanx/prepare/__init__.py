"""From options to what is trained on what under which plan, before the first step."""
