"""What the rows of a table become: one maker for what is computed, sent or moved, and updated."""
