"""Self-Attributing: labels of the turns of a finished episode.

judge    judges: by rule or by language model; labels, or none and the reason
prompt   question about an episode to a language model
labels   labels from an answer or from the environment's scores
"""
