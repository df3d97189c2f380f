"""What a rank runs: a plan's programs linked to functions and buffers, and the loop that goes through them."""
