"""Stream bugs, and what finds them."""
