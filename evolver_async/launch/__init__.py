"""How a run is started: the run directory, the roles by name, and the launchers that place them."""
