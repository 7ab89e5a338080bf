"""Models that ship with the project, and the programs that made them."""
