"""Self-Attributing: labels of the turns of a finished episode.

judge    judges: by rule or by language model; labels, or none and the reason
prompt   question about an episode to a language model
labels   labels from an answer or from the environment's scores
probes   copies of episodes in which the right labels are known
audit    judge that is asked about probes as well, and its error rates
factory  choice of the configured judge
"""
