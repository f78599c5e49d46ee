"""Every kind of off-policy correction."""

KINDS = [
    ("none", "token"),
    ("ppo", "token"),
    ("decoupled", "token"),
    ("decoupled", "trajectory"),
    ("icepop", "token"),
    ("geo_mask", "token"),
    ("gspo", "token"),
    ("cispo", "token"),
    ("topr", "token"),
    ("topr", "trajectory"),
]
