"""Memory of a run, predicted from its recipe and its model's shape, without loading anything."""
