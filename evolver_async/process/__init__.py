"""The set-up of every process: logging, errors, exit codes and private directories."""
