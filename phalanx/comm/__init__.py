"""All communication between ranks: groups, channels, and waiting for them."""
