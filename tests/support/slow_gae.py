"""GAE in the notation of the paper, slowly."""


def slow_gae(r: list[float], V: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """A_t = Σ_{l>=0} (γλ)^l δ_{t+l}, straight from the sum."""
    V = [*V, after]
    delta = [r[t] + gamma * V[t + 1] - V[t] for t in range(len(r))]
    return [
        sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(r))) for t in range(len(r))
    ]
