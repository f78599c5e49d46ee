"""Rules of single values: errors that name a key, and ranges and texts that a field can allow."""
