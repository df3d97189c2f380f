"""The original systems' own interfaces, as thin faces of a session: scripts written for them run here."""
