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
    ("vcpo", "trajectory"),
    ("m2po", "token"),
    ("dppo_tv", "token"),
]
UNCLIPPED = ("cispo", "topr", "vcpo", "m2po", "dppo_tv")


def kept_by_m2po(A, mu, anchor, limit: float) -> set[int]:
    """The tokens that M2PO trains: outliers leave one by one until the mean is small enough."""
    moment = {t: (anchor[t] - mu[t]) ** 2 for t in range(len(mu))}
    held = [
        t for t in moment if (A[t] > 0 and anchor[t] > mu[t]) or (A[t] < 0 and anchor[t] < mu[t])
    ]
    while held and sum(moment[t] for t in held) / len(held) > limit:
        held.remove(max(held, key=lambda t: moment[t]))
    harmless = [t for t in moment if not (anchor[t] - mu[t]) * A[t] > 0]
    return {*held, *harmless}
